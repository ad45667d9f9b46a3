"""Regions: what they tell, the user's 64 bytes, and the table of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import jemhooks as jh

pytestmark = pytest.mark.null
MiB = 1 << 20


@pytest.fixture
def arena(null: jh.Null) -> Iterator[jh.Arena]:
    with jh.Arena(null) as a:
        yield a


def test_region_of_an_object(arena: jh.Arena) -> None:
    a = arena.zeros(100)
    home = jh.region(a)
    where = a.__array_interface__["data"][0]
    assert home.base <= where < home.base + home.length, "the object lies in it"
    assert (home.length, home.base % (2 * MiB)) == (2 * MiB, 0), "the first region is of 2 MiB, on 2 MiB"
    assert (home.state, home.leases, home.arena) == (jh.State.MAPPED, 0, arena)
    assert (home.lkey, home.rkey, home.remote_base) == (0, 0, home.base), "no keys before it is registered"
    key = jh.key(a)
    after = jh.region(a)
    assert (after.state, after.lkey, after.rkey) == (jh.State.REGISTERED, key.lkey, key.rkey)
    assert after.generation == key.generation > home.generation, "registration is a new generation"
    assert home.state is jh.State.MAPPED, "an older answer stays as it was"
    assert repr(after) == f"<jemhooks.Region of {2 * MiB} bytes at {home.base:#x}, registered>"
    assert all(type(getattr(after, n)) is int for n in ("base", "length", "lkey", "rkey", "generation", "leases"))
    del a


def test_every_byte_of_a_region_and_none_beyond(arena: jh.Arena) -> None:
    block = arena.block(1)
    home = jh.region(block)
    for inside in (home.base, home.base + 1, home.base + 4096, home.base + home.length - 1):
        assert jh.region(inside).base == home.base, f"{inside:#x} is in the region"
    ours = arena.regions()
    for outside in (home.base - 1, home.base + home.length):
        if not ((ours["base"] <= outside) & (outside < ours["base"] + ours["length"])).any():
            with pytest.raises(jh.NotOursError):
                jh.region(outside)
    del block


def test_user_bytes(arena: jh.Arena) -> None:
    a, b = arena.zeros(10), arena.zeros(10)
    user = jh.region(a).user
    assert (len(user), user.readonly, user.format) == (64, False, "B"), "64 writable bytes"
    assert bytes(user) == bytes(64), "zero at first"
    user[:16] = b"sixteen bytes ok"
    assert bytes(jh.region(b).user[:16]) == b"sixteen bytes ok", "shared by all memory of the region"
    with pytest.raises(IndexError):
        user[64] = 1
    jh.key(a)
    assert bytes(user[:16]) == b"sixteen bytes ok", "registration leaves them alone"
    words = np.frombuffer(user, "u8")
    words[7] = 2**64 - 1
    assert bytes(user[56:]) == b"\xff" * 8, "views of it work"
    del a, b


def test_user_bytes_outlive_block_and_arena(null: jh.Null) -> None:
    arena = jh.Arena(null)
    user = jh.region(arena.block(8)).user
    user[0] = 7
    arena.close()
    slices = [user[i : i + 1] for i in range(64)]
    del user
    jh.key  # noqa: B018
    assert slices[0][0] == 7, "the view keeps the arena, and so the region"
    slices[1][0] = 8
    del slices


def test_user_bytes_are_zero_in_a_new_region(null: jh.Null) -> None:
    for _ in range(20):
        with jh.Arena(null) as arena:
            user = jh.region(arena.block(8)).user
            assert bytes(user) == bytes(64), "what an earlier region's user wrote must not show"
            user[:] = b"\xff" * 64
            del user


def test_table(arena: jh.Arena) -> None:
    assert arena.regions().shape == (0,), "no region before the first block"
    blocks = [arena.block("3MiB") for _ in range(6)]
    jh.key(blocks[0])
    table = arena.regions()
    assert table.dtype.names == (
        "base", "length", "committed", "lkey", "rkey", "remote_base", "generation", "state", "leases",
    )  # fmt: skip
    assert len({*table["base"].tolist()}) == len(table) == arena.stats().regions
    for block in blocks:
        home = jh.region(block)
        row = table[table["base"] == home.base][0]
        assert (row["length"], row["state"], row["lkey"]) == (home.length, home.state, home.lkey), "as region() says"
        assert row["committed"] >= 3 * MiB, "committed covers what is allocated"
        assert row["committed"] <= row["length"]
    with jh.lease(blocks[1]):
        table = arena.regions()
        assert table["leases"].sum() == 1, "leases are counted by region"
    table["base"] = 0
    assert (arena.regions()["base"] > 0).all(), "the table is a copy"
    del blocks


def test_table_while_regions_are_made(arena: jh.Arena) -> None:
    kept: list[jh.Block] = []
    done = threading.Event()

    def grow() -> None:
        try:
            for _ in range(60):
                kept.append(arena.block("2MiB"))
        finally:
            done.set()

    thread = threading.Thread(target=grow)
    thread.start()
    seen = 0
    while not done.is_set():
        table = arena.regions()
        assert (table["length"] > 0).all(), "no half-made rows"
        assert len(table) >= seen, "regions do not vanish"
        seen = len(table)
    thread.join(20)
    assert len(arena.regions()) == arena.stats().regions
    kept.clear()


def test_regions_of_two_arenas(null: jh.Null) -> None:
    with jh.Arena(null, name="one") as one, jh.Arena(null, name="two") as two:
        a, b = one.zeros(10), two.zeros(10)
        assert jh.region(a).arena is one
        assert jh.region(b).arena is two
        assert not set(one.regions()["base"]) & set(two.regions()["base"]), "no region has two arenas"
        del a, b


def test_addresses_of_a_destroyed_arena(null: jh.Null) -> None:
    with jh.Arena(null) as arena:
        where = arena.block(8).address
    for call in (jh.key, jh.lkey, jh.rkey, jh.region, jh.lease, lambda p: jh.keys([p])):
        with pytest.raises(jh.NotOursError):
            call(where)


def test_region_is_slotted_and_state_is_an_enum(arena: jh.Arena) -> None:
    home = jh.region(arena.block(8))
    with pytest.raises(AttributeError):
        home.extra = 1  # type: ignore[attr-defined]
    assert [s.name for s in jh.State] == ["UNMAPPED", "MAPPED", "REGISTERING", "REGISTERED", "DEREGISTERING"]
    del home
