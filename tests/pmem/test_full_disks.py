"""Full file systems: allocations are refused, nothing is lost, and no page is without room (SIGBUS).

What tests/test_full.py does on tmpfs, in small, and what only a disk can get wrong; in the soak all of it.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
pytest.register_assert_rewrite("test_full")
from test_full import MOUNT, SOURCES  # noqa: E402

SOAK = os.environ.get("JEMHOOKS_SOAK") == "1"
if SOAK:  # an hour: on fsdax, with MAP_SYNC, each first touch of a page is a commit of the journal
    from test_full import (  # noqa: F401
        test_filled_by_others_in_mid_life,
        test_full_as_it_grows,
        test_full_when_it_is_made,
        test_registering_on_a_full_file_system,
    )

if TYPE_CHECKING:
    from conftest import Python

# Instead of a file system of 64 MiB, one in which all else is taken.
TAKEN = """
    import threading, time
    import numpy as np
    place = tempfile.mkdtemp(dir=sys.argv[1])
    excess = sys.argv[1] + "/excess"

    def mount(room=64 * MiB):
        s = os.statvfs(place)
        with open(excess, "wb") as f:
            os.posix_fallocate(f.fileno(), 0, s.f_bfree * s.f_frsize - room)
"""
EMPTY = """
    import shutil
    os.unlink(excess)
    shutil.rmtree(place)
"""


@pytest.fixture
def mounted(python: Python, place: Path) -> Callable[[str], str]:
    """A function that runs a script; its mount(room) leaves so little room."""

    def run(script: str) -> str:
        source = "".join(textwrap.dedent(s) for s in ("import tempfile", MOUNT, TAKEN, script, EMPTY))
        return python.check(source, str(place))

    return run


@SOURCES
def test_full_and_filled_by_others(mounted: Callable[[str], str], source: str) -> None:
    """The pages of a freed block are given back; when they are to be used again, there may be no room for them."""
    mounted(
        f"""
        mount(8 * MiB)
        with jh.Arena(provider={source}, region_max="4MiB", dirty_decay_ms=0, muzzy_decay_ms=0) as arena:
            kept = []
            fill(arena, kept, 100_000)
            first = len(kept)
            assert first > 40, f"only {{first}} blocks of 100,000 bytes fit into 8 MiB"
            del kept[10:]
            gc.collect()
            others_fill_it()
            take_what_there_is(arena, (100, 5000, 100_000, MiB), 10)
            refused(jh.AllocationError, "make room in its file system", lambda: arena.zeros(3 * MiB, "u1"))
            check(arena, kept)
            room_again()
            fill(arena, kept, 100_000)
            assert len(kept) > first * 3 // 4, f"only {{len(kept)}} of {{first}} fit when there is room again"
            check(arena, kept)
            kept.clear()
        """
    )


@SOURCES
def test_what_is_refused_takes_no_room(mounted: Callable[[str], str], source: str) -> None:
    """A file system that refuses a reservation may have made a part of it."""
    mounted(
        f"""
        mount(8 * MiB)
        with jh.Arena(provider={source}, region_max="4MiB", dirty_decay_ms=0, muzzy_decay_ms=0) as arena:
            first = arena.zeros(100_000, "u1")
            room = os.statvfs(place).f_bfree
            for nbytes in (9 * MiB, 20 * MiB, 9 * MiB, 20 * MiB):
                refused(jh.AllocationError, "make room in its file system", lambda: arena.zeros(nbytes, "u1"))
                left = os.statvfs(place).f_bfree
                assert left > room - 64, f"after {{nbytes}} bytes were refused {{left}} of {{room}} blocks are left"
            assert arena.zeros(MiB, "u1").nbytes == MiB
            del first
        """
    )


@SOURCES
def test_bytes_reach_the_medium_of_a_full_file_system(mounted: Callable[[str], str], source: str) -> None:
    """The file is in many pieces, which the file system must describe somewhere, too, when it writes them."""
    mounted(
        f"""
        mount(8 * MiB)
        with jh.Arena(provider={source}, region_max="4MiB", dirty_decay_ms=0, muzzy_decay_ms=0) as arena:
            kept = []
            fill(arena, kept, 12_000)
            for _ in range(2):
                del kept[1::2]
                gc.collect()
                for a in kept[::3]: # some pages of a piece
                    a[::8192] = 9
                others_fill_it()
                fill(arena, kept, 12_000)
                room_again()
                for i, a in enumerate(kept):
                    a[:] = i % 251
                os.sync()
                with open("/proc/sys/vm/drop_caches", "w") as f:
                    f.write("3")
                for i, a in enumerate(kept):
                    assert (a == i % 251).all(), f"block {{i}} of {{len(kept)}} was lost"
                del a
            kept.clear()
        """
    )


@SOURCES
def test_several_who_want_the_last_page(mounted: Callable[[str], str], source: str) -> None:
    """Threads of two arenas, while others fill the file system and make room."""
    mounted(
        f"""
        mount(4 * MiB)
        provider = {source}
        end, taken, refusals, wrong = time.monotonic() + 10, [0] * 4, [0] * 4, []

        def work(n, arena):
            rng, kept = np.random.default_rng(n), []
            while time.monotonic() < end and not wrong:
                try:
                    a = arena.zeros(int(rng.choice((5000, 70_000, 500_000))), "u1")
                except jh.AllocationError:
                    refusals[n] += 1
                    del kept[: len(kept) // 2 + 1]
                    continue
                if a.any():
                    wrong.append("old bytes")
                a[:] = n + 1
                taken[n] += 1
                kept.append(a)
                if not (kept[len(kept) // 2] == n + 1).all():
                    wrong.append("a block changed")

        how = dict(dirty_decay_ms=0, muzzy_decay_ms=0, region_max="4MiB")
        with jh.Arena(provider=provider, **how) as one, jh.Arena(provider=provider, **how) as two:
            threads = [threading.Thread(target=work, args=(n, (one, two)[n % 2])) for n in range(4)]
            for t in threads:
                t.start()
            while time.monotonic() < end:
                others_fill_it()
                time.sleep(0.2)
                room_again()
                time.sleep(0.2)
            for t in threads:
                t.join()
            assert not wrong, wrong
            assert min(taken) and sum(refusals), (taken, refusals)
            gc.collect()
            assert one.stats().abandoned == two.stats().abandoned == 0
        """
    )
