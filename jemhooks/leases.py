"""Leases: promises that memory stays registered."""

from __future__ import annotations

import os
import warnings
from types import TracebackType
from typing import Any

from ._native import check, ffi, lib
from .errors import ClosedError
from .lifetime import drain
from .lookup import KEY, Key, outside, region
from .memory import span


class Lease:
    """A promise that a region stays registered; a context manager that gives the :class:`Key`.

    It keeps the object and the arena: a closed arena ends with its last lease. No budget, ``trim()`` or ``idle_ttl``
    ends the registration; the end of a protection domain or UCX context does. In a forked child it holds nothing:
    leaving a ``with`` statement that the parent began does nothing there, :meth:`release` raises ForkError.
    Thread-safe.
    """

    def __init__(self, address: int, key: Key, *kept: Any) -> None:
        self.key, self._address, self._kept, self._pid = key, address, kept, os.getpid()

    def _end(self) -> bool:
        """Release, if nobody has; of several threads one does."""
        kept = self.__dict__.pop("_kept", None)
        if kept is None:
            return False
        check(lib.jh_face_unlease(self._address))
        return True

    def release(self) -> None:
        """End the lease. :raises ClosedError: it has ended already."""
        if not self._end():
            raise ClosedError(f"the lease on {self._address:#x} has been released already; take a new one")

    def __enter__(self) -> Key:
        if "_kept" not in self.__dict__:
            raise ClosedError(f"the lease on {self._address:#x} has been released already; take a new one")
        return self.key

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pid == os.getpid():  # in a child the parent's is not ours to end
            self._end()

    def __del__(self) -> None:
        if "_kept" in self.__dict__ and self._pid == os.getpid():  # the parent's is not ours to end
            try:
                message = f"the lease on {self._address:#x} was not released; use it in a with statement"
                warnings.warn(message, ResourceWarning, stacklevel=2, source=self)
            finally:  # a filter may turn the warning into an exception
                self._end()


def lease(obj: Any) -> Lease:
    """Keep an object's region registered, whatever happens, until the lease is released; registers where needed.

    Raises as :func:`key` and :func:`region` do.
    """
    drain()
    address, nbytes = span(obj)
    home = region(address)  # first: it keeps the arena open
    out = ffi.new("jemhooks_key *")
    check(lib.jh_face_lease(address, out))
    reached = Key(*KEY.unpack(ffi.buffer(out)))
    held = Lease(address, reached if nbytes is None else reached._replace(length=nbytes), obj, home)
    if nbytes is not None and nbytes > reached.length:
        held.release()
        raise outside(address, nbytes, reached.length)
    return held
