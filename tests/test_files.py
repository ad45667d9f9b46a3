"""Files and devices as memory: wrong paths, limits, and files that are somebody's."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import jemhooks as jh

if TYPE_CHECKING:
    from conftest import Python, Resources

pytestmark = pytest.mark.null
MiB = 1 << 20
TMPFS = Path("/dev/shm")


def state(path: Path) -> tuple[bytes, int, int, int]:
    """What must not change of a file that is left alone."""
    s = path.stat()
    return path.read_bytes(), s.st_size, s.st_mtime_ns, s.st_blocks


# ---- files that are there already ----


def test_an_existing_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_bytes(b"mine" * MiB)
    before = state(path)
    refused: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: jh.File(path), jh.ProviderError, "is there already, and is left alone; overwrite it"),
        (lambda: jh.File(path, "4MiB"), jh.ProviderError, "is there already"),
        (lambda: jh.File(path, "8MiB"), jh.ProviderError, "is there already"),
        (lambda: jh.File(path, 4097, overwrite=True), jh.ConfigError, "multiple of 4096"),
        (lambda: jh.File(path, "8MiB", overwrite=True), jh.ProviderError, r"has only 4194304 .*truncate -s 8388608"),
        (lambda: jh.DevDax(path), jh.ProviderError, "is not a dax device"),
    ]
    for call, error, said in refused:
        with pytest.raises(error, match=said):
            call()
        assert state(path) == before, "a file that is refused is not touched"


@pytest.mark.parametrize("length", [None, 2 * MiB])
def test_overwriting_keeps_the_length(tmp_path: Path, length: int | None) -> None:
    path, nbytes = tmp_path / "scratch", 4 * MiB + 77
    path.write_bytes(b"\xee" * nbytes)
    used = length or 4 * MiB
    provider = jh.File(path, length, overwrite=True)
    assert provider.info().total == used, "whole pages of it"
    with jh.Arena(provider=provider) as arena:
        a = arena.zeros(used // 2, "u1")
        assert not a.any(), "its bytes are not seen in zeros()"
        a[:] = 1
        del a
        with pytest.raises(jh.AllocationError, match=f"the {used} bytes of its file memory"):
            arena.block(used + 4096)
    assert path.stat().st_size == nbytes, "it is never truncated, nor made longer"
    assert path.read_bytes()[used:] == b"\xee" * (nbytes - used), "and beyond the length nothing changes"
    del provider, arena
    gc.collect()
    assert path.stat().st_size == nbytes, "nor when its provider ends"


def test_a_new_file_stays_and_can_be_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "new"
    provider = jh.File(path, "8MiB")
    assert (path.stat().st_size, path.stat().st_mode & 0o777) == (8 * MiB, 0o600)
    with jh.Arena(provider=provider) as one, jh.Arena(provider=provider) as two:
        a, b = one.full(MiB, 1, "u1"), two.full(MiB, 2, "u1")
        bytes_of = path.read_bytes()
        assert (bytes_of.count(1) >= MiB, bytes_of.count(2) >= MiB) == (True, True), "the arrays lie in the file"
        del a, b
    del provider, one, two
    gc.collect()
    assert path.stat().st_size == 8 * MiB, "it stays"
    with jh.Arena(provider=jh.File(path, overwrite=True)) as arena:
        assert not arena.zeros(4 * MiB, "u1").any(), "zeros, whatever was left there"


def test_one_provider_at_a_time(tmp_path: Path, python: Python) -> None:
    path = tmp_path / "file"
    provider = jh.File(path, "4MiB")
    other = (
        f"import jemhooks as jh\ntry: jh.File({str(path)!r}, overwrite=True)\nexcept jh.ProviderError as e: print(e)"
    )
    with jh.Arena(provider=provider) as arena:
        a = arena.full(1000, 1, "u1")
        del provider
        gc.collect()
        for _ in range(2):
            with pytest.raises(jh.ProviderError, match="is locked: another provider, here or in another process"):
                jh.File(path, overwrite=True)
        assert "is locked" in python.check(other), "and in another process"
        assert (a == 1).all(), "which does no harm"
        del a
    del arena
    gc.collect()
    assert python.check(other) == "", "free again when the last arena is gone"
    jh.File(path, overwrite=True)


def test_closing_unlocks(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with jh.File(path, "8MiB") as provider:
        arena = jh.Arena(provider=provider)
        a = arena.full(MiB, 1, "u1")
    provider.close()
    for use in (provider.info, lambda: jh.Arena(provider=provider)):
        with pytest.raises(jh.ClosedError, match="this File is closed; make another one"):
            use()
    with pytest.raises(jh.ProviderError, match="is locked"):
        jh.File(path, overwrite=True)
    assert (a == 1).all(), "the arena keeps its memory"
    assert not arena.zeros(MiB, "u1").any(), "and can have more of it"
    del a
    arena.close()
    jh.File(path, overwrite=True).close()  # free, though this test still has the closed ones


def test_a_forked_child_does_not_keep_the_file_locked(python: Python, tmp_path: Path) -> None:
    script = """
        import gc, os, sys
        import jemhooks as jh
        path = sys.argv[1] + "/file"
        provider = jh.File(path, "4MiB")
        wait, hold = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(hold)
            os.read(wait, 1)
            os._exit(0)
        with jh.Arena(provider=provider) as arena:
            arena.zeros(10)
        del provider, arena
        gc.collect()
        try:
            jh.File(path, overwrite=True)
        finally:
            os.close(hold)
        assert os.waitpid(pid, 0)[1] == 0
    """
    python.check(script, str(tmp_path))


# ---- paths that cannot be used ----


def test_what_is_no_file(tmp_path: Path, resources: Callable[[], Resources]) -> None:
    fifo, link, sock = tmp_path / "fifo", tmp_path / "link", tmp_path / "socket"
    os.mkfifo(fifo)
    link.symlink_to(tmp_path / "nowhere")
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(sock))
    empty = tmp_path / "empty"
    empty.touch()
    before = resources()
    neither = "neither a directory nor an ordinary file"
    refused: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (fifo, {"overwrite": True}, jh.ConfigError, neither),
        (fifo, {"length": "4MiB"}, jh.ProviderError, "is there already"),
        ("/dev/null", {"overwrite": True}, jh.ConfigError, neither),
        ("/dev/zero", {"overwrite": True, "length": "1MiB"}, jh.ConfigError, neither),
        (sock, {"overwrite": True}, jh.ProviderError, "opening it for writing"),
        (link, {"length": "4MiB"}, jh.ProviderError, "File exists"),
        (tmp_path / "new", {}, jh.ConfigError, "a new file has a multiple of 4096"),
        (tmp_path / "new", {"length": 4095}, jh.ConfigError, "multiple of 4096"),
        (tmp_path / "new", {"length": 1}, jh.ConfigError, "multiple of 4096"),
        (tmp_path / "new", {"length": 1 << 62}, jh.ProviderError, "making it as long as asked|mapping it"),
        (tmp_path / "new", {"overwrite": True}, jh.ProviderError, "leave overwrite out to make a new one"),
        (tmp_path / "no" / "new", {"length": "4MiB"}, jh.ProviderError, "No such file or directory"),
        (tmp_path / ("x" * 300), {"length": "4MiB"}, jh.ProviderError, "File name too long"),
        (tmp_path, {"length": "4MiB"}, jh.ConfigError, "is a directory"),
        (tmp_path, {"overwrite": True}, jh.ConfigError, "is a directory"),
        ("/proc", {}, jh.ProviderError, "O_TMPFILE"),
        ("/sys", {}, jh.ProviderError, "O_TMPFILE"),
        (empty, {"overwrite": True}, jh.ProviderError, r"has only 0 bytes, and 4096 are wanted; .*truncate -s 4096"),
        ("", {}, jh.ConfigError, "is not a path"),
        (b"a\0b", {}, jh.ConfigError, "is not a path"),
        (3.5, {}, jh.ConfigError, "is not a path"),
        (None, {}, jh.ConfigError, "is not a path"),
        (tmp_path / "new", {"length": 0}, jh.ConfigError, "length"),
        (tmp_path / "new", {"length": -4096}, jh.ConfigError, "length"),
        (tmp_path / "new", {"length": 2**64}, jh.ConfigError, "length"),
        (tmp_path / "new", {"length": "much"}, jh.ConfigError, "length"),
    ]
    for path, how, error, said in refused:
        with pytest.raises(error, match=said) as e:
            jh.File(path, **how)
        assert error is not jh.ProviderError or str(path) in str(e.value), "the message names the path"
        del e
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "fifo", "link", "socket"], (
        "nothing was made, or left behind"
    )
    assert resources().descriptors == before.descriptors, "no file is left open"


def test_what_is_no_dax_device(tmp_path: Path, resources: Callable[[], Resources]) -> None:
    (tmp_path / "file").write_bytes(b"x" * MiB)
    os.mkfifo(tmp_path / "fifo")
    before = resources()
    for path in ("/dev/null", "/dev/zero", tmp_path / "file", tmp_path / "fifo"):
        with pytest.raises(jh.ProviderError, match=f"{path} is not a dax device; .*ndctl"):
            jh.DevDax(path)
    for path, said in (
        (tmp_path, "Is a directory"),
        ("/dev/dax99.9", "No such file"),
        (tmp_path / "file" / "x", "Not a dir"),
    ):
        for shared in (False, True):
            with pytest.raises(jh.ProviderError, match=f"opening {path}: {said}"):
                jh.DevDax(path, shared=shared)
    for wrong in ("", b"a\0b", 7.5, None):
        with pytest.raises(jh.ConfigError, match="is not a path"):
            jh.DevDax(wrong)  # type: ignore[arg-type]
    assert resources().descriptors == before.descriptors, "no file is left open"


def test_page_sizes_of_memfd() -> None:
    for wrong in (4096, "3MiB", "4MiB", "2GiB", 1):
        with pytest.raises(jh.ConfigError, match=r"page_size .* is not one of 0"):
            jh.Memfd(hugetlb=wrong)
    for wrong in (0, -1, "huge", 2**70):
        with pytest.raises(jh.ConfigError, match="hugetlb"):
            jh.Memfd(hugetlb=wrong)


# ---- memory that cannot be pinned ----


class Pinning(jh.Registrar):
    name = "pinning"

    def __init__(self, pins: int) -> None:
        self.pins = pins

    def register(self, addr: int, length: int, access: jh.Access) -> tuple[int, int, object]:
        return 1, 2, None

    def deregister(self, handle: Any) -> None:
        pass


@pytest.fixture
def on_disk(tmp_path: Path, root: Path) -> jh.File:
    """Files that are not on tmpfs."""
    for place in (tmp_path, root, Path("/var/tmp")):
        provider = jh.File(place)
        if not provider.info().pinnable:
            return provider
    pytest.fail("all file systems here are tmpfs; set TMPDIR to a folder on a disk")


def test_files_on_disk_are_not_pinned(on_disk: jh.File, null: jh.Null) -> None:
    for registrar in (Pinning(1), Pinning(2)):
        for rails in ([registrar], [null, registrar]):
            with pytest.raises(jh.ConfigError, match=r"pinning pins memory for long, which the kernel refuses .*tmpfs"):
                jh.Arena(rails, provider=on_disk)
    for pins, access in ((0, "remote_write"), (2, "remote_write|on_demand")):
        with jh.Arena(Pinning(pins), provider=on_disk, access=access) as arena:
            assert jh.key(arena.zeros(10)).rkey == 2, "one that does not pin is welcome"
    with jh.Arena(null, provider=on_disk) as arena:
        jh.key(arena.zeros(10))
    jh.Arena(Pinning(1), provider=on_disk, policy="none").close()
    on_tmpfs = jh.File(TMPFS)
    assert on_tmpfs.info().pinnable, "on tmpfs files can be pinned"
    with jh.Arena(Pinning(1), provider=on_tmpfs) as arena:
        assert jh.key(arena.zeros(10)).rkey == 2


@pytest.mark.uring
def test_files_on_disk_and_uring(on_disk: jh.File) -> None:
    with jh.Uring() as uring:
        with pytest.raises(jh.ConfigError, match=r"uring pins memory for long, which the kernel refuses .*use memfd"):
            jh.Arena(uring, provider=on_disk)
        for provider in (jh.File(TMPFS), jh.Memfd()):
            with jh.Arena(uring, provider=provider, region_max="2MiB") as arena:
                jh.key(arena.zeros(10))
                assert arena.stats().registered == 2 * MiB, "what can be pinned is pinned"


@pytest.mark.fabric
def test_files_on_disk_and_fabric(on_disk: jh.File) -> None:
    with jh.Fabric("tcp") as fabric, jh.Arena(fabric, provider=on_disk, region_max="2MiB") as arena:
        jh.key(arena.zeros(10))
        assert arena.stats().registered == 2 * MiB, "libfabric's tcp does not pin"


# ---- limits of the process ----


def test_limit_on_file_sizes(python: Python, tmp_path: Path) -> None:
    """An error, and no SIGXFSZ (which Python ignores, but other programs die of)."""
    script = """
        import os, resource, signal, sys
        import jemhooks as jh
        def refused(error, said, call):
            try:
                call()
            except error as e:
                assert said in str(e), e
            else:
                raise SystemExit(f"not refused: {said}")
        place = sys.argv[1]
        os.truncate(os.open(place + "/old", os.O_CREAT | os.O_RDWR), 8 << 20)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        def limit(n):
            resource.setrlimit(resource.RLIMIT_FSIZE, (n, resource.RLIM_INFINITY))
        limit(16 << 20)
        refused(jh.ProviderError, "ulimit -f", lambda: jh.File(place + "/new", "17MiB"))
        assert os.listdir(place) == ["old"], "nothing is left"
        for provider in (jh.File(place), jh.Memfd()):
            with jh.Arena(provider=provider, region_max="4MiB") as arena:
                kept = [arena.zeros(1 << 20, "u1")]
                many = lambda: kept.extend(arena.zeros(1 << 20) for _ in range(9))
                refused(jh.AllocationError, "File too large", many)
                refused(jh.AllocationError, "File too large", lambda: arena.zeros(32 << 20, "u1"))
                assert not kept[0].any() and not arena.zeros(1000).any(), "the arena goes on"
                kept.clear()
        for n in (4096, 100, 0):
            limit(n)
            refused(jh.ProviderError, "File too large", lambda: jh.File(place + "/new", "4MiB"))
            if n < 4096:
                refused(jh.ProviderError, "File too large", lambda: jh.File(place))
                refused(jh.AllocationError, "File too large", lambda: jh.Arena(provider=jh.Memfd()).zeros(10))
            assert os.listdir(place) == ["old"], "nothing is left"
        limit(0)
        try:
            jh.File(place + "/old", overwrite=True)
        except jh.ProviderError as e:
            assert "File too large" in str(e)
        print("alive")
    """
    assert python.check(script, str(tmp_path), options=("-X", "faulthandler")) == "alive\n"


def test_no_file_descriptors_left(python: Python, tmp_path: Path) -> None:
    script = """
        import os, resource, sys
        import jemhooks as jh
        place = sys.argv[1]
        providers = [jh.Memfd(), jh.File(place)]
        for provider in providers:
            jh.Arena(provider=provider).close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (50, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        taken = []
        try:
            while True:
                taken.append(os.dup(0))
        except OSError:
            pass
        for provider in providers:
            for _ in range(3):
                try:
                    jh.Arena(provider=provider, name="many")
                except jh.ProviderError as e:
                    assert "many" in str(e) and "Too many open files" in str(e), e
                else:
                    raise SystemExit("an arena without a file")
        for call in (lambda: jh.File(place), lambda: jh.File(place + "/new", "4MiB"), lambda: jh.DevDax("/dev/null")):
            try:
                call()
            except jh.ProviderError as e:
                assert "Too many open files" in str(e), e
            else:
                raise SystemExit("a file was opened")
        for fd in taken:
            os.close(fd)
        assert os.listdir(place) == []
        for provider in providers:
            with jh.Arena(provider=provider) as arena:
                assert not arena.zeros(1000).any(), "when there are descriptors again, it works"
    """
    python.check(script, str(tmp_path))


def test_a_refused_block_leaves_room_for_smaller_ones(python: Python, tmp_path: Path) -> None:
    """A region that cannot be mapped must not spoil the file for the next one."""
    script = """
        import resource, sys
        import jemhooks as jh
        for provider in (jh.File(sys.argv[1]), jh.Memfd()):
            with jh.Arena(provider=provider) as arena:
                arena.zeros(1000)
                with open("/proc/self/status") as f:
                    now = int(f.read().split("VmSize:")[1].split()[0]) * 1024
                hard = resource.getrlimit(resource.RLIMIT_AS)[1]
                resource.setrlimit(resource.RLIMIT_AS, (now + (64 << 20), hard))
                try:
                    arena.block("200MiB")
                except jh.AllocationError as e:
                    assert "Cannot allocate memory" in str(e), e
                else:
                    raise SystemExit("more than the address space has")
                for nbytes in (3 << 20, 5 << 20, 1 << 20):
                    assert not arena.zeros(nbytes, "u1").any(), "a smaller block can still be had"
                resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    """
    python.check(script, str(tmp_path))
