"""Scatter lists: many pieces of an arena's memory, as verbs' work requests take them."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ._native import error, ffi, lib
from .errors import ConfigError, NotOursError
from .memory import solid
from .sizes import ranged

SGE_DTYPE = np.dtype([("addr", "u8"), ("length", "u4"), ("lkey", "u4")])  # struct ibv_sge


def scatter_list(face: Any, name: str, objects: Iterable[Any], rail: int) -> npt.NDArray[Any]:
    """See :meth:`Arena.sges`."""
    if not isinstance(objects, Iterable):
        raise ConfigError(f"sges: {objects!r} is not an iterable of memory; pass a list, maybe of one")
    spans = [solid(o) for o in objects]
    if any(length is None for _, length in spans):
        raise ConfigError("sges: an integer address has no length; pass a block, an array or a memoryview")
    addresses = np.array([address for address, _ in spans], np.uint64)
    lengths = np.array([length for _, length in spans], np.uint64)
    out, done = np.zeros(len(spans), SGE_DTYPE), ffi.new("size_t *")
    rc = lib.jh_face_sges(
        face,
        ranged(rail, "rail", 0, 2**32 - 1),
        len(spans),
        ffi.from_buffer("uint64_t[]", addresses),
        ffi.from_buffer("uint64_t[]", lengths),
        ffi.from_buffer("jh_face_sge[]", out),
        done,
    )
    if not rc:
        return out
    address, length = spans[done[0]]
    which = f"sges: element {done[0]}, {length} bytes at {address:#x},"
    if rc == errno.EXDEV:
        raise NotOursError(f"{which} is not memory of arena '{name}'; ask the arena that it belongs to")
    if rc == errno.EMSGSIZE:
        raise ConfigError(f"{which} does not fit: an element has 1 to {2**32 - 1} bytes, all in one region")
    if rc == errno.EOVERFLOW:
        raise ConfigError(f"{which} has a local key of more than 32 bits; its registrar is not one of verbs")
    raise error(rc)
