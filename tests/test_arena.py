"""Arenas: their options, their life, their account."""

from __future__ import annotations

import resource
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

import jemhooks as jh

if TYPE_CHECKING:
    from conftest import Python

pytestmark = pytest.mark.null
MiB = 1 << 20


def test_defaults(null: jh.Null) -> None:
    with jh.Arena(null) as arena:
        assert (arena.policy, arena.name, arena.registrars) == ("lazy", "arena", (null,)), "as documented"
        assert arena.access == jh.Access.REMOTE_READ | jh.Access.REMOTE_WRITE, "as documented"
        assert repr(arena) == "<jemhooks.Arena 'arena' lazy>"
    assert repr(arena) == "<jemhooks.Arena 'arena' lazy closed>"
    with jh.Arena() as arena:
        assert arena.policy == "none", "without a registrar nothing can be registered"


def test_account_in_bytes_and_counts(null: jh.Null) -> None:
    with jh.Arena(null) as arena:
        assert arena.stats().regions == 0, "an arena that was not used maps nothing"
        a, b = arena.empty(1000, "u1"), arena.empty(500, "u1")
        del a
        c = arena.block("2KiB")
        s = arena.stats()
        assert (s.current_bytes, s.current_count) == (2560, 2), "what lives, in the sizes that jemalloc gives"
        assert (s.peak_bytes, s.peak_count) == (2560, 2), "the most that lived at a time"
        assert (s.total_bytes, s.total_count) == (3584, 3), "all that ever was"
        assert s.regions == 1, "three small blocks lie in one region"
        assert s.mapped == arena.regions()["length"].sum(), "mapped is the length of all regions"
        assert s.committed == arena.regions()["committed"].sum(), "committed, too"
        assert s.committed == s.active + s.dirty + s.muzzy, "committed is exactly what jemalloc holds"
        assert (s.registered, s.registrations) == (0, 0), "lazy: nothing was asked for a key yet"
        jh.key(b)
        s = arena.stats()
        assert (s.registered, s.registered_peak, s.registrations) == (s.mapped, s.mapped, 1), "the whole region, once"
        del b, c
        assert arena.trim() == s.mapped, "trim tells how many bytes it deregistered"
        s = arena.stats()
        assert (s.registered, s.registered_peak, s.deregistrations) == (0, s.mapped, 1), "the peak stays"
        assert (s.committed, s.abandoned, s.current_count, s.current_bytes) == (0, 0, 0, 0), "nothing is left"
        assert (s.peak_count, s.total_count) == (2, 3), "history stays"


def test_policies(null: jh.Null) -> None:
    with jh.Arena(null, policy="eager") as arena:
        block = arena.block(100)
        assert null.stats().live == 1, "eager: registered before the first block is handed out"
        jh.key(block)
        del block
    with jh.Arena(null, policy="none") as arena:
        block = arena.block(100)
        with pytest.raises(jh.RegistrationError, match="whose policy is none"):
            jh.key(block)
        with pytest.raises(jh.RegistrationError, match="policy is none"):
            jh.lease(block)
        assert jh.region(block).state is jh.State.MAPPED, "memory and look-up work without registration"
        del block
    assert null.stats().registers == 1, "only the eager arena registered"


def test_access_reaches_the_registrar(null: jh.Null) -> None:
    for access, flags in {
        "local_write": 1,
        "remote_read": 2,
        "remote_write": 1 | 4,
        "Remote_Read | REMOTE_WRITE": 1 | 2 | 4,
        "remote_atomic|relaxed_ordering|on_demand": 1 | 8 | 16 | 32,
    }.items():
        with jh.Arena(null, access=access) as arena:
            jh.key(arena.block(1))
        assert null.calls()[-2]["access"] == flags, f"{access}: writing by peers implies writing by our own device"
    for spelled in (
        ["remote_read", "local_write"],
        jh.Access.REMOTE_READ | jh.Access.LOCAL_WRITE,
        3,
        "local_write|remote_read",
    ):
        with jh.Arena(null, access=spelled) as arena:  # type: ignore[arg-type]
            assert arena.access == 3, f"{spelled!r} should mean the same"


def test_use_after_close(null: jh.Null) -> None:
    arena = jh.Arena(null, name="gone")
    kept = arena.zeros(10)
    arena.close()
    for call in (
        lambda: arena.block(1),
        lambda: arena.empty(1),
        lambda: arena.zeros(1),
        lambda: arena.full(1, 1.0),
        lambda: arena.array([1]),
        arena.trim,
        arena.regions,
        arena.stats,
    ):
        with pytest.raises(jh.ClosedError, match="arena 'gone' is closed"):
            call()
    arena.close()
    kept[:] = 1
    assert jh.key(kept).length == 80, "an array of a closed arena lives on, and can be registered"
    with jh.lease(kept):
        assert jh.region(kept).arena is arena, "its region still knows the arena"


def test_closed_registrar(null: jh.Null) -> None:
    registrar = jh.Null()
    with jh.Arena(registrar) as arena:
        registrar.close()
        registrar.close()
        block = arena.block(1)
        assert jh.key(block).lkey == 1, "an arena that has the registrar goes on with it"
        del block
    for call in (registrar.stats, registrar.calls, lambda: registrar.fail("register"), lambda: jh.Arena(registrar)):
        with pytest.raises(jh.ClosedError, match="registrar null is closed"):
            call()
    with pytest.raises(jh.ClosedError), jh.Arena([null, registrar]):
        pass
    assert null.stats().registers == 0, "an arena that cannot be made must not touch its other registrar"
    assert repr(registrar) == "<jemhooks.Null closed>"


def test_regions_grow_up_to_region_max(null: jh.Null) -> None:
    with jh.Arena(null, region_min="2MiB", region_max="8MiB") as arena:
        blocks = [arena.block("1MiB") for _ in range(100)]
        lengths = arena.regions()["length"]
        assert lengths.max() <= 8 * MiB, "regions grow no further than region_max"
        assert len(lengths) < 100, "regions are shared by blocks"
        assert not (arena.regions()["base"] % (2 * MiB)).any(), "regions start on 2 MiB"
        big = arena.block("20MiB")
        home = jh.region(big)
        assert home.length >= 20 * MiB, "a larger block gets a region of its own"
        assert jh.key(big).length == 20 * MiB, "which is one registration"
        del big, blocks
        arena.trim()
        assert arena.stats().abandoned == 0


def test_large_frees_stay(null: jh.Null) -> None:
    """Freeing 16 MiB must not give its pages and its registration away at once: the next one is to be quick."""
    with jh.Arena(null, dirty_decay_ms=-1) as arena:
        for _ in range(20):
            jh.key(arena.block("16MiB"))
        assert null.stats().registers == 1, "20 times the same 16 MiB are one registration"
        assert arena.stats().regions == 1, "and one region"


@pytest.mark.parametrize("decay", [0, None, 1000])
def test_decay(null: jh.Null, decay: int | None) -> None:
    with jh.Arena(null, dirty_decay_ms=decay, muzzy_decay_ms=decay) as arena:
        block = arena.block("1MiB")
        del block
        if decay == 0:
            assert arena.stats().committed == 0, "0 gives freed pages back at once"
        else:
            assert arena.stats().committed >= MiB, "otherwise they are kept for a while"


def test_shards_share_one_arena(null: jh.Null) -> None:
    with jh.Arena(null, shards=4) as arena:
        made: list[np.ndarray] = []
        threads = [threading.Thread(target=lambda: made.append(arena.full(1000, 7.0))) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(20)
        assert [float(a.sum()) for a in made] == [7000.0] * 8, "every thread gets its own memory"
        assert arena.stats().current_count == 8, "one account for all shards"
        assert {jh.region(a).arena for a in made} == {arena}, "all regions belong to the one arena"
        made.clear()


def test_many_arenas(null: jh.Null, soak: int) -> None:
    """More over time than jemalloc has at a time (4,095): indices and thread caches must come back."""
    for i in range(4200 if soak > 1 else 300):
        with jh.Arena(null, name=f"arena {i}") as arena:
            arena.zeros(10)
    arenas = [jh.Arena(null) for _ in range(100)]
    blocks = [a.full(10, i) for i, a in enumerate(arenas)]
    assert all(int(b[0]) == i for i, b in enumerate(blocks)), "100 arenas at a time do not mix"
    for a in arenas:
        a.close()


def test_too_many_arenas_is_an_error_and_not_the_end(python: Python) -> None:
    out = python.check(
        """
        import os, jemhooks as jh
        arenas = []
        try:
            while len(arenas) < 5000:
                arenas.append(jh.Arena())
        except jh.AllocationError as e:
            print(len(arenas) > 4000, "4,095" in str(e))
        a = arenas[0].zeros(10)
        for arena in arenas[-3:]:
            arena.close()
        with jh.Arena() as another:
            print(a.sum(), another.zeros(5).sum(), flush=True)
        os._exit(0)
        """,
        timeout=120,
    )
    assert out == "True True\n0.0 0.0\n", "the limit is named, the others go on, and closing some makes room"


def test_a_failed_growth_does_not_grow_on(python: Python) -> None:
    """What fits must be served, however often larger regions were refused before."""
    out = python.check(
        """
        import resource, jemhooks as jh
        with jh.Arena(name="warm"):
            pass
        with open("/proc/self/statm") as f:
            now = int(f.read().split()[0]) * 4096
        arena = jh.Arena(name="poor")
        resource.setrlimit(resource.RLIMIT_AS, (now + (3 << 20), resource.RLIM_INFINITY))
        refused = 0
        for _ in range(10):
            try:
                arena.block(1000)
            except jh.AllocationError:
                refused += 1
        resource.setrlimit(resource.RLIMIT_AS, (now + (40 << 20), resource.RLIM_INFINITY))
        print(refused, len(arena.block(1000)))
        arena.close()
        """
    )
    assert out == "10 1000\n", "36 MiB of address space are enough for 1,000 bytes"


def test_address_space_exhausted(python: Python) -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    assert limits[0] == resource.RLIM_INFINITY, "this test sets its own limit"
    out = python.check(
        """
        import re, resource, jemhooks as jh
        def now():
            with open("/proc/self/statm") as f:
                return int(f.read().split()[0]) * 4096
        null = jh.Null()
        def limit(more):
            resource.setrlimit(resource.RLIMIT_AS, (now() + more, resource.RLIM_INFINITY))
        limit(256 << 20)
        try:
            jh.Arena(null)
        except jh.AllocationError as e:
            print("page map" in str(e), "ulimit -v" in str(e))
        limit(2 << 30)
        arena = jh.Arena(null, name="poor")
        keep = arena.full(1000, 5.0)
        jh.key(keep)
        limit(64 << 20)
        try:
            arena.block("200MiB")
        except jh.AllocationError as e:
            print(*(part in str(e) for part in ("209715200 bytes in arena 'poor'", "Cannot allocate", "ulimit -v")))
        blocks = []
        try:
            while True:
                blocks.append(arena.block("1MiB"))
        except jh.AllocationError:
            print("full", len(blocks) > 10)
        blocks.clear()
        print(keep.sum(), arena.zeros(1000).sum(), null.stats().live, arena.stats().abandoned)
        limit(4 << 30)
        print(len(arena.block("200MiB")))
        del keep
        arena.close()
        print(null.stats().live)
        """
    )
    assert out == "True True\nTrue True True\nfull True\n5000.0 0.0 1 0\n209715200\n0\n", (
        "a failing mmap is an AllocationError with numbers and remedy, and the arena goes on"
    )
