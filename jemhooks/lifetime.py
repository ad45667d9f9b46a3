"""Which arenas there are, and the end of those whose last use ended where they could not be destroyed."""

from __future__ import annotations

import atexit
import errno
import os
import weakref
from types import TracebackType
from typing import TYPE_CHECKING

from ._native import callbacks, error, ffi, lib

if TYPE_CHECKING:
    from typing_extensions import Self


class Closing:
    """What is closed when its ``with`` statement ends."""

    def close(self) -> None:
        """End it. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


by_address: weakref.WeakValueDictionary[int, Closing] = weakref.WeakValueDictionary()  # C arena -> Arena


def drain() -> None:
    """Destroy the arenas that wait for it: closed and unused, and some must not be destroyed in a finaliser.

    Does nothing inside a registrar. :raises RegistrationError: as Arena.close() does.
    """
    while not callbacks.depth:
        face = lib.jh_face_next()
        if face == ffi.NULL:
            return
        rc = lib.jh_face_finish(face)
        if rc < 0 and rc != -errno.ECHILD:  # the parent's: it goes with this process
            raise error(rc)


def _at_exit() -> None:
    for arena in list(by_address.values()):
        arena.close()
    drain()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=lib.jh_face_forget)  # the parent's arenas are frozen here
