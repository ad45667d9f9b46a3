"""``jemhooks bench``: ours beside the bare things, in one run; medians, and ratios within the run."""

from __future__ import annotations

from statistics import median

from ._native import check, ffi, lib
from .arena import Arena
from .errors import JemhooksError
from .registrars.base import Registrar
from .registrars.null import Null
from .registrars.uring import Uring
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

_TAILS: dict[str, dict[str, str]] = {
    "policy none": {"policy": "none"},
    "eager": {"policy": "eager"},
    "eager, prepared ahead": {"policy": "eager", "prepare": "ahead"},
}
_BUFFER = 64 << 10
_BUFFERS = 10_000


def _registrar() -> Registrar:
    """One that pins, where this machine lets us."""
    try:
        return Uring()
    except JemhooksError:
        return Null()


def _tails(rounds: int) -> None:
    """Print how long the slowest of many allocations take, by policy; each round with new arenas."""
    seen: dict[str, list[tuple[float, ...]]] = {name: [] for name in _TAILS}
    with _registrar() as registrar:
        for _ in range(rounds):
            for name, how in _TAILS.items():
                ns = ffi.new("double[3]")
                with Arena(registrar, **how) as arena, arena._using() as native:  # type: ignore[arg-type]
                    arena.wait_ready()
                    check(lib.jh_bench_tail(native, _BUFFER, _BUFFERS, ns))
                    registrations = arena.stats().registrations
                seen[name].append((*ns, registrations))
        print(f"{_BUFFERS} fresh buffers of {_BUFFER} bytes, registered with {registrar.name}")
    medians = {name: [median(column) for column in zip(*rows, strict=True)] for name, rows in seen.items()}
    for name, (half, tail, most, count) in medians.items():
        ratio = tail / medians["policy none"][1]
        print(
            f"  {name:<24} median {half:7.0f} ns   p99.9 {tail:8.0f} ns {ratio:6.2f} x   "
            f"max {most / 1000:7.0f} us   {count:3.0f} registrations"
        )


def _table(title: str, rows: tuple[str, ...], ns: list[float], reference: int) -> str:
    lines = [title]
    lines += [f"  {row:<40}{value:9.2f} ns{value / ns[reference]:8.2f} x" for row, value in zip(rows, ns, strict=True)]
    return "\n".join(lines)


def bench(rounds: int, iterations: int, sizes: list[int], regions: list[int]) -> None:
    """Print three kinds of tables: blocks by size, look-ups by number of regions, the slowest allocations by policy.

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
    _tails(rounds)
