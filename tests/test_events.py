"""What happens to regions, as Python sees it: a bounded queue that is read on the caller's own thread."""

from __future__ import annotations

import gc
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

import jemhooks as jh
from jemhooks import EventKind

if TYPE_CHECKING:
    from conftest import Python

pytestmark = pytest.mark.null


def test_a_life_in_order(null: jh.Null) -> None:
    with jh.Events(kinds=EventKind(31)) as events:
        with jh.Arena(null, name="told", dirty_decay_ms=0, muzzy_decay_ms=0) as arena:
            block = arena.block("64KiB")
            base = jh.region(block).base
            jh.key(block)
            del block
            arena.trim()
        seen = [e for e in events if e.base == base]
    assert all(e.arena == "told" and e.length for e in seen), "an event names neither its arena nor a range"
    kinds = [e.kind for e in seen]
    expected = [EventKind.MAP, EventKind.REGISTER, EventKind.DECOMMIT, EventKind.DEREGISTER, EventKind.UNMAP]
    assert [k for k in expected if k in kinds] == expected, f"some kind of event did not come: {kinds}"
    assert (kinds[0], kinds[-1]) == (EventKind.MAP, EventKind.UNMAP)
    assert kinds.index(EventKind.DEREGISTER) > kinds.index(EventKind.REGISTER)


def test_a_cache_that_is_told_keeps_nothing_stale(null: jh.Null) -> None:
    """The user's own cache of keys: whatever is in it after the events were taken is still valid."""
    cache: dict[int, jh.Key] = {}
    null.budget.set("4MiB")
    with ExitStack() as stack:
        events = stack.enter_context(jh.Events(kinds="deregister|unmap"))
        arenas = [stack.enter_context(jh.Arena(null, dirty_decay_ms=0, muzzy_decay_ms=0)) for _ in range(3)]
        for _ in range(50):
            for arena in arenas:
                block = arena.block("1500KiB")
                cache[block.address] = jh.key(block)
                del block
                for event in events:
                    for address in [a for a in cache if event.base <= a < event.base + event.length]:
                        del cache[address]
                for address, key in cache.items():
                    assert jh.region(address).generation == key.generation, "a cached key is stale, and nobody said so"
        assert sum(arena.stats().evictions for arena in arenas) > 100, "too little was evicted for a test"


def test_only_of_the_arena_and_kinds_asked_for(null: jh.Null) -> None:
    with jh.Arena(null) as mine, jh.Arena(null) as other, jh.Events(mine, "register") as events:
        for arena in (other, mine):
            jh.key(arena.empty(10))
            arena.trim()
        assert [e.kind for e in events] == [EventKind.REGISTER]


def test_those_beyond_the_capacity_are_counted(null: jh.Null) -> None:
    with jh.Arena(null, dirty_decay_ms=0) as arena, jh.Events(arena, EventKind(31), capacity=2) as events:
        jh.key(arena.empty(10))
        arena.trim()
        assert len(events) == 2, "not as many wait as may"
        lost = events.lost
        assert lost >= 1
        assert [e.kind for e in events.take()] == [EventKind.MAP, EventKind.REGISTER], "the oldest did not stay"
        assert (len(events), events.lost) == (0, lost)
        jh.key(arena.empty(10))
        assert [len(events.take(n)) for n in (1, 0)] == [1, 0]


def test_a_function_that_raises_loses_one_event(null: jh.Null) -> None:
    with jh.Arena(null) as arena, jh.Events(arena, "register|deregister") as events:
        jh.key(arena.empty(10))
        arena.trim()

        def broken(event: jh.Event) -> None:
            raise LookupError(event.kind.name)

        with pytest.raises(LookupError, match="REGISTER"):
            events.deliver(broken)
        kinds: list[EventKind] = []
        assert events.deliver(lambda e: kinds.append(e.kind)) == 1
        assert kinds == [EventKind.DEREGISTER], "the next event was lost with it"
        assert arena.full(4, 2.0).sum() == 8.0, "the arena is not usable any more"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kinds": "free"}, "'free' is not one of map, register"),
        ({"kinds": ""}, "kinds"),
        ({"kinds": 32}, "31"),
        ({"kinds": [7]}, "7 is not one of"),
        ({"kinds": None}, "neither words nor"),
        ({"kinds": 3.5}, "neither words nor"),
        ({"capacity": 0}, "capacity"),
        ({"capacity": 2**40}, "capacity"),
        ({"arena": "arena"}, "not an Arena"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(jh.ConfigError, match=words):
        jh.Events(**arguments)  # type: ignore[arg-type]


def test_use_after_close(null: jh.Null) -> None:
    arena = jh.Arena(null)
    events = jh.Events(arena)
    events.close()
    events.close()
    for call in (events.take, lambda: events.lost, lambda: list(events)):
        with pytest.raises(jh.ClosedError, match="closed"):
            call()
    arena.close()
    with pytest.raises(jh.ClosedError):
        jh.Events(arena)


def test_the_queue_outlives_its_arena(null: jh.Null) -> None:
    arena = jh.Arena(null)
    events = jh.Events(arena, "unmap")
    arena.empty(10)
    gc.collect()
    arena.close()
    assert events.take(), "the end of the arena was not told of"
    with jh.Arena(null) as later:
        later.empty(10)
    assert not events.take(), "told of another arena"
    events.close()


def test_from_many_threads(soak: int) -> None:
    """Arenas live and die in threads while others read and leave."""
    done = threading.Event()
    failures: list[BaseException] = []

    def live() -> None:
        try:
            while not done.is_set():
                with jh.Null() as registrar, jh.Arena(registrar, dirty_decay_ms=0) as arena:
                    for _ in range(20):
                        jh.key(arena.empty(100_000))
                        arena.trim()
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=live) for _ in range(3)]
    for thread in threads:
        thread.start()
    with jh.Events(kinds="release", capacity=100) as steady:
        for _ in range(60 * soak):
            with jh.Events(kinds="map|unmap", capacity=10) as events:
                while not events.take():
                    pass
            steady.take()
    done.set()
    for thread in threads:
        thread.join()
    assert not failures


def test_in_a_forked_child(python: Python) -> None:
    python.check(
        """
        import os
        import jemhooks as jh
        events, parents = jh.Events(kinds=31), jh.Arena()
        pid = os.fork()
        if not pid:
            status = 1
            try:
                with jh.Arena() as arena, jh.Events(arena, 31) as own:
                    arena.empty(10)
                    assert own.take(), "the child's own queue is empty"
                try:
                    jh.Events(parents)
                except jh.ForkError:
                    pass
                else:
                    os._exit(1)
                try:
                    events.take()
                except jh.ForkError as e:
                    assert "parent" in str(e)
                    status = 0
                events.close()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        with jh.Arena() as arena:
            arena.empty(10)
        assert events.take()
        parents.close()
        """
    )
