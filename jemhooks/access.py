"""What devices may do with registered memory."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from .errors import ConfigError


class Access(enum.IntFlag):
    """The access flags of a registration (enum jemhooks_access). Local reading is always allowed."""

    LOCAL_WRITE = 1
    REMOTE_READ = 2
    REMOTE_WRITE = 4  # implies LOCAL_WRITE
    REMOTE_ATOMIC = 8  # implies LOCAL_WRITE
    RELAXED_ORDERING = 16
    ON_DEMAND = 32


def access_flags(value: str | Iterable[str] | int) -> Access:
    """Flags from names ("remote_read|remote_write", an iterable of names) or from flags.

    :raises ConfigError: an unknown name or bit.
    """
    if isinstance(value, int):
        if value & ~int(sum(Access)) or value < 0:
            raise ConfigError(f"access {value:#x} has bits beyond {int(sum(Access)):#x}")
        return Access(value)
    flags = Access(0)
    try:
        names = value.split("|") if isinstance(value, str) else list(value)
    except TypeError:
        raise ConfigError(f"access {value!r} is neither a name, nor several, nor flags") from None
    for name in names:
        try:
            flags |= Access[name.strip().upper()]
        except (KeyError, AttributeError):
            known = ", ".join(f.name.lower() for f in Access if f.name)
            raise ConfigError(f"access {name!r} is not one of {known}; join several with '|'") from None
    return flags
