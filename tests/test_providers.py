"""Where memory comes from: ordinary, huge, on a NUMA node, or the user's own."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import jemhooks as jh

if TYPE_CHECKING:
    from conftest import Python

pytestmark = pytest.mark.null
MiB = 1 << 20
HUGE = Path("/proc/sys/vm/nr_hugepages")
FREE = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")


def smaps(address: int) -> dict[str, str]:
    """The entry of /proc/self/smaps for the mapping at the address."""
    found: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if head:
            inside = int(head[1], 16) <= address < int(head[2], 16)
        elif inside:
            name, _, value = line.partition(":")
            found[name] = value.strip()
    assert found, f"nothing is mapped at {address:#x}"
    return found


@pytest.fixture
def huge_pages() -> Iterator[Callable[[int], int]]:
    """A function that asks for so many reserved 2 MiB pages; how many are free. Restored afterwards."""
    before = HUGE.read_text()

    def reserve(count: int) -> int:
        with contextlib.suppress(OSError):  # not ours to change: the tests take what is there
            HUGE.write_text(str(count))
        return int(FREE.read_text())

    yield reserve
    gc.collect()
    try:
        HUGE.write_text(before)
    except OSError:
        assert HUGE.read_text() == before


# ---- anonymous ----


@pytest.mark.parametrize("thp", [True, False])
def test_transparent_huge_pages(thp: bool) -> None:
    with jh.Arena(provider=jh.Anonymous(thp=thp), region_min="8MiB", region_max="8MiB") as arena:
        block = arena.block("6MiB")
        block.memoryview()[:] = b"x" * len(block)
        entry = smaps(jh.region(block).base)
        assert ("hg" in entry["VmFlags"].split()) == thp, "MADV_HUGEPAGE where asked"
        assert ("nh" in entry["VmFlags"].split()) == (not thp), "MADV_NOHUGEPAGE where not"
        if not thp:
            assert entry["AnonHugePages"] == "0 kB"
        del block


def test_numa_node_is_bound() -> None:
    with jh.Arena(provider=jh.Anonymous(numa_node=0)) as arena:
        a = arena.full(100_000, 1.0)
        base = jh.region(a).base
        for line in Path("/proc/self/numa_maps").read_text().splitlines():
            start, policy = line.split()[:2]
            if int(start, 16) == base:
                assert policy == "bind:0", f"the region must be bound to node 0: {line}"
                break
        else:
            raise AssertionError("the region is not in /proc/self/numa_maps")
        del a


def test_numa_node_that_is_not_there() -> None:
    for node in (999, 1023, 1024, 2**31 - 1):
        with pytest.raises(jh.ConfigError, match=f"no NUMA node {node} on this machine"):
            jh.Anonymous(numa_node=node)


def test_provider_for_several_arenas(null: jh.Null) -> None:
    provider = jh.Anonymous(thp=False)
    with jh.Arena(null, provider=provider) as one, jh.Arena(null, provider=provider) as two:
        del provider
        gc.collect()
        a, b = one.full(10, 1.0), two.full(10, 2.0)
        assert (a.sum(), b.sum()) == (10, 20), "an anonymous provider serves several arenas, and they keep it"
        del a, b


# ---- hugetlb ----


def test_no_huge_pages_reserved(huge_pages: Callable[[int], int], null: jh.Null) -> None:
    assert huge_pages(0) == 0, "this test needs to be allowed to set vm.nr_hugepages, or to find it at 0"
    provider = jh.Anonymous(hugetlb="2MiB")
    with jh.Arena(null, provider=provider, name="huge") as arena:
        for _ in range(3):
            with pytest.raises(jh.AllocationError, match=r"1000 bytes in arena 'huge' .*hugetlb.*vm\.nr_hugepages"):
                arena.block(1000)
        stats = arena.stats()
        assert (stats.regions, stats.mapped, stats.current_count) == (0, 0, 0), "nothing is left of the attempts"
        if huge_pages(4) >= 4:
            assert not arena.zeros(1000).any(), "once pages are there, the same arena works"
            gc.collect()
    assert null.stats().registers == 0


def test_huge_pages_work(huge_pages: Callable[[int], int], null: jh.Null) -> None:
    if huge_pages(16) < 8:
        with jh.Arena(null, provider=jh.Anonymous(hugetlb="2MiB")) as arena, pytest.raises(jh.AllocationError):
            arena.block("64MiB")
        return  # this machine cannot reserve huge pages; the error is what a user sees here
    with jh.Arena(null, provider=jh.Anonymous(hugetlb="2MiB"), region_max="4MiB") as arena:
        a = arena.zeros(3 * MiB, "u1")
        a[:] = 0xA5
        entry = smaps(jh.region(a).base)
        assert entry["KernelPageSize"] == "2048 kB", "the memory is of 2 MiB pages"
        assert int(entry["Private_Hugetlb"].split()[0]) >= 3072, "and counted as such"
        assert jh.region(a).length % (2 * MiB) == 0, "regions are whole huge pages"
        assert jh.key(a).length == 3 * MiB
        del a
        assert arena.trim() > 0
        assert not arena.zeros(3 * MiB, "u1").any(), "hugetlb pages are never given back, so they must be cleared"
        with pytest.raises(jh.AllocationError, match=r"vm\.nr_hugepages"):
            arena.block("64MiB")
        assert not arena.zeros(1000).any(), "the arena goes on after a refusal"
    assert int(re.search(r"HugePages_Free:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) >= 8, (  # type: ignore[index]
        "closing gives the huge pages back"
    )


def test_gigantic_pages() -> None:
    if not Path("/sys/kernel/mm/hugepages/hugepages-1048576kB").exists():
        with pytest.raises(jh.ProviderError, match="no huge pages of 1073741824 bytes"):
            jh.Anonymous(hugetlb="1GiB")
        return
    with jh.Arena(provider=jh.Anonymous(hugetlb="1GiB")) as arena, pytest.raises(jh.AllocationError, match="huge"):
        arena.block(1)


# ---- fixed ----


def test_fixed_range_is_used_and_never_beyond(null: jh.Null) -> None:
    memory = np.full(8 * MiB, 0xEE, "u1")
    start, end = memory.__array_interface__["data"][0], memory.__array_interface__["data"][0] + memory.nbytes
    inner = memory[1000 : 5 * MiB + 77]
    low = -(-(start + 1000) // 4096) * 4096
    high = (start + 5 * MiB + 77) // 4096 * 4096
    with jh.Arena(null, provider=jh.Fixed(inner)) as arena:
        kept = []
        with pytest.raises(jh.AllocationError, match=f"fixed memory has {high - low} bytes") as e:  # noqa: PT012
            while True:
                kept.append(arena.full(30_000, 0x11, "u1"))
        assert len(kept) > 100, "most of the range can be used"
        for a in kept:
            where = a.__array_interface__["data"][0]
            assert low <= where < where + a.nbytes <= high, "blocks lie in the range, rounded inwards to 4 KiB"
        home = jh.region(kept[0])
        assert (home.base, home.length) == (low, high - low), "the range is one region"
        del kept, a, e
        gc.collect()
        arena.trim()
        assert not arena.zeros(2 * MiB, "u1").any(), "purged and reused, and zero where asked"
        del home
    assert (memory[: low - start] == 0xEE).all(), "not one byte before the range was written"
    assert (memory[high - start :] == 0xEE).all(), "nor after it"
    assert end - start == 8 * MiB


def test_fixed_old_bytes_are_cleared_unless_said_to_be_zero() -> None:
    memory = np.full(4 * MiB, 0xEE, "u1")
    with jh.Arena(provider=jh.Fixed(memory)) as arena:
        assert not arena.zeros(MiB, "u1").any(), "zeros() clears what the owner left"
    with jh.Arena(provider=jh.Fixed(memory)) as arena:
        assert not arena.zeros(3 * MiB, "u1").any(), "a second arena in the same range starts with old bytes, too"
    provider = jh.Fixed(np.zeros(4 * MiB, "u1"), zeroed=True)
    for _ in range(2):
        with jh.Arena(provider=provider) as arena:
            a = arena.zeros(MiB, "u1")
            assert not a.any(), "zeroed=True is true only for the first arena"
            a[:] = 1
            del a


def test_one_arena_at_a_time() -> None:
    provider = jh.Fixed(np.zeros(4 * MiB, "u1"))
    with jh.Arena(provider=provider) as arena:
        with pytest.raises(jh.ProviderError, match="already serves an arena"):
            jh.Arena(provider=provider)
        kept = arena.full(3, 2.0)
    with pytest.raises(jh.ProviderError, match="already serves an arena"):
        jh.Arena(provider=provider)
    assert kept.tolist() == [2.0] * 3, "closed, but alive: its range is still taken"
    del kept
    jh.Arena(provider=provider).close()


def test_fixed_memory_smaller_than_what_the_allocator_takes_at_a_time() -> None:
    """Of those that take single pages, none is; the others say so before anything is allocated."""
    memory = np.zeros(100_000, "u1")
    if jh.build_config()["allocator"] not in ("tbbmalloc", "mimalloc"):
        with jh.Arena(policy="none", provider=jh.Fixed(memory)) as arena:
            assert arena.zeros(100).sum() == 0
        return
    with pytest.raises(
        jh.ConfigError, match=r"at most \d+ bytes, and .* takes \d+ bytes at a time.*; give it a range of"
    ):
        jh.Arena(policy="none", provider=jh.Fixed(memory))


def test_several_ranges_are_a_region_each(null: jh.Null) -> None:
    memory = np.full(64 * 16 * 4096, 0xEE, "u1")  # 64 KiB each, every second one given
    start = -(-memory.__array_interface__["data"][0] // 4096) * 4096
    ranges = [(start + i * 65536, 65536) for i in range(0, 62, 2)]
    provider = jh.Fixed(ranges)
    for _ in range(2):
        with jh.Arena(null, provider=provider, access="remote_read") as arena:
            kept = [arena.zeros(56 * 1024, "u1") for _ in ranges]
            assert {jh.region(a).base for a in kept} == {base for base, _ in ranges}, "a block in each"
            assert all(not a.any() for a in kept), "cleared of what the owner left"
            assert len({jh.key(a).rkey for a in kept}) == len(ranges), "each is registered for itself"
            with pytest.raises(
                jh.AllocationError, match=f"has {len(ranges) * 65536} bytes in regions of at most 65536"
            ):
                arena.block(65536)
            kept.clear()
    offset = start - memory.__array_interface__["data"][0]
    for i in range(1, 62, 2):
        between = memory[offset + i * 65536 : offset + (i + 1) * 65536]
        assert (between == 0xEE).all(), "what lies between the ranges is not touched"
    buffers = [bytearray(3 * 4096) for _ in range(5)]
    with jh.Arena(provider=jh.Fixed(buffers)) as arena:
        assert len(arena.regions()) == 5
        with pytest.raises(BufferError):
            buffers[3].extend(b"more")


def test_several_ranges_of_which_one_is_wrong() -> None:
    memory = np.zeros(40 * 4096, "u1")
    good = (memory.__array_interface__["data"][0], 20 * 4096)
    wrong: list[tuple[list[Any], type[Exception], str]] = [
        ([good, (0, 4096)], jh.ConfigError, "not a range of user memory"),
        ([good, (good[0], 100)], jh.ConfigError, "no whole 4 KiB page"),
        ([good, b"read-only"], jh.ConfigError, "not writable"),
        ([good, (good[0], -1)], jh.ConfigError, "length"),
        ([], jh.ConfigError, "at least one"),
    ]
    for ranges, error, said in wrong:
        with pytest.raises(error, match=said):
            jh.Fixed(ranges)
    twice = jh.Fixed([good, good])
    for _ in range(2):
        with pytest.raises(jh.ProviderError, match=r"range 2 of 2 .*overlaps another region"):
            jh.Arena(provider=twice)
    with jh.Arena(provider=jh.Fixed([good])) as arena:
        assert len(arena.regions()) == 1, "nothing of the refused arenas is left in the way"


def test_overlapping_ranges() -> None:
    memory = np.zeros(8 * MiB, "u1")
    base = -(-memory.__array_interface__["data"][0] // 4096) * 4096
    with jh.Arena(provider=jh.Fixed(base, 4 * MiB)):
        with pytest.raises(jh.ProviderError, match="overlaps another region"):
            jh.Arena(provider=jh.Fixed(base + 2 * MiB, 4 * MiB))
        with jh.Arena(provider=jh.Fixed(base + 4 * MiB, 2 * MiB)) as beside:
            assert not beside.zeros(1000).any(), "a range beside it is no overlap"


@pytest.mark.parametrize(
    ("make", "take_away"),
    [
        ("bytearray(4 << 20)", "memory.clear()"),
        ("mmap.mmap(-1, 4 << 20)", "memory.close()"),
        ("array.array('B', bytes(4 << 20))", "memory.pop()"),
        ("memoryview(bytearray(4 << 20))", "memory.release()"),
    ],
)
def test_the_owner_cannot_take_the_memory_away(python: Python, make: str, take_away: str) -> None:
    """Nothing segfaults from Python: a buffer in use must refuse to be resized, closed or released."""
    python.check(
        f"""
        import array, gc, mmap, jemhooks as jh
        def refused():
            try:
                {take_away}
            except BufferError:
                return
            raise SystemExit("the arena's memory could be taken away")
        memory = {make}
        arena = jh.Arena(provider=jh.Fixed(memory))
        a = arena.full(1000, 1.0)
        refused()
        assert a.sum() == 1000
        arena.close()
        refused()
        a[:] = 2
        del a, arena
        gc.collect()
        {take_away}
        """
    )


def test_memory_the_host_cannot_touch(null: jh.Null, python: Python) -> None:
    """PROT_NONE: the first read or write, by us or by jemalloc, would be a crash."""
    source = """
        import ctypes, gc, mmap, jemhooks as jh
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
        base = libc.mmap(None, 64 << 20, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        null = jh.Null()
        with jh.Arena(null, provider=jh.Fixed(base, "64MiB", host_accessible=False), name="device") as arena:
            for round in range(3):
                blocks = [arena.block(n, alignment=256) for n in (1, 100, 5000, 100_000, 3 << 20) for _ in range(5)]
                for block in blocks:
                    key = jh.key(block)
                    assert base <= block.address < base + (64 << 20) and key.length == block.nbytes
                    with jh.lease(block):
                        pass
                jh.keys([b.address for b in blocks])
                block = blocks[0]
                for call in (
                    block.memoryview, block.array, lambda: block.__array_interface__, lambda: arena.zeros(3),
                    lambda: arena.empty(3), lambda: arena.full(3, 1), lambda: arena.array([1]),
                    lambda: arena.block(8, zero=True),
                ):
                    try:
                        call()
                    except jh.ConfigError as e:
                        assert "host cannot touch" in str(e), e
                    else:
                        raise SystemExit("the host was let in")
                assert arena.stats().current_count == len(blocks)
                del blocks[1::2]
                arena.trim()
                blocks.clear()
                del block
                gc.collect()
                arena.trim()
                assert null.stats().live == 0
            print(arena.stats().current_count, arena.stats().abandoned)
    """
    assert python.check(source) == "0 0\n", "block, key, lease and free work without touching the memory"


# ---- an arena in another arena's block ----


@pytest.mark.parametrize("alignment", [64, 4096, 2 * MiB])
@pytest.mark.parametrize("order", ["inner first", "blocks first"])
def test_nested(python: Python, alignment: int, order: str) -> None:
    out = python.check(
        f"""
        import numpy as np
        import jemhooks as jh
        outer_null, inner_null = jh.Null(), jh.Null()
        outer = jh.Arena(outer_null, name="outer")
        before, home, after = outer.full(5000, 1.0), outer.block("4MiB", alignment={alignment}), outer.full(5000, 2.0)
        inner = jh.Arena(inner_null, provider=jh.Fixed(home), name="inner")
        arrays = [inner.full(20_000, i, "u1") for i in range(100)]
        assert all(jh.region(a).arena is inner for a in arrays), "the innermost region wins"
        assert jh.region(before).arena is jh.region(after).arena is outer
        assert jh.key(arrays[0]).rkey == 2 and jh.key(before).rkey == 2
        assert inner_null.stats().live == 1 and outer_null.stats().live >= 1
        assert all((a == i).all() for i, a in enumerate(arrays))
        for _ in range(3):
            arrays[::2] = [inner.full(20_000, i, "u1") for i in range(0, 100, 2)]
            others = [outer.full(50_000, 9.0) for _ in range(20)]
            inner.trim(), outer.trim()
        assert all((a == i).all() for i, a in enumerate(arrays)) and all((o == 9).all() for o in others)
        where = arrays[0].__array_interface__["data"][0]
        if {order!r} == "inner first":
            del arrays
            inner.close()
            assert inner_null.stats().live == 0
            assert jh.region(where).arena is outer, "the outer region is back"
            del inner, home
        else:
            inner.close()
            outer.close()
            del home, inner
            arrays.clear()
        del before, after, others
        outer.close()
        del outer
        import gc; gc.collect()
        print(outer_null.stats().live, outer_null.stats().errors, inner_null.stats().live, inner_null.stats().errors)
        """
    )
    assert out == "0 0 0 0\n", "both arenas end, each with its own registrations"


def test_nested_three_deep(python: Python) -> None:
    """From the second page of each block on: the first may be the block's own from its first byte, or not."""
    out = python.check(
        """
        import jemhooks as jh
        null = [jh.Null() for _ in range(3)]
        a = jh.Arena(null[0], name="a")
        block = a.block("16MiB")
        b = jh.Arena(null[1], provider=jh.Fixed(block.memoryview()[4096:]), name="b")
        inner = b.block("4MiB")
        c = jh.Arena(null[2], provider=jh.Fixed(inner.memoryview()[4096:]), name="c")
        x = c.full(1000, 3.0)
        where = x.__array_interface__["data"][0]
        for n in range(3):
            jh.key(where), jh.key(block.address), jh.key(inner.address)
        print(jh.region(where).arena.name, [n.stats().live for n in null])
        b.close()
        print(jh.region(where).arena.name, x.sum())
        del x
        c.close()
        print(jh.region(where).arena.name)
        del c, inner, b
        print(jh.region(where).arena.name)
        del block
        a.close()
        print([n.stats().live for n in null])
        """
    )
    assert out == "c [1, 1, 1]\nc 3000.0\nb\na\n[0, 0, 0]\n", "each end brings the next outer region back"


def test_fixed_by_address_needs_no_object() -> None:
    buffer = ctypes.create_string_buffer(4 * MiB)
    with jh.Arena(provider=jh.Fixed(ctypes.addressof(buffer), "4MiB")) as arena:
        a = arena.full(10, 7, "u1")
        offset = a.__array_interface__["data"][0] - ctypes.addressof(buffer)
        assert buffer.raw[offset : offset + 10] == b"\7" * 10, "the array lies in the range"
        del a
