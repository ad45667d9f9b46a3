"""Scatter lists, with registrars whose keys can be foreseen."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import jemhooks as jh

pytestmark = pytest.mark.null


def test_a_list_is_filled_in_one_go(null: jh.Null) -> None:
    with jh.Arena(null) as arena:
        blocks = [arena.block(1 + 1000 * i) for i in range(100)]
        array, view = arena.zeros((20, 30), "f4"), arena.block(5000).memoryview()[7:1007]
        pieces = [*blocks, array, array[3:5], view]
        out = arena.sges(pieces)
        assert (out.dtype.itemsize, out.dtype.names) == (16, ("addr", "length", "lkey")), "as struct ibv_sge"
        assert out["addr"].tolist() == [jh.key(p).addr for p in pieces]
        assert out["length"].tolist() == [memoryview(p).nbytes if p is view else p.nbytes for p in pieces]
        assert out["lkey"].tolist() == [jh.lkey(p) for p in pieces]
        assert all(type(n) is int for s in out.tolist() for n in s), "plain ints, as pyverbs wants them"
        assert arena.sges([]).shape == (0,)


def test_registers_where_needed(null: jh.Null) -> None:
    with jh.Arena(null, region_max="2MiB") as arena:
        blocks = [arena.block("1MiB") for _ in range(8)]
        assert null.stats().live == 0
        arena.sges(blocks)
        assert null.stats().live == len({jh.region(b).base for b in blocks})


def test_of_the_rail_that_is_asked_for(null: jh.Null) -> None:
    with jh.Null() as second, jh.Arena([null, second]) as arena:
        block = arena.block(10)
        assert arena.sges([block], rail=1)["lkey"][0] == jh.key(block, 1).lkey
        with pytest.raises(jh.ConfigError, match="2 is not one of 0 to 1"):
            arena.sges([block], rail=2)


def test_wrong_pieces(null: jh.Null) -> None:
    with jh.Arena(null) as arena, jh.Arena(null, name="other") as other:
        good, foreign = arena.block(100), other.block(100)
        wrong: list[tuple[Any, type[Exception], str]] = [
            ([good, foreign], jh.NotOursError, "element 1, 100 bytes at"),
            ([np.zeros(5)], jh.NotOursError, "is not memory of arena 'arena'"),
            ([good, good.array()[:0]], jh.ConfigError, "element 1, 0 bytes"),
            ([good.address], jh.ConfigError, "an integer address has no length"),
            (good.address, jh.ConfigError, "not an iterable"),
            ([good.array("u1", (10, 10))[:, 2:4]], jh.ConfigError, "side by side"),
        ]
        for pieces, error, said in wrong:
            with pytest.raises(error, match=re.escape(said)):
                arena.sges(pieces)
    with pytest.raises(jh.ClosedError):
        arena.sges([good])


def test_a_key_of_more_than_32_bits() -> None:
    class Wide(jh.Registrar):
        def register(self, addr: int, length: int, access: jh.Access) -> tuple[int, int, object]:
            return 1 << 32, 5, None

        def deregister(self, handle: object) -> None:
            pass

    with jh.Arena(Wide()) as arena, pytest.raises(jh.ConfigError, match="more than 32 bits"):
        arena.sges([arena.block(10)])


def test_as_many_bytes_as_an_element_can_have(null: jh.Null) -> None:
    with jh.Arena(null) as arena, pytest.raises(jh.ConfigError, match=r"4294967296 bytes .* does not fit"):
        arena.sges([arena.block(2**32)])
