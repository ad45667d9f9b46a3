"""What every provider must do, II: memory of others, and where memory ends."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from kinds import PAGE, Kind, MiB, most

import jemhooks as jh

if TYPE_CHECKING:
    from conftest import Python


# ---- memory of others ----


def assert_not_ours(address: int, why: str) -> None:
    calls: tuple[Callable[[int], Any], ...] = (jh.key, jh.region, jh.lease, jh.packed_key, lambda a: jh.keys([a]))
    for call in calls:
        try:
            call(address)
        except jh.NotOursError:
            continue
        pytest.fail(f"{call} takes {address:#x}: {why}")


def test_foreign_memory_is_refused(provider_kind: Kind) -> None:
    with (
        provider_kind.make() as provider,
        jh.Null() as null,
        jh.Arena(null, provider=provider) as own,
    ):
        kept = [own.full(300_000, 1, "u1") for _ in range(20)]
        jh.keys([a.__array_interface__["data"][0] for a in kept])
        calls = null.stats().registers
        foreign, buffer, pages = np.zeros(10), ctypes.create_string_buffer(10), mmap.mmap(-1, PAGE)
        assert_not_ours(foreign.__array_interface__["data"][0], "malloc's")
        assert_not_ours(ctypes.addressof(buffer), "malloc's")
        assert_not_ours(np.frombuffer(pages, "u1").__array_interface__["data"][0], "a mapping of somebody else")
        assert_not_ours(ctypes.cast(ctypes.CDLL(None).malloc, ctypes.c_void_p).value or 0, "code")
        for address in (0, 1, PAGE, 2**47 - 1, 2**48, 2**63, 2**64 - 1):
            assert_not_ours(address, "nobody's")
        regions = [(int(r["base"]), int(r["base"] + r["length"])) for r in own.regions()]
        for base, end in regions:
            for edge in (base - 1, end):
                if not any(low <= edge < high for low, high in regions):
                    assert_not_ours(edge, "just outside of a region")
            assert int(jh.region(base).base) == int(jh.region(end - 1).base) == base, "and just inside it is one"
        with pytest.raises(jh.NotOursError):
            own.sges([kept[0], foreign])
        assert null.stats().registers == calls, "nothing was registered for any of them"
        assert all((a == 1).all() for a in kept), "or written"
        del kept


def test_an_ended_arena_is_found_nowhere(provider_kind: Kind) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    free_there = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
    with provider_kind.make() as provider, jh.Null() as null:
        arena = jh.Arena(null, provider=provider, region_max="4MiB")
        kept = [arena.block(n) for n in (100, 5000, 70_000, 3 * MiB, 3 * MiB)]
        where = [b.address for b in kept]
        jh.keys(where)
        regions = [(int(r["base"]), int(r["length"])) for r in arena.regions()]
        where += [base for base, _ in regions] + [base + length - 1 for base, length in regions]
        del kept
        arena.close()
        taken = [libc.mmap(*r, 3, free_there, -1, 0) for r in regions] if provider.info().unmaps else []
        assert not taken or taken == [base for base, _ in regions], "an arena's end frees its address space"
        for address in where:
            assert_not_ours(address, "its arena has ended")
        for base, length in regions if taken else ():
            ctypes.memset(base, 7, length)
        with jh.Arena(null, provider=provider, region_max="4MiB") as arena:
            a = [arena.zeros(3 * MiB, "u1") for _ in range(4)]
            a[0][:] = a[1][:] = 1
            jh.key(a[0])
            for base, length in regions if taken else ():
                assert_not_ours(base, "it is somebody else's mapping now")
                assert ctypes.string_at(base, length) == b"\7" * length, "a later arena wrote to a foreign mapping"
            del a
        for base, length in regions if taken else ():
            ctypes.CDLL(None).munmap(ctypes.c_void_p(base), ctypes.c_size_t(length))
        assert (null.stats().live, null.stats().errors) == (0, 0), "and no registration is left"


def test_memory_that_stays_registered_is_not_used_again(provider_kind: Kind, python: Python) -> None:
    """A device may still write to it; so it stays mapped, and is nobody's."""
    out = python.check(
        provider_kind.script(
            """
            with jh.Null(fail_deregister_at=1) as null:
                how = dict(provider=provider, region_min="8MiB", region_max="8MiB")
                arena = jh.Arena(null, **how)
                block = arena.block(MiB)
                jh.key(block)
                home = jh.region(block)
                base, length = home.base, home.length
                free = provider.info().free
                del block, home
                gc.collect()
                try:
                    arena.close()
                except jh.RegistrationError:
                    pass
                else:
                    raise SystemExit("no error")
                for address in (base, base + length - 1):
                    ctypes.memset(address, 0x5A, 1)
                    try:
                        jh.region(address)
                    except jh.NotOursError:
                        pass
                    else:
                        raise SystemExit("it is still found")
                try:
                    arena = jh.Arena(null, **how)
                except jh.ProviderError as e:
                    print("refused", e)
                else:
                    kept = []
                    try:
                        while len(kept) < 30:
                            kept.append(arena.full(MiB, 1, "u1"))
                    except jh.AllocationError:
                        pass
                    assert len(kept) > 20, len(kept)
                    for a in kept:
                        assert not base - MiB < a.ctypes.data < base + length, "a block where a device may write"
                    jh.key(a)
                    del a
                    kept.clear()
                    arena.close()
                for address in (base, base + length - 1):
                    assert ctypes.string_at(address, 1) == bytes([0x5A]), "somebody wrote there"
                assert null.stats().live == 1
            """
        )
    )
    assert not out or "failed to deregister it earlier" in out


# ---- the end of memory ----


def test_out_of_memory(provider_kind: Kind, python: Python) -> None:
    """Its own memory ends, or the address space (RLIMIT_AS): a typed error, nothing is lost, and it goes on."""
    out = python.check(
        provider_kind.script(
            """
            with jh.Null() as null, jh.Arena(
                null, provider=provider, access="remote_read", region_max="8MiB", name="full"
            ) as arena:
                arena.zeros(1000)
                with open("/proc/self/status") as f:
                    now = int(f.read().split("VmSize:")[1].split()[0]) * 1024
                resource.setrlimit(resource.RLIMIT_AS, (now + 160 * MiB, resource.getrlimit(resource.RLIMIT_AS)[1]))
                counts = []
                for i in range(4):
                    kept, said = [], ""
                    while not said:
                        try:
                            kept.append(arena.block(MiB))
                        except jh.AllocationError as e:
                            said = str(e)
                    assert "1048576 bytes" in said and "'full'" in said, said
                    assert any(remedy in said for remedy in ("free", "vm.nr", "make room")), said
                    counts.append(len(kept))
                    for n, block in enumerate(kept):
                        ctypes.memset(block.address, n + 1, MiB)
                    jh.key(kept[-1])
                    for n, block in enumerate(kept):
                        assert ctypes.string_at(block.address, 5000) == bytes([n + 1]) * 5000, "a block was overwritten"
                    del block
                    kept.clear()
                    gc.collect()
                    if i % 2:
                        arena.trim()
                    assert not arena.zeros(2 * MiB, "u1").any(), "when blocks were freed, it goes on"
                stats = arena.stats()
                assert (stats.abandoned, stats.current_count) == (0, 0), stats
                assert stats.mapped < 200 * MiB, stats
            print(*counts)
            """
        )
    )
    counts = [int(n) for n in out.split()]
    assert counts[0] > 24, "most of the memory can be used"
    assert min(counts) >= counts[0] - counts[0] // 10, f"each time as many blocks fit: {counts}"


def fill(arena: jh.Arena, nbytes: int) -> list[jh.Block]:
    """So many blocks that no more fit."""
    kept = []
    with contextlib.suppress(jh.AllocationError):
        while True:
            kept.append(arena.block(nbytes))
    return kept


def test_small_memory_can_be_used_to_the_end(bounded_kind: Kind) -> None:
    with bounded_kind.make(32 * MiB) as provider:
        room = most(bounded_kind, provider)
        for nbytes in (PAGE, 65536, MiB):
            with jh.Arena(provider=provider) as arena:
                kept = fill(arena, nbytes)
                for n, block in enumerate(kept):
                    ctypes.memset(block.address, n % 255 + 1, nbytes)
                for n, block in enumerate(kept):
                    assert ctypes.string_at(block.address, nbytes) == bytes([n % 255 + 1]) * nbytes, "overwritten"
                share = len(kept) * nbytes / room
                least = 0.9 if nbytes < MiB else 0.65  # each step by which jemalloc grows loses up to a block
                assert share >= least, f"only {share:.1%} usable for blocks of {nbytes} bytes"
                assert arena.stats().abandoned == 0, "nothing is lost at the end"
                del block
                kept.clear()


def test_free_but_dirty_pages_are_found(bounded_kind: Kind) -> None:
    """jemalloc keeps what is freed; it is purged before an allocation is refused."""
    how: dict[str, Any] = {"dirty_decay_ms": -1, "muzzy_decay_ms": -1}
    with bounded_kind.make() as provider, jh.Arena(provider=provider, **how) as arena:
        room = most(bounded_kind, provider)
        kept = fill(arena, 12_000)
        assert len(kept) * 12_000 > room * 0.8, "full"
        kept.clear()
        gc.collect()
        assert arena.stats().dirty > room * 0.8, "and then everything is dirty, or this shows nothing"
        for nbytes in (MiB, 100_000, 1000):
            block = arena.block(nbytes)
            block.memoryview()[:] = b"x" * nbytes
            del block
        assert arena.stats().abandoned == 0, "nothing is lost"


def test_generations_of_arenas_lose_nothing(bounded_kind: Kind, soak: int) -> None:
    """What one arena had is found by the next, however they come and go."""
    rng = random.Random(5)
    with bounded_kind.make() as provider:
        with jh.Arena(provider=provider) as arena:
            at_first = len(fill(arena, MiB))
        several = 4 if provider.info().divides else 1
        alive: list[tuple[jh.Arena, list[Any]]] = []
        for _ in range(120 * soak // bounded_kind.hurry):
            if len(alive) == several:
                arena, blocks = alive.pop(rng.randrange(len(alive)))
                blocks.clear()
                arena.close()
            region = rng.choice(("2MiB", "4MiB", "16MiB"))
            arena, blocks = jh.Arena(provider=provider, region_min=region, region_max=region), []
            alive.append((arena, blocks))
            with contextlib.suppress(jh.AllocationError):
                for _ in range(rng.randrange(20)):
                    n = rng.choice((1000, 70_000, MiB, 3 * MiB))
                    blocks.append(arena.zeros(n, "u1"))
                    assert not blocks[-1].any(), "an earlier arena's bytes are seen"
                    blocks[-1][:] = 0xA5
        for arena, blocks in alive:
            blocks.clear()
            arena.close()
        alive.clear()
        info = provider.info()
        assert info.free == info.total, "all of it came back"
        with jh.Arena(provider=provider) as arena:
            assert len(fill(arena, MiB)) == at_first, "the last arena has as much as the first"
            gc.collect()
        if several > 1:
            with jh.Arena(provider=provider) as arena:
                arena.block(most(bounded_kind, provider) // 2)  # one block: it is whole again, not in pieces
