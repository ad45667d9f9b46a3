"""Files as memory on file systems that are full or read-only: errors that name the remedy, and never SIGBUS."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Python

pytestmark = pytest.mark.null
MOUNT = """
    import ctypes, gc, os, sys
    import jemhooks as jh
    libc, MiB = ctypes.CDLL(None, use_errno=True), 1 << 20
    place = sys.argv[1]

    def mount(flags=0, options=b"size=64m"):
        if libc.mount(b"tmpfs", place.encode(), b"tmpfs", ctypes.c_ulong(flags), options):
            raise OSError(ctypes.get_errno(), "mount")

    def others_fill_it():
        with open(place + "/others", "wb", buffering=0) as f:
            try:
                for n in (MiB, 4096):
                    while True:
                        f.write(b"x" * n)
            except OSError:
                pass
            else:
                raise SystemExit("never full")
            while True: # the last page; other threads may free one again and again, so not by the byte
                try:
                    if not f.write(b"x" * 512):
                        break
                except OSError:
                    break

    def room_again():
        os.remove(place + "/others")

    def refused(error, said, call):
        try:
            call()
        except error as e:
            assert said in str(e), e
        else:
            raise SystemExit(f"not refused: {said}")

    def fill(arena, kept, n=MiB):
        try:
            while True:
                a = arena.zeros(n, "u1")
                assert not a.any(), "old bytes"
                a[:] = len(kept) % 250 + 1
                kept.append(a)
        except jh.AllocationError as e:
            assert "make room in its file system" in str(e), e

    def take_what_there_is(arena, sizes, times):
        for n in sizes:
            for _ in range(times):
                try:
                    a = arena.zeros(n, "u1")
                except jh.AllocationError:
                    continue
                a[:] = 1 # SIGBUS, if there is nothing behind it
                del a

    def check(arena, kept, most=90 * MiB):
        for i, a in enumerate(kept):
            assert (a == i % 250 + 1).all(), f"block {i} changed"
        stats = arena.stats()
        assert stats.abandoned == 0, stats
        assert stats.mapped <= most, stats
"""


@pytest.fixture
def mounted(python: Python, tmp_path: Path) -> Callable[..., str]:
    """A function that runs a script with mounts of its own; MOUNT gives it a small file system."""
    unshare = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--user", "--map-root-user"]), "--"]
    if os.getuid() and subprocess.run([*unshare, "true"], check=False, capture_output=True, timeout=30).returncode:
        pytest.fail("this user may not mount anything; allow user namespaces, or run the tests as root")

    def run(script: str) -> str:
        source = textwrap.dedent(MOUNT) + textwrap.dedent(script)
        command = [*unshare, sys.executable, "-W", "error", "-X", "faulthandler", "-c", source, str(tmp_path)]
        done = subprocess.run(
            command, env=python.environment(), capture_output=True, text=True, timeout=120, check=False
        )
        said = done.stdout[-2000:] + done.stderr[-4000:]
        assert done.returncode == 0, f"the script ended with {done.returncode} (-7 is SIGBUS)\n{said}"
        assert not done.stderr.strip(), f"the script ended with 0, but complained\n{said}"
        return done.stdout

    return run


def test_read_only_file_system(mounted: Callable[..., str]) -> None:
    mounted(
        """
        mount()
        with open(place + "/old", "wb") as f:
            f.write(bytes(MiB))
        mount(1 | 32, None) # MS_RDONLY | MS_REMOUNT
        for call in (
            lambda: jh.File(place), lambda: jh.File(place + "/new", "4MiB"),
            lambda: jh.File(place + "/old", overwrite=True),
        ):
            refused(jh.ProviderError, "Read-only file system", call)
        assert os.listdir(place) == ["old"]
        """
    )


def test_full_when_it_is_made(mounted: Callable[..., str]) -> None:
    mounted(
        """
        mount()
        provider = jh.File(place)
        old = os.open(place + "/old", os.O_CREAT | os.O_RDWR)
        os.truncate(old, 8 * MiB)
        others_fill_it()
        before = sorted(os.listdir(place))
        for call in (
            lambda: jh.File(place), lambda: jh.File(place + "/new", "8MiB"),
            lambda: jh.File(place + "/old", overwrite=True),
        ):
            refused(jh.ProviderError, "No space left on device", call)
        assert sorted(os.listdir(place)) == before, "nothing is left behind"
        with jh.Arena(provider=provider) as arena:
            for _ in range(100):
                refused(jh.AllocationError, "make room in its file system", lambda: arena.zeros(1000))
            check(arena, [], 8 * MiB)
            room_again()
            assert not arena.zeros(1000).any(), "it goes on when there is room"
            check(arena, [])
        """
    )


SOURCES = pytest.mark.parametrize("source", ["jh.File(place)", "jh.File(place + '/file', '128MiB')"])


@SOURCES
def test_full_as_it_grows(mounted: Callable[..., str], source: str) -> None:
    mounted(
        f"""
        mount()
        with jh.Arena(provider={source}, region_max="8MiB") as arena:
            kept = []
            fill(arena, kept)
            first = len(kept)
            assert first > 50, f"only {{first}} MiB of 64 can be used"
            for n in (MiB, 100_000, 9 * MiB, 200 * MiB):
                for _ in range(40):
                    try:
                        arena.zeros(n, "u1")
                    except jh.AllocationError:
                        pass
            check(arena, kept)
            del kept[first // 2 :]
            gc.collect()
            fill(arena, kept)
            assert len(kept) >= first - 2, "what was freed can be had again"
            check(arena, kept)
            kept.clear()
        """
    )


@SOURCES
@pytest.mark.parametrize("decay", [0, None])
def test_filled_by_others_in_mid_life(mounted: Callable[..., str], source: str, decay: int | None) -> None:
    """After pages were given back: there may be no room to take them into use again."""
    mounted(
        f"""
        mount()
        how = dict(dirty_decay_ms={decay}, muzzy_decay_ms={decay}, region_max="8MiB")
        with jh.Arena(provider={source}, **how) as arena:
            for round in range(4):
                kept = []
                fill(arena, kept)
                del kept[10:]
                gc.collect()
                arena.trim()
                others_fill_it()
                take_what_there_is(arena, (100, 5000, 100_000, MiB, 3 * MiB), 20)
                refused(jh.AllocationError, "make room in its file system", lambda: arena.zeros(5 * MiB, "u1"))
                check(arena, kept)
                room_again()
                fill(arena, kept)
                assert len(kept) > 45, f"only {{len(kept)}} MiB can be used when there is room again"
                check(arena, kept)
                kept.clear()
        """
    )


@SOURCES
def test_registering_on_a_full_file_system(mounted: Callable[..., str], source: str) -> None:
    """Devices write to all of a region, so all of it must have room."""
    mounted(
        f"""
        mount()
        provider, null = {source}, jh.Null()
        how = dict(provider=provider, region_min="8MiB", region_max="8MiB", access="remote_write")
        lazy, eager = jh.Arena(null, name="lazy", **how), jh.Arena(null, name="eager", policy="eager", **how)
        a = lazy.zeros(1000, "u1")
        others_fill_it()
        for _ in range(20):
            refused(jh.RegistrationError, "no room for all 8388608 bytes", lambda: jh.key(a))
            try:
                eager.zeros(1000)
            except (jh.RegistrationError, jh.AllocationError) as e:
                assert "room" in str(e), e
            else:
                raise SystemExit("a block that is not registered")
        assert null.stats().live == 0
        for arena in (lazy, eager):
            check(arena, [], 64 * MiB)
        room_again()
        a[:] = 7
        jh.key(a)
        b = eager.zeros(1000, "u1")
        others_fill_it()
        for block in (a, b):
            home = jh.region(block)
            ctypes.memset(home.base + 4 * MiB, 7, MiB) # a peer: SIGBUS, if there is nothing behind it
            jh.key(block)
        assert (a == 7).all() and not b.any()
        del a, b, block, home
        lazy.close(), eager.close()
        assert (null.stats().live, null.stats().errors) == (0, 0)
        """
    )
