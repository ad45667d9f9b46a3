"""RMA between two processes over libfabric on 127.0.0.1, with keys that are enforced."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import jemhooks as jh

if TYPE_CHECKING:
    from conftest import Python, Resources

pytestmark = pytest.mark.fabric
# "net" became "tcp" in libfabric 1.18
PROVIDERS = (
    ("tcp", "sockets", "net") if ctypes.CDLL("libfabric.so.1").fi_version() < 1 << 16 | 18 else ("tcp", "sockets")
)
COUNT, NBYTES = 6, 700_000
WAIT = 20.0


class Target:
    """Our side of fabric_target.py."""

    def __init__(self, python: Python, provider: str) -> None:
        script = str(Path(__file__).with_name("fabric_target.py"))
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", script, provider, str(COUNT), str(NBYTES)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=python.environment(),
        )  # fmt: skip
        self.address, self.keys = b"", []  # type: tuple[bytes, list[jh.Key]]
        address, keys = self.ask("hello")
        self.address, self.keys = bytes.fromhex(address), [jh.Key(*k) for k in keys]

    def ask(self, *order: Any) -> Any:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], WAIT)[0]:
            self.process.kill()
            raise AssertionError(f"the target did not answer {order}: {self.process.communicate()[1]}")
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the target died of {order}: {self.process.communicate(timeout=WAIT)[1]}")
        return json.loads(line)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            assert self.process.stdin
            self.process.stdin.close()
        try:
            self.process.wait(WAIT)
        finally:
            self.process.kill()
            assert self.process.stdout
            assert self.process.stderr
            self.process.stdout.close()
            error = self.process.stderr.read()
            self.process.stderr.close()
        assert (self.process.returncode, error) == (0, ""), "the target must end well"


@pytest.fixture(params=PROVIDERS)
def target(request: pytest.FixtureRequest, python: Python) -> Iterator[Target]:
    it = Target(python, request.param)
    it.provider = request.param  # type: ignore[attr-defined]
    yield it
    it.end()


@pytest.fixture
def fabric(target: Target) -> Iterator[jh.Fabric]:
    with jh.Fabric(target.provider) as registrar:  # type: ignore[attr-defined]
        yield registrar


@pytest.fixture
def arena(fabric: jh.Fabric) -> Iterator[jh.Arena]:
    with jh.Arena(fabric) as a:
        yield a


def pattern(n: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, n, "u1")


def works(fabric: jh.Fabric, arena: jh.Arena, target: Target, peer: int, key: jh.Key | None = None) -> None:
    """A put and a get of all bytes of the target's array 1, right after whatever was done to the connection."""
    key = key or target.keys[1]
    a = arena.array(pattern(NBYTES, 5))
    fabric.put(peer, a, key).wait(WAIT)
    assert target.ask("read", 1) == a.tobytes().hex(), "the bytes of a put"
    target.ask("write", 1, 77)
    fabric.get(peer, a, key).wait(WAIT)
    assert (a == pattern(NBYTES, 77)).all(), "the bytes of a get"


def test_put_and_get_of_parts(fabric: jh.Fabric, arena: jh.Arena, target: Target) -> None:
    peer = fabric.connect(target.address)
    works(fabric, arena, target, peer)
    shadow = bytearray(b"\0" * NBYTES)
    rng = np.random.default_rng(8)
    for i in range(30):
        offset = int(rng.integers(NBYTES))
        n = int(min(NBYTES - offset, 2 ** (rng.random() * 19)))
        a = arena.array(pattern(n + 10, i))
        fabric.put(peer, a, target.keys[0], offset=offset, nbytes=n).wait(WAIT)
        shadow[offset : offset + n] = a[:n].tobytes()
    assert target.ask("read", 0) == shadow.hex(), "exactly the bytes named, and no others"
    for i in (2, 3, 4, 5):
        assert target.ask("read", i) == (bytes([i]) * NBYTES).hex(), "neighbours are untouched"
    back = arena.full(2000, 1, "u1")
    fabric.get(peer, back[500:1500], target.keys[2], offset=100).wait(WAIT)
    assert (back[500:1500] == 2).all(), "a get into a slice"
    assert (back[:500] == 1).all()
    assert (back[1500:] == 1).all(), "and nothing around it"


def test_many_at_a_time(fabric: jh.Fabric, arena: jh.Arena, target: Target) -> None:
    peer = fabric.connect(target.address)
    arrays = [arena.array(pattern(NBYTES, i)) for i in range(COUNT)]
    transfers = [fabric.put(peer, a, k) for a, k in zip(arrays, target.keys, strict=True)]
    assert fabric.info().outstanding == COUNT
    for t in reversed(transfers):
        t.wait(WAIT)
        assert t.done
        t.wait(0)  # again does nothing
    assert fabric.info().outstanding == 0
    assert [target.ask("read", i) for i in range(COUNT)] == [a.tobytes().hex() for a in arrays]


def test_out_of_tickets(target: Target) -> None:
    with jh.Fabric(target.provider, max_outstanding=2) as fabric, jh.Arena(fabric) as arena:  # type: ignore[attr-defined]
        peer = fabric.connect(target.address)
        a = arena.zeros(100, "u1")
        kept = [fabric.put(peer, a, target.keys[0]) for _ in range(2)]
        with pytest.raises(jh.TransferError, match="all 2 tickets are outstanding") as e:
            fabric.put(peer, a, target.keys[0])
        assert e.value.errno == errno.ENOBUFS
        for t in kept:
            t.wait(WAIT)
        fabric.put(peer, a, target.keys[0]).wait(WAIT)
        del a, e


def test_a_wrong_key_is_refused(fabric: jh.Fabric, arena: jh.Arena, target: Target) -> None:
    peer = fabric.connect(target.address)
    works(fabric, arena, target, peer)
    a = arena.full(1000, 0xEE, "u1")
    key = target.keys[0]
    before = target.ask("read", 0)
    wrong = {
        "another rkey": (key.addr, key.rkey + 12345),
        "beyond the region": (key.addr + (1 << 40), key.rkey),
        "across the region's end": (key.addr - key.addr % (4 << 20) + (64 << 20) - 10, key.rkey),
        "address 2^64 - 1": (2**64 - 1, key.rkey),
    }
    for name, remote in wrong.items():
        for start in (fabric.put, fabric.get):
            with pytest.raises(jh.TransferError) as e:
                start(peer, a, remote).wait(WAIT)
            assert e.value.errno in (errno.EACCES, errno.ECANCELED, errno.ENOTCONN, errno.EIO), f"{name}: {e.value}"
            assert f"{remote[1]:#x}" in str(e.value) or "rkey" in str(e.value), f"{name}: the key is named: {e.value}"
            assert (a == 0xEE).all(), f"{name}: nothing may arrive"
    assert target.ask("read", 0) == before, "the target's memory is untouched"
    works(fabric, arena, target, peer)
    del e


@pytest.mark.parametrize("pause", [0.0, 0.1])
def test_transfers_after_a_failed_one_connect_again(
    fabric: jh.Fabric, arena: jh.Arena, target: Target, pause: float
) -> None:
    """However long the program does something else meanwhile: the first try after a failure must work."""
    peer = fabric.connect(target.address)
    works(fabric, arena, target, peer)
    a = arena.full(1000, 0xEE, "u1")
    for _ in range(3):
        with pytest.raises(jh.TransferError):
            fabric.get(peer, a, (0, 12345)).wait(WAIT)
        time.sleep(pause)  # not to wait for anything: the program is busy elsewhere
        fabric.get(peer, a, target.keys[2]).wait(WAIT)
        assert (a == 2).all()
        a[:] = 0xEE


def test_a_key_dies_with_its_registration(fabric: jh.Fabric, arena: jh.Arena, target: Target) -> None:
    peer = fabric.connect(target.address)
    works(fabric, arena, target, peer)
    a = arena.full(1000, 0xEE, "u1")
    stale = target.keys[2]
    assert target.ask("free") > 0, "the target deregisters"
    fresh = [jh.Key(*k) for k in target.ask("allocate")]
    for start in (fabric.put, fabric.get):
        with pytest.raises(jh.TransferError):
            start(peer, a, stale).wait(WAIT)
    assert (a == 0xEE).all()
    for i in range(COUNT):
        assert target.ask("read", i) == (b"\x77" * NBYTES).hex(), "a stale key reached memory registered later"
    assert {k.rkey for k in fresh}.isdisjoint(k.rkey for k in target.keys), "keys are not given out twice"
    works(fabric, arena, target, peer, fresh[1])


def test_a_stopped_target_times_out(fabric: jh.Fabric, arena: jh.Arena, target: Target) -> None:
    peer = fabric.connect(target.address)
    works(fabric, arena, target, peer)
    a = arena.array(pattern(NBYTES, 3))
    target.process.send_signal(signal.SIGSTOP)
    os.waitpid(target.process.pid, os.WUNTRACED)
    transfer = fabric.get(peer, a, target.keys[3])
    for timeout in (0, 0.05, 0.2):
        begun = time.monotonic()
        with pytest.raises(jh.TransferError, match=r"get of 700000 bytes.*still under way") as e:
            transfer.wait(timeout)
        assert e.value.errno == errno.ETIMEDOUT
        assert timeout - 0.01 <= time.monotonic() - begun < timeout + 5, "it waits as long as asked"
        assert not transfer.done, "it is still under way"
    target.process.send_signal(signal.SIGCONT)
    transfer.wait(WAIT)
    assert (a == 3).all(), "and can be waited for again"


def test_a_transfer_keeps_its_memory(fabric: jh.Fabric, arena: jh.Arena, target: Target) -> None:
    peer = fabric.connect(target.address)
    works(fabric, arena, target, peer)
    a = arena.array(pattern(NBYTES, 4))
    count, want = arena.stats().current_count, a.tobytes().hex()
    transfer = fabric.put(peer, a, target.keys[4])
    del a
    assert arena.stats().current_count == count, "a transfer under way keeps its memory"
    junk = [arena.full(NBYTES, 0xFF, "u1") for _ in range(5)]
    transfer.wait(WAIT)
    assert target.ask("read", 4) == want, "so what arrives is what was put"
    del transfer, junk
    gc.collect()
    assert arena.stats().current_count == count - 1, "and lets it go when it is done"


def test_a_forgotten_transfer_keeps_its_memory(fabric: jh.Fabric, arena: jh.Arena, target: Target) -> None:
    peer = fabric.connect(target.address)
    works(fabric, arena, target, peer)
    target.process.send_signal(signal.SIGSTOP)
    os.waitpid(target.process.pid, os.WUNTRACED)
    a = arena.full(NBYTES, 0xEE, "u1")
    count = arena.stats().current_count
    fabric.get(peer, a, target.keys[5])  # the Transfer is gone at once
    del a
    gc.collect()
    assert arena.stats().current_count == count, "its memory may still be written to"
    others = [arena.full(NBYTES, 0x11, "u1") for _ in range(8)]
    target.process.send_signal(signal.SIGCONT)
    works(fabric, arena, target, peer)
    assert all((o == 0x11).all() for o in others), "the late answer was written into someone else's memory"
    del others
    end = time.monotonic() + WAIT
    while fabric.info().outstanding and time.monotonic() < end:
        fabric.progress(0.01)
    works(fabric, arena, target, peer)
    gc.collect()
    assert arena.stats().current_count < count, "when it has ended, its memory is freed"


def test_memory_outside_arenas(fabric: jh.Fabric, target: Target) -> None:
    """Providers without FI_MR_LOCAL take any local memory; a buffer in use must not be taken away."""
    peer = fabric.connect(target.address)
    data = bytearray(pattern(NBYTES, 6).tobytes())
    transfer = fabric.put(peer, data, target.keys[0])
    with pytest.raises(BufferError):
        data.clear()  # what libfabric reads from would be gone
    transfer.wait(WAIT)
    assert target.ask("read", 0) == data.hex()
    data.clear()
    back = bytearray(NBYTES)
    fabric.get(peer, back, target.keys[0]).wait(WAIT)
    assert back.hex() == target.ask("read", 0)


def test_wrong_arguments(fabric: jh.Fabric, arena: jh.Arena, target: Target) -> None:
    peer = fabric.connect(target.address)
    key = target.keys[0]
    a = arena.full(1000, 5, "u1")
    frozen = a.view()
    frozen.flags.writeable = False
    before = target.ask("read", 0)
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: fabric.put(peer, a, key._replace(length=999)), jh.ConfigError, "beyond the 999 bytes of the remote"),
        (lambda: fabric.put(peer, a, key, offset=NBYTES - 999), jh.ConfigError, "beyond the 700000 bytes"),
        (lambda: fabric.put(peer, a, key, offset=-1), jh.ConfigError, "offset: -1"),
        (lambda: fabric.put(peer, a, key, nbytes=0), jh.ConfigError, "nbytes: 0"),
        (
            lambda: fabric.put(peer, a, key, nbytes=1001),
            jh.ConfigError,
            "1001 is more than the 1000 bytes of the local",
        ),
        (lambda: fabric.put(peer, a[:0], key), jh.JemhooksError, "0 bytes"),
        (lambda: fabric.put(peer, None, key), jh.ConfigError, "NoneType names no memory"),
        (lambda: fabric.put(peer, a.ctypes.data, key), jh.ConfigError, "needs nbytes"),
        (lambda: fabric.put(peer, a, None), jh.ConfigError, "remote"),
        (lambda: fabric.put(peer, a, (1,)), jh.ConfigError, "remote"),
        (lambda: fabric.put(peer, a, ("x", "y")), jh.ConfigError, "remote"),
        (lambda: fabric.put(peer, a, (0, -1)), jh.ConfigError, "rkey: -1"),
        (lambda: fabric.put(peer, a, (2**64, 0)), jh.ConfigError, "remote address"),
        (lambda: fabric.put(peer + 99, a, key), jh.TransferError, "peer 99 of 1"),
        (lambda: fabric.put(-1, a, key), jh.ConfigError, "peer: -1"),
        (lambda: fabric.put(None, a, key), jh.ConfigError, "peer: None"),  # type: ignore[arg-type]
        (lambda: fabric.get(peer, frozen, key), jh.ConfigError, "read-only|writable"),
        (lambda: fabric.get(peer, bytes(10), key), jh.ConfigError, "writable"),
        (lambda: fabric.connect(b""), jh.JemhooksError, "0 bytes"),
        (lambda: fabric.connect(b"nonsense"), jh.JemhooksError, "8 bytes"),
        (lambda: fabric.connect(None), jh.ConfigError, "address"),  # type: ignore[arg-type]
        (lambda: fabric.connect("127.0.0.1"), jh.ConfigError, "address"),  # type: ignore[arg-type]
        (lambda: fabric.progress(-1), jh.ConfigError, "timeout -1"),
        (lambda: fabric.progress(float("nan")), jh.ConfigError, "timeout nan"),
        (lambda: fabric.progress(None), jh.ConfigError, "timeout None"),  # type: ignore[arg-type]
    ]
    wrong = []
    for i, (call, kind, match) in enumerate(cases):
        try:
            with pytest.raises(kind, match=match):
                call()
        except BaseException as e:
            wrong.append(f"case {i} ({match}): {type(e).__name__}: {e}")
    assert not wrong, "\n".join(wrong)
    assert target.ask("read", 0) == before, "nothing of this was sent"
    assert fabric.info().outstanding == 0, "or is under way"
    works(fabric, arena, target, peer)


def test_strided_memory(fabric: jh.Fabric, arena: jh.Arena, target: Target) -> None:
    """Of a[::2] the bytes between its elements are someone else's: they must not be overwritten by a get."""
    peer = fabric.connect(target.address)
    a = arena.full(10, 0xEE, "u1")
    with contextlib.suppress(jh.ConfigError):
        fabric.get(peer, a[::2], target.keys[1]).wait(WAIT)
    assert (a[1::2] == 0xEE).all(), "elements outside of the view were overwritten"


def test_closed(fabric: jh.Fabric, arena: jh.Arena, target: Target) -> None:
    peer = fabric.connect(target.address)
    a = arena.array(pattern(NBYTES, 1))
    transfer = fabric.put(peer, a, target.keys[0])
    alive = weakref.ref(a)
    fabric.close()
    del a
    for call in (
        transfer.wait, fabric.info, fabric.address, fabric.progress,
        lambda: fabric.connect(target.address), lambda: fabric.put(peer, bytearray(5), target.keys[0]),
    ):  # fmt: skip
        with pytest.raises(jh.ClosedError, match="registrar fabric is closed"):
            call()
    assert alive() is not None, "memory of a transfer that nobody waited for is never freed"
    b = arena.zeros(5)
    assert jh.key(b).length == 40, "arenas of the closed registrar go on"
    from jemhooks.registrars import fabric as module

    del module._for_good[:]


def test_threads(fabric: jh.Fabric, arena: jh.Arena, target: Target) -> None:
    peer = fabric.connect(target.address)
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for n in range(15):
                a = arena.array(pattern(50_000, 100 * i + n))
                fabric.put(peer, a, target.keys[i], offset=1000 * n).wait(WAIT)
                b = arena.zeros(50_000, "u1")
                fabric.get(peer, b, target.keys[i], offset=1000 * n).wait(WAIT)
                assert (a == b).all(), "another thread's bytes"
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(100)
    assert not failures, failures[0]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_info_and_remote_addresses(provider: str) -> None:
    with jh.Fabric(provider) as fabric, jh.Arena(fabric) as arena:
        info = fabric.info()
        assert provider in info.provider
        assert (info.max_outstanding, info.outstanding) == (256, 0)
        a = arena.zeros(10)
        key = jh.key(a)
        offset = a.__array_interface__["data"][0] - jh.region(a).base
        assert key.addr == (a.__array_interface__["data"][0] if info.virtual_addresses else offset)
        assert len(fabric.address()) > 4
        del a


def test_atomics_are_refused() -> None:
    with jh.Fabric("tcp") as fabric, jh.Arena(fabric, access="remote_atomic", name="atomic") as arena:
        with pytest.raises(jh.RegistrationError, match=r"arena 'atomic': fabric failed .* atomics") as e:
            jh.key(arena.block(8))
        assert e.value.errno == errno.EOPNOTSUPP
        del e


def test_open_and_close_leak_nothing(resources: Callable[[], Resources], soak: int) -> None:
    def round_() -> None:
        for provider in PROVIDERS:
            with jh.Fabric(provider) as fabric, jh.Arena(fabric) as arena:
                jh.key(arena.zeros(10))

    round_()
    round_()
    before = resources()
    for _ in range(5 * soak):
        round_()
    after = resources()
    assert after.descriptors <= before.descriptors, "descriptors leaked"
    assert after.resident_kb < before.resident_kb + 8192, f"{after.resident_kb - before.resident_kb} kB leaked"
