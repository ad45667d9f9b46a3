"""Sizes as numbers of bytes or as strings such as "64MiB"."""

from __future__ import annotations

import operator
import re
from typing import SupportsIndex

from .errors import ConfigError

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGTP")}
_UNITS |= {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("kMGTP")}
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
LIMIT = 2**63 - 1  # PTRDIFF_MAX


def size(value: SupportsIndex | str, what: str = "size", least: int = 0) -> int:
    """Bytes from a number or a string with a unit: B, KiB, MiB, GiB, TiB (1024s), kB, MB, GB, TB (1000s).

    :param least: the smallest value allowed.
    :raises ConfigError: not a size, below ``least``, above 2**63 - 1, or not a whole number of bytes.
    """
    if isinstance(value, str):
        match = _FORM.fullmatch(value)
        if not match or match[2] not in _UNITS:
            raise ConfigError(
                f"{what}: {value!r} is not a size; write a number of bytes, or one with a unit as in '64MiB'"
            )
        if len(match[1]) > 40:
            raise ConfigError(f"{what}: a number of {len(match[1])} digits is not between {least} and {LIMIT} bytes")
        whole, _, fraction = match[1].partition(".")
        scaled, rest = divmod(int(whole + fraction) * _UNITS[match[2]], 10 ** len(fraction))
        if rest:
            raise ConfigError(f"{what}: {value!r} is not a whole number of bytes")
        number: int = scaled
    else:
        try:
            number = operator.index(value)
        except TypeError:
            raise ConfigError(
                f"{what}: {value!r} is not a size; write a number of bytes, or one with a unit as in '64MiB'"
            ) from None
    if not least <= number <= LIMIT:
        raise ConfigError(f"{what}: {number} bytes is not between {least} and {LIMIT}")
    return number


def ranged(value: SupportsIndex, what: str, least: int, most: int) -> int:
    """A whole number between ``least`` and ``most``. :raises ConfigError: it is not."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"{what}: {value!r} is not a whole number") from None
    if not least <= number <= most:
        raise ConfigError(f"{what}: {number} is not between {least} and {most}")
    return number


def text(value: str, what: str) -> bytes:
    """A string for C, in UTF-8. :raises ConfigError: not a string, or one with NUL or lone surrogates."""
    if not isinstance(value, str):
        raise ConfigError(f"{what}: {value!r} is not a string")
    try:
        encoded = value.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{what}: {value!r} cannot be encoded in UTF-8") from None
    if b"\0" in encoded:
        raise ConfigError(f"{what}: {value!r} has a NUL character in it")
    return encoded
