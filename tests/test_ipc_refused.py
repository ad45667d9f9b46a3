"""What jemhooks.ipc must refuse: handles of what is gone, changed and forged ones, memory that cannot be shared."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    zygote_fixture,
)  # fmt: skip

if TYPE_CHECKING:
    from conftest import Python

pytestmark = pytest.mark.null
EXPORT = """
    arena = jh.Arena(provider=jh.Memfd(), name="theirs")
    a = arena.full(4000, value, "u1")
    answer = jh.ipc.export(a)
"""


def wrong(calls: dict[str, tuple[Callable[[], Any], type[Exception], str]]) -> list[str]:
    """Which calls were not refused as they must be."""
    out = []
    for name, (call, kind, match) in calls.items():
        try:
            with pytest.raises(kind, match=match):
                call()
        except BaseException as e:
            out.append(f"{name}: {type(e).__name__}: {e}")
    return out


# ---- memory that cannot be shared, arguments that make no sense ----


def test_what_cannot_be_exported(arena: jh.Arena) -> None:
    block, outside = arena.block(1000), np.zeros(1000)
    home = jh.region(block)
    end = home.base + home.length
    with (
        jh.Arena(name="private") as private,
        jh.Arena(provider=jh.Fixed(mmap.mmap(-1, 1 << 20)), name="owned") as fixed,
        jh.Arena(provider=jh.Fixed(arena.block("1MiB", alignment=4096)), name="nested") as nested,
    ):
        p, f, n = private.block(10), fixed.block(10), nested.block(10)
        opened = jh.ipc.open(jh.ipc.export(block))
        assert (
            wrong(
                {
                    "anonymous": (lambda: jh.ipc.export(p), jh.ProviderError, "'private'.*memfd, file or devdax"),
                    "fixed": (lambda: jh.ipc.export(f), jh.ProviderError, "'owned'.*memfd, file or devdax"),
                    "nested": (lambda: jh.ipc.export(n), jh.ProviderError, "'nested'"),
                    "heap": (lambda: jh.ipc.export(bytearray(10)), jh.NotOursError, "no region"),
                    "numpy's own": (lambda: jh.ipc.export(outside), jh.NotOursError, "no region"),
                    "what was opened": (lambda: jh.ipc.export(opened), jh.NotOursError, "no region"),
                    "no length": (lambda: jh.ipc.export(block.address), jh.ConfigError, "needs nbytes"),
                    "null": (lambda: jh.ipc.export(0, 10), jh.NotOursError, "no region"),
                    "too large": (lambda: jh.ipc.export(2**64, 10), jh.ConfigError, "is not an address"),
                    "beyond": (lambda: jh.ipc.export(end - 10, 11), jh.ConfigError, "reach beyond their region.* 10;"),
                    "far beyond": (lambda: jh.ipc.export(block.address, 2**62), jh.ConfigError, "reach beyond"),
                    "more than it has": (
                        lambda: jh.ipc.export(block, 1001),
                        jh.ConfigError,
                        "1001 is more than the 1000",
                    ),
                    "nothing of it": (lambda: jh.ipc.export(block, 0), jh.ConfigError, "nbytes"),
                    "negative": (lambda: jh.ipc.export(block, -1), jh.ConfigError, "nbytes"),
                    "not a number": (lambda: jh.ipc.export(block, "many"), jh.ConfigError, "nbytes"),
                    "empty": (lambda: jh.ipc.export(block.array()[:0]), jh.ConfigError, "nbytes"),
                    "None": (lambda: jh.ipc.export(None), jh.ConfigError, "names no memory"),
                    "text": (lambda: jh.ipc.export("x"), jh.ConfigError, "names no memory"),
                }
            )
            == []
        )
        last = jh.ipc.export(end - 10, 10)
        assert jh.ipc.open(last).nbytes == 10, "up to the end of the region is right"
        assert jh.ipc.stats().exported == 1, "what was refused is not exported"


def test_what_is_no_handle(arena: jh.Arena) -> None:
    handle = jh.ipc.export(arena.block(100))
    cases: dict[str, Any] = {
        "truncated": handle[:63], "too long": handle + b"\0", "nothing": b"", "text": handle.hex(), "None": None,
        "a number": 64, "a list": list(handle), "zeros": bytes(64), "ones": b"\xff" * 64, "noise": os.urandom(64),
        "reversed": handle[::-1], "an array of others": np.zeros(64), "an object": object(),
    }  # fmt: skip
    assert wrong({k: (lambda v=v: jh.ipc.open(v), jh.ConfigError, "handle") for k, v in cases.items()}) == []
    released = memoryview(bytearray(handle))
    released.release()
    with pytest.raises((jh.ConfigError, ValueError)):
        jh.ipc.open(released)


# ---- changed and forged ----


@pytest.fixture(scope="module")
def lasting() -> Iterator[bytes]:
    """A handle of 4,000 bytes, good for all of the module."""
    with jh.Arena(provider=jh.Memfd()) as arena:
        block = arena.block(4000)
        yield jh.ipc.export(block)
        del block


def test_each_bit_counts(lasting: bytes) -> None:
    for bit in range(512):
        changed = bytearray(lasting)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(jh.ConfigError, match="no handle of this version, or were changed"):
            jh.ipc.open(changed)


@settings(max_examples=300, deadline=None)
@given(changes=st.dictionaries(st.integers(0, 63), st.integers(0, 255), min_size=1))
def test_changed_bytes(lasting: bytes, changes: dict[int, int]) -> None:
    changed = bytearray(lasting)
    for at, byte in changes.items():
        changed[at] = byte
    if changed == lasting:
        assert jh.ipc.open(changed).nbytes == 4000
    else:
        with pytest.raises((jh.ConfigError, jh.ClosedError)):
            jh.ipc.open(changed)


FORGED = st.fixed_dictionaries(
    {},
    optional={
        "pid": st.sampled_from([os.getpid(), 2**22 + 1]),
        "fd": st.one_of(st.integers(0, 40), st.integers(0, 2**32 - 1)),
        "slot": st.one_of(st.integers(0, 5), st.integers(0, 2**32 - 1)),
        "ledger": st.integers(0, 2**64 - 1),
        "serial": st.one_of(st.integers(0, 50), st.integers(0, 2**64 - 1)),
        "offset": st.one_of(st.integers(0, 5 << 20), st.integers(0, 2**64 - 1)),
        "length": st.one_of(st.integers(0, 5 << 20), st.integers(0, 2**64 - 1)),
        "flags": st.integers(0, 2**32 - 1),
    },
)


@settings(max_examples=400, deadline=None)
@given(changes=FORGED)
def test_forged_with_the_right_checksum(lasting: bytes, changes: dict[str, int]) -> None:
    """Whoever forges one may reach other memory of that region, but nothing else, and nothing crashes."""
    handle = forged(lasting, **changes)
    try:
        opened = jh.ipc.open(handle)
    except (jh.ConfigError, jh.ClosedError):
        return
    now, was = Fields.of(handle), Fields.of(lasting)
    assert (now.ledger, now.slot, now.serial) == (was.ledger, was.slot, was.serial), "another region was opened"
    region = opened.region
    assert region.address <= opened.address
    assert opened.address + opened.nbytes <= region.address + region.nbytes, "it reaches beyond its region"
    opened.memoryview().tobytes()


def test_forged_fields(arena: jh.Arena, peer: Peer) -> None:
    """What each must be refused with, where nothing of the exporter is mapped yet."""
    block = arena.block(4000)
    handle, length = jh.ipc.export(block), jh.region(block).length
    was = Fields.of(handle)
    config = {
        "host": {"host": was.host ^ 1}, "magic": {"magic": was.magic + 1}, "slot 0": {"slot": 0},
        "slot 65536": {"slot": 65536}, "no length": {"length": 0}, "beyond": {"length": length - was.offset + 1},
        "nothing in nothing": {"slot": 60_000, "serial": 0}, "no serial": {"serial": 0},
        "offset": {"offset": length}, "far": {"offset": 2**64 - 4096, "length": 8192}, "huge": {"length": 2**64 - 1},
    }  # fmt: skip
    closed = {
        "another serial": {"serial": was.serial + 1}, "an unused slot": {"slot": 60_000}, "slot 65535": {"slot": 65535},
        "another exporter": {"ledger": was.ledger + 1}, "standard input": {"fd": 0}, "no descriptor": {"fd": 2**32 - 1},
        "a free descriptor": {"fd": 9999}, "a pid that there is not": {"pid": 2**22 + 5},
    }  # fmt: skip
    for cases, kind in ((config, "ConfigError"), (closed, "ClosedError")):
        got = {}
        for name, changes in cases.items():
            got[name] = peer(
                """
                try:
                    jh.ipc.open(handle)
                    answer = "opened"
                except jh.JemhooksError as e:
                    answer = type(e).__name__ if len(str(e)) > 50 else str(e)
                assert jh.ipc.stats().opened == 0
                jh.ipc.set_cache(0)
                assert jh.ipc.stats()[1:4] == (0, 0, 0), "refused, but something stays mapped"
                """,
                handle=forged(handle, **changes),
            )
        assert got == dict.fromkeys(cases, kind)
    with pytest.raises((jh.ClosedError, jh.ProviderError)):
        peer("jh.ipc.open(handle)", handle=forged(handle, pid=1))  # init's descriptors may not be taken
    with pytest.raises(jh.ConfigError, match=r"another host, or before this one was booted"):
        jh.ipc.open(forged(handle, host=was.host ^ 1))
    assert peer("jh.ipc.open(handle).nbytes", handle=handle) == 4000, "and the handle itself is still good"
    del block


@pytest.mark.parametrize("pid", [0, 2**31, 2**32 - 1])
def test_forged_pid_that_none_can_have(lasting: bytes, peer: Peer, pid: int) -> None:
    with pytest.raises((jh.ConfigError, jh.ClosedError)):
        peer("jh.ipc.open(handle)", handle=forged(lasting, pid=pid))


def test_forged_length_without_a_cache(python: Python) -> None:
    """The mapping that was made to find out goes at once, and must not be looked at any more."""
    out = python.check(
        """
        import jemhooks as jh
        with jh.Arena(provider=jh.Memfd()) as arena:
            block = arena.block(100)
            print(jh.region(block).length)
            import sys
            sys.path.insert(0, sys.argv[1])
            from ipc_peer import forged
            handle = forged(jh.ipc.export(block), length=2**50)
            jh.ipc.set_cache(0)
            try:
                jh.ipc.open(handle)
            except jh.ConfigError as e:
                print(str(e).partition("of a region of ")[2].partition(":")[0])
            del block
        """,
        str(Path(__file__).parent),
        variables={"MALLOC_PERTURB_": "85"},
    )
    length, said = out.split()
    assert said == length, "the message reads memory that was freed"


# ---- what is gone ----


def test_after_the_arena_is_closed(arena: jh.Arena, peer: Peer) -> None:
    a, other = arena.full(4000, 7, "u1"), jh.Arena(provider=jh.Memfd())
    b = other.full(4000, 8, "u1")
    handle, lasting = jh.ipc.export(a), jh.ipc.export(b)
    peer(
        """
        x, y = jh.ipc.open(handle), jh.ipc.open(lasting)
        z = jh.ipc.open(handle).array()
        assert x.alive and y.alive
        """,
        handle=handle, lasting=lasting,
    )  # fmt: skip
    arena.close()
    assert peer("x.alive, len(set(jh.ipc.open(handle).array()))") == (True, 1), "an array keeps the arena"
    assert peer("len(jh.ipc.open(handle).array())", handle=jh.ipc.export(a)) == 4000, "and can still be exported"
    del a
    gc.collect()
    assert peer("x.alive, y.alive") == (False, True), "the arena has ended; the other one has not"
    for _ in range(2):
        with pytest.raises(jh.ClosedError, match="its arena has ended; ask for a new handle"):
            peer("jh.ipc.open(handle)")
    assert peer("x.array().tobytes() in (bytes(4000), bytes([7]) * 4000)"), "what is open can still be read"
    peer("del x")
    assert peer("jh.ipc.stats().opened") == 2, "z is still open"
    peer("del z")
    assert peer("jh.ipc.stats()[2:4]") == (1, 0), "what is gone is not kept for the next open"
    peer("del y")
    assert peer("jh.ipc.stats()[2:4]") == (0, 1)
    del b
    other.close()
    assert peer("jh.ipc.stats()[2:4]") == (0, 1), "nobody has looked yet"
    with pytest.raises(jh.ClosedError):
        peer("jh.ipc.open(lasting)")
    assert peer("jh.ipc.stats()[1:4]") == (0, 0, 0), "the next open finds that it is gone, and the exporter unused"


@pytest.mark.parametrize("source", ["jh.Memfd()", "jh.File(place + '/file', '16MiB')"])
def test_a_slot_that_is_used_again(peer: Peer, tmp_path: Path, source: str) -> None:
    """The next arena's region takes the slot, the descriptor and even the same part of the file."""
    space = {"jh": jh, "place": str(tmp_path)}
    provider = eval(source, space)
    old = []
    for i in range(5):
        with jh.Arena(provider=provider) as arena:
            a = arena.full(4000, 10 + i, "u1")
            handle = jh.ipc.export(a)
            assert peer("int(jh.ipc.open(h).array()[0])", h=handle) == 10 + i
            for stale in old:
                with pytest.raises(jh.ClosedError):
                    peer("jh.ipc.open(h)", h=stale)
            old.append(handle)
            del a
    fields = [Fields.of(h) for h in old]
    assert len({(f.slot, f.fd, f.offset) for f in fields}) == 1, "the test needs them to be used again"
    assert len({f.serial for f in fields}) == 5
    with pytest.raises(jh.ClosedError):
        peer("jh.ipc.open(h)", h=old[-1])
    with pytest.raises((jh.ClosedError, jh.ConfigError)):
        peer("jh.ipc.open(h)", h=forged(old[-1], serial=0))  # the number that free slots have


def test_a_pid_that_is_another_exporter(peers: Callable[[], Peer]) -> None:
    """A process of jemhooks, with its descriptors of the same numbers, has the pid of one that is gone."""
    first, second = peers(), peers()
    handle, other = first(EXPORT, value=1), second(EXPORT, value=2)
    assert Fields.of(handle).fd == Fields.of(other).fd, "the test needs the same numbers"
    assert Fields.of(handle).slot == Fields.of(other).slot
    first.kill()
    recycled = forged(handle, pid=second.pid)
    with pytest.raises(jh.ClosedError, match="not the one that made the handle"):
        jh.ipc.open(recycled)
    assert jh.ipc.open(other).array()[0] == 2
    with pytest.raises(jh.ClosedError, match="not the one that made the handle"):
        jh.ipc.open(recycled)  # where the other one is known
    with pytest.raises(jh.ClosedError):
        jh.ipc.open(forged(other, pid=os.getpid(), serial=Fields.of(other).serial + 1))


def test_a_pid_that_is_a_thread(peer: Peer) -> None:
    """Threads have numbers of the same kind, so that of a dead exporter may be one's."""
    handle = peer(EXPORT, value=1)
    peer.kill()
    go, there = threading.Event(), threading.Event()
    number = []

    def work() -> None:
        number.append(threading.get_native_id())
        there.set()
        go.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    there.wait(30)
    try:
        with pytest.raises(jh.ClosedError):
            jh.ipc.open(forged(handle, pid=number[0]))
    finally:
        go.set()
        thread.join(30)


def test_descriptors_that_are_other_files_now(peers: Callable[[], Peer]) -> None:
    """A daemon that closed all its descriptors, say: then other files have their numbers."""
    table, memory = peers(), peers()
    handle = table(EXPORT, value=1)
    table(
        "fd = os.memfd_create('x', os.MFD_ALLOW_SEALING); os.dup2(fd, table); os.close(fd)", table=Fields.of(handle).fd
    )
    with pytest.raises(jh.ClosedError, match="not the one that made the handle"):
        jh.ipc.open(handle)
    handle = memory(EXPORT, value=2)
    memory(
        """
        for name in os.listdir("/proc/self/fd"):
            try:
                if "jemhooks:theirs" in os.readlink(f"/proc/self/fd/{name}"):
                    import fcntl
                    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
                    os.ftruncate(fd, 64 << 20)
                    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
                    os.dup2(fd, int(name))
                    os.close(fd)
            except FileNotFoundError:
                pass
        """
    )
    with pytest.raises(jh.ClosedError, match="the memory it is of is gone"):
        jh.ipc.open(handle)
    with contextlib.suppress(jh.JemhooksError):
        memory("del a; arena.close()")
