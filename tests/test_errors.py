"""Wrong arguments: a typed error that names the value, the limit or the choices; never a crash, never a leak."""

from __future__ import annotations

import errno
import gc
import mmap
import pickle
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest
from allocator import PIECE

import jemhooks as jh

if TYPE_CHECKING:
    from conftest import Resources

pytestmark = pytest.mark.null
Case = tuple[str, Callable[[jh.Arena], object], type[Exception], str]

# What is called with the open arena `a`, what it must raise, and what the message must contain (a regular expression).
BLOCKS: list[Case] = [
    ("no bytes", lambda a: a.block(0), jh.ConfigError, r"0 bytes is not between 1 and 9223372036854775807"),
    ("negative", lambda a: a.block(-1), jh.ConfigError, r"-1 bytes"),
    ("beyond PTRDIFF_MAX", lambda a: a.block(2**63), jh.ConfigError, r"9223372036854775808 bytes"),
    (
        "larger than memory",
        lambda a: a.block(2**62),
        jh.AllocationError,
        r"4611686018427387904 bytes in arena 'tested'",
    ),
    ("None", lambda a: a.block(None), jh.ConfigError, r"None is not a size"),  # type: ignore[arg-type]
    ("float", lambda a: a.block(1.5), jh.ConfigError, r"1.5 is not a size"),  # type: ignore[arg-type]
    ("bytes", lambda a: a.block(b"1"), jh.ConfigError, r"b'1' is not a size"),  # type: ignore[arg-type]
    ("alignment 0", lambda a: a.block(8, alignment=0), jh.ConfigError, r"alignment: 0 is not between 1"),
    ("alignment -8", lambda a: a.block(8, alignment=-8), jh.ConfigError, r"alignment: -8"),
    ("alignment 3", lambda a: a.block(8, alignment=3), jh.ConfigError, r"alignment 3 is not a power of two"),
    ("alignment 2 GiB", lambda a: a.block(8, alignment=1 << 31), jh.ConfigError, r"alignment 2147483648 .* 1 GiB"),
    ("alignment 2^64", lambda a: a.block(8, alignment=1 << 64), jh.ConfigError, r"18446744073709551616"),
    ("alignment None", lambda a: a.block(8, alignment=None), jh.ConfigError, r"alignment: None"),  # type: ignore[arg-type]
    ("shape overflows", lambda a: a.empty((2**32, 2**32), "f8"), jh.ConfigError, r"has 147573952589676412928 bytes"),
    ("shape negative", lambda a: a.empty((3, -1)), jh.ConfigError, r"shape: -1 is not between"),
    ("shape has a zero", lambda a: a.empty((3, 0)), jh.ConfigError, r"has 0 bytes"),
    ("shape of text", lambda a: a.empty("12"), jh.ConfigError, r"shape: '1' is not a whole number"),  # type: ignore[arg-type]
    ("shape None", lambda a: a.empty(None), jh.ConfigError, r"shape: None"),  # type: ignore[arg-type]
    ("65 dimensions", lambda a: a.empty([1] * 65), jh.ConfigError, r"65"),
    ("dtype of objects", lambda a: a.empty(3, object), jh.ConfigError, r"Python objects"),
    ("dtype with an object", lambda a: a.zeros(3, [("a", "i4"), ("b", "O")]), jh.ConfigError, r"Python objects"),
    ("dtype of no size", lambda a: a.empty(3, "V0"), jh.ConfigError, r"has 0 bytes"),
    ("dtype unknown", lambda a: a.empty(3, "nonsense"), jh.ConfigError, r"dtype 'nonsense' is not a numpy dtype"),
    ("dtype with a field twice", lambda a: a.empty(3, [("a", "i4"), ("a", "i4")]), jh.ConfigError, r"occurs more than"),
    ("order", lambda a: a.empty(3, order="X"), jh.ConfigError, r"'X'"),  # type: ignore[arg-type]
    ("full of nothing", lambda a: a.full(3, None), jh.ConfigError, r"Python objects"),
    ("array of objects", lambda a: a.array([object()]), jh.ConfigError, r"Python objects"),
    ("array of nothing", lambda a: a.array([]), jh.ConfigError, r"has 0 bytes"),
    ("view too large", lambda a: a.block(8).array("f8", 2), jh.ConfigError, r"needs 16 bytes; the block has 8"),
    ("view of a larger dtype", lambda a: a.block(7).array("f8"), jh.ConfigError, r"needs 8 bytes; the block has 7"),
    ("view of unknown dtype", lambda a: a.block(8).array("nonsense"), jh.ConfigError, r"nonsense"),
    ("view in order Q", lambda a: a.block(8).array("u1", order="Q"), jh.ConfigError, r"'Q'"),  # type: ignore[arg-type]
]
SIZES: list[Case] = [
    (text, lambda a, text=text: a.block(text), jh.ConfigError, r"is not a (size|whole number)|is not between")  # type: ignore[misc]
    for text in (
        "",
        " ",
        "MiB",
        "1 XiB",
        "1mib",
        "-1KiB",
        "1e3",
        "0x10",
        "1.0001B",
        "0.3KiB",
        "1,000",
        "1 2",
        "0",
        "9EiB",
        "inf",
    )
] + [("5,000 digits", lambda a: a.block("9" * 5000), jh.ConfigError, r"size|block")]
MEMORY: list[Case] = [
    (f"{call.__name__}({name})", lambda _, call=call, value=value: call(value), kind, match)  # type: ignore[misc]
    for call in (jh.key, jh.lkey, jh.rkey, jh.lease, jh.region)
    for name, value, kind, match in [
        ("None", None, jh.ConfigError, r"NoneType names no memory"),
        ("text", "text", jh.ConfigError, r"str names no memory"),
        ("float", 1.0, jh.ConfigError, r"float names no memory"),
        ("list", [1], jh.ConfigError, r"list names no memory"),
        ("NULL", 0, jh.NotOursError, r"address (0x0|\(nil\))"),
        ("1", 1, jh.NotOursError, r"address 0x1 "),
        ("negative", -1, jh.ConfigError, r"-1 is not an address"),
        ("2^64", 2**64, jh.ConfigError, r"is not an address"),
        ("2^64 - 1", 2**64 - 1, jh.NotOursError, r"0xffffffffffffffff"),
        ("2^48", 2**48, jh.NotOursError, r"0x1000000000000 "),
        ("not ours", bytearray(5), jh.NotOursError, r"in no region of any arena"),
        ("numpy's own", np.zeros(5), jh.NotOursError, r"in no region of any arena"),
        ("empty", b"", jh.NotOursError, r"in no region of any arena"),
        ("released view", None, jh.ConfigError, r"names no memory"),
    ]
]
KEYS: list[Case] = [
    ("rail -1", lambda a: jh.key(a.block(8), -1), jh.ConfigError, r"-1"),
    ("rail 1 of 1", lambda a: jh.key(a.block(8), 1), jh.ConfigError, r"1 registrars; 1 is not one of 0 to 0"),
    ("rail 2^40", lambda a: jh.key(a.block(8), 2**40), jh.ConfigError, r"1099511627776"),
    ("rail of text", lambda a: jh.key(a.block(8), "x"), jh.ConfigError, r"'x'"),  # type: ignore[arg-type]
    ("keys of None", lambda _: jh.keys(None), jh.ConfigError, r"must be integers"),  # type: ignore[arg-type]
    ("keys of text", lambda _: jh.keys(["x"]), jh.ConfigError, r"must be integers"),
    ("keys of floats", lambda _: jh.keys([1.0]), jh.ConfigError, r"must be integers, not float64"),
    ("keys of negatives", lambda _: jh.keys([5, -1]), jh.ConfigError, r"-1 is not an address"),
    ("keys beyond 2^64", lambda _: jh.keys([2**64]), jh.ConfigError, r"must be integers"),
    ("keys of ragged", lambda _: jh.keys([[1], [1, 2]]), jh.ConfigError, r"must be integers"),  # type: ignore[list-item]
    ("keys not ours", lambda a: jh.keys([a.block(8).address, 0x1234000]), jh.NotOursError, r"0x1234000"),
]
ARENAS: list[Case] = [
    ("registrar", lambda _: jh.Arena("null"), jh.ConfigError, r"'n' is not a Registrar"),  # type: ignore[arg-type]
    ("registrars None", lambda _: jh.Arena(None), jh.ConfigError, r"None"),  # type: ignore[arg-type]
    ("registrars 5", lambda _: jh.Arena(5), jh.ConfigError, r"5"),  # type: ignore[arg-type]
    ("five rails", lambda a: jh.Arena([a.registrars[0]] * 5), jh.ConfigError, r"5 registrars .* at most 4"),
    ("a registrar class", lambda _: jh.Arena(jh.Null), jh.ConfigError, r"Null"),  # type: ignore[arg-type]
    ("provider", lambda _: jh.Arena(provider="anonymous"), jh.ConfigError, r"'anonymous' is not a Provider"),  # type: ignore[arg-type]
    (
        "policy",
        lambda a: jh.Arena(a.registrars, policy="often"),
        jh.ConfigError,
        r"'often' is not one of lazy, eager, none",
    ),  # type: ignore[arg-type]
    ("policy empty", lambda a: jh.Arena(a.registrars, policy=""), jh.ConfigError, r"policy ''"),  # type: ignore[arg-type]
    ("policy list", lambda _: jh.Arena(policy=["lazy"]), jh.ConfigError, r"policy"),  # type: ignore[arg-type]
    ("lazy without registrar", lambda _: jh.Arena(policy="lazy"), jh.ConfigError, r"needs a registrar"),
    (
        "access name",
        lambda _: jh.Arena(access="remote_wriet"),
        jh.ConfigError,
        r"'remote_wriet' is not one of local_write",
    ),
    ("access empty", lambda _: jh.Arena(access=""), jh.ConfigError, r"access ''"),
    ("access bits", lambda _: jh.Arena(access=64), jh.ConfigError, r"0x40 has bits beyond 0x3f"),  # type: ignore[arg-type]
    ("access negative", lambda _: jh.Arena(access=-1), jh.ConfigError, r"access"),  # type: ignore[arg-type]
    ("access None", lambda _: jh.Arena(access=None), jh.ConfigError, r"access"),  # type: ignore[arg-type]
    ("access 1.5", lambda _: jh.Arena(access=1.5), jh.ConfigError, r"1.5"),  # type: ignore[arg-type]
    ("access of numbers", lambda _: jh.Arena(access=[1]), jh.ConfigError, r"access 1"),  # type: ignore[list-item]
    ("region_min 1 MiB", lambda _: jh.Arena(region_min="1MiB"), jh.ConfigError, r"multiples of 2 MiB"),
    ("region_max 3 MiB", lambda _: jh.Arena(region_max="3MiB"), jh.ConfigError, r"multiples of 2 MiB"),
    ("region_max 2 GiB", lambda _: jh.Arena(region_max="2GiB"), jh.ConfigError, r"2147483648 .* at most 1 GiB"),
    ("min above max", lambda _: jh.Arena(region_min="4MiB", region_max="2MiB"), jh.ConfigError, r"4194304 to 2097152"),
    ("shards 0", lambda _: jh.Arena(shards=0), jh.ConfigError, r"shards: 0 is not between 1 and 64"),
    ("shards 65", lambda _: jh.Arena(shards=65), jh.ConfigError, r"shards: 65"),
    ("shards 1.5", lambda _: jh.Arena(shards=1.5), jh.ConfigError, r"shards: 1.5"),  # type: ignore[arg-type]
    ("decay -3", lambda _: jh.Arena(dirty_decay_ms=-3), jh.ConfigError, r"dirty_decay_ms: -3"),
    ("decay -2", lambda _: jh.Arena(muzzy_decay_ms=-2), jh.ConfigError, r"muzzy_decay_ms"),
    ("name None", lambda _: jh.Arena(name=None), jh.ConfigError, r"name"),  # type: ignore[arg-type]
    ("name with NUL", lambda _: jh.Arena(name="a\0b"), jh.ConfigError, r"name"),
    ("name of surrogates", lambda _: jh.Arena(name="\udcff"), jh.ConfigError, r"name"),
]
OTHERS: list[Case] = [
    ("hugetlb size", lambda _: jh.Anonymous(hugetlb="4KiB"), jh.ConfigError, r"4096 is not one of"),
    ("numa 999", lambda _: jh.Anonymous(numa_node=999), jh.ConfigError, r"no NUMA node 999"),
    ("numa -1", lambda _: jh.Anonymous(numa_node=-1), jh.ConfigError, r"numa_node -1"),
    ("numa 2^40", lambda _: jh.Anonymous(numa_node=2**40), jh.ConfigError, r"numa_node 1099511627776"),
    ("numa text", lambda _: jh.Anonymous(numa_node="0"), jh.ConfigError, r"numa_node '0'"),  # type: ignore[arg-type]
    ("fixed None", lambda _: jh.Fixed(None), jh.ConfigError, r"NoneType names no memory"),
    ("fixed read-only", lambda _: jh.Fixed(bytes(8192)), jh.ConfigError, r"names no memory|read-only"),
    ("fixed address alone", lambda _: jh.Fixed(4096), jh.ConfigError, r"an address needs a length"),
    ("fixed longer than it is", lambda _: jh.Fixed(bytearray(8192), 9000), jh.ConfigError, r"9000 .* 8192"),
    ("fixed tiny", lambda _: jh.Fixed(bytearray(100)), jh.ConfigError, r"100 bytes .* no whole 4 KiB page"),
    ("fixed at NULL", lambda _: jh.Fixed(0, 8192), jh.ConfigError, r"not a range of user memory"),
    ("fixed beyond 2^48", lambda _: jh.Fixed(2**48, 8192), jh.ConfigError, r"not a range of user memory"),
    ("fixed wraps", lambda _: jh.Fixed(2**64 - 4096, 2**62), jh.ConfigError, r"not a range of user memory"),
    ("null limit", lambda _: jh.Null(max_mr=-1), jh.ConfigError, r"max_mr: -1"),
    ("null op", lambda a: a.registrars[0].fail("reg"), jh.ConfigError, r"'reg' is not one of register"),  # type: ignore[attr-defined]
    ("null op list", lambda a: a.registrars[0].fail([]), jh.ConfigError, r"op"),  # type: ignore[attr-defined]
    ("uring slots", lambda _: jh.Uring(slots=16385), jh.ConfigError, r"slots: 16385 is not between 1 and 16384"),
    ("fabric bytes", lambda _: jh.Fabric(b"tcp"), jh.ConfigError, r"b'tcp'"),  # type: ignore[arg-type]
    ("fabric provider", lambda _: jh.Fabric("nonsense"), jh.RegistrationError, r"provider nonsense"),
    ("fabric node", lambda _: jh.Fabric("tcp", node="203.0.113.77"), jh.RegistrationError, r"203\.0\.113\.77"),
    ("fabric outstanding", lambda _: jh.Fabric("tcp", max_outstanding=0), jh.ConfigError, r"max_outstanding: 0"),
]
ALL = BLOCKS + SIZES + MEMORY + KEYS + ARENAS + OTHERS


@pytest.fixture
def arena(null: jh.Null, passed: Callable[[], bool]) -> Iterator[jh.Arena]:
    with jh.Arena(null, name="tested") as a:
        yield a
        if not passed():
            return
        gc.collect()
        assert a.stats().current_count == 0, "a refused call must not keep a block"
        assert a.stats().abandoned == 0, "jemalloc must not lose address space"


def make(call: Callable[[jh.Arena], object], arena: jh.Arena) -> None:
    """Call; what should not have been made is closed, lest its warning be what is reported."""
    made = call(arena)
    if isinstance(made, jh.Arena | jh.Registrar):
        made.close()


@pytest.mark.parametrize("case", [pytest.param(c, id=f"{i}-{c[0][:40]}") for i, c in enumerate(ALL)])
def test_wrong_argument(arena: jh.Arena, case: Case) -> None:
    _, call, kind, match = case
    with pytest.raises(jh.JemhooksError, match=match) as e:
        make(call, arena)
    assert type(e.value) is kind, f"expected {kind.__name__}: {e.value}"
    assert jh.key(arena.zeros(3)).length == 24, "the arena must work as before"


def test_wrong_arguments_leak_nothing(null: jh.Null, resources: Callable[[], Resources], soak: int) -> None:
    quick = [c for c in ALL if not c[0].startswith(("fabric", "uring"))]

    def everything() -> None:
        with jh.Arena(null, name="tested") as arena:
            for _, call, _, _ in quick:
                with pytest.raises(Exception, match=r"."):  # which one is the other test's question
                    make(call, arena)

    everything()
    before = resources()
    for _ in range(5 * soak):
        everything()
    after = resources()
    assert (after.arenas, after.descriptors) == (before.arenas, before.descriptors), "arenas or descriptors leaked"
    assert after.resident_kb < before.resident_kb + 4096, "memory leaked"


def test_hierarchy() -> None:
    for name in jh.__all__:
        value = getattr(jh, name)
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, jh.JemhooksError), f"{name} must be caught by `except JemhooksError`"
            assert value("x").errno == 0, f"{name} must have an errno, 0 where there is none"
            assert str(pickle.loads(pickle.dumps(value("x")))) == "x", f"{name} must survive multiprocessing"
    assert issubclass(jh.AllocationError, MemoryError), "code that catches MemoryError must catch ours"
    assert issubclass(jh.ConfigError, ValueError), "and ValueError"
    assert issubclass(jh.NotOursError, LookupError), "and LookupError"
    assert issubclass(jh.PinLimitError, jh.RegistrationError), "a limit is a kind of refusal"


def test_errno_comes_along(arena: jh.Arena) -> None:
    with pytest.raises(jh.AllocationError) as e:
        arena.block(2**60)
    assert e.value.errno == errno.ENOMEM, "C's error number must be there"
    with pytest.raises(jh.NotOursError) as f:
        jh.key(4096)
    assert f.value.errno == errno.ENOENT, "C's error number must be there"


def test_block_larger_than_its_provider() -> None:
    with jh.Arena(provider=jh.Fixed(mmap.mmap(-1, 1 << 20)), name="small") as arena:
        with pytest.raises(jh.AllocationError, match=r"2097152 bytes in arena 'small': its fixed memory has 1048576"):
            arena.block("2MiB")
        assert arena.zeros(1000).sum() == 0, "a smaller one still fits"


def test_block_larger_than_a_registration() -> None:
    with jh.Null(max_mr_size="4MiB") as null, jh.Arena(null, name="limited") as arena:
        with pytest.raises(jh.AllocationError, match=r"8388608 bytes .* registrars take at most 4194304 bytes"):
            arena.block("8MiB")
        block = arena.block("1MiB")
        assert jh.key(block).length == 1 << 20, "a smaller one is registered"
    with jh.Null(max_mr_size=5000) as tiny, pytest.raises(jh.ConfigError, match=r"at most 5000 bytes"):
        jh.Arena(tiny, provider=jh.Fixed(bytearray(1 << 20)))


def test_less_than_the_allocator_takes_at_a_time() -> None:
    """A registrar or a budget that could never register a region is refused at once; what is just enough works."""
    said = rf"at most {PIECE - 1} bytes at a time, and regions of this anonymous provider have at least {PIECE}"
    with jh.Null(max_mr_size=PIECE - 1) as null, pytest.raises(jh.ConfigError, match=said):
        jh.Arena(null)
    with jh.Null(max_mr_size=PIECE) as null, jh.Arena(null) as arena:
        assert jh.key(arena.block(100)).length == 100
    least = max(PIECE, 2 << 20)  # no region begins smaller than 2 MiB
    with jh.Null() as null, pytest.raises(jh.ConfigError, match=f"no room for one region of {least} bytes on 1 rails"):
        jh.Arena(null, pin_limit=least - 1)
    with jh.Null() as null, jh.Arena(null, pin_limit=least) as arena:
        assert jh.key(arena.block(100)).length == 100
