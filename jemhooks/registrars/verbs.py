"""ibverbs: memory regions of a protection domain, one of jemhooks' own or any pyverbs PD."""

from __future__ import annotations

import atexit
import errno
import functools
import os
import resource
import threading
import weakref
from pathlib import Path
from typing import Any, NamedTuple

from .._native import callbacks, check, ffi, lib
from ..access import Access
from ..errors import ClosedError, ConfigError, ForkError, JemhooksError, RegistrationError
from ..lifetime import drain
from ..sizes import text
from .base import NativeRegistrar, Registrar
from .pds import context_of, is_pyverbs

# enum ibv_access_flags of infiniband/verbs.h
_LOCAL_WRITE = 1
_FLAGS = {
    Access.LOCAL_WRITE: _LOCAL_WRITE,
    Access.REMOTE_WRITE: _LOCAL_WRITE | 1 << 1,
    Access.REMOTE_READ: 1 << 2,
    Access.REMOTE_ATOMIC: _LOCAL_WRITE | 1 << 3,
    Access.ON_DEMAND: 1 << 6,
    Access.RELAXED_ORDERING: 1 << 20,
}
_PATIENCE = 30.0  # seconds for another thread to end a registration
_open: weakref.WeakSet[Any] = weakref.WeakSet()  # our pyverbs MRs
_registrars: weakref.WeakSet[Any] = weakref.WeakSet()  # those with a pyverbs PD


class VerbsInfo(NamedTuple):
    """What the device offers; the fields of jemhooks_verbs_info."""

    device: str
    max_mr_size: int
    max_mr: int
    atomics: bool
    on_demand: bool
    fork: int
    ports: int


def _memlock() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
    lines = Path("/proc/self/status").read_text().splitlines()
    pinned = next((line.split(":")[1].strip() for line in lines if line.startswith("VmPin:")), "unknown")
    return f"RLIMIT_MEMLOCK is {limit} and this process has {pinned} pinned"


@functools.cache
def _watched() -> tuple[Any, Any]:
    """The class of our pyverbs MRs, and its base. A PD that closes closes them first: then their keys must go, too."""
    from pyverbs.mr import MR

    class Watched(MR):  # type: ignore[misc]
        keeper: Verbs | None = None  # while jemhooks has the registration
        failed = False  # it could not be ended when it should have been

        def close(self) -> None:
            # Also called while the object is freed, without its attributes: then it must not get new ones.
            if self.keeper is None:
                MR.close(self)
            else:
                self.keeper._pd_closes(self)

    return Watched, MR


@atexit.register
def _keep_open() -> None:
    """Leave open MRs, and their PDs and contexts, to the kernel. The interpreter's last garbage collection could free a
    context before them, and they would crash; and those in a forked child are the parent's."""
    import ctypes

    for kept in [*_open, *(registrar._pd for registrar in list(_registrars))]:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


class Verbs(NativeRegistrar):
    """Registers memory with a protection domain of ibverbs; transfers go by queue pairs of the same one.

    :param device: "mlx5_0", "rxe0", … as ``ibv_devices`` lists them; None: the first with an active port.
    :param pd: a PD of pyverbs, or of another binding with ``pd.reg_mr(addr, length, access)``; it must be of
        ``device`` if that is given. None: a protection domain of jemhooks' own, for use from C.
    :raises RegistrationError: no such device, or it cannot be opened. :raises LoadError: libibverbs is missing.
    :raises ConfigError: not a PD, or of another device. :raises ClosedError: the PD is closed.

    Closing a pyverbs PD, or its context, ends the registrations first, leased or not, on all rails: keys that are asked
    for later raise RegistrationError. Thread-safe; but a pyverbs PD must not be closed while the first region is just
    being registered with it, which pyverbs itself does not survive.
    """

    pins = 2

    def __init__(self, device: str | None = None, *, pd: Any = None) -> None:
        name = None if device is None else ffi.new("char[]", text(device, "device"))
        self._pd = pd
        self._closing = False
        self._changed = threading.Condition()  # guards _closing, _arenas, and the making and the end of MRs
        self._arenas: weakref.WeakSet[Any] = weakref.WeakSet()
        if pd is None:
            config = ffi.new("jemhooks_verbs_config *")
            config.size = ffi.sizeof("jemhooks_verbs_config")
            if name is not None:
                config.device = name
            super().__init__("verbs", config)
            return
        self.name, self.in_python, self._pid = "verbs", True, os.getpid()
        if not is_pyverbs(pd) and not callable(getattr(pd, "reg_mr", None)):
            raise ConfigError(f"pd {pd!r} is neither a pyverbs PD nor has it reg_mr(addr, length, access)")
        self._device = self._open_device()
        if is_pyverbs(pd):
            _registrars.add(self)
        if device is not None and self._device not in (device, "?"):
            raise ConfigError(f"the PD is of device {self._device}, not of {device}; leave one of them out")
        if query := getattr(context_of(pd), "query_device", None):
            limits = query()
            self.max_mr_size, self.max_mr = int(limits.max_mr_size), int(limits.max_mr)

    def info(self) -> VerbsInfo:
        """What the device offers. :raises ConfigError: the PD is the caller's; ask its own context."""
        if self._pd is not None:
            raise ConfigError("the PD is yours, so jemhooks has not opened its device; ask its context")
        out = ffi.new("jemhooks_verbs_info *")
        out.size = ffi.sizeof("jemhooks_verbs_info")
        check(lib.jemhooks_verbs_get_info(self._open(), out))
        device = ffi.string(out.device).decode()
        return VerbsInfo(
            device, out.max_mr_size, out.max_mr, bool(out.atomics), bool(out.on_demand), out.fork, out.ports
        )

    def _native(self) -> Any:
        if self._pd is None:
            return super()._native()
        self._check_process()
        return Registrar._native(self)

    def _check_process(self) -> None:
        """:raises ForkError:"""
        if self._pid != os.getpid():
            raise ForkError("the protection domain was opened before the fork; open one in this process")

    def _open_device(self) -> str:
        """The name of the PD's device. A closed pyverbs PD must not be used: it would crash.

        :raises ClosedError, ForkError:
        """
        self._check_process()
        context = context_of(self._pd)
        if context is None and is_pyverbs(self._pd):
            raise ClosedError("the protection domain, or its device context, is closed; open another registrar")
        name = getattr(context, "name", "?")
        return name.decode() if isinstance(name, bytes) else str(name)

    def _joined(self, arena: Any) -> None:
        super()._joined(arena)
        with self._changed:
            self._arenas.add(arena)

    def _pyverbs_mr(self, addr: int, length: int, flags: int) -> Any:
        watched, _ = _watched()
        with self._changed:  # so that the PD does not close meanwhile, which pyverbs would not survive
            if self._closing:
                raise ClosedError("the protection domain is being closed; open another registrar")
            mr = watched.__new__(watched, self._pd, length, flags, address=addr)
            mr.keeper = self  # before the PD knows it
            try:
                mr.__init__(self._pd, length, flags, address=addr)
            except BaseException:
                mr.keeper = None
                raise
            _open.add(mr)
            return mr

    def register(self, addr: int, length: int, access: Access) -> tuple[int, int, Any]:
        """Register with the caller's PD."""
        flags = 0
        for ours, theirs in _FLAGS.items():
            flags |= theirs if access & ours else 0
        device = self._open_device()
        try:
            mr = (self._pyverbs_mr if is_pyverbs(self._pd) else self._pd.reg_mr)(addr, length, flags)
        except JemhooksError:
            raise
        except Exception as e:
            failed = RegistrationError(
                f"registering {length} bytes at {addr:#x} on device {device} with access {flags:#x}: {e}; "
                f"{_memlock()}; for want of memory raise the limit (ulimit -l), grant CAP_IPC_LOCK, or use a smaller "
                "region_max"
            )
            # pyverbs says error_code, others errno
            failed.errno = getattr(e, "error_code", None) or getattr(e, "errno", None) or errno.EIO
            raise failed from e
        return mr.lkey, mr.rkey, mr

    def deregister(self, handle: Any) -> None:
        """End what :meth:`register` returned."""
        if not is_pyverbs(self._pd):
            handle.close()
            return
        try:
            _watched()[1].close(handle)
        except BaseException:
            handle.failed = True
            raise
        with self._changed:
            handle.keeper = None
            self._changed.notify_all()
        _open.discard(handle)

    def _pd_closes(self, mr: Any) -> None:
        """The PD is about to go, with all of its MRs: end the registrations of all our arenas."""
        if self._pid != os.getpid():
            raise ForkError("the protection domain is the parent process's; leave it alone here")
        if callbacks.depth:
            raise RegistrationError("a protection domain was closed from inside a registrar; close it elsewhere")
        with self._changed:
            self._closing = True
        drain()
        with self._changed:
            arenas = list(self._arenas)
        for arena in arenas:
            arena._revoke()
        with self._changed:  # another thread may just be ending the arena
            if not self._changed.wait_for(lambda: mr.keeper is None or mr.failed, _PATIENCE):
                raise RegistrationError("another thread has not ended a registration of this PD; close it again")
        if mr.keeper is not None:  # its region is kept for good, and found no more
            _watched()[1].close(mr)
            mr.keeper = None
