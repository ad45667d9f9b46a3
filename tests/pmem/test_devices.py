"""A dax device, and files on a file system with dax: what the kernel says about their memory, and who may pin it."""

from __future__ import annotations

import gc
import mmap
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import jemhooks as jh

if TYPE_CHECKING:
    from conftest import Python, Resources

MiB = 1 << 20
LINUX = tuple(int(n) for n in os.uname().release.split(".")[:2])
SHARED = pytest.mark.parametrize("shared", [False, True])


@pytest.fixture
def device() -> Iterator[Any]:
    """rxe0, opened by pyverbs."""
    from verbs_rc import Device

    opened = Device("rxe0")
    yield opened
    opened.close()


def flags(address: int) -> set[str]:
    """VmFlags of the mapping at the address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if head:
            inside = int(head[1], 16) <= address < int(head[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError(f"nothing is mapped at {address:#x}")


def free(place: Path) -> int:
    """Bytes; the journal frees late what was deleted, so it is written first."""
    os.sync()
    s = os.statvfs(place)
    return s.f_bfree * s.f_frsize


def address_of(a: Any) -> int:
    return int(a.__array_interface__["data"][0])


# ---- a dax device ----


@SHARED
def test_what_a_device_is(dax: str, shared: bool) -> None:
    info = jh.DevDax(dax, shared=shared).info()
    told = int(Path("/sys/bus/dax/devices", Path(dax).name, "size").read_text())
    assert info.total == info.free == told, "all that the kernel says there is"
    assert 120 * MiB < told < 128 * MiB, "of 128 MiB, some are the kernel's own for the pages' structs"
    assert told % (2 * MiB) == 0
    assert (info.name, info.divides) == ("devdax", shared)
    assert (info.host_accessible, info.pinnable, info.shares) == (True, True, True)
    assert (info.gives_back, info.unmaps) == (False, False), "it keeps what was written, and stays mapped"


@SHARED
def test_a_device_is_in_huge_pages(dax: str, shared: bool) -> None:
    provider = jh.DevDax(dax, shared=shared)
    with jh.Arena(provider=provider, region_min="8MiB", region_max="8MiB") as arena:
        blocks = [arena.full(3 * MiB, i, "u1") for i in range(8)]
        assert all((b == i).all() for i, b in enumerate(blocks)), "blocks can be written and read"
        lengths = {jh.region(b).length for b in blocks}
        assert lengths == ({8 * MiB} if shared else {provider.info().total}), "unshared, the device is one region"
        assert all(jh.region(b).base % (2 * MiB) == 0 for b in blocks)
        if not shared:
            assert len(arena.regions()) == 1
            with pytest.raises(jh.AllocationError, match=rf"{provider.info().total} bytes"):
                arena.block(provider.info().total + 1)
        blocks.clear()


@SHARED
def test_a_device_keeps_what_was_written(dax: str, shared: bool) -> None:
    provider = jh.DevDax(dax, shared=shared)
    total, written = provider.info().total, np.random.default_rng(shared).integers(0, 256, 5 * MiB, "u1")
    with jh.Arena(provider=provider) as arena:
        a = arena.array(written)
        offset = address_of(a) - min(m.start for m in maps(dax))
        del a
    del provider, arena
    gc.collect()
    assert not maps(dax), "when the provider has ended, it is unmapped"
    with open(dax, "r+b") as f, mmap.mmap(f.fileno(), total) as plain:
        kept = np.frombuffer(plain, "u1")
        assert (kept[offset : offset + written.nbytes] == written).all(), "anyone who maps it sees the bytes"
        kept[:] = 0xEE
        del kept
    with jh.Arena(provider=jh.DevDax(dax, shared=shared)) as arena:
        assert (arena.empty(MiB, "u1") == 0xEE).all(), "only zeros() clears what others left"
        for n in (100, 5000, 3 * MiB, 40 * MiB):
            a = arena.zeros(n, "u1")
            assert not a.any(), "which it does"
            a[:] = 0xEE
            del a
            arena.trim()
        gc.collect()


class Mapping:
    def __init__(self, line: str) -> None:
        self.start, self.end = (int(a, 16) for a in line.split()[0].split("-"))


def maps(path: str) -> list[Mapping]:
    """Where this process has the device."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [Mapping(line) for line in lines if line.endswith(f" {path}")]


def test_arenas_divide_a_device(dax: str) -> None:
    provider = jh.DevDax(dax, shared=True)
    total = provider.info().total
    [mapping] = maps(dax)
    for _ in range(3):
        with jh.Arena(provider=provider) as one, jh.Arena(provider=provider, region_min="16MiB") as two:
            kept = [arena.full(n, arena is two, "u1") for n in (1000, 100_000, 3 * MiB) * 4 for arena in (one, two)]
            assert all((a == i % 2).all() for i, a in enumerate(kept)), "each has its own bytes"
            regions = sorted((int(r["base"]), int(r["length"])) for arena in (one, two) for r in arena.regions())
            ends = [base + length for base, length in regions]
            assert all(end <= base for end, (base, _) in zip(ends, regions[1:], strict=False)), "and regions"
            assert mapping.start <= regions[0][0] <= ends[-1] <= mapping.end, "all of them in the device"
            assert provider.info().free == total - sum(length for _, length in regions), "the account is right"
            with pytest.raises(jh.AllocationError, match="devdax"):
                one.block(total // 2 + MiB)
            kept.clear()
        assert provider.info().free == total, "all of it came back"
        with jh.Arena(provider=provider) as arena:
            arena.block(96 * MiB)  # jemalloc's size that is nearest to all: it is in one piece again


def test_one_arena_at_a_time(dax: str) -> None:
    provider = jh.DevDax(dax)
    with jh.Arena(provider=provider) as arena:
        kept = arena.full(3, 2.0)
        with pytest.raises(jh.ProviderError, match=r"the devdax memory at .* already serves an arena"):
            jh.Arena(provider=provider)
    with pytest.raises(jh.ProviderError, match="already serves an arena"):
        jh.Arena(provider=provider)
    assert kept.tolist() == [2.0] * 3, "closed, but alive: the device is still taken"
    del kept
    jh.Arena(provider=provider).close()


@SHARED
def test_one_provider_at_a_time(dax: str, shared: bool, python: Python, resources: Callable[[], Resources]) -> None:
    """Or two would give the same bytes to two arenas."""
    other = """
        import sys
        import jemhooks as jh
        try:
            with jh.Arena(provider=jh.DevDax(sys.argv[1])) as arena:
                print(arena.zeros(3).sum())
        except jh.ProviderError as e:
            print(e)
        """
    before = resources()
    provider = jh.DevDax(dax, shared=shared)
    for also in (False, True):
        with pytest.raises(jh.ProviderError, match=f"devdax: {dax} is locked: another provider"):
            jh.DevDax(dax, shared=also)
    assert "is locked: another provider" in python.check(other, dax), "nor may another process"
    with jh.Arena(provider=provider) as arena:
        del provider
        gc.collect()
        assert "is locked: another provider" in python.check(other, dax), "an arena keeps it"
        del arena
    gc.collect()
    assert python.check(other, dax).strip() == "0.0", "with its last user it is free"
    assert resources().descriptors == before.descriptors, "what was refused left no file open"


def test_a_forked_child_sees_the_device(dax: str, python: Python) -> None:
    """Shared memory: a child sees what its parent writes later, cannot free it, and does not keep it locked."""
    python.check(
        """
        import gc, os, sys
        import jemhooks as jh
        with jh.Arena(provider=jh.DevDax(sys.argv[1])) as arena:
            a = arena.full(100_000, 1, "u1")
            wait, go = os.pipe()
            pid = os.fork()
            if not pid:
                os.close(go)
                os.read(wait, 1)
                status = 0 if (a == 2).all() else 1
                try:
                    arena.zeros(10)
                except jh.ForkError:
                    os.read(wait, 1)
                    os._exit(status)
                os._exit(2)
            a[:] = 2
            os.write(go, b"x")
            del a
        del arena
        gc.collect()
        jh.DevDax(sys.argv[1])
        os.close(go)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        """,
        dax,
    )


def test_what_is_no_dax_device(tmp_path: Path, fsdax: Path, resources: Callable[[], Resources]) -> None:
    (tmp_path / "file").write_bytes(bytes(4096))
    (tmp_path / "link").symlink_to("/dev/dax0.0")
    before = resources()
    for path in ("/dev/pmem1", "/dev/ram0", "/dev/null", tmp_path / "file"):
        with pytest.raises(jh.ProviderError, match=rf"devdax: {path} is not a dax device; `ndctl create-namespace"):
            jh.DevDax(path)
    for path, why in (("/dev/dax9.9", "No such file"), (fsdax, "Is a directory")):
        with pytest.raises(jh.ProviderError, match=rf"devdax: opening {path}: {why}"):
            jh.DevDax(path)
    assert resources().descriptors == before.descriptors, "no file is left open"
    assert jh.DevDax(tmp_path / "link").info().total > 120 * MiB, "a link to one is one"
    with pytest.raises(jh.ConfigError, match="neither a directory nor an ordinary file"):
        jh.File("/dev/dax0.0", overwrite=True)


# ---- keys of a device ----


@SHARED
def test_verbs_pins_a_device(dax: str, shared: bool, pins: Callable[[], int], wait_until: Callable[..., bool]) -> None:
    before = pins()
    provider = jh.DevDax(dax, shared=shared)
    with jh.Verbs("rxe0") as verbs, jh.Arena(verbs, provider=provider, region_max="8MiB") as arena:
        a = arena.full(1000, 7, "u1")
        assert pins() == before, "lazy: nothing is pinned before a key is asked for"
        key = jh.key(a)
        assert (key.addr, key.length) == (address_of(a), 1000)
        assert pins() - before == jh.region(a).length, "the region is pinned, all of it"
        del a
        assert arena.trim() > 0
        assert wait_until(lambda: pins() == before), "trim() unpins"
        jh.key(arena.zeros(10))
    assert wait_until(lambda: pins() == before), "close unpins"


@SHARED
def test_bytes_by_rdma(dax: str, shared: bool, device: Any) -> None:
    from verbs_rc import QueuePair

    here, there = QueuePair(device), QueuePair(device)
    here.connect(there.address())
    there.connect(here.address())
    rng = np.random.default_rng(1)
    with jh.Arena(jh.Verbs(pd=device.pd), provider=jh.DevDax(dax, shared=shared)) as arena:
        for n in (1, 4095, 100_001, 3 * MiB + 1):
            source, target = arena.array(rng.integers(0, 256, n, "u1")), arena.full(n + 128, 0xEE, "u1")
            key = jh.key(target)
            here.write(arena.sges([source]).tolist(), key.addr + 64, key.rkey)
            assert (target[64 : n + 64] == source).all(), f"{n} bytes written"
            assert (target[:64] == 0xEE).all(), "none before"
            assert (target[n + 64 :] == 0xEE).all(), "none after"
        del source, target
    here.close()
    there.close()


@SHARED
def test_uring_pins_a_device(
    dax: str, shared: bool, tmp_path: Path, pins: Callable[[], int], wait_until: Callable[..., bool]
) -> None:
    before = pins()
    provider = jh.DevDax(dax, shared=shared)
    with jh.Uring(slots=64) as uring, jh.Arena(uring, provider=provider, region_max="8MiB") as arena:
        a = arena.array(np.random.default_rng(2).integers(0, 256, 3 * MiB + 1, "u1"))
        if LINUX < (6, 5):  # io_uring then took no file's memory but shmem and hugetlbfs
            for _ in range(3):
                with pytest.raises(jh.RegistrationError, match="io_uring does not pin memory of a file"):
                    jh.key(a)
            assert pins() == before, "nothing is left of the attempts"
        else:
            jh.key(a)
            assert pins() - before == jh.region(a).length, "the region is pinned, all of it"
            with open(tmp_path / "file", "w+b") as f:
                assert uring.write_from(f.fileno(), a) == a.nbytes
                b = arena.zeros(a.nbytes, "u1")
                assert uring.read_into(f.fileno(), b) == b.nbytes
            assert (a == b).all(), "by the pinned pages"
            del b
        del a
        arena.trim()
    assert wait_until(lambda: pins() == before), "close unpins"


@pytest.mark.parametrize("source", ["devdax", "devdax, shared", "fsdax", "fsdax, a file"])
def test_registrars_that_do_not_pin(dax: str, fsdax: Path, source: str, pins: Callable[[], int]) -> None:
    provider: jh.Provider
    if "devdax" in source:
        provider = jh.DevDax(dax, shared="shared" in source)
    else:
        provider = jh.File(fsdax / "file", "32MiB") if "file" in source else jh.File(fsdax)
    before = pins()
    with jh.Null() as null, jh.Fabric("tcp") as fabric, jh.Arena([fabric, null], provider=provider) as arena:
        a, b = arena.full(MiB, 7, "u1"), arena.zeros(MiB, "u1")
        me = fabric.connect(fabric.address())
        fabric.put(me, a, jh.key(b)).wait()
        assert (b == 7).all()
        assert jh.key(a, 1).rkey, "and the null registrar's key"
        assert pins() == before
        del a, b
    del arena, provider
    gc.collect()
    (fsdax / "file").unlink(missing_ok=True)


def test_prepared_ahead(dax: str, fsdax: Path, null: jh.Null) -> None:
    """By a thread that populates the pages."""
    how: dict[str, Any] = {"policy": "eager", "prepare": "ahead", "region_min": "4MiB", "region_max": "4MiB"}
    makers: list[Callable[[], jh.Provider]] = [
        lambda: jh.DevDax(dax, shared=True),
        lambda: jh.DevDax(dax),
        lambda: jh.File(fsdax),
    ]
    for make in makers:
        with make() as provider, jh.Arena(null, provider=provider, **how) as arena:
            kept = []
            for i in range(20):
                kept.append(arena.full(MiB, i, "u1"))
                arena.wait_ready()
            assert all((a == i).all() for i, a in enumerate(kept))
            kept.clear()


# ---- files with dax ----


@pytest.mark.parametrize("named", [False, True])
def test_files_are_persistent_memory_itself(fsdax: Path, named: bool) -> None:
    provider = jh.File(fsdax / "file", "32MiB") if named else jh.File(fsdax)
    info = provider.info()
    assert (info.name, info.gives_back, info.shares, info.divides) == ("file", True, True, True)
    assert not info.pinnable, "a file system with dax may want its pages back"
    with jh.Arena(provider=provider, region_max="8MiB") as arena:
        a = arena.full(5 * MiB, 7, "u1")
        assert {"sh", "sf"} <= flags(jh.region(a).base), "MAP_SYNC: what is flushed from the caches is on the medium"
        if named:
            assert (fsdax / "file").read_bytes().count(7) >= a.nbytes, "the array lies in the file"
        del a
    del arena, provider
    gc.collect()
    if named:
        with jh.Arena(provider=jh.File(fsdax / "file", overwrite=True)) as arena:
            a = arena.zeros(5 * MiB, "u1")
            assert not a.any(), "zeros() clears what an earlier arena left"
            assert "sf" in flags(jh.region(a).base)
            del a
        del arena
        gc.collect()
        (fsdax / "file").unlink()


def test_files_without_dax_are_page_cache() -> None:
    with jh.Arena(provider=jh.File("/run/ext4")) as arena:
        assert "sf" not in flags(jh.region(arena.zeros(10)).base)


def test_registrars_that_pin_are_refused(place: Path, null: jh.Null) -> None:
    """When the arena is made, and not in the middle of its life."""
    provider = jh.File(place)
    with jh.Uring() as uring, jh.Verbs("rxe0") as verbs:
        for pinning in (uring, verbs):
            for rails in (pinning, [null, pinning]):
                with pytest.raises(jh.ConfigError, match=rf"{pinning.name} pins memory for long, which the kernel ref"):
                    jh.Arena(rails, provider=provider)
        jh.Arena(uring, provider=provider, policy="none").close()


@pytest.mark.parametrize("named", [False, True])
def test_pages_given_back_are_free_again(place: Path, named: bool) -> None:
    path = place / "file"
    provider, before = jh.File(path, "16MiB") if named else jh.File(place), free(place)
    with jh.Arena(provider=provider, dirty_decay_ms=0, muzzy_decay_ms=0, region_max="8MiB") as arena:
        for _ in range(2):
            kept = [arena.full(MiB, i, "u1") for i in range(8)]  # no more: MAP_SYNC makes each first touch a commit
            used = before - free(place)
            assert 8 * MiB <= used < 12 * MiB, "what is used takes room"
            if named:
                assert 8 * MiB <= path.stat().st_blocks * 512 < 12 * MiB
            del kept[::2]
            gc.collect()
            assert used - (before - free(place)) >= 4 * MiB, "blocks are freed, and their pages given back"
            assert all((a == i).all() for i, a in zip(range(1, 8, 2), kept, strict=True)), "the others are untouched"
            kept.clear()
            gc.collect()
            arena.trim()
            assert before - free(place) < MiB, "all of them"
            if named:
                assert path.stat().st_blocks * 512 < MiB
    del arena, provider
    gc.collect()
    assert before - free(place) < MiB, "and nothing is left of an arena that has ended"
    if named:
        assert path.stat().st_size == 16 * MiB, "a named file stays, and so does its length"
        path.unlink()
