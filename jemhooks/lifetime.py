"""Which arenas there are, and the end of those whose last use ended where they could not be destroyed."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol

from ._native import callbacks, error, ffi, lib


class Closable(Protocol):
    """An arena, as far as its end goes."""

    def close(self) -> None:
        """Stop allocating."""


by_address: weakref.WeakValueDictionary[int, Closable] = weakref.WeakValueDictionary()  # C arena -> Arena

#: What the memory of an arena that is destroyed below belongs to: it goes with the arena, or never.
owners: dict[int, object] = {}  # jh_face -> Provider


def drain() -> None:
    """Destroy the arenas that wait for it: closed and unused, and some must not be destroyed in a finaliser.

    Does nothing inside a registrar. :raises RegistrationError: as Arena.close() does.
    """
    while not callbacks.depth:
        face = lib.jh_face_next()
        if face == ffi.NULL:
            return
        number = int(ffi.cast("uintptr_t", face))
        rc = lib.jh_face_finish(face)
        if rc < 0:
            raise error(rc)  # the memory may still be registered: its owner stays
        owners.pop(number, None)


def _at_exit() -> None:
    for arena in list(by_address.values()):
        arena.close()
    drain()


def _after_fork() -> None:
    """The parent's arenas are frozen here and must not be destroyed."""
    by_address.clear()
    lib.jh_face_forget()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
