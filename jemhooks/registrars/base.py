"""Registrars, and registrars written in Python."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .._native import check, ffi, lib
from ..access import Access
from ..budget import Budget, checked
from ..errors import ClosedError, ConfigError, ForkError
from ..lifetime import Closing
from .bound import Bound, alive

_changing = threading.Lock()  # guards which budget a native registrar has


class Registrar(Closing):
    """Who registers memory and issues keys. Subclass it to write one in Python::

        class Mine(jemhooks.Registrar):
            def register(self, addr, length, access):
                mr = my_library.register(addr, length, write=bool(access & jemhooks.Access.REMOTE_WRITE))
                return mr.lkey, mr.rkey, mr  # the last is passed to deregister()

            def deregister(self, handle):
                handle.close()

    Both run on the thread that asked for a key, allocated (eager), trimmed or closed, never inside the allocator;
    several threads may be in them at once. What they raise becomes the cause of a RegistrationError. An arena keeps its
    registrars.
    """

    name: str = "python"
    max_mr_size: int = 0  #: bytes of one registration; 0: no limit
    max_mr: int = 0  #: registrations at a time; 0: no limit
    pins: int = 0  #: 1: keeps what is registered pinned, so that memory must be pinnable; 2: but for on-demand access
    in_python: bool = True

    _closed: bool = False
    _budget: Budget | None = None
    _in_use: bool = False

    def register(self, addr: int, length: int, access: Access) -> tuple[int, int, object]:
        """Register ``length`` bytes at ``addr``; return lkey, rkey (ints of 64 bits) and a handle."""
        raise NotImplementedError(f"{type(self).__name__}.register(addr, length, access)")

    def deregister(self, handle: Any) -> None:
        """End what :meth:`register` returned this handle for. Raising means that the memory is still registered."""
        raise NotImplementedError(f"{type(self).__name__}.deregister(handle)")

    def remote_base(self, addr: int, handle: Any) -> int:
        """The address by which peers name the first byte; the address itself unless overridden."""
        return addr

    @contextmanager
    def _native(self) -> Iterator[Any]:
        """The C registrar while an arena is made, which then keeps it. :raises ClosedError, ConfigError:"""
        if self._closed:
            raise ClosedError(f"registrar {self.name} is closed; open another one")
        bound = Bound(self)
        out = ffi.new("jemhooks_registrar **")
        check(lib.jemhooks_registrar_create(bound.ops, bound.pointer, out))
        alive[bound.address] = bound
        try:
            check(lib.jemhooks_registrar_set_budget(out[0], self.budget._pointer))
            yield out[0]
        finally:
            lib.jemhooks_registrar_close(out[0])

    @property
    def budget(self) -> Budget:
        """The limits on all of its arenas together; until you set some, those that the registrar itself has."""
        if self._budget is None:
            self._budget = Budget()
        return self._budget

    def use_budget(self, budget: Budget) -> None:
        """Take another budget, which other registrars may have, too. Before arenas are made.

        :raises ConfigError: an arena uses the registrar already, or not a Budget.
        """
        if self._in_use:
            raise ConfigError(f"registrar {self.name}: an arena uses it; give it a budget before making arenas")
        self._budget = checked(budget)

    def _joined(self, arena: Any) -> None:
        """An arena was made that uses this registrar."""
        self._in_use = True

    def close(self) -> None:
        """Refuse new arenas; those that use the registrar go on. Idempotent."""
        self._closed = True

    def __repr__(self) -> str:
        return f"<jemhooks.{type(self).__name__}{' closed' if self._closed else ''}>"


class NativeRegistrar(Registrar):
    """A registrar in a loadable module."""

    in_python = False
    _pointer: Any = None

    def __init__(self, kind: str, config: Any) -> None:
        out = ffi.new("jemhooks_registrar **")
        check(lib.jemhooks_registrar_open(kind.encode(), config, out))
        # Whoever is in a call holds it too: close() in another thread must not pull it away.
        self._pid = os.getpid()
        self.name, self._pointer = kind, ffi.gc(out[0], lib.jemhooks_registrar_close)

    def _open(self) -> Any:
        """The C registrar. :raises ClosedError:"""
        pointer = self._pointer
        if self._pid != os.getpid():
            raise ForkError(f"registrar {self.name} was opened before the fork; open one in this process")
        if pointer is None:
            raise ClosedError(f"registrar {self.name} is closed; open another one")
        return pointer

    @contextmanager
    def _native(self) -> Iterator[Any]:
        yield self._open()

    @property
    def budget(self) -> Budget:
        """The limits on all of its arenas together; until you set some, those that the registrar itself has."""
        if self.in_python:
            return super().budget
        with _changing:
            return Budget._of(lib.jemhooks_registrar_budget(self._open()))

    def use_budget(self, budget: Budget) -> None:
        """Take another budget, which other registrars may have, too. Before arenas are made.

        :raises ConfigError: not a Budget. :raises ProviderError: an arena uses the registrar already.
        """
        if self.in_python:
            super().use_budget(budget)
        else:
            with _changing:
                check(lib.jemhooks_registrar_set_budget(self._open(), checked(budget)._pointer))

    def close(self) -> None:
        """Refuse new arenas and calls; the registrar ends with the last arena that uses it. Idempotent."""
        super().close()
        self._pointer = None
