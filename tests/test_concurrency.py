"""Many threads on one arena."""

from __future__ import annotations

import gc
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest

import jemhooks as jh

if TYPE_CHECKING:
    from conftest import Python

pytestmark = pytest.mark.null


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(count: int, work: Callable[[int], object], timeout: float = 60.0) -> list[BaseException]:
    """Run work(0) … work(count - 1) at the same time; what they raised. All must end in time."""
    begin, raised = threading.Barrier(count), []

    def run(i: int) -> None:
        try:
            begin.wait(timeout)
            work(i)
        except BaseException as e:
            raised.append(e)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout)
    assert not any(t.is_alive() for t in threads), f"a thread did not end within {timeout} s: a deadlock"
    return raised


@pytest.mark.parametrize("ask", [jh.key, jh.lkey, lambda a: jh.keys([a.__array_interface__["data"][0]] * 3), jh.lease])
def test_one_fresh_region_is_registered_once(null: jh.Null, ask: Callable[[object], object]) -> None:
    for round_ in range(20):
        with jh.Arena(null) as arena:
            a = arena.zeros(10)
            answers: list[object] = []

            def work(_: int, a: np.ndarray = a, answers: list[object] = answers) -> None:
                answers.append(ask(a))

            raised = together(8, work)
            assert not raised, raised
            assert null.stats().registers == round_ + 1, "eight threads asked, one registered"
            for answer in answers:
                if isinstance(answer, jh.Lease):
                    answer.release()
            del a, answers, work


def test_eager_registers_before_handing_out(null: jh.Null) -> None:
    with jh.Arena(null, policy="eager", shards=2) as arena:

        def work(i: int) -> None:
            for n in range(50):
                block = arena.block(1 << (10 + (n + i) % 12))
                assert jh.region(block).state is jh.State.REGISTERED, "handed out before it was registered"

        raised = together(6, work)
        assert not raised, raised
        assert null.stats().errors == 0, "a region was registered twice"


def test_eager_failures_among_threads() -> None:
    with jh.Null() as null, jh.Arena(null, policy="eager", region_max="2MiB", dirty_decay_ms=0) as arena:
        refused = []

        def work(i: int) -> None:
            for _ in range(40):
                try:
                    block = arena.block("1800KiB")
                    assert jh.region(block).state is jh.State.REGISTERED
                    del block
                    if i == 0:
                        null.fail("register", 1)
                    arena.trim()
                except jh.RegistrationError as e:
                    refused.append(str(e))

        raised = together(4, work)
        assert not raised, raised
        assert all("errno 12" in text for text in refused), "each thread gets its own failure's text"
        gc.collect()
        null.fail("register", 0)
        assert arena.stats().current_count == 0, "no block leaked with a refused registration"
        arena.trim()
        assert (null.stats().live, null.stats().errors) == (0, 0)


def test_everything_at_once(null: jh.Null, soak: int) -> None:
    with jh.Arena(null, shards=3, region_max="4MiB", dirty_decay_ms=10) as arena:
        shelf: dict[int, np.ndarray] = {}
        counter = iter(range(10**9))

        def work(i: int) -> None:
            rng = random.Random(i)
            for _ in range(400 * soak):
                roll = rng.random()
                if roll < 0.45:
                    number = next(counter)
                    a = arena.full(rng.choice([1, 100, 5000, 300_000]), number % 251, "u1")
                    shelf[number] = a
                elif roll < 0.75 and shelf:
                    number = rng.choice(list(shelf) or [0])
                    a = shelf.pop(number, None)  # type: ignore[assignment]  # freed by another thread than allocated it
                    if a is not None:
                        assert (a == number % 251).all(), "someone wrote into a live array"
                elif roll < 0.95 and shelf:
                    a = shelf.get(rng.choice(list(shelf) or [0]))  # type: ignore[assignment]
                    if a is not None:
                        key = jh.key(a)
                        home = jh.region(a)
                        assert (home.rkey, home.generation) == (key.rkey, key.generation), "a live array's key changed"
                elif roll < 0.97:
                    arena.trim()
                else:
                    assert arena.stats().abandoned == 0
                    table = arena.regions()
                    assert (table["committed"] <= table["length"]).all()

        raised = together(5, work, 300)
        assert not raised, raised
        assert all((a == n % 251).all() for n, a in shelf.items())
        shelf.clear()
        arena.trim()


def test_close_in_the_middle_gives_closed_errors_only(null: jh.Null, soak: int) -> None:
    for round_ in range(15 * soak):
        arena = jh.Arena(null, name=f"round {round_}")
        going = threading.Barrier(5)

        def work(i: int, arena: jh.Arena = arena, going: threading.Barrier = going) -> None:
            if i == 4:
                going.wait(10)
                arena.close()
                return
            kept = arena.full(100, i)
            going.wait(10)
            try:
                for n in range(100_000):
                    a = arena.full(50, n)
                    jh.key(a)
                    if n % 10 == 0:
                        arena.stats(), arena.regions(), arena.trim()
                    assert (a == n).all()
            except jh.ClosedError:
                pass
            else:
                raise AssertionError("the arena did not close")
            assert (kept == i).all(), "close() took memory from a live array"
            assert jh.key(kept).length == 800
            with jh.lease(kept):
                pass

        raised = together(5, work)
        assert not raised, raised
        del work, arena
    gc.collect()
    assert null.stats().live == 0, "each arena ended with its last array"


def test_close_from_many_threads_at_once(null: jh.Null) -> None:
    for alive in (False, True):
        for _ in range(100):
            arena = jh.Arena(null)
            a = arena.zeros(10)
            jh.key(a)
            if not alive:
                del a
            raised = together(4, lambda _, arena=arena: arena.close())  # type: ignore[misc]
            assert not raised, raised
            assert null.stats().live == int(alive), "destroyed exactly when nothing is alive"
            a = None  # type: ignore[assignment]
            assert null.stats().live == 0


def test_registrar_closed_in_the_middle(python: Python, soak: int) -> None:
    """In a child, where freed memory of C's is overwritten at once: so its use shows."""
    python.check(
        f"""
        import sys, threading
        import jemhooks as jh
        sys.setswitchinterval(1e-6)
        failures = []
        def work(i, null, begin):
            begin.wait(20)
            try:
                if i == 0:
                    null.close()
                    return
                for _ in range(30):
                    null.stats()
                    with jh.Arena(null) as arena:
                        jh.key(arena.zeros(10))
            except jh.ClosedError:
                pass
            except BaseException as e:
                failures.append(e)
        for _ in range({60 * soak}):
            null, begin = jh.Null(), threading.Barrier(4)
            threads = [threading.Thread(target=work, args=(i, null, begin)) for i in range(4)]
            for t in threads:
                t.start()
            for t in threads:
                t.join(20)
        assert not failures, failures
        """,
        variables={"MALLOC_PERTURB_": "170"},
        timeout=120,
    )


def test_errors_are_per_thread(null: jh.Null) -> None:
    with jh.Arena(null, name="shared") as arena:

        def work(i: int) -> None:
            for n in range(200):
                address = (i + 1) << 40 | n << 12
                with pytest.raises(jh.NotOursError, match=f"{address:#x} "):
                    jh.key(address)
                with pytest.raises(jh.AllocationError, match=f"{2**50 + i} bytes"):
                    arena.block(2**50 + i)

        raised = together(4, work)
        assert not raised, raised
