"""Budgets: limits on what is registered at a time."""

from __future__ import annotations

from typing import Any, SupportsIndex

from ._native import check, ffi, lib
from .errors import ConfigError
from .sizes import LIMIT, ranged, size

_UNLIMITED = 2**64 - 1  # JEMHOOKS_UNLIMITED


def pin_limit_of(value: SupportsIndex | str | None) -> int:
    """Bytes, for C; None: no limit. :raises ConfigError:"""
    return _UNLIMITED if value is None else size(value, "pin_limit", 1)


def max_regions_of(value: SupportsIndex | None) -> int:
    """A number of regions, for C; None: no limit. :raises ConfigError:"""
    return _UNLIMITED if value is None else ranged(value, "max_regions", 1, LIMIT)


class Budget:
    """Limits on the bytes and the regions that are registered at a time, for whatever shares the budget.

    Every arena has one of its own and every registrar one over all of its arenas; a budget of yours can be given to
    several registrars with :meth:`Registrar.use_budget`. When a limit is reached, idle regions are deregistered, the
    longest idle first, in whichever of the arenas they are; if everything is in use, PinLimitError.

    :param pin_limit: bytes, with a unit if you like; None: no limit.
    :param max_regions: how many registrations; None: no limit.

    Thread-safe. In a forked child nothing is registered yet.
    """

    def __init__(self, pin_limit: SupportsIndex | str | None = None, max_regions: SupportsIndex | None = None) -> None:
        out = ffi.new("jemhooks_budget **")
        check(lib.jemhooks_budget_create(pin_limit_of(pin_limit), max_regions_of(max_regions), out))
        self._pointer = ffi.gc(out[0], lib.jemhooks_budget_close)

    @classmethod
    def _of(cls, pointer: Any) -> Budget:
        """The Python face of a budget of C's, which it keeps."""
        self = cls.__new__(cls)
        lib.jemhooks_budget_keep(pointer)
        self._pointer = ffi.gc(pointer, lib.jemhooks_budget_close)
        return self

    def set(self, pin_limit: SupportsIndex | str | None, max_regions: SupportsIndex | None = None) -> None:
        """Put new limits in force, both: what is not given is unlimited.

        Idle regions beyond them are deregistered now, others stay until they are idle.

        :raises RegistrationError: a registrar failed to deregister; the limits are in force nevertheless.
        """
        check(lib.jemhooks_budget_set(self._pointer, pin_limit_of(pin_limit), max_regions_of(max_regions)))

    def _info(self) -> Any:
        info = ffi.new("jemhooks_budget_info *")
        info.size = ffi.sizeof("jemhooks_budget_info")
        check(lib.jemhooks_budget_get(self._pointer, info))
        return info

    @property
    def pin_limit(self) -> int | None:
        """Bytes; None: no limit."""
        value = int(self._info().pin_limit)
        return None if value == _UNLIMITED else value

    @property
    def max_regions(self) -> int | None:
        """None: no limit."""
        value = int(self._info().max_regions)
        return None if value == _UNLIMITED else value

    @property
    def registered(self) -> int:
        """Bytes registered now, or being so; memory on two rails of one budget counts twice."""
        return int(self._info().registered)

    @property
    def peak(self) -> int:
        """The most bytes that ever were."""
        return int(self._info().peak)

    @property
    def regions(self) -> int:
        """How many registrations there are now."""
        return int(self._info().regions)

    def __repr__(self) -> str:
        info = self._info()
        return f"<jemhooks.Budget {info.registered} bytes in {info.regions} regions of {self.pin_limit}>"


def checked(budget: object) -> Budget:
    """:raises ConfigError: not a Budget."""
    if not isinstance(budget, Budget):
        raise ConfigError(f"{budget!r} is not a Budget")
    return budget
