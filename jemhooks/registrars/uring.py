"""Pinned memory without a network card: io_uring's registered buffers."""

from __future__ import annotations

from typing import Any

from .._native import check, ffi, lib
from ..lookup import rail_key
from ..memory import solid
from ..sizes import LIMIT, ranged
from .base import NativeRegistrar


class Uring(NativeRegistrar):
    """Pins regions as io_uring buffers, and moves data between files and the pinned pages.

    :param slots: buffers, 1 to 16384; a region takes one for each GiB. Not more than needed: a registration takes
        longer with a larger table.
    :raises RegistrationError: the kernel has no io_uring, or it is switched off.

    Pinned memory counts against RLIMIT_MEMLOCK. Thread-safe; transfers take turns.
    """

    def __init__(self, *, slots: int = 1024) -> None:
        config = ffi.new("jemhooks_uring_config *")
        config.size = ffi.sizeof("jemhooks_uring_config")
        config.slots = ranged(slots, "slots", 1, 16384)
        super().__init__("uring", config)

    def _move(self, function: Any, fd: int, obj: Any, offset: int, writable: bool) -> int:
        address, _ = solid(obj, writable)
        home, where = rail_key(obj, self)
        transfer = ffi.new("jemhooks_uring_transfer *")
        transfer.fd = ranged(fd, "fd", 0, 2**31 - 1)
        transfer.slot, transfer.base, transfer.length = where.lkey, home.base, where.length
        transfer.address = address
        transfer.file_offset = ranged(offset, "offset", 0, LIMIT)
        return int(check(function(self._open(), transfer)))

    def read_into(self, fd: int, obj: Any, offset: int = 0) -> int:
        """Read from the file at ``offset`` into an object's memory, by its pinned pages; the bytes moved.

        :raises ConfigError: the memory is read-only, or not contiguous, or its arena does not use this registrar.
        :raises TransferError: the file's error.
        """
        return self._move(lib.jemhooks_uring_read, fd, obj, offset, True)

    def write_from(self, fd: int, obj: Any, offset: int = 0) -> int:
        """Write an object's memory, as its pinned pages have it, to the file at ``offset``; otherwise the same."""
        return self._move(lib.jemhooks_uring_write, fd, obj, offset, False)
