"""Other processes for the tests of jemhooks.ipc: each does what a test tells it to.

A process that has everything imported and nothing open forks them, which is quicker than to start Python for each.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

import jemhooks as jh

if TYPE_CHECKING:
    from conftest import Python

WAIT = 20.0


# ---- handles, as csrc/ipc/ipc.h lays them out ----


class Fields(NamedTuple):
    """What a handle says."""

    magic: int
    host: int
    ledger: int
    pid: int
    fd: int
    slot: int
    flags: int
    serial: int
    offset: int
    length: int
    check: int

    LAYOUT = struct.Struct("=IIQIIIIQQQQ")  # type: ignore[misc]

    @classmethod
    def of(cls, handle: bytes) -> Fields:
        return cls(*cls.LAYOUT.unpack(handle))


def forged(handle: bytes, **changes: int) -> bytes:
    """The handle with other fields, and the checksum that belongs to them."""
    body = Fields.LAYOUT.pack(*Fields.of(handle)._replace(**changes))[:56]
    check = 0xCBF29CE484222325
    for byte in body:
        check = (check ^ byte) * 0x100000001B3 % 2**64
    return body + struct.pack("=Q", check)


# ---- what a process holds ----


class Held(NamedTuple):
    """Mappings and open descriptors of this process."""

    mappings: int
    descriptors: int

    @classmethod
    def now(cls) -> Held:
        """Mappings of shared memory only: the interpreter makes others."""
        gc.collect()
        with open("/proc/self/maps") as maps:
            return cls(sum(line.split()[1][3] == "s" for line in maps), len(os.listdir("/proc/self/fd")))


def stripes(nbytes: int, seed: int) -> Any:
    """Bytes that look like no other seed's."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, "u1")


# ---- the other side ----


def _obey(connection: Connection) -> None:
    told: dict[str, Any] = {
        "jh": jh, "np": np, "os": os, "gc": gc, "signal": signal, "socket": socket, "sys": sys,
        "ctypes": ctypes, "resource": resource, "Held": Held, "stripes": stripes, "forged": forged, "Fields": Fields,
    }  # fmt: skip
    answer: Any
    while True:
        try:
            source, values = connection.recv()
        except EOFError:
            return
        told.update(values)
        try:
            try:
                code = compile(source.strip(), "told", "eval")
            except SyntaxError:
                code = compile(textwrap.dedent(source), "told", "exec")
            result = eval(code, told)
            answer = True, told.pop("answer", None) if result is None else result
        except jh.JemhooksError as e:
            e.__cause__ = e.__context__ = None
            answer = False, e.with_traceback(None)
        except BaseException:
            answer = False, AssertionError("in the other process: " + traceback.format_exc())
        result = None
        try:
            connection.send(answer)
        except TypeError:  # cannot be pickled
            connection.send((answer[0], f"{answer[1]!r}"))
        del answer


def _fork(control: socket.socket, descriptors: list[int]) -> None:
    pid = os.fork()
    if pid:
        for fd in descriptors:
            os.close(fd)
        control.send(b"%d" % pid)
        return
    control.close()
    connection = Connection(descriptors[0])
    os.dup2(descriptors[1], 2)
    os.close(descriptors[1])
    _obey(connection)
    sys.exit()


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    jh.ipc.stats(), stripes(1, 1)  # all is imported: some of the others may not read Python's files
    while True:
        order, descriptors, _, _ = socket.recv_fds(control, 64, 2)
        if not order:
            return
        if descriptors:
            _fork(control, descriptors)
        else:
            control.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(int(order), 0)[1]))


# ---- our side ----


class Peer:
    """Another process. Call it with source: an expression, whose value is the result; or statements, which may set
    `answer`. Its variables stay, exceptions are raised here."""

    def __init__(self, zygote: socket.socket) -> None:
        ours, theirs = socket.socketpair()
        self._error = os.memfd_create("error")
        self._zygote, self._connection = zygote, Connection(ours.detach())
        with theirs:
            socket.send_fds(zygote, [b"fork"], [theirs.fileno(), self._error])
        self.pid = int(zygote.recv(64))
        self.running = True

    def start(self, source: str, **values: Any) -> None:
        """Tell it, and do not wait."""
        self._connection.send((source, values))

    def result(self) -> Any:
        if not self._connection.poll(WAIT):
            self.kill()
            raise AssertionError(f"no answer in {WAIT:g} s")
        try:
            good, answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            status = self.reap()
            raise AssertionError(f"it ended with {status}: {os.pread(self._error, 4000, 0).decode()}") from None
        if good:
            return answer
        raise answer

    def __call__(self, source: str, **values: Any) -> Any:
        self.start(source, **values)
        return self.result()

    def reap(self) -> int:
        """Wait for its end; its exit status."""
        self.running = False
        self._zygote.send(b"%d" % self.pid)
        return int(self._zygote.recv(64))

    def kill(self, *, reap: bool = True) -> None:
        os.kill(self.pid, signal.SIGKILL)
        if reap:
            assert self.reap() == -signal.SIGKILL

    def end(self) -> None:
        """An ordinary end, which must be quiet."""
        self._connection.close()
        if self.running:
            process = os.pidfd_open(self.pid)
            if not select.select([process], [], [], WAIT)[0]:
                os.kill(self.pid, signal.SIGKILL)
            os.close(process)
        status = self.reap() if self.running else 0
        said = os.pread(self._error, 4000, 0).decode()
        os.close(self._error)
        assert (status, said) == (0, ""), "a process must end well"


@pytest.fixture(scope="session", name="zygote")
def zygote_fixture(python: Python) -> Iterator[socket.socket]:
    """What forks the others."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(WAIT)
    with ours:
        with theirs:
            start = "import ipc_peer; ipc_peer.main()"  # not as __main__: what it answers is pickled
            process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-c", start, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=python.environment(PYTHONPATH=str(Path(__file__).parent)),
            )
        yield ours
    assert process.wait(WAIT) == 0


@pytest.fixture(name="peers")
def peers_fixture(zygote: socket.socket) -> Iterator[Callable[[], Peer]]:
    """Makes other processes, which must end well."""
    with contextlib.ExitStack() as ends:

        def make() -> Peer:
            peer = Peer(zygote)
            ends.callback(peer.end)
            return peer

        yield make


EXPORT = """
    arena = jh.Arena(provider=jh.Memfd(), name="theirs")
    a = arena.array(stripes(100_000, 1))
    answer = jh.ipc.export(a)
"""
OPEN = "block = jh.ipc.open(handle); answer = int(block.array()[0])"


@pytest.fixture(name="arena")
def arena_fixture() -> Iterator[jh.Arena]:
    with jh.Arena(provider=jh.Memfd(), name="ours", dirty_decay_ms=0, muzzy_decay_ms=0) as a:
        yield a


@pytest.fixture(name="peer")
def peer_fixture(peers: Callable[[], Peer]) -> Peer:
    return peers()


@pytest.fixture(autouse=True, name="_nothing_mapped")
def nothing_mapped_fixture(passed: Callable[[], bool]) -> Iterator[None]:
    """No test may leave a block open; and what it leaves in the cache must go when told."""
    before = Held.now().descriptors
    yield
    if not passed():
        return
    gc.collect()
    assert jh.ipc.stats().opened == 0, "the test left a block open"
    jh.ipc.set_cache(0)
    assert jh.ipc.stats()[1:4] == (0, 0, 0), "an empty cache keeps no mapping and no exporter"
    jh.ipc.set_cache(64)
    ledger = 2  # made by the first export, for good
    assert Held.now().descriptors <= before + ledger, "descriptors were left open"


def pairs(kind: int = socket.SOCK_STREAM) -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, kind)


def sizes(count: int, seed: int, largest: int = 300_000) -> list[int]:
    """Of blocks: tiny to large."""
    rng = np.random.default_rng(seed)
    return list(itertools.islice((max(1, int(largest ** rng.random())) for _ in itertools.count()), count))
