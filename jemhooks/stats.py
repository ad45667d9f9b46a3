"""An arena's account."""

from __future__ import annotations

from typing import Any, NamedTuple


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


def stats_of(native: Any, blocks: Any) -> Stats:
    """From a jemhooks_stats and a jh_face_stats."""
    values = [getattr(blocks if i < _OF_BLOCKS else native, name) for i, name in enumerate(Stats._fields)]
    return Stats._make([*values[:-1], tuple(values[-1])])
