"""Naming memory: where an object's bytes are."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

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
    itemsize = np.dtype(interface["typestr"]).itemsize
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
    return _check_address(low), size(high - low + itemsize, "extent")


def _without_buffer(obj: Any, writable: bool, why: str) -> tuple[int, int | None]:
    """Of objects that cannot give a C-contiguous buffer."""
    block = getattr(obj, "_jemhooks_span_", None)
    if block is not None:
        if writable and not obj.writable:
            raise ConfigError(f"the memory of this {type(obj).__name__} is read-only; give a writable one")
        return block  # type: ignore[no-any-return]
    interface = getattr(obj, "__array_interface__", None)
    if interface is not None:
        try:
            read_only, found = interface["data"][1], _of_interface(interface)
        except (LookupError, TypeError, ValueError) as e:
            raise ConfigError(f"the __array_interface__ of this {type(obj).__name__} makes no sense: {e!r}") from None
        if writable and read_only:
            raise ConfigError(f"the memory of this {type(obj).__name__} is read-only; give a writable one")
        return found
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
    if isinstance(obj, (int, np.integer)):  # numpy's integers have a buffer, too
        return _check_address(int(obj)), None
    try:
        data = ffi.from_buffer(obj, require_writable=True) if writable else ffi.from_buffer(obj)  # keywords are slow
    except (TypeError, BufferError, ValueError) as e:
        return _without_buffer(obj, writable, str(e))
    return int(ffi.cast("uintptr_t", data)), len(data)


def solid(obj: Any, writable: bool = False) -> tuple[int, int | None]:
    """As :func:`span`, of memory that is to be moved as it lies: without gaps between elements, none backwards.

    :raises ConfigError: it has.
    """
    found = span(obj, writable)
    interface = None if isinstance(obj, (int, np.integer)) else getattr(obj, "__array_interface__", None)
    strides = interface.get("strides") if interface else None
    if interface and strides:
        nbytes = np.dtype(interface["typestr"]).itemsize
        for n in interface["shape"]:
            nbytes *= n
        if nbytes != found[1] or min(strides) < 0:
            raise ConfigError(
                f"the {nbytes} bytes of this array do not lie side by side (strides {strides}); move a contiguous copy"
            )
    return found


def hold(obj: Any) -> tuple[Any, ...]:
    """What keeps an object's memory where it is: the object, and its buffer, which it then must not resize or close."""
    try:
        return obj, ffi.from_buffer(obj)
    except (TypeError, BufferError, ValueError):
        return (obj,)
