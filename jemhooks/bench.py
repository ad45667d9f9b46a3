"""``jemhooks bench``: ours beside the bare things, in one run; medians, and ratios within the run."""

from __future__ import annotations

from ._native import check, ffi, lib
from .sizes import ranged

_BLOCKS = (
    "jemhooks alloc+free",
    "mallocx+dallocx, explicit tcache",
    "jemhooks calloc+free",
    "malloc+free of this process",
)
_LOOKUPS = (
    "jemhooks_lookup, inline",
    "bare table, region, key, bounds check",
    "jemhooks_get_key",
    "jemhooks_get_keys, an array at a time",
    "jemhooks_region_of, inline",
)


def _table(title: str, rows: tuple[str, ...], ns: list[float], reference: int) -> str:
    lines = [title]
    lines += [f"  {row:<40}{value:9.2f} ns{value / ns[reference]:8.2f} x" for row, value in zip(rows, ns, strict=True)]
    return "\n".join(lines)


def bench(rounds: int, iterations: int, sizes: list[int], regions: list[int]) -> None:
    """Print two kinds of tables: blocks by size, look-ups by number of regions.

    :param rounds: of which the median is taken, 1 to 101; rows alternate within a round.
    :param iterations: operations per row and round.
    """
    ranged(rounds, "--rounds", 1, 101)
    ranged(iterations, "--iterations", 1, 10**12)
    for size in sizes:
        ranged(size, "--sizes", 1, 1 << 30)
    for count in regions:
        ranged(count, "--regions", 1, 100_000)
    for size in sizes:
        ns = ffi.new(f"double[{len(_BLOCKS)}]")
        check(lib.jh_bench_blocks(size, iterations, rounds, ns))
        print(_table(f"a block of {size} bytes, allocated and freed, one thread (64 at a time)", _BLOCKS, list(ns), 1))
    for count in regions:
        ns, made = ffi.new(f"double[{len(_LOOKUPS)}]"), ffi.new("size_t *")
        check(lib.jh_bench_lookups(count, iterations, rounds, ns, made))
        print(_table(f"the key of a random address among {made[0]} regions", _LOOKUPS, list(ns), 1))
