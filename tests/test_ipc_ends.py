"""Memory of one process in another when one of them dies, or forks."""

from __future__ import annotations

import errno
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import FORK

import jemhooks as jh

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("ipc_peer")
from ipc_peer import (  # noqa: E402, F401
    EXPORT,
    OPEN,
    Held,
    Peer,
    arena_fixture,
    nothing_mapped_fixture,
    peer_fixture,
    peers_fixture,
    stripes,
    zygote_fixture,
)  # fmt: skip

pytestmark = pytest.mark.null


# ---- deaths ----


@pytest.mark.parametrize("source", ["jh.Memfd()", "jh.File(place)", "jh.File(place + '/file', '8MiB')"])
@pytest.mark.parametrize("reap", [True, False], ids=["gone", "zombie"])
def test_the_exporter_is_killed(peer: Peer, tmp_path: Path, source: str, reap: bool) -> None:
    peer("place = p", p=str(tmp_path))
    handle = peer(EXPORT.replace("jh.Memfd()", source))
    mapped, late = jh.ipc.open(handle), peer("b = arena.full(10, 3, 'u1'); answer = jh.ipc.export(b)")
    array = mapped.array()
    assert mapped.alive
    peer.kill(reap=reap)
    if not reap:
        while Path(f"/proc/{peer.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            pass
    assert not mapped.alive
    for stale in (handle, late):
        with pytest.raises(jh.ClosedError, match=r"has ended|process is gone|not the one") as e:
            jh.ipc.open(stale)
        assert e.value.errno in (errno.ESRCH, errno.ESTALE)
    assert (array == stripes(100_000, 1)).all(), "open blocks keep their bytes"
    array[:10] = 1
    assert jh.ipc.stats()[1:4] == (1, 1, 0)
    del mapped, array
    gc.collect()
    assert jh.ipc.stats()[1:4] == (0, 0, 0), "with the last block all goes, as nobody can open it any more"
    with pytest.raises(jh.ClosedError):
        jh.ipc.open(handle)
    if not reap:
        assert peer.reap() == -signal.SIGKILL
        with pytest.raises(jh.ClosedError, match="has ended"):
            jh.ipc.open(handle)
    assert jh.ipc.stats()[1:4] == (0, 0, 0)


def test_an_exporter_that_is_stopped(peer: Peer) -> None:
    """It need not do anything."""
    handle = peer(EXPORT)
    os.kill(peer.pid, signal.SIGSTOP)
    try:
        block = jh.ipc.open(handle)
        assert block.alive
        assert (block.array() == stripes(100_000, 1)).all()
    finally:
        os.kill(peer.pid, signal.SIGCONT)
    del block


def test_an_exporter_that_runs_another_program(peer: Peer) -> None:
    handle = peer(EXPORT)
    block = jh.ipc.open(handle)
    peer.start("os.execv('/bin/sh', ['sh', '-c', 'kill -STOP $$'])")  # the same process, and still there
    while Path(f"/proc/{peer.pid}/stat").read_text().rpartition(" (sh) ")[2].split()[0] != "T":
        pass
    assert not block.alive
    with pytest.raises(jh.ClosedError):
        jh.ipc.open(handle)
    assert (block.array() == stripes(100_000, 1)).all()
    peer.kill()
    del block


def memfds(name: str) -> list[str]:
    """Our open descriptors of memfds of arenas of that name."""
    out = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(fd).startswith(f"/memfd:jemhooks:{name}"):
                out.append(str(fd))
        except FileNotFoundError:  # the listing's own
            pass
    return out


def test_the_importer_is_killed(arena: jh.Arena, peers: Callable[[], Peer]) -> None:
    """Amid opens: nothing is left here, and the memory can be given back."""
    a = arena.full(20 << 20, 1, "u1")
    handle = jh.ipc.export(a)
    (file,) = memfds("ours")
    assert os.stat(file).st_blocks * 512 >= 20 << 20
    for _ in range(4):
        importer = peers()
        before = Held.now()
        importer(OPEN, handle=handle)
        importer.start(
            "while True: block = None; jh.ipc.set_cache(0); block = jh.ipc.open(handle); block.array()[0] = 2"
        )
        while a[0] == 1:
            pass
        assert Held.now() == before, "an importer costs the exporter nothing"
        importer.kill()
        assert Held.now() == before
        assert jh.ipc.stats().exported == 1
        a[0] = 1
    assert (a == 1).all()
    del a
    arena.trim()
    assert os.stat(file).st_blocks == 0, "the memory must be free again"


def test_memory_lives_as_long_as_somebody_has_it(peer: Peer, wait_until: Callable[..., bool]) -> None:
    """On a file system, where that can be seen: the arena has ended, the importer still reads, and is killed."""

    def used() -> int:
        s = os.statvfs("/dev/shm")
        return (s.f_blocks - s.f_bfree) * s.f_frsize

    size = 64 << 20
    before = used()
    with jh.Arena(provider=jh.File("/dev/shm")) as arena:
        a = arena.full(size, 1, "u1")
        peer(OPEN, handle=jh.ipc.export(a))
        assert used() >= before + size // 2
        home = jh.region(a).base
        del a
    assert home
    assert peer("set(block.array()[::4096]) <= {0, 1}"), "it can be read"
    peer.kill()
    assert wait_until(lambda: used() < before + size // 2), "the memory must be free again"


# ---- forks ----


def test_a_child_of_the_exporter(peer: Peer) -> None:
    """It is another process: it opens what its parent exported, and exports what is its own."""
    peer(FORK)
    peer(
        """
        arena = jh.Arena(provider=jh.Memfd(), name="parent's")
        a, fresh = arena.full(1000, 1, "u1"), arena.block("4MiB")
        handle = jh.ipc.export(a)
        mine, theirs = os.pipe(), os.pipe()

        def child():
            assert jh.ipc.stats() == jh.ipc.Stats(0, 0, 0, 0, 0, 0, 64), jh.ipc.stats()
            left, right = socket.socketpair()
            for what in (a, fresh):
                text = refused(jh.ForkError, lambda: jh.ipc.export(what))
                assert "parent's" in text and "fork" in text, text
                refused(jh.ForkError, lambda: jh.ipc.send(left, what))
            block = jh.ipc.open(handle)
            assert block.alive and block.array()[0] == 1
            block.array()[1] = 2
            own = jh.Arena(provider=jh.Memfd(), name="child's")
            b = own.full(500, 3, "u1")
            os.write(mine[1], jh.ipc.export(b))
            assert os.read(theirs[0], 1) == b"x"
            assert b[7] == 9, "what the parent wrote"
            assert jh.ipc.open(jh.ipc.export(b)).array()[7] == 9, "its own, as well"
            del b
            own.close()
            os.write(mine[1], b"y")
            assert os.read(theirs[0], 1) == b"z"

        pid = fork(child)
        its = os.read(mine[0], 64)
        block = jh.ipc.open(its)
        assert (block.array()[1:] == 3).all() and a[1] == 2 and block.alive
        block.array()[7] = 9
        os.write(theirs[1], b"x")
        assert os.read(mine[0], 1) == b"y"
        assert not block.alive
        refused(jh.ClosedError, lambda: jh.ipc.open(its))
        os.write(theirs[1], b"z")
        wait(pid)
        assert Fields.of(its).ledger != Fields.of(handle).ledger
        answer = handle
        """
    )
    assert jh.ipc.open(peer("handle")).array()[1] == 2, "the parent's is as good as before"


def test_blocks_that_were_open_at_a_fork(arena: jh.Arena, peer: Peer) -> None:
    a, b = arena.array(stripes(100_000, 1)), arena.array(stripes(1000, 2))
    peer(FORK)
    peer(
        """
        block, array, other = jh.ipc.open(handle), jh.ipc.open(handle).array(), jh.ipc.open(second, read_only=True)
        before, stats = Held.now(), jh.ipc.stats()

        def child():
            global block, array, other
            assert not block.alive, "not known here"
            assert jh.ipc.stats()[1:4] == (0, 0, 0)
            assert (array == stripes(100_000, 1)).all() and (other.array() == stripes(1000, 2)).all(), "readable"
            array[0] = 77
            again = jh.ipc.open(handle)
            assert again.address != block.address and again.alive and again.array()[0] == 77
            del block, array, other
            gc.collect()
            assert again.array()[0] == 77
            assert jh.ipc.stats()[1:4] == (1, 1, 0)
            jh.ipc.set_cache(0)
            del again
            assert jh.ipc.stats()[1:4] == (0, 0, 0)

        wait(fork(child))
        assert jh.ipc.stats() == stats and Held.now() == before, "the child's closing is its own"
        assert block.alive and array[0] == 77 and (array[1:] == stripes(100_000, 1)[1:]).all()
        assert (other.array() == stripes(1000, 2)).all()
        array[0] = stripes(1, 1)[0]
        wait(fork(lambda: wait(fork(child))))
        assert jh.ipc.stats() == stats and block.alive
        assert jh.ipc.open(handle).region.address == block.region.address
        del block, array, other
        gc.collect()
        assert jh.ipc.stats()[1:4] == (1, 0, 2)
        """,
        handle=jh.ipc.export(a), second=jh.ipc.export(b),
    )  # fmt: skip
    del a, b


def test_an_exporter_dies_and_its_child_lives(peer: Peer) -> None:
    """The child has the memory, and had the descriptors; but nobody vouches for the handle any more."""
    peer(FORK)
    handle = peer(EXPORT)
    block = jh.ipc.open(handle)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0jemhooks-{os.getpid()}")
        listener.listen()
        listener.settimeout(20)
        peer(
            """
            def child():
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.connect(path)
                    sock.send(b"here")
                    assert sock.recv(4) == b"end" and (a == stripes(100_000, 1)).all()
                    sock.send(b"done")
            pid = fork(child)
            """,
            path=listener.getsockname(),
        )
        child, _ = listener.accept()
    with child:
        child.settimeout(20)
        assert child.recv(4) == b"here"
        assert block.alive
        peer.kill()
        assert not block.alive, "a child must not keep its parent alive for others"
        with pytest.raises(jh.ClosedError, match="has ended"):
            jh.ipc.open(handle)
        assert (block.array() == stripes(100_000, 1)).all()
        child.send(b"end")
        assert child.recv(4) == b"done"
    del block
