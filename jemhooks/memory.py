"""Naming memory: where an object's bytes are."""

from __future__ import annotations

import operator
import re
from typing import Any

from ._native import ffi
from .errors import ConfigError
from .sizes import size


def _check_address(address: int) -> int:
    if not 0 <= address < 2**64:
        raise ConfigError(f"{address} is not an address: it is not between 0 and 2**64 - 1")
    return address


def _of_interface(interface: dict[str, Any]) -> tuple[int, int]:
    """First address and extent in bytes of an array with strides."""
    low = high = _check_address(interface["data"][0])
    itemsize = int(re.match(r"\d*", interface["typestr"][2:])[0] or 1)  # type: ignore[index]
    shape, strides = interface["shape"], interface.get("strides")
    if 0 in shape:
        return low, 0
    if strides is None:
        for n in shape:
            itemsize *= n
    else:
        for n, stride in zip(shape, strides, strict=True):
            if stride < 0:
                low += stride * (n - 1)
            else:
                high += stride * (n - 1)
    return _check_address(low), high - low + itemsize


def _without_buffer(obj: Any, writable: bool, why: str) -> tuple[int, int | None]:
    """Of objects that cannot give a C-contiguous buffer."""
    block = getattr(obj, "_jemhooks_span_", None)
    if block is not None:
        return block  # type: ignore[no-any-return]
    interface = getattr(obj, "__array_interface__", None)
    if interface is not None:
        if writable and interface["data"][1]:
            raise ConfigError(f"the memory of this {type(obj).__name__} is read-only; give a writable one")
        return _of_interface(interface)
    pointer = getattr(obj, "data_ptr", None)
    if pointer is not None:
        device = getattr(obj, "device", None)
        if getattr(device, "type", "cpu") != "cpu":
            raise ConfigError(f"this tensor lies on {device}, not in host memory")
        return _check_address(operator.index(pointer())), size(obj.nbytes, "nbytes")
    try:
        return _check_address(operator.index(obj)), None
    except TypeError:
        raise ConfigError(
            f"{type(obj).__name__} names no memory ({why}); give a buffer, an array or an integer address"
        ) from None


def span(obj: Any, writable: bool = False) -> tuple[int, int | None]:
    """Address and length in bytes of an object's memory; (address, None) for an integer address.

    Takes integers, everything with a buffer, objects with ``__array_interface__`` (strided arrays: the whole extent),
    and objects with ``data_ptr()`` and ``nbytes`` (torch CPU tensors).

    :raises ConfigError: the object names no memory, or it is read-only and ``writable`` was asked.
    """
    if type(obj) is int:
        return _check_address(obj), None
    try:
        data = ffi.from_buffer(obj, require_writable=True) if writable else ffi.from_buffer(obj)  # keywords are slow
    except (TypeError, BufferError, ValueError) as e:
        return _without_buffer(obj, writable, str(e))
    return int(ffi.cast("uintptr_t", data)), len(data)
