"""Bytes over real queue pairs: right where the key allows it, refused and without effect where not."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from verbs_rc import TransferFailed, e

import jemhooks as jh

SIZES = (1, 2, 7, 8, 63, 64, 1023, 1024, 4095, 4096, 4097, 65535, 65536, 100_001, 1 << 20, 3_000_001)


@pytest.fixture
def arena(devices: tuple[Any, Any]) -> Any:
    """Registered on both rails, by their own protection domains."""
    with jh.Arena([jh.Verbs(pd=d.pd) for d in devices], access="remote_read|remote_write|remote_atomic") as arena:
        yield arena


@pytest.mark.parametrize("rail", [0, 1])
def test_sizes(devices: tuple[Any, Any], arena: jh.Arena, loop: Callable[..., Any], rail: int) -> None:
    queue = loop(devices[rail]).here
    rng = np.random.default_rng(rail)
    for n in SIZES:
        source, target = arena.array(rng.integers(0, 256, n, "u1")), arena.full(n + 128, 0xEE, "u1")
        key = jh.key(target, rail)
        queue.write(arena.sges([source], rail).tolist(), key.addr + 64, key.rkey)
        assert (target[64 : n + 64] == source).all(), f"{n} bytes written"
        assert (target[:64] == 0xEE).all(), "none before"
        assert (target[n + 64 :] == 0xEE).all(), "none after"
        back = arena.full(n, 0x11, "u1")
        queue.read(arena.sges([back], rail).tolist(), key.addr + 64, key.rkey)
        assert (back == source).all(), f"{n} bytes read"


def test_a_scatter_list(device: Any, arena: jh.Arena, loop: Callable[..., Any]) -> None:
    queue = loop(device).here
    pieces = [arena.full(1000 + i, i, "u1") for i in range(8)]
    target = arena.zeros(sum(p.nbytes for p in pieces), "u1")
    queue.write(arena.sges(pieces).tolist(), jh.key(target).addr, jh.rkey(target))
    assert (target == np.concatenate(pieces)).all()


def test_atomics(device: Any, arena: jh.Arena, loop: Callable[..., Any]) -> None:
    queue = loop(device).here
    counter, old = arena.full(1, 5, "u8"), arena.zeros(1, "u8")
    [result] = arena.sges([old]).tolist()
    key = jh.key(counter)
    for n in range(20):
        queue.fetch_add(result, key.addr, key.rkey, 1 << 40)
        assert old[0] == 5 + (n << 40)
    queue.post(e.IBV_WR_ATOMIC_CMP_AND_SWP, [result], key.addr, key.rkey, add=5 + (20 << 40), swap=99)
    queue.wait()
    assert counter[0] == 99


def test_huge_pages(devices: tuple[Any, Any], loop: Callable[..., Any]) -> None:
    reserved = Path("/proc/sys/vm/nr_hugepages")
    before = reserved.read_text()
    reserved.write_text("24")
    try:
        rails = [jh.Verbs(pd=devices[0].pd), jh.Verbs("rxe1")]
        with jh.Arena(rails, provider=jh.Anonymous(hugetlb="2MiB"), region_max="4MiB") as arena:
            source = arena.array(np.arange(3_000_000) % 251, "u1")
            for n in (1, 5_000_000):
                target = arena.zeros(max(n, source.nbytes), "u1")
                loop(devices[0]).here.write(arena.sges([source]).tolist(), jh.key(target).addr, jh.key(target).rkey)
                assert (target[: source.nbytes] == source).all()
                del target
                assert arena.trim() >= 0
            del source
    finally:
        reserved.write_text(before)


OPERATIONS = {"read": e.IBV_WR_RDMA_READ, "write": e.IBV_WR_RDMA_WRITE, "atomic": e.IBV_WR_ATOMIC_FETCH_AND_ADD}


@pytest.mark.parametrize(
    ("access", "allowed"),
    [
        ("local_write", set()),
        ("remote_read", {"read"}),
        ("remote_write", {"write"}),
        ("remote_atomic", {"atomic"}),
        ("remote_read|remote_write", {"read", "write"}),
        ("remote_read|remote_write|remote_atomic|relaxed_ordering", {"read", "write", "atomic"}),
    ],
)
def test_access(device: Any, loop: Callable[..., Any], access: str, allowed: set[str]) -> None:
    with jh.Arena(jh.Verbs(pd=device.pd)) as mine, jh.Arena(jh.Verbs(pd=device.pd), access=access) as theirs:
        ours, target = mine.full(1, 5, "u8"), theirs.full(1, 7, "u8")
        key = jh.key(target)
        for name, opcode in OPERATIONS.items():
            queue = loop(device).here
            more = {"add": 1} if name == "atomic" else {}
            ours[:], target[:] = 5, 7
            queue.post(opcode, mine.sges([ours]).tolist(), key.addr, key.rkey, **more)
            if name in allowed:
                queue.wait()
                assert (int(ours[0]), int(target[0])) == {"read": (7, 7), "write": (5, 5), "atomic": (7, 8)}[name]
            else:
                with pytest.raises(TransferFailed) as failed:
                    queue.wait()
                assert failed.value.status == e.IBV_WC_REM_ACCESS_ERR, f"{name}: {failed.value}"
                assert (int(ours[0]), int(target[0])) == (5, 7), f"{name} was refused, but moved something"
        del ours, target


@pytest.mark.parametrize("attack", ["read-only", "before", "beyond", "wrong key", "deregistered", "other device"])
def test_what_the_key_does_not_allow(devices: tuple[Any, Any], loop: Callable[..., Any], attack: str) -> None:
    """Each ends in a remote access error, and changes not one byte."""
    device = devices[0]
    queue = loop(device).here
    access = "remote_read" if attack == "read-only" else "remote_read|remote_write"
    verbs = jh.Verbs(pd=devices[attack == "other device"].pd)
    with jh.Arena(jh.Verbs(pd=device.pd)) as mine, jh.Arena(verbs, access=access, region_max="2MiB") as arena:
        source, target = mine.full(4096, 0x11, "u1"), arena.full(4096, 0xEE, "u1")
        region, key = jh.region(target), jh.key(target)
        addr, rkey, n = key.addr, key.rkey, 4096
        if attack == "before":
            addr = region.base - 1
        elif attack == "beyond":
            addr = region.base + region.length - n + 1
        elif attack == "wrong key":
            rkey ^= 0x5A
        elif attack == "deregistered":
            del target, region
            assert arena.trim() > 0
            target = arena.full(4096, 0xEE, "u1")
            assert jh.region(target).base <= key.addr < jh.region(target).base + jh.region(target).length
        with pytest.raises(TransferFailed) as failed:
            queue.write(mine.sges([source]).tolist(), addr, rkey)
        assert failed.value.status == e.IBV_WC_REM_ACCESS_ERR, str(failed.value)
        assert (target == 0xEE).all(), "not one byte was changed"
        if attack != "other device":
            loop(device).here.read(mine.sges([source]).tolist(), jh.key(target).addr, jh.key(target).rkey)
            assert (source == 0xEE).all(), "and the right key works on a new queue pair"
        del target, source


def test_stale_registration_storm(devices: tuple[Any, Any], loop: Callable[..., Any], soak: int) -> None:
    """RDMA writes into live blocks while others free, purge, trim and allocate, on two rails: no byte goes astray."""
    transfers = 1_000 * min(soak, 5)  # tests/c/verbs.c makes many more
    rails = [jh.Verbs(pd=d.pd) for d in devices]
    queues = [loop(d).here for d in devices]
    stop, failures = threading.Event(), []
    with jh.Arena(rails, region_max="2MiB", dirty_decay_ms=0, muzzy_decay_ms=0) as arena:

        def churn(seed: int) -> None:
            dice = random.Random(seed)
            kept: list[Any] = []
            try:
                while not stop.is_set():
                    for _ in range(20):
                        value = dice.randrange(256)
                        kept.append((value, arena.full(dice.choice((64, 4000, 60_000, 700_000)), value, "u1")))
                    for value, a in kept:
                        assert (a == value).all(), "a transfer to somebody else's block came here"
                    kept = kept[: dice.randrange(3)]
                    arena.trim()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=churn, args=(i,)) for i in range(2)]
        for t in threads:
            t.start()
        dice, wrong, generations = random.Random(7), 0, set()
        try:
            for n in range(transfers):
                rail = n % 2
                size = dice.choice((1, 64, 100, 4096, 9000))
                room = size if n % 8 else 1_500_000  # which is most of a region
                source, target = arena.full(size, n % 251, "u1"), arena.full(room, 0xEE, "u1")
                key, at = jh.key(target, rail), dice.randrange(room - size + 1)
                generations.add((jh.region(target).base, key.generation))
                queues[rail].write(arena.sges([source], rail).tolist(), key.addr + at, key.rkey)
                wrong += int(np.count_nonzero(target[at : at + size] != n % 251))
                wrong += int(np.count_nonzero(target[:at] != 0xEE)) + int(np.count_nonzero(target[at + size :] != 0xEE))
                if failures:
                    break
                del source, target
                if n % 4 == 0:
                    arena.trim()
        finally:
            stop.set()
            for t in threads:
                t.join()
        assert not failures, failures
        assert wrong == 0, f"{wrong} bytes went where the CPU does not see them"
        stats = arena.stats()
        assert stats.deregistrations > transfers // 40, f"registrations came and went: {stats}"
        assert len(generations) > transfers // 40, "and transfers met them"
