"""An arena's account, and the table of its regions."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ._native import check, ffi, lib

_REGION = np.dtype(
    [(n, "u8") for n in ("base", "length", "committed", "lkey", "rkey", "remote_base", "generation")]
    + [("state", "u4"), ("leases", "u4")]
)


class Stats(NamedTuple):
    """An arena's account: its blocks, in bytes as jemalloc rounds them and in numbers; then its regions.

    In bytes, or in numbers: regions, registrations, deregistrations, registration_failures; hits (idle regions that
    came into use again while still registered), evictions (deregistrations to make room, or after idle_ttl), retries
    (registrations tried again after evictions). registering_ns: spent in successful registrations; durations: how many
    of them took less than 1 us, 2 us, 4 us, ...; the last: all others.
    """

    current_bytes: int
    current_count: int
    peak_bytes: int
    peak_count: int
    total_bytes: int
    total_count: int
    regions: int
    mapped: int
    committed: int
    registered: int
    registered_peak: int
    registrations: int
    deregistrations: int
    registration_failures: int
    active: int
    dirty: int
    muzzy: int
    abandoned: int
    allocated: int
    hits: int
    evictions: int
    retries: int
    registering_ns: int
    durations: tuple[int, ...]


_OF_BLOCKS = 6  # of the fields, how many are jh_face_stats'; the rest are jemhooks_stats'


def stats_of(arena: Any, face: Any) -> Stats:
    """Of a C arena, and of its face, which counts blocks."""
    native, blocks = ffi.new("jemhooks_stats *"), ffi.new("jh_face_stats *")
    native.size = ffi.sizeof("jemhooks_stats")
    check(lib.jemhooks_get_stats(arena, native))
    lib.jh_face_get_stats(face, blocks)
    values = [getattr(blocks if i < _OF_BLOCKS else native, name) for i, name in enumerate(Stats._fields)]
    return Stats._make([*values[:-1], tuple(values[-1])])


def regions_of(arena: Any) -> npt.NDArray[Any]:
    """The regions of a C arena, as a structured array."""
    room, count = 0, ffi.new("size_t *")
    while True:
        table = np.zeros(room, _REGION)
        count[0] = room
        at = ffi.cast("jemhooks_region_info *", ffi.from_buffer(table)) if room else ffi.NULL
        check(lib.jemhooks_regions(arena, at, count))
        if count[0] <= room:
            return table[: count[0]]
        room = count[0] + 8
