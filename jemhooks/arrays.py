"""numpy arrays in an arena."""

from __future__ import annotations

from typing import Any, Literal, SupportsIndex

import numpy as np
import numpy.typing as npt

from .block import Block, Shape, array_size

Order = Literal["C", "F"]


class Arrays:
    """The array constructors of an arena: numpy's, on blocks. Each raises what :meth:`block` raises.

    ``alignment`` is in bytes, a power of two of at most 1 GiB. An array keeps its block, and the block its arena.
    """

    def block(self, nbytes: SupportsIndex | str, *, alignment: int = 64, zero: bool = False) -> Block:
        """Raw memory."""
        raise NotImplementedError

    def _array(
        self, shape: Shape, dtype: npt.DTypeLike | None, order: Order, alignment: int, zero: bool
    ) -> npt.NDArray[Any]:
        kind, lengths, nbytes = array_size(shape, dtype)
        return self.block(nbytes, alignment=alignment, zero=zero)._view(kind, lengths, order)

    def empty(
        self, shape: Shape, dtype: npt.DTypeLike = float, *, order: Order = "C", alignment: int = 64
    ) -> npt.NDArray[Any]:
        """``numpy.empty``."""
        return self._array(shape, dtype, order, alignment, False)

    def zeros(
        self, shape: Shape, dtype: npt.DTypeLike = float, *, order: Order = "C", alignment: int = 64
    ) -> npt.NDArray[Any]:
        """``numpy.zeros``."""
        return self._array(shape, dtype, order, alignment, True)

    def full(
        self, shape: Shape, value: Any, dtype: npt.DTypeLike | None = None, *, order: Order = "C", alignment: int = 64
    ) -> npt.NDArray[Any]:
        """``numpy.full``; the dtype is the value's unless given."""
        out = self._array(shape, np.asarray(value).dtype if dtype is None else dtype, order, alignment, False)
        out[...] = value
        return out

    def array(
        self, data: npt.ArrayLike, dtype: npt.DTypeLike | None = None, *, alignment: int = 64
    ) -> npt.NDArray[Any]:
        """Copy ``data`` into the arena, as ``numpy.array`` does."""
        source = np.asarray(data, dtype)
        out = self._array(source.shape, source.dtype, "C", alignment, False)
        out[...] = source
        return out
