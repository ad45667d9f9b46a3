"""What is mapped of other processes, and for how long."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import jemhooks as jh

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("ipc_peer")
from ipc_peer import (  # noqa: E402, F401
    Held,
    Peer,
    arena_fixture,
    nothing_mapped_fixture,
    peer_fixture,
    peers_fixture,
    zygote_fixture,
)  # fmt: skip

pytestmark = pytest.mark.null


# ---- what is mapped ----


def test_blocks_of_a_region_share_a_mapping(arena: jh.Arena, peer: Peer) -> None:
    a, b = arena.full(100, 1, "u1"), arena.full(5000, 2, "u1")
    assert jh.region(a).base == jh.region(b).base, "the test needs them in one region"
    result = peer(
        """
        before = Held.now()
        x = jh.ipc.open(h1)
        one = Held.now(), jh.ipc.stats()
        y, z = jh.ipc.open(h2), jh.ipc.open(h1)
        three = Held.now(), jh.ipc.stats()
        same = x.region.address == y.region.address and y.address - x.address == apart and x.address == z.address
        inside = x.region.nbytes == length
        del x, y
        left = jh.ipc.stats().opened
        kept = z.array()
        del z
        array = jh.ipc.stats().opened, int(kept.sum())
        del kept
        gone = jh.ipc.stats()
        again = jh.ipc.open(h2)
        last = jh.ipc.stats()
        del again
        answer = before, one, three, same, inside, left, array, gone, last
        """,
        h1=jh.ipc.export(a), h2=jh.ipc.export(b), length=jh.region(a).length,
        apart=b.ctypes.data - a.ctypes.data,
    )  # fmt: skip
    before, one, three, same, inside, left, array, gone, last = result
    assert one[1] == jh.ipc.Stats(0, 1, 1, 0, 0, 1, 64)
    assert three[1] == jh.ipc.Stats(0, 1, 1, 0, 2, 1, 64), "the second and third open are hits"
    assert three[0] == one[0], "and cost no mapping and no descriptor"
    assert one[0].mappings - before.mappings == 2, "the region and the exporter's table"
    assert one[0].descriptors - before.descriptors == 1, "the table's"
    assert same, "the blocks must be as far apart as in the exporter"
    assert inside
    assert left == 1, "one block is still open"
    assert array == (1, 100), "an array keeps its block open"
    assert (gone.opened, gone.cached) == (0, 1), "the mapping stays for the next open"
    assert (last.opened, last.cached, last.hits) == (1, 0, 3), "which finds it"
    del a, b


def test_the_cache_is_bounded_and_forgets_the_oldest(peer: Peer) -> None:
    with contextlib.ExitStack() as arenas:
        blocks = [arenas.enter_context(jh.Arena(provider=jh.Memfd())).full(10, i, "u1") for i in range(4)]
        result = peer(
            """
            def touch(i):
                before = jh.ipc.stats().hits
                assert jh.ipc.open(handles[i]).array()[0] == i
                now = jh.ipc.stats()
                return now.hits - before, now.cached
            jh.ipc.set_cache(2)
            answer = [touch(i) for i in (0, 1, 2, 1, 2, 0, 2, 1)]
            held = [jh.ipc.open(h) for h in handles]
            open_beside = jh.ipc.stats()
            del held[3]
            jh.ipc.set_cache(0)
            answer += [jh.ipc.stats()[2:4], open_beside[2:4], touch(3), touch(3)]
            del held
            answer += [jh.ipc.stats()[1:4]]
            jh.ipc.set_cache(64)
            """,
            handles=[jh.ipc.export(b) for b in blocks],
        )
        opens = [(0, 1), (0, 2), (0, 2), (1, 2), (1, 2), (0, 2), (1, 2), (0, 2)]
        assert result[:8] == opens, "whether it was a hit, and how many are kept: the least recently used one goes"
        assert result[8:12] == [(3, 0), (4, 0), (0, 0), (0, 0)], "open ones do not count; with 0, nothing is kept"
        assert result[12] == (0, 0, 0), "and the last one takes the exporter's table along"
        del blocks
    for wrong in (-1, 2**64, "x", None, 1.5):
        with pytest.raises(jh.ConfigError, match="mappings"):
            jh.ipc.set_cache(wrong)  # type: ignore[arg-type]
    assert jh.ipc.stats().cache_limit == 64


@pytest.mark.parametrize("limit", [64, 1, 0])
def test_opening_and_closing_leaves_nothing(peer: Peer, limit: int, soak: int) -> None:
    with contextlib.ExitStack() as arenas:
        blocks = [arenas.enter_context(jh.Arena(provider=jh.Memfd())).full(5000, i, "u1") for i in range(3)]
        rounds = 1000 * soak
        before, after, empty, stats = peer(
            """
            jh.ipc.set_cache(limit)
            def opens(n):
                for i in range(n):
                    block = jh.ipc.open(handles[i % 3], read_only=i % 2)
                    assert block.memoryview()[4999] == i % 3
            opens(12)
            before = Held.now()
            opens(rounds)
            after, stats = Held.now(), jh.ipc.stats()
            jh.ipc.set_cache(0)
            answer = before, after, Held.now(), stats
            """,
            handles=[jh.ipc.export(b) for b in blocks], rounds=rounds, limit=limit,
        )  # fmt: skip
        assert after == before, f"mappings or descriptors were left behind by {rounds} opens"
        assert stats.hits + stats.misses == rounds + 12
        assert stats.misses == (6 if limit == 64 else rounds + 12), "the cache does what it is told"
        assert empty.descriptors == after.descriptors - (limit > 0), "the exporter's table goes with the last mapping"
        del blocks


def test_many_exporters(peers: Callable[[], Peer]) -> None:
    """All are mapped at once; all die; nothing is left."""
    gc.collect()
    before = Held.now()
    count = 24
    exporters = [peers() for _ in range(count)]
    for i, exporter in enumerate(exporters):
        exporter.start("a = jh.Arena(provider=jh.Memfd()).full(999, i, 'u1'); answer = jh.ipc.export(a)", i=i)
    opened = [jh.ipc.open(exporter.result()) for exporter in exporters]
    assert jh.ipc.stats()[1:4] == (count, count, 0)
    assert [int(o.array()[-1]) for o in opened] == list(range(count)), "each is its own exporter's"
    for exporter in exporters:
        exporter.kill()
    assert not any(o.alive for o in opened)
    assert [int(o.array()[-1]) for o in opened] == list(range(count)), "their bytes are still there"
    del opened
    gc.collect()
    assert jh.ipc.stats()[1:4] == (0, 0, 0), "nothing of the dead is kept for later"
    after = Held.now()
    assert after.mappings <= before.mappings
    assert after.descriptors <= before.descriptors + 2 * count, "but for the tests' own two for each process"
