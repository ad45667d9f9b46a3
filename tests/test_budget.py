"""Limits on what is registered: of an arena, of a registrar, shared; and how long idle regions stay registered."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

import jemhooks as jh

pytestmark = pytest.mark.null
MiB = 1 << 20
REGION = "1536KiB"  # a block of this size has a region of 2 MiB to itself


def arena(*registrars: jh.Registrar, **more: Any) -> jh.Arena:
    return jh.Arena(registrars, **{"region_max": "2MiB", "dirty_decay_ms": 0, "muzzy_decay_ms": 0, **more})


def registered(*blocks: jh.Block) -> list[bool]:
    return [jh.region(b).state is jh.State.REGISTERED for b in blocks]


def test_a_full_budget_says_who_holds_what_and_how_to_go_on() -> None:
    with jh.Null() as null, arena(null, pin_limit="4MiB", name="cache") as a:
        blocks = [a.block(REGION) for _ in range(3)]
        jh.keys([b.address for b in blocks[:2]])
        with pytest.raises(jh.PinLimitError) as e:
            jh.key(blocks[2])
        assert e.value.errno == errno.ENOBUFS
        for part in (
            "arena 'cache'",
            "2097152 bytes",
            "at most 4194304 bytes may be registered",
            "4194304 bytes in 2 regions are: 4194304 by arena 'cache'",
            "raise pin_limit",
        ):
            assert part in str(e.value)
        assert registered(*blocks) == [True, True, False], "nothing half registered"
        del e
        a.budget.set("6MiB")
        assert jh.key(blocks[2]).length > 0, "the arena goes on"
        assert (a.budget.pin_limit, a.budget.registered, a.budget.regions) == (6 * MiB, 6 * MiB, 3)
        del blocks


def test_idle_regions_make_room() -> None:
    with jh.Null() as null, arena(null, max_regions=2) as a:
        first, second, third = (a.block(REGION) for _ in range(3))
        jh.key(first)
        jh.key(second)
        where = first.address
        del first
        assert jh.region(where).state is jh.State.REGISTERED, "an idle region stays registered"
        jh.key(third)
        assert jh.region(where).state is jh.State.MAPPED
        assert registered(second, third) == [True, True]
        stats = a.stats()
        assert (stats.evictions, stats.registrations, sum(stats.durations)) == (1, 3, 3)
        assert stats.registering_ns > 0
        assert null.stats().live_peak == 2
        del second, third


def test_an_eager_arena_refuses_the_allocation() -> None:
    with jh.Null() as null, arena(null, policy="eager", max_regions=1) as a:
        first = a.block(REGION)
        with pytest.raises(jh.PinLimitError, match="at most 1 regions"):
            a.block(REGION)
        assert a.stats().current_count == 1, "the refused block is not kept"
        del first
        assert a.block(REGION).nbytes > 0


@pytest.mark.parametrize("kind", ["native", "python"])
def test_a_registrars_budget_is_over_all_its_arenas(kind: str) -> None:
    class Mine(jh.Registrar):
        def register(self, addr: int, length: int, access: jh.Access) -> tuple[int, int, object]:
            return 1, 2, None

        def deregister(self, handle: object) -> None:
            pass

    registrar = jh.Null() if kind == "native" else Mine()
    registrar.budget.set("4MiB")
    with registrar, arena(registrar, name="a") as a, arena(registrar, name="b") as b:
        x, y, z = a.block(REGION), a.block(REGION), b.block(REGION)
        jh.key(x)
        jh.key(y)
        with pytest.raises(jh.PinLimitError, match="by arena 'a'"):
            jh.key(z)
        assert registrar.budget.registered == a.budget.registered == 4 * MiB
        del y
        gc.collect()
        assert jh.key(z).length > 0, "the other arena's idle region made room"
        assert (a.budget.registered, b.budget.registered, registrar.budget.peak) == (2 * MiB, 2 * MiB, 4 * MiB)
        del x, z


def test_use_budget_refuses() -> None:
    with jh.Null() as null, pytest.raises(jh.ConfigError, match="None is not a Budget"):
        null.use_budget(None)  # type: ignore[arg-type]


def test_one_budget_for_two_registrars() -> None:
    both = jh.Budget(pin_limit="6MiB")
    one, two = jh.Null(), jh.Null()
    one.use_budget(both)
    two.use_budget(both)
    with one, two, arena(one) as a, arena(one, two) as rails:
        x, y, z = a.block(REGION), rails.block(REGION), a.block(REGION)
        jh.key(x)
        jh.key(y)
        assert both.registered == 6 * MiB, "memory on two rails counts twice"
        assert rails.budget.registered == 2 * MiB, "but once in the arena's own"
        with pytest.raises(jh.PinLimitError):
            jh.key(z)
        del y
        gc.collect()
        assert jh.key(z).length > 0
        assert two.stats().live == 0, "all rails or none"
        with pytest.raises(jh.JemhooksError, match="before making arenas"):
            two.use_budget(jh.Budget())
        del x, z
    assert both.registered == 0
    assert "0 bytes in 0 regions" in repr(both)


def test_leases_and_unleased() -> None:
    with jh.Null() as null, arena(null, max_regions=1, evict="unleased") as a:
        x, y = a.block(REGION), a.block(REGION)
        with jh.lease(x), pytest.raises(jh.PinLimitError):
            jh.key(y)
        jh.key(y)
        assert registered(x, y) == [False, True], "a region with a live block, but without a lease, made room"
        del x, y


def test_idle_ttl() -> None:
    with jh.Null() as null, arena(null, idle_ttl=0) as a:
        x = a.block(REGION)
        jh.key(x)
        where = x.address
        del x
        assert jh.region(where).state is jh.State.MAPPED, "it goes with its last block"
    with jh.Null() as null, arena(null, idle_ttl=None) as a:
        x = a.block(REGION)
        jh.key(x)
        where = x.address
        del x
        assert jh.region(where).state is jh.State.REGISTERED


def test_a_python_registrar_is_not_called_from_a_free() -> None:
    """Blocks may die inside a garbage collection."""
    calls = []

    class Mine(jh.Registrar):
        def register(self, addr: int, length: int, access: jh.Access) -> tuple[int, int, object]:
            return 1, 2, None

        def deregister(self, handle: object) -> None:
            calls.append(1)

    with arena(Mine(), idle_ttl=0) as a:
        x, y = a.block(REGION), a.block(REGION)
        jh.key(x)
        where = x.address
        del x
        gc.collect()
        assert not calls
        jh.key(y)
        assert len(calls) == 1, "but when something is registered"
        assert jh.region(where).state is jh.State.MAPPED
        del y


def test_hits_are_registrations_saved() -> None:
    with jh.Null() as null, arena(null) as a:
        for _ in range(10):
            jh.key(a.block(REGION))
        assert (a.stats().registrations, a.stats().hits) == (1, 9)


def test_what_the_registrar_can_do_is_its_budget() -> None:
    with jh.Null(max_mr=2) as null, arena(null) as a:
        assert null.budget.max_regions == 2
        x, y, z = (a.block(REGION) for _ in range(3))
        jh.key(x)
        jh.key(y)
        with pytest.raises(jh.PinLimitError, match="at most 2 regions"):
            jh.key(z)
        assert null.stats().registers == 2, "it was not even asked"
        null.budget.set(None)
        with pytest.raises(jh.RegistrationError, match="exceeds max_mr 2") as e:
            jh.key(z)
        assert not isinstance(e.value, jh.PinLimitError)
        del e, x
        gc.collect()
        assert jh.key(z).length > 0, "an idle region is evicted when the registrar refuses, too"
        assert a.stats().retries == 1
        del y, z


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"pin_limit": "1MiB"}, "has no room for one region"),
        ({"pin_limit": 0}, "pin_limit: 0"),
        ({"pin_limit": -1}, "pin_limit: -1"),
        ({"pin_limit": "lots"}, "'lots' is not a size"),
        ({"max_regions": 0}, "max_regions: 0"),
        ({"max_regions": 1.5}, "max_regions: 1.5"),
        ({"idle_ttl": -0.1}, "idle_ttl: -0.1 seconds is not between 0 and"),
        ({"idle_ttl": float("nan")}, "idle_ttl: nan"),
        ({"idle_ttl": float("inf")}, "idle_ttl: inf"),
        ({"idle_ttl": "soon"}, "idle_ttl: 'soon'"),
        ({"evict": "all"}, "evict 'all' is not one of idle, unleased"),
        ({"evict": None}, "evict None"),
    ],
)
def test_wrong_limits(more: dict[str, Any], says: str) -> None:
    with jh.Null() as null, pytest.raises(jh.ConfigError) as e:
        arena(null, **more)
    assert says in str(e.value)
    assert e.value.errno == 0 or e.value.errno == errno.EINVAL


@pytest.mark.parametrize(
    "wrong", [lambda: jh.Budget(0), lambda: jh.Budget(max_regions=-1), lambda: jh.Budget().set("x")]
)
def test_wrong_budgets(wrong: Callable[[], object]) -> None:
    with pytest.raises(jh.ConfigError):
        wrong()


def test_a_budget_outlives_its_arena_and_registrar() -> None:
    with jh.Null() as null, arena(null, pin_limit="4MiB") as a:
        own, theirs = a.budget, null.budget
        jh.key(a.block(REGION))
    with pytest.raises(jh.ClosedError):
        a.budget  # noqa: B018
    with pytest.raises(jh.ClosedError):
        null.budget  # noqa: B018
    assert (own.pin_limit, own.registered, theirs.registered) == (4 * MiB, 0, 0)


def test_a_closed_arena_is_charged_until_its_last_block_dies() -> None:
    with jh.Null() as null:
        null.budget.set("2MiB")
        a = arena(null)
        x = a.block(REGION)
        jh.key(x)
        a.close()
        with arena(null) as b:
            y = b.block(REGION)
            with pytest.raises(jh.PinLimitError):
                jh.key(y)
            del x
            gc.collect()
            assert jh.key(y).length > 0
            del y


def test_threads_share_a_small_budget() -> None:
    with jh.Null() as null, arena(null, pin_limit="8MiB") as a:
        failures: list[BaseException] = []

        def work() -> None:
            try:
                for _ in range(300):
                    block = a.block(REGION)
                    jh.key(block)
                    assert registered(block) == [True]
                    assert null.stats().live_bytes <= 8 * MiB
                    del block
            except BaseException as e:
                failures.append(e)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not failures, "there is room for four at a time"
        assert a.budget.peak <= 8 * MiB


def test_a_child_begins_with_an_empty_budget() -> None:
    budget = jh.Budget(pin_limit="2MiB")
    null = jh.Null()
    null.use_budget(budget)
    with null, arena(null) as a:
        x = a.block(REGION)
        jh.key(x)
        pid = os.fork()
        if not pid:
            ok = budget.registered == 0
            mine = jh.Null()
            mine.use_budget(budget)
            with mine, arena(mine) as b:
                y = b.block(REGION)
                ok = ok and jh.key(y).length > 0 and budget.registered == 2 * MiB
                del y
            os._exit(not ok)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert budget.registered == 2 * MiB, "the child's registrations are not the parent's"
        del x


@pytest.mark.parametrize("whose", ["the arena's", "the registrar's"])
@pytest.mark.parametrize("evict", ["idle", "unleased"])
@pytest.mark.parametrize("ttl", [None, 10.0])
def test_a_lowered_limit_is_in_force_as_soon_as_something_may_go(whose: str, evict: Any, ttl: float | None) -> None:
    with jh.Null() as null, arena(null, evict=evict, idle_ttl=ttl) as a:
        budget = a.budget if whose == "the arena's" else null.budget
        blocks = [a.block(REGION) for _ in range(4)]
        leases = [jh.lease(b) for b in blocks]
        budget.set(None, 1)
        assert budget.regions == 4, "what is leased stays"
        for left in (3, 2, 1, 1):
            leases.pop().release()
            if evict == "idle":
                assert budget.regions == len(blocks), "a live block keeps its region registered"
                blocks.pop()
            assert budget.regions == left == null.stats().live, "what is above the limit goes with its last use"


def test_a_lowered_limit_and_a_registrar_that_minds_being_called_from_a_free() -> None:
    class Mine(jh.Registrar):
        live = 0

        def register(self, addr: int, length: int, access: jh.Access) -> tuple[int, int, object]:
            Mine.live += 1
            return 1, 2, None

        def deregister(self, handle: object) -> None:
            Mine.live -= 1

    with Mine() as mine, arena(mine) as a:
        blocks = [a.block(REGION) for _ in range(3)]
        jh.keys([b.address for b in blocks])
        mine.budget.set(None, 1)
        del blocks[1:]
        assert Mine.live == 3, "not from a finaliser"
        a.trim()
        assert Mine.live == 1, "but with the next trim, or registration"
        blocks.clear()
