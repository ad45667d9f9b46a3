"""An arena's account."""

from __future__ import annotations

from typing import NamedTuple


class Stats(NamedTuple):
    """An arena's account: its blocks, in bytes as jemalloc rounds them and in numbers; then its regions.

    All in bytes but regions, registrations, deregistrations and registration_failures.
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


OF_BLOCKS = 6  # of the fields, how many are jh_face_stats'; the rest are jemhooks_stats'
