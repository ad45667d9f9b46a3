"""What happens to regions, as it happens: for those who cache things about memory."""

from __future__ import annotations

import enum
import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple, SupportsIndex

from ._native import check, ffi, lib
from .arena import Arena
from .errors import AllocationError, ClosedError, ConfigError, ForkError
from .lifetime import Closing
from .sizes import ranged, text

_BATCH = 64
_MOST = 1 << 24


class EventKind(enum.IntFlag):
    """enum jemhooks_event_kind. RELEASE is all that ends something."""

    MAP = 1
    REGISTER = 2
    DEREGISTER = 4
    DECOMMIT = 8
    UNMAP = 16
    RELEASE = 28


class Event(NamedTuple):
    """One thing that happened to ``length`` bytes at ``base``, of the arena with this name.

    MAP: a region began. REGISTER: it was registered. DEREGISTER: its registration ended. DECOMMIT: the allocator gave
    this part of it up. UNMAP: it ended, with its arena.
    """

    kind: EventKind
    base: int
    length: int
    arena: str


def _kinds(given: EventKind | str | Iterable[str]) -> int:
    if isinstance(given, int):
        return ranged(given, "kinds", 1, 31)
    bits = 0
    try:
        words = given.replace("|", " ").split() if isinstance(given, str) else list(given)
    except TypeError:
        raise ConfigError(f"kinds {given!r} are neither words nor EventKind flags") from None
    for word in words:
        try:
            bits |= EventKind[word.upper()]
        except (KeyError, AttributeError):
            known = ", ".join(name.lower() for name in EventKind.__members__)
            raise ConfigError(f"kinds: {word!r} is not one of {known}") from None
    return ranged(bits, "kinds", 1, 31)


def notify_cache(kind: str) -> None:
    """Have another library's registration caches told before pages of any arena go, so that none of them is stale.

    As long as the process lives. Call it before that library makes its first context or domain, and again in a child.

    :param kind: "ucx": UCX must be loaded already. "fabric": replaces libfabric's memory monitor in the whole process;
        registrations of memory outside of arenas are then no longer cached.
    :raises ConfigError: another kind, or the cache is switched off. :raises LoadError: the library is not there.
    :raises ProviderError: too late, another monitor is in use.
    """
    check(lib.jemhooks_notify_cache(text(kind, "kind")))


class Events(Closing):
    """A bounded queue of what happens to regions, taken on the caller's own thread.

    ::

        with jh.Events(arena, "deregister|unmap") as events:
            ...
            for event in events:
                my_cache.drop(event.base, event.length)

    When an event is taken, it has happened: a cache that must know *before* pages go subscribes in C.

    :param arena: whose; None: of all arenas. :param kinds: any of "map", "register", "deregister", "decommit", "unmap",
        or "release" for the last three; as a string joined by "|", an iterable, or :class:`EventKind` flags.
    :param capacity: events that may wait; those beyond are lost, and counted in ``lost``.
    :raises ConfigError, ClosedError:

    Thread-safe.
    """

    def __init__(
        self,
        arena: Arena | None = None,
        kinds: EventKind | str | Iterable[str] = EventKind.RELEASE,
        *,
        capacity: SupportsIndex = 1024,
    ) -> None:
        self._pid = os.getpid()
        if arena is not None and not isinstance(arena, Arena):
            raise ConfigError(f"{arena!r} is not an Arena")
        if arena is not None and arena._pid != self._pid:
            raise ForkError(f"arena '{arena.name}' is the parent process's; make one in this process")
        out, wanted = ffi.new("jh_queue **"), _kinds(kinds)
        room = ranged(capacity, "capacity", 1, _MOST)
        with nullcontext(ffi.NULL) if arena is None else arena._using() as native:
            rc = lib.jh_queue_open(native, wanted, room, out)
        if rc == -errno.ENOMEM:
            raise AllocationError(f"no memory for a queue of {room} events; ask for fewer")
        check(rc)
        # Whoever is just taking events keeps it: close() in another thread must not pull it away.
        self._queue = ffi.gc(out[0], lib.jh_queue_close)

    def _open(self) -> Any:
        queue = self._queue
        if self._pid != os.getpid():
            raise ForkError("this queue of events is the parent process's; make one in this process")
        if queue is None:
            raise ClosedError("this queue of events is closed; make another one")
        return queue

    def take(self, most: SupportsIndex | None = None) -> list[Event]:
        """Events that have happened, the oldest first; no more than ``most``. Does not wait for any."""
        queue, left = self._open(), _MOST if most is None else ranged(most, "most", 0, _MOST)
        room, events = ffi.new("jh_queue_event[]", _BATCH), []
        while left:
            n = lib.jh_queue_take(queue, room, min(left, _BATCH))
            for i in range(n):
                e = room[i]
                events.append(Event(EventKind(e.kind), e.base, e.length, ffi.string(e.arena).decode(errors="replace")))
            left -= n
            if n < _BATCH:
                break
        return events

    def __iter__(self) -> Iterator[Event]:
        """Take one event after the other, until none waits."""
        while found := self.take(1):
            yield found[0]

    def deliver(self, function: Callable[[Event], object]) -> int:
        """Call the function with each waiting event, in order; how many there were.

        What it raises is passed on; that event counts as delivered, and those after it go on waiting.
        """
        n = 0
        for event in self:
            function(event)
            n += 1
        return n

    def _state(self) -> tuple[int, int]:
        waiting, lost = ffi.new("size_t *"), ffi.new("uint64_t *")
        lib.jh_queue_get_state(self._open(), waiting, lost)
        return waiting[0], lost[0]

    def __len__(self) -> int:
        return self._state()[0]

    @property
    def lost(self) -> int:
        """How many events came while the queue was full."""
        return self._state()[1]

    def close(self) -> None:
        """Take no more events, and drop those that wait. Idempotent."""
        self._queue = None
