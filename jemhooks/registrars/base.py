"""Registrars, and registrars written in Python."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from .._native import callbacks, check, ffi, lib
from ..access import Access
from ..errors import ClosedError, ConfigError
from ..sizes import ranged

_alive: dict[int, Any] = {}  # what C registrars point to, until they are closed


class Registrar:
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
    in_python: bool = True

    _closed: bool = False
    _handles: dict[int, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Registrar:
        """Set up what subclasses need even if they do not call ``super().__init__()``."""
        self = super().__new__(cls)
        self._handles = {}  # by address
        return self

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
        """The C registrar while an arena is made, which then keeps it. :raises ClosedError:"""
        if self._closed:
            raise ClosedError(f"registrar {self.name} is closed; open another one")
        handle, name = ffi.new_handle(self), ffi.new("char[]", self.name.encode())
        ops = ffi.new("jemhooks_registrar_ops *")
        ops.size, ops.name = ffi.sizeof("jemhooks_registrar_ops"), name
        ops.register_memory, ops.deregister_memory = lib.jh_py_register, lib.jh_py_deregister
        ops.limits, ops.close = lib.jh_py_limits, lib.jh_py_close
        out = ffi.new("jemhooks_registrar **")
        check(lib.jemhooks_registrar_create(ops, handle, out))
        _alive[int(ffi.cast("uintptr_t", handle))] = (handle, name, ops)
        try:
            yield out[0]
        finally:
            lib.jemhooks_registrar_close(out[0])

    def close(self) -> None:
        """Refuse new arenas; those that use the registrar go on. Idempotent."""
        self._closed = True

    def __enter__(self) -> Registrar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<jemhooks.{type(self).__name__}{' closed' if self._closed else ''}>"


class NativeRegistrar(Registrar):
    """A registrar in a loadable module."""

    in_python = False
    _pointer: Any = None

    def __init__(self, kind: str, config: Any) -> None:
        out = ffi.new("jemhooks_registrar **")
        check(lib.jemhooks_registrar_open(kind.encode(), config, out))
        self.name, self._pointer = kind, out[0]

    def _open(self) -> Any:
        """The C registrar. :raises ClosedError:"""
        if self._pointer is None:
            raise ClosedError(f"registrar {self.name} is closed; open another one")
        return self._pointer

    @contextmanager
    def _native(self) -> Iterator[Any]:
        yield self._open()

    def close(self) -> None:
        """Refuse new arenas and calls; the registrar ends with the last arena that uses it. Idempotent."""
        super().close()
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            lib.jemhooks_registrar_close(pointer)

    def __del__(self) -> None:
        self.close()


def _of(self: Any) -> Registrar:
    registrar: Registrar = ffi.from_handle(self)
    return registrar


def _failed(what: str, e: BaseException) -> int:
    callbacks.raised = e
    text = f"{what} raised {type(e).__name__}: {e}"
    lib.jemhooks_set_error(b"%s", ffi.new("char[]", text.encode()[:500]))
    code = getattr(e, "errno", None)
    return -code if isinstance(code, int) and 0 < code < 4096 else -errno.EIO


def _checked(registrar: Registrar, answer: Any) -> tuple[int, int, object]:
    """What register() returned, if it makes sense; what it registered is undone if not."""
    try:
        lkey, rkey, handle = answer
    except (TypeError, ValueError):
        raise ConfigError(f"register() must return (lkey, rkey, handle), not {answer!r}") from None
    try:
        return ranged(lkey, "lkey", 0, 2**64 - 1), ranged(rkey, "rkey", 0, 2**64 - 1), handle
    except ConfigError:
        registrar.deregister(handle)
        raise


@ffi.def_extern()
def jh_py_register(self: Any, address: Any, length: int, access: int, mr: Any) -> int:
    """C asks a Python registrar to register."""
    registrar = _of(self)
    addr = int(ffi.cast("uintptr_t", address))
    callbacks.depth += 1
    try:
        lkey, rkey, handle = _checked(registrar, registrar.register(addr, length, Access(access)))
        mr.lkey, mr.rkey, mr.handle = lkey, rkey, address
        mr.remote_base = registrar.remote_base(addr, handle)
        registrar._handles[addr] = handle
    except BaseException as e:
        return _failed("register()", e)
    finally:
        callbacks.depth -= 1
    return 0


@ffi.def_extern()
def jh_py_deregister(self: Any, mr: Any) -> int:
    """C asks it to deregister."""
    registrar = _of(self)
    addr = int(ffi.cast("uintptr_t", mr.handle))
    callbacks.depth += 1
    try:
        registrar.deregister(registrar._handles[addr])
        del registrar._handles[addr]
    except BaseException as e:
        return _failed("deregister()", e)
    finally:
        callbacks.depth -= 1
    return 0


@ffi.def_extern()
def jh_py_limits(self: Any, limits: Any) -> None:
    """C asks for its limits."""
    registrar = _of(self)
    limits.max_mr_size, limits.max_mr = registrar.max_mr_size, registrar.max_mr


@ffi.def_extern()
def jh_py_close(self: Any) -> None:
    """C is done with it."""
    _alive.pop(int(ffi.cast("uintptr_t", self)), None)
