"""Memory of one process in another when descriptors run out, and with other users."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import jemhooks as jh

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("ipc_peer")
from ipc_peer import (  # noqa: E402, F401
    EXPORT,
    OPEN,
    Fields,
    Peer,
    arena_fixture,
    forged,
    nothing_mapped_fixture,
    peer_fixture,
    peers_fixture,
    stripes,
    zygote_fixture,
)  # fmt: skip

if TYPE_CHECKING:
    from conftest import Python

pytestmark = pytest.mark.null
NOBODY = 65534
root = pytest.mark.skipif(os.geteuid() != 0, reason="changing the user needs root, as in the guest")


# ---- limits ----


def test_an_importer_without_descriptors(arena: jh.Arena, peer: Peer) -> None:
    """However few are left: it opens, or it says which limit to raise. What is mapped needs none."""
    blocks = [arena.full(1000, 7, "u1")]
    with jh.Arena(provider=jh.Memfd()) as other:
        blocks.append(other.full(1000, 8, "u1"))
        result = peer(
            """
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            os.listdir("/proc/self/fd")
            used = max(map(int, os.listdir("/proc/self/fd")))        # the listing's own is free again
            held = [os.dup(2) for _ in range(64)]
            top = max(held) + 1
            answer = []
            for left in range(6):
                jh.ipc.set_cache(0)
                jh.ipc.set_cache(64)
                resource.setrlimit(resource.RLIMIT_NOFILE, (top + left, hard))
                try:
                    block = jh.ipc.open(handles[0])
                    text = "opened" if block.array()[0] == 7 else "other bytes"
                except jh.JemhooksError as e:
                    text = f"{type(e).__name__} {e.errno}: {e}"
                block = None
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                answer.append(text)
            block = jh.ipc.open(handles[0])
            resource.setrlimit(resource.RLIMIT_NOFILE, (top, hard))
            try:
                text = jh.ipc.open(handles[0]).nbytes == 1000
            except jh.JemhooksError as e:
                text = f"{type(e).__name__} {e.errno}: {e}"
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in held:
                os.close(fd)
            del block
            before = len(os.listdir("/proc/self/fd"))
            assert [int(jh.ipc.open(h).array()[0]) for h in handles] == [7, 8], "afterwards all is well"
            assert len(os.listdir("/proc/self/fd")) == before
            answer.append(text)
            """,
            handles=[jh.ipc.export(b) for b in blocks],
        )
        *few, mapped = result
        assert few[-1] == "opened", f"with five descriptors it must work: {few}"
        failed = [text for text in few if text != "opened"]
        assert failed, "the test was to run out of descriptors"
        assert all(text.startswith(f"ProviderError {errno.EMFILE}") and "ulimit -n" in text for text in failed), failed
        assert mapped is True, f"a block of a region that is open needs no descriptor: {mapped}"
        del blocks


def test_an_exporter_without_descriptors(peer: Peer) -> None:
    failed, handle, again = peer(
        """
        arena = jh.Arena(provider=jh.Memfd())
        a = arena.full(1000, 7, "u1")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        held = [os.dup(2) for _ in range(64)]
        top = max(held) + 1
        failed = []
        for left in range(2):
            resource.setrlimit(resource.RLIMIT_NOFILE, (top + left, hard))
            try:
                jh.ipc.export(a)
                failed.append("exported")
            except jh.JemhooksError as e:
                failed.append(f"{type(e).__name__} {e.errno}: {e}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)
        before = len(os.listdir("/proc/self/fd"))
        handle = jh.ipc.export(a)
        assert len(os.listdir("/proc/self/fd")) == before + 2, "those that failed left none behind"
        held = [os.dup(2) for _ in range(64)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, hard))
        again = jh.ipc.export(a)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)
        answer = failed, handle, again
        """
    )
    assert all(text.startswith(f"ProviderError {errno.EMFILE}") and "ulimit -n" in text for text in failed), failed
    assert jh.ipc.open(handle).array().sum() == 7000, "afterwards all is well"
    assert jh.ipc.open(again).array().sum() == 7000, "a handle that was made without a free descriptor must be good"


def test_a_receiver_without_descriptors(python: Python) -> None:
    python.check(
        """
        import errno, os, resource, socket
        import jemhooks as jh
        with jh.Arena(provider=jh.Memfd()) as arena:
            a = arena.full(1000, 7, "u1")
            left, right = socket.socketpair()
            jh.ipc.export(a)
            left.settimeout(5)
            right.settimeout(5)
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            held = [os.dup(0) for _ in range(64)]
            failed, before = 0, len(os.listdir("/proc/self/fd"))
            for free in range(4):
                jh.ipc.send(left, a)
                resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1 + free, hard))
                try:
                    assert jh.ipc.receive(right).array().sum() == 7000
                except (jh.TransferError, jh.ProviderError) as e:
                    assert e.errno == errno.EMFILE and "ulimit -n" in str(e), e
                    failed += 1
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                jh.ipc.set_cache(0)
                assert len(os.listdir("/proc/self/fd")) == before, "descriptors that came along were left open"
            assert 2 <= failed <= 3, failed
            jh.ipc.send(left, a)
            assert jh.ipc.receive(right).array().sum() == 7000
            del a
            left.close(), right.close()
        """
    )


def test_an_importer_without_address_space(arena: jh.Arena, peer: Peer) -> None:
    """That the exporter were gone would be a lie."""
    a = arena.full(1000, 7, "u1")
    text = peer(
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        with open("/proc/self/statm") as f:
            now = int(f.read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 20), hard))
        try:
            jh.ipc.open(handle)
            text = "opened"
        except jh.JemhooksError as e:
            text = f"{type(e).__name__}: {e}"
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        assert jh.ipc.open(handle).array().sum() == 7000, "afterwards all is well"
        answer = text
        """,
        handle=jh.ipc.export(a),
    )
    assert text.startswith("ProviderError"), text
    del a


# ---- who may ----

BECOME = """
    def become(user):
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    def dumpable(yes):
        assert ctypes.CDLL(None).prctl(4, yes, 0, 0, 0) == 0          # PR_SET_DUMPABLE
    def connect(path):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(path)
        sock.settimeout(20)
        return sock
"""


class Meeting:
    """A socket of no path, which any user may connect to."""

    def __enter__(self) -> Meeting:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(f"\0jemhooks-{os.getpid()}")
        self.listener.listen()
        self.listener.settimeout(20)
        return self

    def connect(self, peer: Peer) -> socket.socket:
        peer.start("sock = connect(path)", path=self.listener.getsockname())
        ours, _ = self.listener.accept()
        peer.result()
        ours.settimeout(20)
        return ours

    def __exit__(self, *_: object) -> None:
        self.listener.close()


def explained(error: jh.ProviderError) -> None:
    assert error.errno == errno.EPERM
    for word in ("same user", "CAP_SYS_PTRACE", "ptrace_scope", "Unix socket"):
        assert word in str(error), f"'{word}' is missing: {error}"


@root
def test_another_user(arena: jh.Arena, peer: Peer) -> None:
    """May not take it, and is told what to do, which then works, both ways."""
    a = arena.array(stripes(5000, 1))
    handle = jh.ipc.export(a)
    peer(BECOME)
    with Meeting() as meeting, meeting.connect(peer) as sock:
        peer("become(user)", user=NOBODY)
        with pytest.raises(jh.ProviderError) as e:
            peer("jh.ipc.open(handle)", handle=handle)
        explained(e.value)
        assert peer("jh.ipc.stats()[1:4]") == (0, 0, 0)
        jh.ipc.send(sock, a)
        peer(
            """
            block = jh.ipc.receive(sock)
            assert (block.array() == stripes(5000, 1)).all() and block.alive
            block.array()[0] = 1
            assert jh.ipc.open(handle).array()[0] == 1, "what is mapped can be opened by handle, too"
            mine = jh.Arena(provider=jh.Memfd(), name="nobody's")
            b = mine.full(1000, 5, "u1")
            jh.ipc.send(sock, b)
            """
        )
        assert a[0] == 1
        block = jh.ipc.receive(sock)
        assert block.array().sum() == 5000
        assert jh.ipc.open(peer("jh.ipc.export(b)")).array().sum() == 5000, "root may take it from everybody"
        peer("del block, b; mine.close()")
        assert not block.alive
        del block
    del a, e


@root
def test_an_exporter_that_may_not_be_looked_at(peers: Callable[[], Peer]) -> None:
    """The same user, but the exporter has changed its own, or has secrets: then the kernel refuses."""
    exporter, importer = peers(), peers()
    with Meeting() as meeting:
        for peer in (exporter, importer):
            peer(BECOME)
        with meeting.connect(exporter) as one, meeting.connect(importer) as two:
            for peer in (exporter, importer):
                peer("become(user); dumpable(1)", user=NOBODY)
            handle = exporter(EXPORT)
            assert importer("jh.ipc.open(handle).nbytes", handle=handle) == 100_000, "the same user needs no privilege"
            importer("jh.ipc.set_cache(0)")
            exporter("dumpable(0)")
            with pytest.raises(jh.ProviderError) as e:
                importer("jh.ipc.open(handle)")
            explained(e.value)
            exporter("jh.ipc.send(sock, a)")
            message, descriptors, _, _ = socket.recv_fds(one, 64, 4)  # we are between them
            socket.send_fds(two, [message], descriptors)
            for fd in descriptors:
                os.close(fd)
            importer("block = jh.ipc.receive(sock); assert (block.array() == stripes(100_000, 1)).all()")
            exporter.kill()
            assert importer("block.alive") is False
            importer("del block")
            del e


@root
def test_a_process_without_the_capability(arena: jh.Arena, peer: Peer) -> None:
    """Root without CAP_SYS_PTRACE may not take from root with it."""
    a = arena.full(1000, 5, "u1")
    peer(
        """
        libc = ctypes.CDLL(None)
        head, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert libc.capget(head, data) == 0
        for word in (0, 1, 2):
            data[word] &= ~(1 << 19)                                                   # CAP_SYS_PTRACE
        assert libc.capset(head, data) == 0
        """
    )
    with pytest.raises(jh.ProviderError) as e:
        peer("jh.ipc.open(handle)", handle=jh.ipc.export(a))
    explained(e.value)
    del a, e


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS], ids=["forbidden", "not there"])
@pytest.mark.parametrize("call", [434, 438], ids=["pidfd_open", "pidfd_getfd"])
def test_without_pidfd_getfd(arena: jh.Arena, peer: Peer, call: int, error: int) -> None:
    """As under Yama, in many containers, and on older kernels: then /proc has the descriptors."""
    a = arena.array(stripes(5000, 1))
    with jh.Arena(provider=jh.Memfd()) as short:
        gone = jh.ipc.export(short.block(100))
    peer(
        """
        import struct
        libc = ctypes.CDLL(None, use_errno=True)
        code = b"".join(struct.pack("=HBBI", *op) for op in (
            (0x20, 0, 0, 0), (0x15, 0, 1, call), (0x06, 0, 0, 0x50000 | error), (0x06, 0, 0, 0x7FFF0000)
        ))                                                                # this call fails, all others are allowed
        class Program(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]
        assert libc.prctl(38, 1, 0, 0, 0) == 0                            # PR_SET_NO_NEW_PRIVS
        assert libc.prctl(22, 2, ctypes.byref(Program(4, code)), 0, 0) == 0, ctypes.get_errno()
        assert libc.syscall(call, os.getpid(), 0, 0) == -1 and ctypes.get_errno() == error
        block = jh.ipc.open(handle)
        assert (block.array() == stripes(5000, 1)).all() and block.alive
        block.array()[:] = 4
        del block
        """,
        call=call, error=error, handle=jh.ipc.export(a),
    )  # fmt: skip
    assert (a == 4).all()
    peer("jh.ipc.set_cache(0)")
    for changes in ({"pid": 2**22 + 5}, {"fd": 9999}, {"fd": 0}):
        with pytest.raises(jh.ClosedError):
            peer("jh.ipc.open(handle)", handle=forged(jh.ipc.export(a), **changes))
    with pytest.raises(jh.ClosedError):
        peer("jh.ipc.open(handle)", handle=gone)
    assert Fields.of(gone).pid == os.getpid()
    del a
