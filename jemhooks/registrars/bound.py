"""The bridge from C to registrars written in Python."""

from __future__ import annotations

import errno
import itertools
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .._native import callbacks, ffi, lib
from ..access import Access
from ..errors import ConfigError
from ..sizes import ranged, text

if TYPE_CHECKING:
    from .base import Registrar

_U64 = 2**64 - 1
alive: dict[int, Any] = {}  #: what C registrars point to, until they are closed


class Bound:
    """A Python registrar in one arena: what its C registrar points to, and the handles of its registrations."""

    def __init__(self, registrar: Registrar) -> None:
        self.registrar = registrar
        self.handles: dict[int, Any] = {}
        self.numbers = itertools.count(1)
        self.max_mr_size = ranged(registrar.max_mr_size, "max_mr_size", 0, _U64)
        self.max_mr = ranged(registrar.max_mr, "max_mr", 0, 2**64 - 1)
        self.pointer = ffi.new_handle(self)
        self.address = int(ffi.cast("uintptr_t", self.pointer))
        self.name = ffi.new("char[]", text(registrar.name, "name"))
        self.ops = ffi.new("jemhooks_registrar_ops *")
        self.ops.size, self.ops.name = ffi.sizeof("jemhooks_registrar_ops"), self.name
        self.ops.register_memory, self.ops.deregister_memory = lib.jh_py_register, lib.jh_py_deregister
        self.ops.not_in_free, self.ops.pins = 1, ranged(registrar.pins, "pins", 0, 2)
        self.ops.limits, self.ops.close = lib.jh_py_limits, lib.jh_py_close

    def register(self, addr: int, length: int, access: int, mr: Any) -> None:
        """Fill in mr. What register() made is undone if the rest of what it says makes no sense."""
        answer = self.registrar.register(addr, length, Access(access))
        try:
            lkey, rkey, handle = answer
        except (TypeError, ValueError):
            raise ConfigError(f"register() must return (lkey, rkey, handle), not {answer!r}") from None
        try:
            mr.lkey, mr.rkey = ranged(lkey, "lkey", 0, _U64), ranged(rkey, "rkey", 0, _U64)
            mr.remote_base = ranged(self.registrar.remote_base(addr, handle), "remote_base", 0, _U64)
        except BaseException:
            self.registrar.deregister(handle)
            raise
        number = next(self.numbers)
        mr.handle = ffi.cast("void *", number)
        self.handles[number] = handle

    def deregister(self, mr: Any) -> None:
        """End the registration of mr."""
        number = int(ffi.cast("uintptr_t", mr.handle))
        self.registrar.deregister(self.handles[number])
        del self.handles[number]


def _of(self: Any) -> Bound:
    bound: Bound = ffi.from_handle(self)
    return bound


def _failed(what: str, e: BaseException) -> int:
    callbacks.raised = e
    message, code = f"{what} raised {type(e).__name__}", None
    with suppress(Exception):  # it may refuse even to be shown
        message += f": {e}"
        code = getattr(e, "errno", None)
    lib.jemhooks_set_error(b"%s", ffi.new("char[]", message.encode(errors="replace").replace(b"\0", b"?")[:500]))
    return -code if type(code) is int and 0 < code < 4096 else -errno.EIO


@ffi.def_extern(error=-errno.EIO)  # for what escapes even the handlers below
def jh_py_register(self: Any, address: Any, length: int, access: int, mr: Any) -> int:
    """C asks a Python registrar to register."""
    callbacks.depth += 1
    try:
        _of(self).register(int(ffi.cast("uintptr_t", address)), length, access, mr)
    except BaseException as e:
        return _failed("register()", e)
    finally:
        callbacks.depth -= 1
    return 0


@ffi.def_extern(error=-errno.EIO)
def jh_py_deregister(self: Any, mr: Any) -> int:
    """C asks it to deregister."""
    callbacks.depth += 1
    try:
        _of(self).deregister(mr)
    except BaseException as e:
        return _failed("deregister()", e)
    finally:
        callbacks.depth -= 1
    return 0


@ffi.def_extern()
def jh_py_limits(self: Any, limits: Any) -> None:
    """C asks for its limits."""
    bound = _of(self)
    limits.max_mr_size, limits.max_mr = bound.max_mr_size, bound.max_mr


@ffi.def_extern()
def jh_py_close(self: Any) -> None:
    """C is done with it."""
    alive.pop(int(ffi.cast("uintptr_t", self)), None)
