"""The conformance suite over the providers of this machine. Those that need persistent memory: tests/pmem."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jemhooks as jh

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("conformance", "conformance_ends", "kinds")
from conformance import *  # noqa: E402, F403
from kinds import PAGE, SIZE, Kind, assert_disjoint  # noqa: E402

SOAK = os.environ.get("JEMHOOKS_SOAK") == "1"
pytestmark = pytest.mark.null
HUGE = Path("/proc/sys/vm/nr_hugepages")
TMPFS = "/dev/shm"

KINDS = [
    Kind("anonymous", "jh.Anonymous()"),
    Kind("memfd", "jh.Memfd()"),
    Kind("directory", "jh.File(place)"),
    Kind("directory on tmpfs", "jh.File(place)", TMPFS, hurry=2),
]
BOUNDED = [
    Kind("file", "jh.File(f'{place}/file', size)"),
    Kind("file on tmpfs", "jh.File(f'{place}/file', size)", TMPFS, hurry=2),
    Kind("fixed", "jh.Fixed(mmap.mmap(-1, size))"),
    Kind("fixed, shared", "jh.Fixed(mmap.mmap(-1, size), shared=True)"),
    Kind("memfd of huge pages", "jh.Memfd(hugetlb='2MiB')", limit=SIZE, hurry=4),
]


@pytest.fixture(scope="module")
def huge_pages() -> Iterator[bool]:
    """Whether SIZE bytes of huge pages could be reserved; given back at the end."""
    before, wanted = HUGE.read_text(), SIZE >> 21
    with contextlib.suppress(OSError):
        HUGE.write_text(str(wanted))
    yield int(HUGE.read_text()) >= wanted
    gc.collect()
    with contextlib.suppress(OSError):
        HUGE.write_text(before)


def _usable(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    if kind.limit and not request.getfixturevalue("huge_pages"):
        assert os.geteuid(), f"root must be able to reserve {SIZE >> 21} huge pages (vm.nr_hugepages)"
        pytest.skip("reserving huge pages needs root, as in the guest")
    return kind


@pytest.fixture(params=KINDS + BOUNDED, ids=lambda kind: kind.name)
def provider_kind(request: pytest.FixtureRequest) -> Kind:
    return _usable(request)


@pytest.fixture(params=BOUNDED, ids=lambda kind: kind.name)
def bounded_kind(request: pytest.FixtureRequest) -> Kind:
    return _usable(request)


# ---- how arenas divide memory ----


@given(
    pages=st.lists(st.integers(1, 3000), min_size=1, max_size=4),
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3000), st.booleans()), max_size=40),
)
@settings(max_examples=1000 if SOAK else 100, deadline=None, suppress_health_check=list(HealthCheck))
def test_shared_ranges_in_any_order(pages: list[int], steps: list[tuple[int, int, bool]]) -> None:
    """Arenas come and go; nothing overlaps, nothing is lost, and in the end all is whole again."""
    memory = mmap.mmap(-1, (sum(pages) + len(pages)) * PAGE)
    ranges, at = [], np.frombuffer(memory, "u1").__array_interface__["data"][0]
    for n in pages:
        ranges.append((at, n * PAGE))
        at += (n + 1) * PAGE  # a page between them, which is nobody's
    provider = jh.Fixed(ranges, shared=True)
    total = sum(pages) * PAGE
    arenas: dict[int, tuple[jh.Arena, list[tuple[Any, int]]]] = {}

    def close(slot: int) -> None:
        arena, blocks = arenas.pop(slot)
        assert all((block == value).all() for block, value in blocks), "somebody else wrote to a block"
        blocks.clear()
        arena.close()

    for slot, n, end in steps:
        if end and slot in arenas:
            close(slot)
        elif slot not in arenas:
            arenas[slot] = jh.Arena(provider=provider, region_max="4MiB"), []
        if slot in arenas:
            arena, blocks = arenas[slot]
            with contextlib.suppress(jh.AllocationError):
                blocks.append((arena.full(n * 800, n % 251, "u1"), n % 251))
        regions = [(int(r["base"]), int(r["length"])) for a, _ in arenas.values() for r in a.regions()]
        assert_disjoint("regions", [("", base, base + length) for base, length in regions])
        for base, length in regions:
            assert any(low <= base and base + length <= low + n for low, n in ranges), "a region beyond the ranges"
        assert provider.info().free == total - sum(length for _, length in regions), "the account is right"
    for slot in list(arenas):
        close(slot)
    assert provider.info().free == total, "all of it came back"
    with jh.Arena(
        provider=provider
    ) as last:  # whole again: each has room for the largest of jemalloc's sizes that it can
        whole = [max(m << k for m in (4, 5, 6, 7) for k in range(11) if m << k < n) for n in pages if n > 4]
        kept = [last.block(n * PAGE) for n in sorted(whole, reverse=True)]
        del kept
