"""Real pinning without a network card: what is registered is pinned, counted, limited, and moves the right bytes."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import pytest

import jemhooks as jh

if TYPE_CHECKING:
    from conftest import Python, Resources

pytestmark = pytest.mark.uring
MiB = 1 << 20


@pytest.fixture
def uring() -> Iterator[jh.Uring]:
    with jh.Uring(slots=64) as registrar:
        yield registrar


@pytest.fixture
def file(tmp_path: Path) -> Iterator[BinaryIO]:
    with (tmp_path / "file").open("w+b", buffering=0) as f:
        yield f


def pinned() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmPin:")[1].split()[0])


def pattern(n: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, n, "u1")


def test_pins_whole_regions_and_lets_go(uring: jh.Uring, wait_until: Callable[..., bool]) -> None:
    before = pinned()
    with jh.Arena(uring, region_max="8MiB") as arena:
        blocks = [arena.block("3MiB") for _ in range(5)]
        assert pinned() == before, "lazy: nothing is pinned before a key is asked for"
        jh.key(blocks[0])
        length = jh.region(blocks[0]).length
        assert length <= pinned() - before < length + 2 * MiB, "the whole region, and at most the rest of a huge page"
        for b in blocks:
            jh.key(b)
        stats = arena.stats()
        assert stats.registered <= pinned() - before < stats.registered + stats.regions * 2 * MiB, "as registered"
        del blocks, b
        assert arena.trim() > 0
        assert wait_until(lambda: pinned() == before), "trim unpins"
        jh.key(arena.block(8))
    assert wait_until(lambda: pinned() == before), "close unpins"


def test_bytes_go_through_the_pinned_pages(uring: jh.Uring, file: BinaryIO) -> None:
    with jh.Arena(uring) as arena:
        for n in (1, 4095, 4096, 100_000, 5 * MiB + 3):
            out = arena.array(pattern(n, n))
            assert uring.write_from(file.fileno(), out) == n
            assert os.pread(file.fileno(), n, 0) == out.tobytes(), "the file has what the array has"
            back = arena.zeros(n, "u1")
            assert uring.read_into(file.fileno(), back) == n
            assert (back == out).all(), "and back"
        assert uring.write_from(file.fileno(), out[10:20], 5) == 10, "a part, at an offset"
        assert os.pread(file.fileno(), 10, 5) == out[10:20].tobytes()
        file.truncate(100)
        assert uring.read_into(file.fileno(), back, 40) == 60, "short at the end of the file"
        assert uring.read_into(file.fileno(), back, 100) == 0, "nothing beyond it"


def test_pages_stay_right_through_free_purge_and_reuse(uring: jh.Uring, file: BinaryIO, soak: int) -> None:
    """A stale registration would read pages that the process no longer sees."""
    rng = np.random.default_rng(3)
    with jh.Arena(uring, region_max="8MiB", dirty_decay_ms=0, muzzy_decay_ms=0) as arena:
        kept: list[tuple[Any, int]] = []
        for i in range(300 * soak):
            n = int(rng.choice([100, 5000, 70_000, 600_000, 2 * MiB]))
            a = arena.array(pattern(n, i)) if i % 3 else arena.zeros(n, "u1")
            if i % 3 == 0:
                assert not a.any(), "not zero"
                a[:] = pattern(n, i)
            kept.append((a, i))
            jh.key(a)
            if len(kept) > 12 or sum(k.nbytes for k, _ in kept) > 16 * MiB:
                del kept[int(rng.integers(len(kept)))]
            if i % 10 == 0:
                arena.trim()
            if i % 4 == 0:
                b, seed = kept[int(rng.integers(len(kept)))]
                uring.write_from(file.fileno(), b)
                assert os.pread(file.fileno(), b.nbytes, 0) == pattern(b.nbytes, seed).tobytes(), (
                    "the device reads other pages than the program wrote"
                )
        assert arena.stats().abandoned == 0
        del a, b


def test_a_device_write_does_not_show_in_new_memory(uring: jh.Uring, file: BinaryIO) -> None:
    file.write(b"\xaa" * 3 * MiB)
    with jh.Arena(uring) as arena:
        for _ in range(5):
            a = arena.empty(3 * MiB, "u1")
            assert uring.read_into(file.fileno(), a) == 3 * MiB
            del a
            arena.trim()
            assert not arena.zeros(3 * MiB, "u1").any(), "zeros() after the device wrote there"


def test_read_only_memory_is_not_read_into(uring: jh.Uring, file: BinaryIO) -> None:
    file.write(b"new!")
    with jh.Arena(uring) as arena:
        a = arena.full(4, ord("o"), "u1")
        a.flags.writeable = False
        with pytest.raises(jh.ConfigError, match=r"read-only|writable"):
            uring.read_into(file.fileno(), a)
        assert a.tobytes() == b"oooo", "read-only memory must not be written"
        assert uring.write_from(file.fileno(), a) == 4, "but may be read"


def test_strided_memory_is_not_moved_as_if_it_were_not(uring: jh.Uring, file: BinaryIO) -> None:
    """Of a[::2] the bytes between its elements are someone else's."""
    file.write(bytes(100))
    with jh.Arena(uring) as arena:
        a = arena.full(10, 7, "u1")
        with contextlib.suppress(jh.ConfigError):
            uring.read_into(file.fileno(), a[::2])
        assert (a[1::2] == 7).all(), "elements outside of the view were overwritten"


def test_errors_of_transfers(uring: jh.Uring, file: BinaryIO) -> None:
    with jh.Arena(uring) as arena, jh.Null() as null, jh.Arena(null) as elsewhere:
        a = arena.zeros(10)
        other = elsewhere.zeros(10)
        with pytest.raises(jh.TransferError, match=r"fd 1000000: Bad file descriptor") as e:
            uring.write_from(1_000_000, a)
        assert e.value.errno == errno.EBADF
        with pytest.raises(jh.ConfigError, match="fd: -1"):
            uring.write_from(-1, a)
        with pytest.raises(jh.ConfigError, match="fd: None"):
            uring.read_into(None, a)  # type: ignore[arg-type]
        with pytest.raises(jh.ConfigError, match="offset: -1"):
            uring.read_into(file.fileno(), a, -1)
        with pytest.raises(jh.NotOursError):
            uring.read_into(file.fileno(), np.zeros(10))
        with pytest.raises(jh.JemhooksError):  # registered, but not with this registrar
            uring.read_into(file.fileno(), other)
        reading = os.open(file.name, os.O_RDONLY)
        try:
            with pytest.raises(jh.TransferError) as e:
                uring.write_from(reading, a)
            assert e.value.errno == errno.EBADF, "a file open for reading only"
        finally:
            os.close(reading)
        assert uring.write_from(file.fileno(), a) == 80, "errors leave the ring usable"


def test_second_rail(file: BinaryIO) -> None:
    """A uring registrar that is not the arena's first must use its own slots, not the first's keys."""
    with (
        jh.Null() as null,
        jh.Uring(slots=8) as first,
        jh.Uring(slots=8) as second,
        jh.Arena(second) as filler,
        jh.Arena([null, first, second]) as arena,
    ):
        jh.key(filler.block(8))
        a = arena.array(pattern(5000, 1))
        for ring in (first, second):
            assert ring.write_from(file.fileno(), a) == 5000, "each rail moves its own pinned pages"
            assert os.pread(file.fileno(), 5000, 0) == a.tobytes()
        del a


def test_closed(uring: jh.Uring, file: BinaryIO) -> None:
    with jh.Arena(uring) as arena:
        a = arena.zeros(10)
        jh.key(a)
        uring.close()
        for move in (uring.write_from, uring.read_into):
            with pytest.raises(jh.ClosedError, match="registrar uring is closed"):
                move(file.fileno(), a)
        assert jh.key(a).length == 80, "its arenas go on"


def test_slots_run_out() -> None:
    with jh.Uring(slots=2) as uring, jh.Arena(uring, region_max="2MiB") as arena:
        blocks = [arena.block("1536KiB") for _ in range(3)]
        jh.key(blocks[0])
        jh.key(blocks[1])
        with pytest.raises(jh.PinLimitError, match="at most 2 regions may be registered"):
            jh.key(blocks[2])
        uring.budget.set(None)
        with pytest.raises(jh.RegistrationError, match=r"no 1 consecutive slots left of 2") as e:
            jh.key(blocks[2])
        assert e.value.errno == errno.ENOSPC
        del blocks[0], e
        gc.collect()
        arena.trim()
        assert jh.key(blocks[-1]).length == 1536 << 10, "trim made room"
        del blocks


def test_larger_than_one_buffer(file: BinaryIO) -> None:
    """A region of more than 1 GiB takes several buffers, and transfers cross their border."""
    with jh.Uring(slots=4) as uring, jh.Arena(uring) as arena:
        block = arena.block((1 << 30) + 8 * MiB)
        a = block.array()
        assert jh.region(block).length > 1 << 30
        border = jh.region(block).base + (1 << 30) - block.address
        part = a[border - 5000 : border + 5000]
        part[:] = pattern(10_000, 9)
        assert uring.write_from(file.fileno(), part) == 10_000
        assert os.pread(file.fileno(), 10_000, 0) == part.tobytes(), "across the border of two buffers"
        del a, part, block


def test_descriptors_and_memory_come_back(resources: Callable[[], Resources], soak: int) -> None:
    def round_() -> None:
        with jh.Uring(slots=4) as uring, jh.Arena(uring) as arena:
            jh.key(arena.zeros(10))

    round_()
    before = resources()
    rounds = 30 * soak
    for _ in range(rounds):
        round_()
    after = resources()
    assert after.descriptors == before.descriptors, "a ring's descriptor leaked"
    assert after.pinned_kb == before.pinned_kb, "pages stayed pinned"
    assert after.resident_kb < before.resident_kb + 2048, "memory leaked"


def test_threads(uring: jh.Uring, tmp_path: Path, soak: int) -> None:
    failures: list[BaseException] = []
    with jh.Arena(uring, region_max="4MiB") as arena:

        def work(i: int) -> None:
            try:
                with (tmp_path / str(i)).open("w+b", buffering=0) as f:
                    for n in range(30 * soak):
                        a = arena.array(pattern(50_000 + 1000 * n, i))
                        assert uring.write_from(f.fileno(), a) == a.nbytes
                        assert os.pread(f.fileno(), a.nbytes, 0) == a.tobytes(), "another thread's bytes"
                        del a
                        arena.trim()
            except BaseException as e:
                failures.append(e)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(120)
    assert not failures, failures[0]


def test_a_large_region() -> None:
    """Populated by several threads, then pinned whole; what was in it stays, and what the device moves is right."""
    with contextlib.ExitStack() as stack:
        uring, file = stack.enter_context(jh.Uring()), stack.enter_context(tempfile.TemporaryFile())
        arena = stack.enter_context(jh.Arena(uring, dirty_decay_ms=0, muzzy_decay_ms=0))
        array = arena.empty(300 << 20, "u1")
        array[:3], array[-3:] = 7, 9
        before = pinned()
        assert jh.key(array).length >= 300 << 20
        assert pinned() - before >= 300 << 20, "not all of it is pinned"
        assert (array[:3].tolist(), array[-3:].tolist()) == ([7] * 3, [9] * 3)
        uring.write_from(file.fileno(), array[-(1 << 20) :])
        file.seek((1 << 20) - 3)
        assert file.read() == b"\x09\x09\x09"
        del array


MEMLOCK = """
    import gc, os, resource
    import jemhooks as jh
    jh.Arena().close()                                   # all loaded as root
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))
    if os.geteuid() == 0:
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)                # gives up CAP_IPC_LOCK
    def pinned():
        with open("/proc/self/status") as f:
            return int(f.read().split("VmPin:")[1].split()[0]) << 10
    def until(condition):
        import time
        end = time.monotonic() + 10
        while not condition() and time.monotonic() < end:
            time.sleep(0.005)
        return condition()
"""


def test_memlock_too_small(python: Python) -> None:
    out = python.check(
        MEMLOCK
        + """
    # with huge pages the kernel would count the whole of one that a purge has left in parts
    pages = jh.Anonymous(thp=False)
    with jh.Uring(slots=16) as uring, jh.Arena(uring, name="poor", provider=pages) as arena:
        descriptors = len(os.listdir("/proc/self/fd"))
        small = arena.full(1000, 2.0)
        big = arena.full(32 << 17, 1.0)
        for call in (jh.key, jh.lease, jh.rkey):
            try:
                call(big)
            except jh.RegistrationError as e:
                text = str(e)
                print("arena 'poor'" in text, "RLIMIT_MEMLOCK is 8388608 bytes" in text, "ulimit -l" in text, e.errno)
                del e
        print(jh.region(big).state.name, pinned(), big.sum() == 32 << 17)
        print(jh.key(small).length, pinned(), len(os.listdir("/proc/self/fd")) == descriptors)
        try:
            jh.key(big)
        except jh.RegistrationError:
            print("still too large")
        with jh.lease(small):
            print(arena.trim(), jh.region(small).leases)
        stats = arena.stats()
        print(stats.registered, stats.registrations, stats.registration_failures, stats.current_count)
        del big, small
        gc.collect()
        print(arena.trim() > 0, until(lambda: pinned() == 0), arena.stats().current_count)
    """
    )
    assert out.splitlines() == [
        "True True True 12",
        "True True True 12",
        "True True True 12",
        "MAPPED 0 True",
        "8000 2097152 True",
        "still too large",
        "0 1",
        "2097152 1 4 2",
        "True True 0",
    ], "refused with the numbers; then a smaller region still registers, and nothing is leaked"


def test_memlock_too_small_eager(python: Python) -> None:
    out = python.check(
        MEMLOCK
        + """
    with jh.Uring(slots=16) as uring, jh.Arena(uring, policy="eager", region_max="2MiB") as arena:
        kept = []
        try:
            while len(kept) < 100:
                kept.append(arena.block("1536KiB"))
        except jh.RegistrationError as e:
            print("8388608" in str(e), 1 <= len(kept) <= 4, arena.stats().current_count == len(kept))
            del e
        with open("/proc/self/statm") as f:
            resident = int(f.read().split()[1])
        for _ in range(200):
            try:
                arena.block("1536KiB")
            except jh.RegistrationError:
                pass
        with open("/proc/self/statm") as f:
            print(int(f.read().split()[1]) - resident < 1024, arena.stats().current_count == len(kept))
        kept.pop()
        gc.collect()
        arena.trim()
        kept.append(arena.block("1536KiB"))
        print(jh.region(kept[-1]).state.name, pinned() >= arena.stats().registered)
        kept.clear()
    print(until(lambda: pinned() == 0))
    """
    )
    assert out.splitlines() == ["True True True", "True True", "REGISTERED True", "True"], (
        "eager: refused cleanly, without populating more memory each time, and after a free it works again"
    )
