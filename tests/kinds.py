"""Kinds of providers for the conformance suite, and what the kernel says about memory."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import mmap
import os
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import jemhooks as jh

MiB = 1 << 20
PAGE = 4096
SIZE = 64 * MiB


class Kind(NamedTuple):
    """A kind of provider. ``source`` makes one: an expression of jh, mmap, place (a new directory) and size (bytes)."""

    name: str
    source: str
    parent: str | None = None  #: where the directory is made
    limit: int = 0  #: bytes that there are, where the provider does not know
    hurry: int = 1  #: by what to divide loop counts

    @property
    def bounded(self) -> bool:
        return bool(self.limit) or "size" in self.source

    @contextlib.contextmanager
    def make(self, size: int = SIZE) -> Iterator[jh.Provider]:
        """A fresh provider; its files go at the end."""
        with tempfile.TemporaryDirectory(dir=self.parent) as place:
            yield eval(self.source, {"jh": jh, "mmap": mmap, "place": place, "size": size})

    def script(self, text: str, size: int = SIZE) -> str:
        """A script that finds such a provider in `provider`."""
        start = f"""
        import ctypes, gc, mmap, os, random, resource, sys, tempfile
        import numpy as np
        import jemhooks as jh
        MiB, size, folder = 1 << 20, {size}, tempfile.TemporaryDirectory(dir={self.parent!r})
        place = folder.name
        provider = {self.source}
        """
        return textwrap.dedent(start) + textwrap.dedent(text) + "\ndel provider\nfolder.cleanup()\n"


def most(kind: Kind, provider: jh.Provider) -> int:
    """How much memory there is; 0: no limit."""
    return provider.info().total or kind.limit


# ---- what the kernel says ----


class Mapping(NamedTuple):
    """A line of /proc/self/maps."""

    start: int
    end: int
    file: tuple[str, int]  #: device and inode
    offset: int
    name: str


def mappings() -> list[Mapping]:
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, offset, device, inode, *name = line.split(maxsplit=5)
        start, end = (int(a, 16) for a in addresses.split("-"))
        found.append(Mapping(start, end, (device, int(inode)), int(offset, 16), name[0] if name else ""))
    return found


def pieces(address: int, nbytes: int, table: list[Mapping]) -> Iterator[tuple[tuple[str, int], int, int]]:
    """Where memory really is: (file, first byte, end); anonymous memory is its own file."""
    at, end = address, address + nbytes
    while at < end:
        m = table[bisect.bisect_right(table, at, key=lambda m: m.start) - 1]
        assert m.start <= at < m.end, f"{at:#x} is not mapped"
        stop = min(end, m.end)
        shift = m.offset - m.start if m.file[1] else 0
        yield m.file if m.file[1] else ("", 0), at + shift, stop + shift
        at = stop


def assert_disjoint(what: str, spans: Iterable[tuple[Any, int, int]]) -> None:
    ordered = sorted(spans)
    for (file, _, end), (next_file, start, _) in itertools.pairwise(ordered):
        assert file != next_file or end <= start, f"two {what} share {file} from {start:#x} to {end:#x}"


def descriptor(file: tuple[str, int]) -> int | None:
    """One of our descriptors of this file."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.stat(int(fd)).st_ino == file[1]:
                return int(fd)
    return None


def status(name: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0])


def in_memory(address: int, nbytes: int) -> int:
    """How many of these pages this process has in memory."""
    with open("/proc/self/pagemap", "rb") as f:
        f.seek(address // PAGE * 8)
        return int((np.frombuffer(f.read(nbytes // PAGE * 8), "u8") >> 62 != 0).sum())
