"""Blocks: raw memory of an arena, and arrays on it."""

from __future__ import annotations

import builtins
from collections.abc import Iterable
from typing import Any, Literal, SupportsIndex

import numpy as np
import numpy.typing as npt

from ._native import ffi
from .errors import ConfigError
from .sizes import LIMIT, ranged

Shape = SupportsIndex | Iterable[SupportsIndex]


def array_size(shape: Shape, dtype: npt.DTypeLike | None) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """The dtype, the shape and the bytes of an array, checked.

    :raises ConfigError: a dtype with Python objects in it, a negative length, no bytes or too many.
    """
    try:
        kind = np.dtype(dtype)
    except (TypeError, ValueError) as e:
        raise ConfigError(f"dtype {dtype!r} is not a numpy dtype: {e}") from None
    if kind.hasobject:
        raise ConfigError(f"dtype {kind} holds Python objects, which mean nothing to a device; use a plain dtype")
    try:
        given: Iterable[Any] = (shape,) if hasattr(shape, "__index__") else tuple(shape)
    except TypeError:
        raise ConfigError(f"shape: {shape!r} is neither a whole number nor a sequence of them") from None
    lengths = tuple([ranged(n, "shape", 0, LIMIT) for n in given])
    nbytes = kind.itemsize
    for n in lengths:
        nbytes *= n
    if not 0 < nbytes <= LIMIT:
        raise ConfigError(f"an array of shape {lengths} and dtype {kind} has {nbytes} bytes; a block has 1 to {LIMIT}")
    return kind, lengths, nbytes


class Block:
    """Raw memory of an arena; freed when it and everything made from it is gone. Never moved.

    ``address`` and ``nbytes`` are plain ints. Supports the buffer protocol (Python 3.12 and later) and
    ``__array_interface__``, unless the host cannot touch the memory.
    """

    __slots__ = ("__weakref__", "_host_accessible", "_owner", "address", "nbytes")

    writable: bool = True

    def __init__(self, owner: Any, nbytes: int, host_accessible: bool) -> None:
        self._owner, self._host_accessible = owner, host_accessible
        self.address = int(ffi.cast("uintptr_t", owner))
        self.nbytes = nbytes

    def _buffer(self) -> Any:
        if not self._host_accessible:
            raise ConfigError(
                f"the block at {self.address:#x} lies in memory that the host cannot touch; "
                "pass its address and nbytes to a device"
            )
        return ffi.buffer(self._owner, self.nbytes)

    def memoryview(self) -> builtins.memoryview:
        """A writable view of the bytes, which keeps the block."""
        return builtins.memoryview(self._buffer())

    def array(
        self, dtype: npt.DTypeLike = np.uint8, shape: Shape | None = None, *, order: Literal["C", "F"] = "C"
    ) -> npt.NDArray[Any]:
        """An array on this block, which keeps it; by default as many elements as fit.

        :raises ConfigError: it needs more bytes than the block has, or the host cannot touch the memory.
        """
        kind, lengths, nbytes = array_size(1 if shape is None else shape, dtype)
        if shape is None and nbytes <= self.nbytes:
            lengths = (self.nbytes // nbytes,)
        if nbytes > self.nbytes:
            raise ConfigError(
                f"an array of shape {lengths} and dtype {kind} needs {nbytes} bytes; the block has {self.nbytes}"
            )
        return self._view(kind, lengths, order)

    def _view(self, kind: np.dtype[Any], lengths: tuple[int, ...], order: Literal["C", "F"]) -> npt.NDArray[Any]:
        if order not in ("C", "F"):
            raise ConfigError(f"order {order!r} is not one of 'C' and 'F'")
        try:
            return np.ndarray(lengths, kind, self._buffer(), order=order)
        except ValueError as e:  # numpy's own limits
            raise ConfigError(f"an array of shape {lengths} and dtype {kind}: {e}") from None

    def __buffer__(self, flags: int) -> builtins.memoryview:
        return self.memoryview()

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Of the bytes; numpy keeps the block as the array's base."""
        self._buffer()
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, not self.writable)}

    @property
    def _jemhooks_span_(self) -> tuple[int, int]:
        return self.address, self.nbytes

    def __len__(self) -> int:
        return self.nbytes

    def __repr__(self) -> str:
        return f"<jemhooks.Block of {self.nbytes} bytes at {self.address:#x}>"
