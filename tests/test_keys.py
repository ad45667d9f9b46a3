"""Keys: of everything that names memory; as plain ints; one by one and in bulk."""

from __future__ import annotations

import array
import gc
import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import jemhooks as jh

if TYPE_CHECKING:
    from conftest import Tensor

pytestmark = pytest.mark.null


@pytest.fixture
def arena(null: jh.Null) -> Iterator[jh.Arena]:
    with jh.Arena(null) as a:
        yield a


def address(a: Any) -> int:
    return int(a.__array_interface__["data"][0])


def test_key_is_five_plain_ints(arena: jh.Arena) -> None:
    a = arena.zeros(100, "f4")
    key = jh.key(a)
    assert [type(v) for v in key] == [int] * 5, "pyverbs, NIXL and mpi4py take plain ints"
    assert key._fields == ("addr", "length", "lkey", "rkey", "generation")
    assert key.addr == address(a), "null and verbs name remote memory by its pointer"
    assert (key.length, key.lkey, key.rkey) == (400, 1, 2), "the object's bytes, the registrar's keys"
    assert key.generation % 2 == 0, "even: the region is not changing"
    assert key == jh.key(a) == jh.key(a, 0), "asking again changes nothing"
    assert arena.stats().registrations == 1, "and registers nothing"


def test_key_survives_pickling(arena: jh.Arena) -> None:
    key = jh.key(arena.zeros(3))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(key, protocol)) == key, "keys are sent to peers"
        assert type(pickle.loads(pickle.dumps(key, protocol))) is jh.Key


def test_everything_that_names_memory(arena: jh.Arena, tensor: type[Tensor]) -> None:
    block = arena.block(800, zero=True)
    a = block.array("f8")
    frozen = a.view()
    frozen.flags.writeable = False
    where = block.address
    names: dict[str, tuple[Any, int]] = {
        "block": (block, 800),
        "array": (a, 800),
        "read-only array": (frozen, 800),
        "memoryview": (block.memoryview(), 800),
        "read-only memoryview": (memoryview(frozen), 800),
        "slice": (a[:10], 80),
        "0-dimensional": (a[0:1].reshape(()), 8),
        "Fortran order": (a.reshape(10, 10, order="F"), 800),
        "transposed": (a.reshape(4, 25).T, 800),
        "strided": (a[::3], 8 * 99 + 8),
        "strided in two dimensions": (a.reshape(10, 10)[::2, :3], 8 * 80 + 8 * 2 + 8),
        "broadcast": (np.broadcast_to(a[:1], (5, 5)), 8),
        "strided datetimes": (a.view("M8[ns]")[::2], 8 * 98 + 8),
        "strided text": (a.view("U2")[::2], 8 * 98 + 8),
        "strided records": (a.view([("x", "f4"), ("y", "i4")])[::2], 8 * 98 + 8),
        "strided complex": (a.view("c16")[::2], 16 * 48 + 16),
        "tensor": (tensor(a), 800),
        "tensor slice": (tensor(a[:5]), 40),
    }
    for name, (memory, nbytes) in names.items():
        key = jh.key(memory)
        assert (key.addr, key.length) == (where, nbytes), f"{name}: from the first byte to the last"
        assert (jh.lkey(memory), jh.rkey(memory)) == (key.lkey, key.rkey), f"{name}: the quick ways agree"
        with jh.lease(memory) as leased:
            assert leased == key, f"{name}: so does a lease"
    reach = jh.region(block).base + jh.region(block).length - where
    numbers = (where, np.uint64(where), np.int64(where), arena.regions()["base"].max() + np.uint64(0))
    for number in numbers:
        got = jh.key(number)
        assert got.addr == int(number), f"{type(number).__name__}: an integer is an address, not an object with 8 bytes"
        assert got.length == reach - (got.addr - where), "an address reaches to the end of its region"


def test_backwards_strides_start_at_the_lowest_byte(arena: jh.Arena) -> None:
    a = arena.zeros(100, "f8")
    for view, first, nbytes in [
        (a[::-1], 0, 800),
        (a[90:10:-4], 14, 8 * 76 + 8),
        (a.reshape(10, 10)[::-1, ::-3], 0, 800),
    ]:
        key = jh.key(view)
        assert (key.addr, key.length) == (address(a) + 8 * first, nbytes), "the whole extent of the view"


def test_tensor_elsewhere_is_refused(arena: jh.Arena, tensor: type[Tensor]) -> None:
    with pytest.raises(jh.ConfigError, match="lies on cuda"):
        jh.key(tensor(arena.zeros(3), device="cuda"))


def test_objects_that_lie_about_their_memory(arena: jh.Arena) -> None:
    """Whatever the object says, the answer is a key within the region or an error."""
    a = arena.zeros(3)
    home = jh.region(a)

    class Liar:
        def __init__(self, **interface: Any) -> None:
            self.__array_interface__ = {
                "version": 3,
                "shape": (3,),
                "typestr": "<f8",
                "data": (address(a), False),
            } | interface

    for interface in (
        {"shape": (10**9,)},
        {"shape": (3,), "strides": (10**9,)},
        {"data": (0, False)},
        {"data": (-1, False)},
        {"data": (2**64, False)},
        {"data": None},
        {"typestr": "<"},
        {"shape": (-5,)},
        {"shape": (3, 3), "strides": (8,)},
        {"shape": None},
    ):
        with pytest.raises(jh.JemhooksError):
            jh.key(Liar(**interface))
    assert jh.region(a).base == home.base


def test_objects_beyond_their_region() -> None:
    with jh.Null() as null, jh.Arena(null, region_max="2MiB") as arena:
        block = arena.block(1 << 20)
        home = jh.region(block)
        inside = home.base + home.length - block.address
        fake = np.lib.stride_tricks.as_strided(block.array("u1"), (inside + 1,), (1,), writeable=False)
        for call in (jh.key, jh.lease):
            with pytest.raises(jh.ConfigError, match=f"{inside + 1} bytes .* ends after {inside}"):
                call(fake)
        assert jh.region(block).leases == 0, "the refused lease must not stay"
        assert jh.key(fake[:-1]).length == inside, "up to the end is right"
        del fake


def test_empty_memory_of_an_arena(arena: jh.Arena) -> None:
    a = arena.zeros(10)
    assert jh.key(a[3:3]).length == 0, "an empty slice has a key of no bytes"


# ---- keys() ----


def test_keys_equal_key_one_by_one(arena: jh.Arena, soak: int) -> None:
    rng = np.random.default_rng(1)
    arrays = [arena.empty(int(n), "u1") for n in rng.integers(1, 300_000, 200)]
    base = np.array([address(a) for a in arrays], "u8")
    pick = rng.integers(0, len(arrays), 100_000 * soak)
    addresses = base[pick] + (rng.random(pick.size) * np.array([a.nbytes for a in arrays])[pick]).astype("u8")
    table = jh.keys(addresses)
    assert table.dtype.names == jh.Key._fields, "the columns are the fields of Key"
    assert table.shape == addresses.shape
    singles = np.array([tuple(jh.key(p)) for p in addresses.tolist()], table.dtype)
    assert (table == singles).all(), "keys() must say of each address what key() says"
    assert arena.stats().registrations == arena.stats().regions, "each region was registered once"


def test_keys_takes_what_numpy_takes(arena: jh.Arena) -> None:
    p = arena.block(64).address
    block = arena.block(64)
    p = block.address
    want = jh.keys([p, p + 8]).tolist()
    assert want == [tuple(jh.key(p)), tuple(jh.key(p + 8))]
    spellings: dict[str, Any] = {
        "tuple": (p, p + 8),
        "int64": np.array([p, p + 8], "i8"),
        "big endian": np.array([p, p + 8], ">u8"),
        "strided": np.array([p, 0, p + 8, 0], "u8")[::2],
        "array.array": array.array("Q", [p, p + 8]),
        "arange": range(p, p + 9, 8),
    }
    for name, addresses in spellings.items():
        assert jh.keys(addresses).tolist() == want, name
    assert jh.keys([]).shape == (0,), "no addresses, no keys"
    assert jh.keys(np.zeros(0, "u8")).shape == (0,)
    assert jh.keys(p).tolist() == want[:1], "one address is an array of one"
    del block


def test_keys_stops_at_the_first_that_has_none(arena: jh.Arena) -> None:
    block = arena.block(64)
    with pytest.raises(jh.NotOursError, match="0xdead000"):
        jh.keys([block.address, 0xDEAD000, 0xBEEF000])
    with jh.Arena(arena.registrars, policy="none", name="never") as other:
        kept = other.block(8)
        with pytest.raises(jh.RegistrationError, match="'never', whose policy is none"):
            jh.keys([block.address, kept.address])


# ---- failure, rails, generations ----


@pytest.mark.parametrize(
    "call", [jh.key, jh.lkey, jh.rkey, jh.lease, lambda b: jh.keys([b.address]), lambda b: jh.key(b, 0)]
)
def test_a_refused_registration_is_reported_once(call: Any) -> None:
    """An injected failure is the caller's to see, not to be tried away."""
    with jh.Null() as null, jh.Arena(null, name="refused") as arena:
        block = arena.block(8)
        null.fail("register")
        with pytest.raises(jh.RegistrationError, match=r"'refused': null failed to register 2097152 bytes .*12"):
            call(block)
        assert null.stats().registers == 1, "one question, one attempt"
        assert arena.stats().registration_failures == 1
        assert jh.region(block).state is jh.State.MAPPED, "as it was before"
        assert jh.key(block).lkey > 0, "the next try succeeds"
        del block


def test_rails(null: jh.Null) -> None:
    with jh.Null() as second, jh.Null(remote_offset=True) as third, jh.Arena([null, second, third]) as arena:
        for n in range(5):
            second.fail("register", 0)
            with jh.Arena(second) as other:
                jh.key(other.block(1))
            assert second.stats().registers == n + 1
        a = arena.zeros(10)
        first, other, offset = (jh.key(a, rail) for rail in range(3))
        assert (first.lkey, other.lkey, offset.lkey) == (1, 11, 1), "each rail has its own keys"
        assert (first.rkey, other.rkey, offset.rkey) == (2, 12, 2)
        assert first.addr == other.addr == address(a), "by pointer on the first two"
        assert offset.addr == address(a) - jh.region(a).base, "by offset on the third"
        assert {first.length, other.length, offset.length} == {80}
        assert (jh.lkey(a), jh.rkey(a)) == (1, 2), "lkey and rkey are the first rail's"
        with pytest.raises(jh.ConfigError, match="3 registrars; 3 is not one of 0 to 2"):
            jh.key(a, 3)
        del a


def test_generation_tells_that_a_key_is_stale(null: jh.Null) -> None:
    with jh.Arena(null) as arena:
        keep = arena.block("4MiB")
        first = jh.key(keep)
        assert arena.trim() == 0, "a region with a live block is not idle"
        assert jh.key(keep) == first, "so its key stays"
        where = jh.region(keep).base
        del keep
        assert arena.trim() > 0
        with pytest.raises(jh.NotOursError):
            jh.key(1 << 40)
        again = arena.block("4MiB")
        assert jh.region(again).base == where, "the same memory"
        second = jh.key(again)
        assert second.generation > first.generation, "a new registration is a new generation"
        assert second.rkey != first.rkey, "with a new key"
        del again


def test_64_bit_keys_come_through() -> None:
    class Wide(jh.Registrar):
        def register(self, addr: int, length: int, access: jh.Access) -> tuple[int, int, object]:
            return 2**64 - 1, 2**63 + 5, None

        def deregister(self, handle: object) -> None:
            pass

        def remote_base(self, addr: int, handle: object) -> int:
            return 2**63

    with jh.Arena(Wide()) as arena:
        a = arena.zeros(4)
        key = jh.key(a)
        assert (key.lkey, key.rkey) == (2**64 - 1, 2**63 + 5), "keys have 64 bits"
        assert (jh.lkey(a), jh.rkey(a)) == (key.lkey, key.rkey), "on the quick way too"
        assert key.addr == 2**63 + address(a) - jh.region(a).base, "and so have remote addresses"
        del a
        gc.collect()
