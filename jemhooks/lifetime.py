"""Which arenas there are, and the end of those whose last use ended where they could not be destroyed."""

from __future__ import annotations

import atexit
import os
import weakref
from collections import deque
from typing import Protocol

from ._native import callbacks


class Ending(Protocol):
    """An arena, as far as its end goes."""

    def close(self) -> None:
        """Stop allocating."""

    def _finish(self) -> None: ...


by_address: weakref.WeakValueDictionary[int, Ending] = weakref.WeakValueDictionary()  # C arena -> Arena
unfinished: deque[Ending] = deque()  # closed and unused, but a finaliser may not call Python registrars


def drain() -> None:
    """Destroy the unfinished arenas, unless this thread is inside a registrar."""
    while unfinished and not callbacks.depth:
        try:
            arena = unfinished.popleft()
        except IndexError:  # another thread took it
            return
        arena._finish()


def _at_exit() -> None:
    for arena in list(by_address.values()):
        arena.close()
    drain()


def _after_fork() -> None:
    """The parent's arenas are frozen here and must not be destroyed."""
    by_address.clear()
    unfinished.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
