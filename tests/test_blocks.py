"""Blocks and arrays: contents, views, strides, and how they are kept alive."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest
from allocator import OPTIONS

import jemhooks as jh

if TYPE_CHECKING:
    from conftest import Python

pytestmark = pytest.mark.null


@pytest.fixture
def arena(null: jh.Null) -> Iterator[jh.Arena]:
    with jh.Arena(null) as a:
        yield a


def dirty(arena: jh.Arena, nbytes: int) -> None:
    """Leave old bytes where the next block of this size will lie."""
    for block in [arena.block(nbytes) for _ in range(4)]:
        block.memoryview()[:] = b"\xa5" * nbytes


@pytest.mark.parametrize(
    "dtype", ["?", "u1", "<i2", ">i4", "f2", "f8", "c16", "g", "S7", "U5", "M8[ns]", "m8[s]", "V24"]
)
@pytest.mark.parametrize("order", ["C", "F"])
def test_zeros_of_every_dtype(arena: jh.Arena, dtype: str, order: str) -> None:
    kind = np.dtype(dtype)
    dirty(arena, 3 * 5 * kind.itemsize)
    a = arena.zeros((3, 5), dtype, order=order)  # type: ignore[arg-type]
    assert (a.shape, a.dtype, a.flags[f"{order}_CONTIGUOUS"]) == ((3, 5), kind, True), "as numpy.zeros"
    assert a.tobytes() == bytes(15 * kind.itemsize), "zeros, though old bytes lay there"
    assert a.flags.writeable, "and writable"


def test_structured(arena: jh.Arena) -> None:
    kind = np.dtype([("a", "u1"), ("b", "f8", (2, 3)), ("c", [("d", "i2")])], align=True)
    a = arena.zeros(4, kind)
    a["b"][2] = 7
    a["c"]["d"] = np.arange(4)
    assert a["b"].sum() == 42, "fields and sub-arrays work"
    assert jh.key(a).length == 4 * kind.itemsize, "padding included"
    assert jh.key(a["b"]).length > 0, "a field is a strided view, and has a key"


@pytest.mark.parametrize(
    "shape", [(), 5, (5,), [2, 3], (1, 1, 1, 7), np.int64(6), (np.uint8(2), 2), iter((2, 2)), True]
)
def test_shapes(arena: jh.Arena, shape: object) -> None:
    a = arena.zeros(shape)  # type: ignore[arg-type]
    assert a.size > 0, "every way to write a shape"
    assert jh.key(a).length == a.nbytes, "and the key is of all of it"


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096, 1 << 16, 2 << 20, 64 << 20])
def test_alignment(arena: jh.Arena, alignment: int) -> None:
    blocks = [arena.block(n, alignment=alignment) for n in (1, 100, 5000)]
    assert all(b.address % alignment == 0 for b in blocks), f"every address is a multiple of {alignment}"
    assert arena.zeros(3, alignment=alignment).__array_interface__["data"][0] % alignment == 0, "arrays too"
    assert all(jh.key(b).length == b.nbytes for b in blocks), "a block lies in one region, however aligned"


def test_alignment_of_a_gibibyte() -> None:
    """The largest allowed; it costs address space, not memory."""
    with jh.Arena() as arena:
        block = arena.block(100, alignment=1 << 30)
        assert block.address % (1 << 30) == 0, "1 GiB is the largest alignment that is promised"
        del block


@pytest.mark.parametrize("options", ["", "zero:true", "retain:false", "retain:false,zero:true"])
def test_zeroes_on_any_alignment(python: Python, options: str) -> None:
    """jemalloc asks for zeroes on 2 MiB for records of its own, too; such blocks must not be taken for these."""
    python.check(
        """
        import numpy as np
        import jemhooks as jh
        def zeroes(arena, size, alignment):
            for turn in ("new", "used again", "given back"):
                a = arena.zeros(size, "u1", alignment=alignment)
                assert a.__array_interface__["data"][0] % alignment == 0, alignment
                assert jh.key(a).length == size, "it has a key"
                assert not a.any(), f"{size} bytes on {alignment}, {turn}, are not zero"
                a[:] = 0xA5
                del a
                if turn == "used again":
                    arena.trim()

        with jh.Null() as null:
            for alignment in (64, 4096, 1 << 20, 2 << 20, 4 << 20):
                for size in (1000, 50_000, 2 << 20, 3 << 20, 6 << 20, 12 << 20):
                    with jh.Arena(null, region_max="8MiB") as arena: # all its memory is new
                        zeroes(arena, size, alignment)
        """,
        variables={OPTIONS: options},
    )


def test_full_and_array(arena: jh.Arena) -> None:
    assert arena.full((2, 3), 1.5).tolist() == [[1.5] * 3] * 2
    assert arena.full(3, 7).dtype == np.asarray(7).dtype, "the value's dtype, as numpy.full"
    assert arena.full(2, [1, 2], "f4").tolist() == [1, 2], "values broadcast"
    source = np.arange(12).reshape(3, 4)[:, ::2]
    a = arena.array(source, "f8")
    assert a.tolist() == source.tolist(), "a copy, converted"
    a[0, 0] = 99
    assert source[0, 0] == 0, "a copy, not a view"
    with pytest.raises(ValueError, match="broadcast"):
        arena.full(3, [1, 2])
    gc.collect()
    del a
    assert arena.stats().current_count == 0, "a failed full() must free its block"


def test_block_and_its_views(arena: jh.Arena) -> None:
    block = arena.block("1KiB", zero=True)
    assert (block.nbytes, len(block), type(block.address)) == (1024, 1024, int), "plain ints"
    assert repr(block) == f"<jemhooks.Block of 1024 bytes at {block.address:#x}>"
    view, words = block.memoryview(), block.array("<u4")
    words[0] = 0x01020304
    assert bytes(view[:4]) == b"\4\3\2\1", "views show the same memory"
    assert not view.readonly, "and are writable"
    assert np.asarray(block)[0] == 4, "__array_interface__ shows it too"
    assert block.array("u1", (2, 3), order="F").strides == (1, 2), "any shape that fits, in any order"
    assert jh.key(view[10:20]).length == 10, "a slice of a memoryview has the slice's key"
    if sys.version_info >= (3, 12):
        assert memoryview(block).nbytes == 1024, "the buffer protocol"


def test_views_keep_their_block(arena: jh.Arena) -> None:
    makers = {
        "array": lambda: arena.full(64, 0x5A, "u1"),
        "slice": lambda: arena.full(100, 0x5A, "u1")[10:74],
        "reshaped": lambda: arena.full(64, 0x5A, "u1").reshape(8, 8).T,
        "strided": lambda: arena.full(128, 0x5A, "u1")[::-2],
        "of a block": lambda: arena.block(64, zero=True).array() + np.uint8(0x5A),
        "asarray": lambda: np.asarray(arena.block(64, zero=True)),
        "memoryview": lambda: arena.block(64, zero=True).memoryview()[::2],
        "cast": lambda: memoryview(arena.zeros(8)).cast("B"),
        "frombuffer": lambda: np.frombuffer(arena.block(64, zero=True).memoryview(), "u1"),
    }
    for name, make in makers.items():
        view = make()
        before = bytes(view)
        others = [arena.full(64, 0xFF, "u1") for _ in range(50)] + [arena.full(128, 0xFF, "u1") for _ in range(50)]
        assert bytes(view) == before, f"{name}: its memory was handed out again while the view lived"
        del view, others
    assert arena.stats().current_count == 0, "and every block was freed when its last view was gone"


def test_blocks_do_not_overlap(arena: jh.Arena) -> None:
    rng = np.random.default_rng(5)
    arrays = [arena.full(int(n), i % 251, "u1") for i, n in enumerate(2 ** (rng.random(400) * 17))]
    assert all((a == i % 251).all() for i, a in enumerate(arrays)), "every block has its own bytes"
    spans = sorted((a.__array_interface__["data"][0], a.nbytes) for a in arrays)
    assert all(p + n <= q for (p, n), (q, _) in itertools.pairwise(spans)), "and its own addresses"
    ours = arena.regions()
    for p, n in spans:
        home = ours[(ours["base"] <= p) & (p < ours["base"] + ours["length"])]
        assert len(home) == 1, "a block lies in exactly one region"
        assert p + n <= home["base"][0] + home["length"][0], "and never across its end"


def test_memory_that_comes_back_is_zero_when_asked(arena: jh.Arena) -> None:
    for nbytes in (8, 5000, 70_000, 3 << 20):
        for trim in (False, True):
            dirty(arena, nbytes)
            if trim:
                arena.trim()
            assert not np.any(arena.zeros(nbytes, "u1")), f"zeros of {nbytes} bytes after {'trim' if trim else 'free'}"


def test_blocks_have_no_attributes_and_are_weakly_referable(arena: jh.Arena) -> None:
    import weakref

    block = arena.block(8)
    reference = weakref.ref(block)
    with pytest.raises(AttributeError):
        block.extra = 1  # type: ignore[attr-defined]
    del block
    assert reference() is None, "a block is freed at once, without the garbage collector"
