"""Memory of one process in another, by descriptors sent over a Unix socket."""

from __future__ import annotations

import array
import contextlib
import errno
import gc
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import jemhooks as jh

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("ipc_peer")
from ipc_peer import (  # noqa: E402, F401
    Held,
    Peer,
    arena_fixture,
    forged,
    nothing_mapped_fixture,
    pairs,
    peer_fixture,
    peers_fixture,
    sizes,
    stripes,
    zygote_fixture,
)  # fmt: skip

if TYPE_CHECKING:
    from conftest import Python

pytestmark = pytest.mark.null
STREAM, SEQPACKET, DGRAM = socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM
EACH = pytest.mark.parametrize("kind", [STREAM, SEQPACKET, DGRAM], ids=lambda kind: kind.name)


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a socket, of the kind that the test is about, which wait for 10 s at most."""
    kind = getattr(request.node, "callspec", None)
    a, b = pairs(kind.params.get("kind", STREAM) if kind else STREAM)
    with a, b:
        a.settimeout(10)
        b.settimeout(10)
        yield a, b


def connect(peer: Peer, tmp_path: Path, kind: int = STREAM) -> socket.socket:
    """A connection to the other process, there named `sock`; by a path, as strangers do it."""
    path = str(tmp_path / f"{peer.pid}")
    with socket.socket(socket.AF_UNIX, kind) as listener:
        listener.bind(path)
        listener.listen()
        listener.settimeout(10)
        peer.start("sock = socket.socket(socket.AF_UNIX, kind); sock.connect(path)", path=path, kind=kind)
        ours, _ = listener.accept()
        peer.result()
    ours.settimeout(10)
    return ours


def refused(call: Callable[[], Any], number: int, match: str = "socket") -> None:
    with pytest.raises(jh.TransferError, match=match) as e:
        call()
    assert e.value.errno == number, f"{errno.errorcode.get(e.value.errno)}: {e.value}"


def as_sent(a: Any) -> tuple[bytes, list[int]]:
    """What is sent for an array: the message and its descriptors, which must be closed."""
    ours, theirs = pairs()
    with ours, theirs:
        jh.ipc.send(ours, a)
        message, descriptors, _, _ = socket.recv_fds(theirs, 200, 10)
    return message, descriptors


# ---- what works ----


@EACH
def test_send_and_receive(arena: jh.Arena, ends: tuple[socket.socket, socket.socket], kind: int) -> None:
    ours, theirs = ends
    a = arena.array(stripes(5000, 1))
    before = Held.now().descriptors
    jh.ipc.send(ours, a)
    jh.ipc.send(ours, a, 10, writable=False)
    first, second = jh.ipc.receive(theirs), jh.ipc.receive(theirs)
    assert (first.array() == a).all()
    assert second.memoryview().tobytes() == a[:10].tobytes()
    assert (first.writable, second.writable) == (True, False)
    first.array()[:] = 9
    assert (a == 9).all()
    jh.ipc.send(ours, a)
    assert not jh.ipc.receive(theirs, read_only=True).writable
    assert jh.ipc.stats().opened == 2
    handle = jh.ipc.export(a)
    hits = jh.ipc.stats().hits
    assert jh.ipc.open(handle).region.address == first.region.address, "it is the mapping of the handle, too"
    assert jh.ipc.stats().hits == hits + 1
    after = Held.now().descriptors
    assert after <= before + 3, (
        "descriptors that came along must be closed (the table's are kept: 2 of ours, 1 of theirs)"
    )
    del a, first, second


@pytest.mark.parametrize("kind", [STREAM, SEQPACKET], ids=lambda kind: kind.name)
def test_many_messages_between_processes(arena: jh.Arena, peer: Peer, tmp_path: Path, kind: int) -> None:
    """Sent one after the other, whether or not they have been received."""
    lengths = sizes(100, 4, 100_000)
    with connect(peer, tmp_path, kind) as sock:
        peer.start(
            """
            sock.settimeout(20)
            blocks = [jh.ipc.receive(sock) for _ in lengths]
            bad = [i for i, (b, n) in enumerate(zip(blocks, lengths)) if b.array().tobytes() != stripes(n, i).tobytes()]
            mine = jh.Arena(provider=jh.Memfd())
            for i, b in enumerate(blocks):
                jh.ipc.send(sock, mine.array(b.array()[::-1]))
            answer = bad, jh.ipc.stats().opened
            """,
            lengths=lengths,
        )
        arrays = [arena.array(stripes(n, i)) for i, n in enumerate(lengths)]
        for a in arrays:
            jh.ipc.send(sock, a)
        back = [jh.ipc.receive(sock) for _ in lengths]
        bad, opened = peer.result()
        assert bad == [], "messages whose block has other bytes"
        assert opened == len({jh.region(a).base for a in arrays})
        assert all(b.alive for b in back)
        assert len(os.listdir("/proc/self/fd")) < 60, "descriptors of 200 messages must not be kept"
    del arrays, a, back
    peer("del blocks, b, mine, sock; gc.collect()")


def test_in_pieces(arena: jh.Arena, ends: tuple[socket.socket, socket.socket]) -> None:
    """A stream may be cut anywhere; descriptors come with the first piece."""
    a = arena.full(100, 7, "u1")
    message, descriptors = as_sent(a)
    assert (len(message), len(descriptors)) == (64, 2)
    for cut in (1, 10, 63):
        socket.send_fds(ends[0], [message[:cut]], descriptors)
        ends[1].settimeout(0.05)
        refused(lambda: jh.ipc.receive(ends[1]), errno.ETIMEDOUT, "timed out")
        ends[0].send(message[cut:])  # the rest of what was given up: not at the border of a message
        refused(lambda: jh.ipc.receive(ends[1]), errno.EPROTO, "something else")
    peer_pid = os.fork()
    if not peer_pid:  # sends the pieces one by one, each when the one before it has been read
        with contextlib.suppress(BaseException):
            for cut in (1, 10, 63):
                socket.send_fds(ends[0], [message[:cut]], descriptors)
                left = array.array("i", [1])
                while left[0]:
                    import fcntl
                    import termios

                    fcntl.ioctl(ends[1], termios.FIONREAD, left)
                ends[0].send(message[cut:])
        os._exit(0)
    ends[1].settimeout(10)
    for _ in range(3):
        assert jh.ipc.receive(ends[1]).array().sum() == 700
    os.waitpid(peer_pid, 0)
    for fd in descriptors:
        os.close(fd)
    del a


def test_sockets_that_name_their_peers(arena: jh.Arena, ends: tuple[socket.socket, socket.socket]) -> None:
    """Where the receiver asks for the sender's credentials, as one who checks users does, they come along, too."""
    ends[1].setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    a = arena.full(100, 7, "u1")
    jh.ipc.send(ends[0], a)
    assert jh.ipc.receive(ends[1]).array().sum() == 700
    del a


# ---- what does not ----


@EACH
@pytest.mark.parametrize("timeout", [0.05, 0.0])
def test_nobody_sends(ends: tuple[socket.socket, socket.socket], kind: int, timeout: float) -> None:
    ends[1].settimeout(timeout)
    begun = time.monotonic()
    refused(lambda: jh.ipc.receive(ends[1]), errno.ETIMEDOUT, "timed out")
    assert timeout <= time.monotonic() - begun < 5, "it waits as long as it was told"


@EACH
def test_nobody_receives(arena: jh.Arena, ends: tuple[socket.socket, socket.socket], kind: int) -> None:
    a = arena.full(1000, 7, "u1")
    ends[0].settimeout(0.05)
    sent: list[int] = []

    def fill() -> None:
        while True:
            jh.ipc.send(ends[0], a)
            sent.append(1)

    refused(fill, errno.ETIMEDOUT, "timed out")
    assert len(sent) > 5
    for _ in sent:
        assert jh.ipc.receive(ends[1]).nbytes == 1000, "what was sent before is whole"
    ends[1].settimeout(0.05)
    refused(lambda: jh.ipc.receive(ends[1]), errno.ETIMEDOUT)
    jh.ipc.send(ends[0], a)
    assert jh.ipc.receive(ends[1]).nbytes == 1000, "and it goes on"


@pytest.mark.parametrize("kind", [STREAM, SEQPACKET], ids=lambda kind: kind.name)
def test_the_peer_has_closed(arena: jh.Arena, ends: tuple[socket.socket, socket.socket], kind: int) -> None:
    a = arena.full(1000, 7, "u1")
    ours, theirs = ends
    jh.ipc.send(ours, a)
    ours.close()
    assert jh.ipc.receive(theirs).nbytes == 1000, "what it sent before is there"
    refused(lambda: jh.ipc.receive(theirs), errno.EPIPE, "the peer has closed it")
    refused(lambda: jh.ipc.send(theirs, a), errno.EPIPE, "the peer has closed it")


def test_the_peer_is_killed(arena: jh.Arena, peers: Callable[[], Peer], tmp_path: Path) -> None:
    """Before a message, after it, and while we wait for it."""
    a = arena.full(1000, 7, "u1")
    export = "arena = jh.Arena(provider=jh.Memfd()); a = arena.full(1000, 3, 'u1'); jh.ipc.send(sock, a)"
    for first in ("pass", export):
        peer = peers()
        with connect(peer, tmp_path) as sock:
            peer(first)
            peer.kill()
            if first is export:
                with pytest.raises(jh.ClosedError, match="has ended"):
                    jh.ipc.receive(sock)  # the memory came along, but its owner is gone
            refused(lambda sock=sock: jh.ipc.receive(sock), errno.EPIPE, "the peer has closed")
            with pytest.raises(jh.TransferError):
                jh.ipc.send(sock, a)
    peer = peers()
    with connect(peer, tmp_path) as sock:
        peer.start("os.kill(os.getpid(), 9)")
        with pytest.raises(jh.TransferError):
            jh.ipc.receive(sock)
        peer.reap()
    del a


@EACH
def test_garbage(arena: jh.Arena, ends: tuple[socket.socket, socket.socket], kind: int) -> None:
    """Whatever comes, it is refused, its descriptors are closed, and the next message is good."""
    a = arena.full(1000, 7, "u1")
    handle = jh.ipc.export(a)
    jh.ipc.send(ends[0], a)
    jh.ipc.receive(ends[1])
    files = [os.open(__file__, os.O_RDONLY), os.open("/dev/null", os.O_RDWR), os.memfd_create("x")]
    raw, table = as_sent(a)
    assert raw == handle
    cases: dict[str, tuple[bytes, list[int], type[Exception]]] = {
        "no descriptors": (bytes(64), [], jh.TransferError),
        "a handle without": (handle, [], jh.TransferError),
        "one descriptor": (handle, files[:1], jh.TransferError),
        "noise": (os.urandom(64), files[:2], jh.ConfigError),
        "zeros": (bytes(64), files, jh.ConfigError),
        "another host": (forged(handle, host=1), table, jh.ConfigError),
        "other memory": (handle, [table[0], files[2]], jh.ClosedError),
        "other files": (handle, files[:2], jh.ClosedError),
        "exchanged": (handle, table[::-1], jh.ClosedError),
        "another exporter": (forged(handle, ledger=1), table, jh.ClosedError),
        "another serial": (forged(handle, serial=99), table, jh.ClosedError),
        "beyond": (forged(handle, length=2**40), table, jh.ConfigError),
        "too many": (os.urandom(64), files * 20, jh.ConfigError),
    }
    got = {}
    for name, (message, descriptors, _) in cases.items():
        jh.ipc.set_cache(0)  # nothing of the exporter is known
        before = Held.now().descriptors
        socket.send_fds(ends[0], [message], descriptors)
        try:
            jh.ipc.receive(ends[1])
            got[name] = "accepted"
        except jh.JemhooksError as e:
            got[name] = type(e).__name__
        assert Held.now().descriptors == before, f"{name}: descriptors were left open"
        jh.ipc.send(ends[0], a)
        assert jh.ipc.receive(ends[1]).array().sum() == 7000, f"{name}: the next message is not good any more"
    assert got == {name: kind.__name__ for name, (_, _, kind) in cases.items()}
    jh.ipc.set_cache(64)
    for fd in [*files, *table]:
        os.close(fd)
    del a


@pytest.mark.parametrize("kind", [SEQPACKET, DGRAM], ids=lambda kind: kind.name)
def test_empty_messages_with_descriptors(ends: tuple[socket.socket, socket.socket], kind: int) -> None:
    """A peer must not be able to fill our table of descriptors."""
    before = Held.now().descriptors
    fd = os.memfd_create("x")
    for _ in range(10):
        ends[0].sendmsg([b""], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd, fd]))])
        with pytest.raises(jh.TransferError):
            jh.ipc.receive(ends[1])
    os.close(fd)
    assert Held.now().descriptors == before, "descriptors of messages without bytes were left open"


def test_what_is_no_such_socket(arena: jh.Arena) -> None:
    a = arena.full(1000, 7, "u1")
    with contextlib.ExitStack() as made:

        def new(*kind: int) -> socket.socket:
            sock = made.enter_context(socket.socket(*kind))
            sock.settimeout(0.5)
            return sock

        listener = new(socket.AF_INET, STREAM)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        tcp = new(socket.AF_INET, STREAM)
        tcp.connect(listener.getsockname())
        accepted = made.enter_context(listener.accept()[0])
        accepted.send(bytes(64))
        udp = new(socket.AF_INET, DGRAM)
        udp.connect(("127.0.0.1", 9))

        class File:
            """A file where a socket belongs."""

            def __init__(self) -> None:
                self.file = made.enter_context(open(__file__, "rb"))

            def fileno(self) -> int:
                return self.file.fileno()

            def gettimeout(self) -> float:
                return 0.5

        others: dict[str, Any] = {
            "tcp": tcp, "datagrams of udp": udp, "not connected": new(socket.AF_UNIX, STREAM),
            "datagrams without a peer": new(socket.AF_UNIX, DGRAM), "a file": File(),
        }  # fmt: skip
        got = {}
        for name, sock in others.items():
            for way, call in (("send", lambda s: jh.ipc.send(s, a)), ("receive", jh.ipc.receive)):
                try:
                    call(sock)
                    got[name, way] = "accepted"
                except jh.TransferError as e:
                    if e.errno not in (errno.ETIMEDOUT, errno.ECONNREFUSED) or "datagram" not in name:
                        got[name, way] = str(e)
        told = ("connected Unix socket", "something else was received")
        silent = {name: text for name, text in got.items() if not any(t in text for t in told)}
        assert not silent, "these were not refused, or it does not say what to do"


def test_a_closed_socket(arena: jh.Arena) -> None:
    """It has no descriptor, and nothing will ever come: without a timeout, waiting would never end."""
    a = arena.full(1000, 7, "u1")
    closed, other = pairs()
    closed.settimeout(0.5)
    closed.close()
    other.close()
    refused(lambda: jh.ipc.receive(closed), errno.EBADF)
    refused(lambda: jh.ipc.send(closed, a), errno.EBADF)


def test_a_signal_ends_the_wait(python: Python) -> None:
    """As Ctrl-C must: Python's handlers run only when the call gives way to them."""
    python.check(
        """
        import signal, socket, time
        import jemhooks as jh
        jh.ipc.stats()                                        # all is imported
        class Alarm(Exception):
            pass
        def handler(number, frame):
            raise Alarm
        signal.signal(signal.SIGALRM, handler)
        a, b = socket.socketpair()
        with a, b:
            b.settimeout(3)
            begun = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            try:
                jh.ipc.receive(b)
            except (Alarm, jh.TransferError):
                pass
            assert time.monotonic() - begun < 2, "the handler was not called before the wait was over"
        """
    )


def test_sending_what_cannot_be_sent(arena: jh.Arena, ends: tuple[socket.socket, socket.socket]) -> None:
    with jh.Arena() as private:
        p, a = private.block(10), arena.block(100)
        for call, kind in (
            (lambda: jh.ipc.send(ends[0], p), jh.ProviderError),
            (lambda: jh.ipc.send(ends[0], bytearray(10)), jh.NotOursError),
            (lambda: jh.ipc.send(ends[0], a.address), jh.ConfigError),
            (lambda: jh.ipc.send(ends[0], a.address, 2**40), jh.ConfigError),
            (lambda: jh.ipc.send(ends[0], a, 101), jh.ConfigError),
        ):
            with pytest.raises(kind):
                call()
    ends[1].settimeout(0)
    refused(lambda: jh.ipc.receive(ends[1]), errno.ETIMEDOUT)  # nothing of these was sent
    gc.collect()
