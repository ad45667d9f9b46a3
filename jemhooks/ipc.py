"""Memory of one process in another: of arenas over ``Memfd``, ``File`` or ``DevDax``.

The exporter makes a handle, 64 plain bytes, and sends it by any means; the importer sees the same memory::

    handle = jh.ipc.export(array)                      # in one process
    block = jh.ipc.open(handle)                        # in another one of the same user
    array = block.array("f4", (1024, 1024))            # no copy; keeps the block

A handle keeps nothing alive: the exporter must not free the memory while others use it. Once its arena or process is
gone the handle is refused, whatever has come into its place. What is open stays mapped; when the exporter dies, with
its bytes.

An importer gets keys of its own by an arena over the mapped region, in which nothing need be allocated::

    arena = jh.Arena(registrar, provider=jh.Fixed(block.region))
    with jh.lease(block):
        key = jh.key(block)

Thread-safe.
"""

from __future__ import annotations

import builtins
import errno
import socket
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from ._native import check, ffi, lib
from .block import Block
from .errors import ConfigError
from .lookup import Region, region
from .memory import span
from .sizes import LIMIT, ranged, size

_READ_ONLY = 1  # JEMHOOKS_IPC_READ_ONLY
_HANDLE = 64  # bytes


class _Mapped(Block):
    """Memory that may be for reading only."""

    __slots__ = ("writable",)

    def __init__(self, owner: Any, nbytes: int, writable: bool) -> None:
        super().__init__(owner, nbytes, True)
        self.writable = writable

    def _buffer(self) -> Any:
        view = builtins.memoryview(super()._buffer())
        return view if self.writable else view.toreadonly()

    def _view(self, kind: np.dtype[Any], lengths: tuple[int, ...], order: Literal["C", "F"]) -> npt.NDArray[Any]:
        if self.writable:
            return super()._view(kind, lengths, order)
        count = int(np.prod(lengths, dtype=object))  # frombuffer's arrays cannot be made writable
        return np.frombuffer(self._buffer(), kind, count).reshape(lengths, order=order)


class Opened(_Mapped):
    """A block of another process. The mapping goes with the last block and array of it."""

    __slots__ = ("_block",)

    def __init__(self, block: Any) -> None:
        self._block = block
        owner = ffi.gc(ffi.cast("char *", block.base), lambda _: lib.jemhooks_ipc_close(block))
        super().__init__(owner, int(block.length), bool(block.writable))

    @property
    def region(self) -> Block:
        """The whole region as it is mapped here, which is what to register. It keeps this block."""
        owner, block = self._owner, self._block
        whole = ffi.gc(ffi.cast("char *", block.region), lambda _: owner)
        return _Mapped(whole, int(block.region_length), self.writable)

    @property
    def alive(self) -> bool:
        """Whether the exporter's arena is still there; otherwise the bytes are what it left."""
        return bool(lib.jemhooks_ipc_alive(self._block))


class Stats(NamedTuple):
    """What this process exports and has mapped."""

    exported: int  #: regions that handles were made of
    exporters: int  #: processes of which something is mapped
    opened: int  #: mapped regions with open blocks
    cached: int  #: mapped regions without, kept for the next open
    hits: int  #: opens that found their region mapped
    misses: int  #: and those that did not
    cache_limit: int


def _memory(obj: Any, nbytes: SupportsIndex | str | None) -> tuple[Region, Any, int]:
    """Where an object's bytes are, and the region, which keeps the arena open meanwhile."""
    address, have = span(obj)
    if have is None and nbytes is None:
        raise ConfigError(f"ipc: address {address:#x} needs nbytes")
    length = size(have if nbytes is None else nbytes, "nbytes", 1)  # type: ignore[arg-type]
    if have is not None and length > have:
        raise ConfigError(f"ipc: nbytes {length} is more than the {have} bytes of the object")
    return region(address), ffi.cast("void *", address), length


def export(obj: Any, nbytes: SupportsIndex | str | None = None, *, writable: bool = True) -> bytes:
    """A handle of an object's memory, 64 bytes.

    :param nbytes: only so many; needed with an integer address. :param writable: False: others may only read it (which
        is a promise among well-behaved processes).
    :raises NotOursError: it is in no arena. :raises ProviderError: its provider does not share. :raises ConfigError: it
        reaches beyond its region, or is no memory. :raises ForkError:
    """
    home, address, length = _memory(obj, nbytes)
    handle = ffi.new("jemhooks_ipc_handle *")
    check(lib.jemhooks_ipc_export(address, length, 0 if writable else _READ_ONLY, handle))
    del home
    return bytes(ffi.buffer(handle))


def open(handle: Any, *, read_only: bool = False) -> Opened:
    """The memory of a handle, writable if the handle and you allow it.

    :raises ConfigError: not a handle, or of another host. :raises ClosedError: its arena or its process is gone.
    :raises ProviderError: this process may not take it from the other one (have it sent), or lacks descriptors or
        space.
    """
    try:
        given = bytes(builtins.memoryview(handle))
    except TypeError:
        raise ConfigError(
            f"ipc.open: {type(handle).__name__} is not a handle; pass on the bytes of ipc.export()"
        ) from None
    if len(given) != _HANDLE:
        raise ConfigError(
            f"ipc.open: a handle has {_HANDLE} bytes, not {len(given)}; pass on all that ipc.export() gave"
        )
    block, out = ffi.new("jemhooks_ipc_handle *"), ffi.new("jemhooks_ipc_block *")
    ffi.buffer(block)[:] = given
    check(lib.jemhooks_ipc_open(block, _READ_ONLY if read_only else 0, out))
    return Opened(out)


def _transfer(sock: socket.socket, call: Callable[[int], int]) -> None:
    """Call with the socket's timeout in ms (-1: for ever), and again after signals, whose handlers may raise."""
    seconds = sock.gettimeout()
    end = 0.0 if seconds is None else time.monotonic() + seconds
    while True:
        left = -1 if seconds is None else min(max(0, round((end - time.monotonic()) * 1000)), 2**31 - 1)
        rc = call(left)
        if rc != -errno.EINTR:
            check(rc)
            return


def send(sock: socket.socket, obj: Any, nbytes: SupportsIndex | str | None = None, *, writable: bool = True) -> None:
    """Send an object's memory to :func:`receive`, over a connected Unix socket: where descriptors may not be taken.

    :raises TransferError: the socket failed, or its timeout is over. Else raises as :func:`export` does.
    """
    home, address, length = _memory(obj, nbytes)
    flags = 0 if writable else _READ_ONLY
    _transfer(sock, lambda ms: lib.jemhooks_ipc_send(sock.fileno(), address, length, flags, ms))
    del home


def receive(sock: socket.socket, *, read_only: bool = False) -> Opened:
    """What the peer sends next.

    :raises TransferError: the socket failed, its timeout is over, or something else came. Else raises as :func:`open`.
    """
    out = ffi.new("jemhooks_ipc_block *")
    flags = _READ_ONLY if read_only else 0
    _transfer(sock, lambda ms: lib.jemhooks_ipc_receive(sock.fileno(), flags, ms, out))
    return Opened(out)


def stats() -> Stats:
    """What this process exports and has mapped."""
    out = ffi.new("jemhooks_ipc_stats *")
    out.size = ffi.sizeof("jemhooks_ipc_stats")
    check(lib.jemhooks_ipc_get_stats(out))
    return Stats(*(int(getattr(out, name)) for name in Stats._fields))


def set_cache(mappings: int) -> None:
    """How many regions without open blocks stay mapped for the next open: 64 at first."""
    lib.jemhooks_ipc_set_cache(ranged(mappings, "mappings", 0, LIMIT))
