"""Memory of one process in another: that the bytes are the same, keys, threads, and the C interface.

What is mapped: test_ipc_mapped.py. What must be refused: test_ipc_refused.py. Ends and forks: test_ipc_ends.py.
Limits and users: test_ipc_limits.py. Sockets: test_ipc_sockets.py.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing as mp
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jemhooks as jh

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("ipc_peer")
from ipc_peer import (  # noqa: E402, F401
    Fields,
    Peer,
    arena_fixture,
    forged,
    nothing_mapped_fixture,
    peer_fixture,
    peers_fixture,
    sizes,
    stripes,
    zygote_fixture,
)  # fmt: skip
from test_contract import Run, count, passes, run  # noqa: E402, F401

pytestmark = pytest.mark.null
MiB = 1 << 20
OVERCOMMIT = Path("/proc/sys/vm/nr_overcommit_hugepages")
KINDS = ["memfd", "memfd of huge pages", "directory", "directory on tmpfs", "file", "file on tmpfs"]


@pytest.fixture(name="huge_pages")
def huge_pages_fixture() -> Iterator[bool]:
    """Whether the kernel lends 24 MiB of huge pages."""
    before = OVERCOMMIT.read_text()
    with contextlib.suppress(OSError):
        OVERCOMMIT.write_text(str(max(12, int(before))))
    yield int(OVERCOMMIT.read_text()) >= 12
    gc.collect()
    jh.ipc.set_cache(0)
    with contextlib.suppress(OSError):
        OVERCOMMIT.write_text(before)


@pytest.fixture(params=KINDS)
def provider(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[jh.Provider]:
    kind: str = request.param
    shm = Path("/dev/shm") / f"jemhooks-{tmp_path.name}"
    place = shm if "tmpfs" in kind else tmp_path
    place.mkdir(exist_ok=True)
    if "huge" in kind:
        if not request.getfixturevalue("huge_pages"):
            assert os.geteuid(), "root must be able to have the kernel lend 12 huge pages (vm.nr_overcommit_hugepages)"
            pytest.skip("huge pages need root, as in the guest")
        yield jh.Memfd(hugetlb="2MiB")
    elif kind == "memfd":
        yield jh.Memfd()
    else:
        yield jh.File(place) if "directory" in kind else jh.File(place / "file", "24MiB")
    for file in place.iterdir():
        file.unlink()
    if place == shm:
        shm.rmdir()


# ---- bytes ----


def test_a_handle_is_64_plain_bytes(arena: jh.Arena, peer: Peer) -> None:
    a = arena.full(1000, 2.0)
    handle = jh.ipc.export(a)
    assert type(handle) is bytes
    assert len(handle) == 64
    assert pickle.loads(pickle.dumps(handle)) == handle
    fields = Fields.of(handle)
    assert (fields.length, forged(handle)) == (8000, handle), "these tests know the layout of handles"
    for same in (handle, bytearray(handle), memoryview(handle), np.frombuffer(handle, "u8")):
        assert jh.ipc.open(same).array("f8").sum() == 2000, f"a {type(same).__name__} of these bytes is as good"
    assert peer("float(jh.ipc.open(bytes.fromhex(h)).array('f8').sum())", h=handle.hex()) == 2000
    del a


def test_the_same_bytes_everywhere(provider: jh.Provider, peers: Callable[[], Peer]) -> None:
    """Blocks of all sizes, in several arenas of one provider, read and written by several processes at once."""
    ends = contextlib.ExitStack()
    arenas = [ends.enter_context(jh.Arena(provider=provider, region_max="4MiB")) for _ in range(2)]
    lengths = [100, 1, 4096, 2 * MiB + 5, *sizes(20, 1)]
    blocks = [arenas[i % 2].array(stripes(n, i)) for i, n in enumerate(lengths)]
    assert provider.info().shares
    handles = [jh.ipc.export(a) for a in blocks]
    homes = {jh.region(a).base for a in blocks}
    assert len(homes) > 2, "not all at the beginning of a file"
    readers = [peers() for _ in range(3)]
    for i, reader in enumerate(readers):
        reader.start(
            """
            opened = [jh.ipc.open(h) for h in handles]
            arrays = [o.array() for o in opened]
            bad = [j for j, (a, n) in enumerate(zip(arrays, lengths)) if a.nbytes != n or (a != stripes(n, j)).any()]
            answer = bad, jh.ipc.stats().opened
            """,
            handles=handles, lengths=lengths, me=i,
        )  # fmt: skip
    for reader in readers:
        bad, opened = reader.result()
        assert bad == [], "blocks with other bytes than here"
        assert opened == len(homes), "a region is mapped once, whatever is opened of it"
    for reader in readers:
        reader.start("for i, n in enumerate(lengths): arrays[i][me::3] = stripes(n, 100 + me)[me::3]")
    for reader in readers:
        reader.result()
    for i, n in enumerate(lengths):
        expected = np.empty(n, "u1")
        for me in range(3):
            expected[me::3] = stripes(n, 100 + me)[me::3]
        assert (blocks[i] == expected).all(), f"block {i} ({n} bytes) has other bytes than were written by the others"
        blocks[i][:] = i
    for reader in readers:
        assert reader("[bool((a == i).all()) for i, a in enumerate(arrays)]") == [True] * len(lengths), "back again"
        reader("del opened, arrays; jh.ipc.set_cache(0)")
        assert reader("jh.ipc.stats()")[1:4] == (0, 0, 0)
    blocks.clear()
    ends.close()


def test_a_large_block(arena: jh.Arena, peer: Peer) -> None:
    big = arena.block("100MiB")
    view = big.array("u8")
    view[:] = np.arange(view.size)
    peer(
        """
        block = jh.ipc.open(handle)
        a = block.array("u8")
        assert a.nbytes == 100 << 20
        assert (a == np.arange(a.size)).all(), "other bytes"
        a[::512] = 7
        del a, block
        """,
        handle=jh.ipc.export(big),
    )
    assert (view[::512] == 7).all(), "what the other one wrote, a word in each page"
    assert (view[1::512] == np.arange(1, view.size, 512)).all()
    del view, big


def test_what_can_be_exported(arena: jh.Arena, tensor: Any) -> None:
    a = arena.array(stripes(24_000, 3)).reshape(60, 400)
    b = arena.block(100)
    b.array()[:] = 9
    where = a.__array_interface__["data"][0]
    cases: list[tuple[Any, Any, bytes]] = [
        (a, None, a.tobytes()),
        (a[7], None, a[7].tobytes()),
        (a[1:3, 5:9], None, a.tobytes()[405:809]),  # the whole extent, with its gaps
        (a.T, None, a.tobytes()),
        (a[::-1], None, a.tobytes()),
        (a.data, 10, a.tobytes()[:10]),
        (where + 123, 77, a.tobytes()[123:200]),
        (np.uint64(where), "1KiB", a.tobytes()[:1024]),
        (tensor(a), None, a.tobytes()),
        (b, None, b"\x09" * 100),
        (b, 1, b"\x09"),
    ]
    for i, (what, nbytes, expected) in enumerate(cases):
        opened = jh.ipc.open(jh.ipc.export(what, nbytes))
        assert opened.memoryview().tobytes() == expected, f"case {i}: other bytes than named"
        assert len(opened) == opened.nbytes == len(expected)
        assert opened.address not in (where, b.address), "a mapping of its own"
    del a, b, what, cases, opened


# ---- for reading only ----


@pytest.mark.parametrize("by", ["export", "open", "both"])
def test_for_reading_only(arena: jh.Arena, peer: Peer, by: str) -> None:
    a = arena.full(10_000, 5, "u1")
    assert peer(
        """
        import ctypes, warnings
        block = jh.ipc.open(handle, read_only=read_only)
        array, view, whole = block.array(), block.memoryview(), block.region
        assert not block.writable and not whole.writable and (array == 5).all()
        assert not array.flags.writeable and not np.asarray(block).flags.writeable, "numpy could write"
        assert view.readonly and whole.memoryview().readonly, "a memoryview could write"
        refused = []
        for write in (
            lambda: array.__setitem__(0, 1),
            lambda: view.__setitem__(0, 1),
            lambda: jh.Fixed(block),
            lambda: jh.Fixed(whole),
        ):
            try:
                write()
            except (ValueError, TypeError) as e:
                refused.append(type(e).__name__)
        with open("/proc/self/maps") as maps:
            lines = [line.split() for line in maps if ":ours" in line]
        child = os.fork()
        if not child:
            os.close(2)
            ctypes.memset(block.address, 1, 1)
            os._exit(0)
        died = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        del array, view, whole, block, write
        answer = refused, {line[1] for line in lines}, died
        """,
        handle=jh.ipc.export(a, writable=by == "open"),
        read_only=by != "export",
    ) == (["ValueError", "TypeError", "ConfigError", "ConfigError"], {"r--s"}, -11), (
        "neither Python nor C may write to it"
    )
    assert (a == 5).all()
    a[:] = 6
    both = jh.ipc.open(jh.ipc.export(a)), jh.ipc.open(jh.ipc.export(a), read_only=True)
    assert [o.writable for o in both] == [True, False]
    both[0].array()[3] = 1
    assert both[1].array()[3] == 1, "another view of the same bytes"
    assert jh.ipc.stats().opened == 2, "one mapping to write to, one to read"
    del a, both


def test_for_reading_only_cannot_be_overridden(arena: jh.Arena) -> None:
    """numpy asks the array's base; where that says yes, a write would end the process."""
    a = arena.full(100, 5, "u1")
    array = jh.ipc.open(jh.ipc.export(a), read_only=True).array()
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.setflags(write=True)
    del a, array


# ---- keys ----


def test_the_importer_has_keys_of_its_own(arena: jh.Arena, peer: Peer) -> None:
    a = arena.array(stripes(50_000, 1))
    peer(
        """
        null = jh.Null()
        block = jh.ipc.open(handle)
        before = block.array().copy()
        arena = jh.Arena(null, provider=jh.Fixed(block.region))
        with jh.lease(block) as key:
            assert key == jh.key(block) and key.length == 50_000, key
            assert jh.key(block.array()[1000:]).addr == key.addr + 1000
            home = jh.region(block)
            assert home.base == block.region.address and home.leases == 1 and home.arena is arena
            del home
        assert null.stats().live == 1
        address = block.address
        del block
        assert jh.ipc.stats().opened == 1, "the arena keeps the memory it is over"
        assert (arena.provider.owner.array()[address - arena.provider.owner.address :][:50_000] == before).all()
        arena.close()
        del arena
        gc.collect()
        assert null.stats().live == 0 and jh.ipc.stats().opened == 0, (null.stats(), jh.ipc.stats())
        null.close()
        """,
        handle=jh.ipc.export(a),
    )
    assert (a == stripes(50_000, 1)).all(), "an arena over imported memory must not touch it"
    del a


@pytest.mark.fabric
def test_a_third_one_reaches_it_by_rma(arena: jh.Arena, peer: Peer) -> None:
    """We export; the other one registers what it opened; we put to it over the network, and find our bytes changed."""
    a, stop = arena.array(stripes(200_000, 1)), arena.zeros(1, "u1")
    with jh.Fabric("tcp") as fabric, jh.Arena(fabric) as local:
        address, key = peer(
            """
            block, stop = jh.ipc.open(handle), jh.ipc.open(stop).array()
            fabric = jh.Fabric("tcp")
            arena = jh.Arena(fabric, provider=jh.Fixed(block.region))
            lease = jh.lease(block)
            key = lease.__enter__()
            answer = fabric.address(), key
            """,
            handle=jh.ipc.export(a), stop=jh.ipc.export(stop),
        )  # fmt: skip
        peer.start("while not stop[0]: fabric.progress(0.002)")
        other = fabric.connect(address)
        mine = local.array(stripes(200_000, 2))
        fabric.put(other, mine[100:-100], key, offset=100).wait(20)
        expected = stripes(200_000, 1)
        expected[100:-100] = mine[100:-100]
        assert (a == expected).all(), "a put to the importer's key must change the exporter's bytes, and no others"
        a[:] = 3
        fabric.get(other, mine, key).wait(20)
        assert (mine == 3).all(), "and a get must see what the exporter wrote"
        stop[0] = 1
        peer.result()
        del mine
    peer("lease.release(); del lease, block, stop; arena.close(); del arena; fabric.close(); gc.collect()")
    assert peer("jh.ipc.stats().opened") == 0
    del a, stop


# ---- ways of working ----


def _spawned(handle: bytes, pipe: Any) -> None:
    array = jh.ipc.open(handle).array("f8")
    array *= 2
    pipe.send((float(array.sum()), jh.ipc.stats().opened))  # it is still open at the end of the process


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_multiprocessing(arena: jh.Arena, method: str, python: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", python.environment()["GLIBC_TUNABLES"])
    a = arena.full(1000, 1.0)
    ours, theirs = mp.Pipe()
    child = mp.get_context(method).Process(target=_spawned, args=(jh.ipc.export(a), theirs))
    child.start()
    theirs.close()
    assert ours.recv() == (2000, 1)
    child.join(30)
    assert child.exitcode == 0
    assert (a == 2).all(), "what the other one wrote"
    ours.close()
    child.close()
    del a


def test_threads_while_exporters_end(peers: Callable[[], Peer], soak: int) -> None:
    """Eight threads open what is there, what is just closing and what is gone; bytes of live exporters are right."""
    exporter = peers()
    stop, shared, failures, opens = threading.Event(), list[tuple[bytes, int]](), list[BaseException](), [0]
    with jh.Arena(provider=jh.Memfd()) as lasting:
        always = lasting.full(3000, 200, "u1")
        shared += [(jh.ipc.export(always), 200), (jh.ipc.export(always), 200)]

        def work(me: int) -> None:
            try:
                for i in range(10**9):
                    if stop.is_set():
                        return
                    handle, value = shared[(i + me) % 2]
                    try:
                        block = jh.ipc.open(handle, read_only=bool(me % 2))
                    except jh.ClosedError:
                        assert value != 200, "what lasts was refused"
                        continue
                    opens[0] += 1
                    seen = set(np.unique(block.array()).tolist())
                    assert seen <= {0, value}, f"a stranger's bytes {seen} instead of {value}"
                    if value == 200:
                        assert block.alive
                        assert seen == {value}
                    del block
            except BaseException as e:
                failures.append(e)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for t in threads:
            t.start()
        for i in range(30 * soak):
            jh.ipc.set_cache(i % 3)
            value = 1 + i % 100
            if i % 2:
                handle = exporter(
                    "ar = jh.Arena(provider=jh.Memfd()); a = ar.full(3000, v, 'u1'); answer = jh.ipc.export(a)", v=value
                )
                shared[1] = handle, value
                exporter("del a; ar.close(); del ar")
            else:
                with jh.Arena(provider=jh.Memfd()) as arena:
                    a = arena.full(3000, value, "u1")
                    shared[1] = jh.ipc.export(a), value
                    del a
        stop.set()
        for t in threads:
            t.join(30)
        del always
    assert not failures, failures[0]
    assert opens[0] > 30, "the test was to open something"


@pytest.mark.contract
@pytest.mark.parametrize("case", ["arguments", "forged", "leaks", "many", "table_full", "threads", "exporters"])
def test_in_c(run: Run, case: str) -> None:  # noqa: F811
    passes(run("ipc", f"case={case}", count("rounds", 200)))
