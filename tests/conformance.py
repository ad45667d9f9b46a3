"""What every provider must do, whatever its memory is: one suite for all kinds, here and in the guest.

A test module imports everything from here and defines the fixtures ``provider_kind``, of all its kinds, and
``bounded_kind``, of those whose memory has a size.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import random
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from allocator import RECORDS
from conformance_ends import *  # noqa: F403
from kinds import PAGE, Kind, MiB, assert_disjoint, descriptor, in_memory, mappings, most, pieces, status

import jemhooks as jh

if TYPE_CHECKING:
    from conftest import Python, Resources

HUGE = 2 * MiB


# ---- nothing is left behind ----


def leaves_nothing(
    what: str, once: Callable[[], None], warm: int, rounds: int, resources: Callable[[], Resources]
) -> None:
    for _ in range(warm):
        once()
    before, size, lines = resources(), status("VmSize"), len(mappings())
    for _ in range(rounds):
        once()
    after, grown = resources(), status("VmSize") - size
    assert after.descriptors == before.descriptors, f"{rounds} {what} left open files behind"
    assert len(mappings()) <= lines + 10, f"{rounds} {what} left mappings behind"
    assert grown <= 32768, f"{rounds} {what} took {grown} kB of address space with them"
    assert after.resident_kb < before.resident_kb + 4096, f"{rounds} {what} left memory behind"


def test_arenas_leave_nothing(provider_kind: Kind, resources: Callable[[], Resources], soak: int) -> None:
    with provider_kind.make() as provider:

        def once() -> None:
            with jh.Arena(provider=provider) as arena:
                kept = arena.zeros(100_000, "u1"), arena.block("3MiB")
                del kept

        leaves_nothing("arenas", once, 30, (10_000 if soak > 1 else 1000) // provider_kind.hurry, resources)


def test_providers_leave_nothing(provider_kind: Kind, resources: Callable[[], Resources], soak: int) -> None:
    def once() -> None:
        with provider_kind.make() as provider, jh.Arena(provider=provider) as arena:
            arena.zeros(100_000, "u1")

    leaves_nothing("providers", once, 5, 100 * soak // provider_kind.hurry, resources)


def test_blocks_leave_nothing(provider_kind: Kind, resources: Callable[[], Resources], soak: int) -> None:
    with provider_kind.make() as provider, jh.Arena(provider=provider, dirty_decay_ms=0, muzzy_decay_ms=0) as arena:

        def once(seed: int) -> None:
            sizes = random.Random(seed).choices((10, 1000, 5000, 70_000, MiB, 3 * MiB), k=6)
            kept = [arena.full(n, 1, "u1") for n in sizes]
            del kept

        for i in range(60):
            once(i)
        arena.trim()
        before, lines, mapped = resources(), len(mappings()), arena.stats().mapped
        for i in range(150 * soak // provider_kind.hurry):
            once(i)
        arena.trim()
        after, stats = resources(), arena.stats()
        assert after.descriptors == before.descriptors, "allocating left open files behind"
        assert len(mappings()) <= lines + 10, "allocating left mappings behind"
        assert after.resident_kb < before.resident_kb + 4096, "allocating left memory behind"
        assert (stats.current_bytes, stats.committed, stats.abandoned) == (0, 0, 0), "all was freed"
        assert stats.mapped <= mapped * 2, "the same work needs no more regions"


# ---- where blocks lie ----


def test_alignment(provider_kind: Kind) -> None:
    with provider_kind.make() as provider, jh.Arena(provider=provider) as arena:
        room = most(provider_kind, provider)
        for power in range(31):
            alignment = 1 << power
            try:
                block = arena.block(max(1, min(alignment // 2, 5000)), alignment=alignment)
            except jh.AllocationError:
                assert room, "an alignment of at most 1 GiB can be had where memory has no limit"
                assert alignment > room // 8, f"an alignment of {alignment} bytes can be had in {room} bytes"
                continue
            assert block.address % alignment == 0, f"asked for alignment {alignment}, got {block.address:#x}"
            block.memoryview()[:] = b"x" * len(block)
            del block
        assert arena.stats().abandoned == 0, "nothing is lost for alignment"


def test_blocks_are_apart(provider_kind: Kind) -> None:
    """In addresses and in their files; each in one region, of its arena; and no page is shared with anyone."""
    rng = random.Random(3)
    with provider_kind.make() as provider, contextlib.ExitStack() as stack:
        count = 3 if provider.info().divides else 1
        arenas = [stack.enter_context(jh.Arena(provider=provider, region_max="8MiB")) for _ in range(count)]
        live: list[list[tuple[Any, int]]] = [[] for _ in arenas]
        strangers = []
        for step in range(600):
            i = rng.randrange(count)
            n = rng.choice((24, 700, 5000, 40_000, 300_000)) + rng.randrange(16)
            live[i].append((arenas[i].full(n, step % 251, "u1"), step % 251))
            strangers.append(np.full(n, 255, "u1"))
            if step % 3 == 0:
                del live[i][rng.randrange(len(live[i]))], strangers[rng.randrange(len(strangers))]
            if step % 100 == 0:
                arenas[i].trim()
        table = mappings()
        regions = [{(int(r["base"]), int(r["length"])) for r in a.regions()} for a in arenas]
        assert_disjoint("regions", [p for own in regions for r in own for p in pieces(*r, table)])
        spans: list[tuple[Any, int, int]] = []
        pages: list[set[int]] = []
        for arena, own, blocks in zip(arenas, regions, live, strict=True):
            used = set()
            for block, value in blocks:
                assert (block == value).all(), "what was written to a block changed"
                address = block.__array_interface__["data"][0]
                home = jh.region(block)
                assert home.arena is arena, "a block lies in a region of its arena"
                assert home.base <= address < address + block.nbytes <= home.base + home.length, "and not beyond it"
                assert (home.base, home.length) in own, "which is one that the arena knows"
                spans += pieces(address, block.nbytes, table)
                used |= set(range(address // PAGE, (address + block.nbytes - 1) // PAGE + 1))
            pages.append(used)
        assert_disjoint("blocks", spans)
        pages.append({s.__array_interface__["data"][0] // PAGE for s in strangers})
        pages[-1] |= {(s.__array_interface__["data"][0] + s.nbytes - 1) // PAGE for s in strangers}
        whole = [(f, a // PAGE * PAGE, a // PAGE * PAGE + PAGE) for own in pages for p in own for f, a, _ in
                 pieces(p * PAGE, 1, table)]  # fmt: skip
        assert_disjoint("owners of a page", whole)
        del block, blocks, home
        live.clear()


def test_an_arena_in_a_block(provider_kind: Kind) -> None:
    """The innermost region wins, and its end brings the outer one back."""
    with provider_kind.make() as provider, jh.Null() as outer_null, jh.Null() as inner_null:
        with jh.Arena(outer_null, provider=provider, name="outer") as outer:
            home = outer.block("5MiB", alignment=PAGE)
            for shared in (False, True):
                with jh.Arena(inner_null, provider=jh.Fixed(home, shared=shared), name="inner") as inner:
                    a, beside = inner.full(5000, 1, "u1"), outer.full(5000, 2, "u1")
                    assert jh.region(a).arena is inner, "the innermost region wins"
                    assert jh.region(beside).arena is outer, "and what lies beside it is the outer arena's"
                    jh.key(a), jh.key(beside)
                    assert (inner_null.stats().live, outer_null.stats().live > 0) == (1, True), "each has its own key"
                    assert (a.sum(), beside.sum()) == (5000, 10_000), "and its own bytes"
                    where = a.__array_interface__["data"][0]
                    del a, beside
                assert jh.region(where).arena is outer, "the outer region is back"
            del home, inner
            gc.collect()
        assert outer_null.stats().errors == inner_null.stats().errors == outer_null.stats().live == 0


# ---- zeroes ----

CHURN = f"""
    def scribble(at, end):
        while at < end: # but for records at the start of each 2 MiB
            stop = min(end, at // {HUGE} * {HUGE} + {HUGE})
            at = max(at, at // {HUGE} * {HUGE} + {RECORDS})
            if at < stop:
                ctypes.memset(at, 0x5A, stop - at)
            at = stop
"""
CHURN += """
    def churn(arena, write, steps, limited):
        rng, live, used, again = random.Random(steps), {}, set(), 0
        for step in range(steps):
            n = rng.choice((100, 5000, 70_000, MiB, 3 * MiB))
            n = rng.randrange(n // 2 + 1, n + 1)
            try:
                a = arena.zeros(n, "u1")
            except jh.AllocationError:
                assert limited, "memory ran out"
                live.clear()
                continue
            assert not a.any(), f"zeros() of {n} bytes holds {int((a != 0).sum())} old bytes at step {step}"
            a[:] = 0xA5
            pages = set(range(a.ctypes.data // 4096, (a.ctypes.data + n) // 4096 + 1))
            again += not used.isdisjoint(pages)
            used |= pages
            if write and step % 4 == 0:
                jh.key(a)
            live[rng.randrange(10)] = a
            del a
            if step % 16 == 15:
                live.clear()
                gc.collect()
                for r in arena.regions() if write else ():
                    if r["state"] == jh.State.REGISTERED: # a peer that has the key may write to all of it
                        scribble(int(r["base"]), int(r["base"] + r["length"]))
            if step % 40 == 39:
                arena.trim()
        assert again > steps // 3, "many blocks lie where others did, or this shows nothing"

    def all_ways(steps, limited):
        for decay in (0, None, -1):
            for policy in ("none", "lazy", "eager"):
                null = jh.Null()
                how = dict(region_max="8MiB", dirty_decay_ms=decay, muzzy_decay_ms=decay, policy=policy)
                with jh.Arena(null, provider=provider, access="remote_write", **how) as arena:
                    churn(arena, policy != "none", steps, limited)
                assert null.stats().live == null.stats().errors == 0
                assert policy == "none" or null.stats().registers, "there was a writer"
"""


def test_zeroes_where_others_wrote(provider_kind: Kind, python: Python) -> None:
    """Earlier blocks, other arenas, and peers with the key of the region."""
    script = f"all_ways({30 + 70 // provider_kind.hurry}, {provider_kind.bounded})"
    python.check(provider_kind.script(textwrap.dedent(CHURN) + script))


def test_zeroes_with_all_memory_locked(provider_kind: Kind, python: Python) -> None:
    """Locked pages of private memory cannot be given back; that must be noticed."""
    script = f"""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mlockall(2 | 4) == 0, "MCL_FUTURE | MCL_ONFAULT needs CAP_IPC_LOCK or a high `ulimit -l`"
    all_ways({20 + 40 // provider_kind.hurry}, {provider_kind.bounded})
    """
    python.check(provider_kind.script(textwrap.dedent(CHURN) + textwrap.dedent(script)))


def test_zeroes_while_forked_children_live(provider_kind: Kind, python: Python) -> None:
    """Children have the same pages, or copies of them."""
    script = f"""
    def child():
        pid = os.fork()
        if not pid:
            os.close(hold)
            os.read(wait, 1)
            os._exit(0)
        return pid

    wait, hold = os.pipe()
    children = []
    with jh.Arena(provider=provider, dirty_decay_ms=0, muzzy_decay_ms=0, region_max="8MiB") as arena:
        for i in range(3):
            old = arena.full(3 * MiB, 0xA5, "u1")
            children.append(child())
            del old
            churn(arena, False, 60, {provider_kind.bounded})
    os.close(hold)
    for pid in children:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "a child ended badly"
    """
    python.check(provider_kind.script(textwrap.dedent(CHURN) + textwrap.dedent(script)))


def test_free_pages_are_given_back(provider_kind: Kind) -> None:
    """To the kernel, and read as zero then; or info() says that they are not."""
    how: dict[str, Any] = {"dirty_decay_ms": 0, "muzzy_decay_ms": 0, "region_min": "8MiB", "region_max": "8MiB"}
    with provider_kind.make() as provider, jh.Arena(provider=provider, **how) as arena:
        block = arena.block("6MiB")
        block.memoryview()[:] = b"\xa5" * len(block)
        address, nbytes = block.address, len(block)
        [(file, start, end)] = pieces(address, nbytes, mappings())
        fd = descriptor(file)
        before = 0 if fd is None else os.stat(fd).st_blocks * 512
        assert in_memory(address, nbytes) == nbytes // PAGE, "what was written is in memory"
        del block
        arena.trim()
        if not provider.info().gives_back:
            assert ctypes.string_at(address, nbytes) == b"\xa5" * nbytes, "not given back, and not touched"
            return
        assert in_memory(address, nbytes) == 0, "what was freed is not in memory"
        if fd is not None:
            held = os.stat(fd).st_blocks * 512
            assert held <= before - nbytes + MiB, f"the file still takes {held} of {before} bytes"
            # In whole huge pages: of less, munmap() would refuse to undo anything, and close() would not say so.
            low, high = start // HUGE * HUGE, -(-end // HUGE) * HUGE
            high = min(high, os.stat(fd).st_size or high)
            with mmap.mmap(fd, high - low, mmap.MAP_SHARED, mmap.PROT_READ, offset=low) as other:
                assert not any(other[start - low : end - low]), "another process sees the old bytes"
        assert not any(ctypes.string_at(address, nbytes)), "what was given back reads as zero"
