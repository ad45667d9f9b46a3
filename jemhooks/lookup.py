"""What memory belongs to: keys and regions. Memory is named by anything that :mod:`jemhooks.memory` takes."""

from __future__ import annotations

import enum
import errno
import os
import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ._native import check, error, ffi, lib
from .arena import Arena
from .errors import ClosedError, ConfigError, ForkError, NotOursError
from .lifetime import by_address
from .memory import span
from .providers import Provider
from .registrars.base import Registrar
from .sizes import ranged

KEY_DTYPE = np.dtype([(n, "u8") for n in ("addr", "length", "lkey", "rkey", "generation")])
KEY = struct.Struct("5Q")
_TOO_LARGE = 2**64 - 2  # jh_face_packed_keys: a key of more than 32 bits; above: no key


class State(enum.IntEnum):
    """Where a region is in its life (enum jemhooks_state)."""

    UNMAPPED = 0
    MAPPED = 1
    REGISTERING = 2
    REGISTERED = 3
    DEREGISTERING = 4


class Key(NamedTuple):
    """What a peer needs to reach memory, as plain ints; picklable.

    ``addr`` is the remote address: the pointer itself for verbs, an offset for some libfabric providers. ``length`` is
    the object's, or for an integer address what remains of the region. The key is good while its region has this
    ``generation``; a region with a live block or a lease keeps it.
    """

    addr: int
    length: int
    lkey: int
    rkey: int
    generation: int


def outside(address: int, nbytes: int, reach: int) -> ConfigError:
    """What is wrong with memory that is longer than its region."""
    return ConfigError(
        f"{nbytes} bytes at {address:#x} reach beyond their region, which ends after {reach}; name one block at a time"
    )


def key(obj: Any, rail: int = 0) -> Key:
    """The key of an object's memory, registering its region first where the arena is lazy.

    :param rail: which of the arena's registrars.
    :raises NotOursError: the memory is in no arena. :raises RegistrationError: its region cannot be registered, or its
        arena's policy is none. :raises ConfigError: not memory; or it reaches beyond its region. :raises ForkError:
    """
    address, nbytes = span(obj)
    out = ffi.new("jemhooks_key *")
    if rail:
        rc = lib.jh_face_rail_key(address, ranged(rail, "rail", 0, 2**32 - 1), out)
    else:
        rc = lib.jh_face_key(address, out)
    if rc:
        raise error(rc)
    addr, reach, lkey_, rkey_, generation = KEY.unpack(ffi.buffer(out))
    if nbytes is None:
        nbytes = reach
    elif nbytes > reach:
        raise outside(address, nbytes, reach)
    return Key(addr, nbytes, lkey_, rkey_, generation)


def packed_key(obj: Any, rail: int = 0) -> bytes:
    """The packed key of an object's memory, where a peer needs more than a number: UCX, libfabric with FI_MR_RAW.

    Of the whole region. Empty where the registrar has none. Raises as :func:`key` does.
    """
    address, _ = span(obj)
    room, length = 512, ffi.new("size_t *")
    while True:
        out, length[0] = ffi.new("char[]", room), room
        rc = lib.jh_face_packed_key(address, ranged(rail, "rail", 0, 2**32 - 1), out, length)
        if rc != -errno.ENOSPC:
            check(rc)
            return bytes(ffi.buffer(out, length[0]))
        room = length[0]


def _pair(obj: Any) -> tuple[int, int]:
    pair = lib.jh_face_packed_keys(span(obj)[0])
    if pair < _TOO_LARGE:
        return pair & 0xFFFFFFFF, pair >> 32
    if pair > _TOO_LARGE:
        raise error(-ffi.errno)
    full = key(obj)
    return full.lkey, full.rkey


def lkey(obj: Any) -> int:
    """The local key of an object's memory; the quickest way to it. Raises as :func:`key` does."""
    return _pair(obj)[0]


def rkey(obj: Any) -> int:
    """The remote key of an object's memory; the quickest way to it. Raises as :func:`key` does."""
    return _pair(obj)[1]


def keys(addresses: npt.ArrayLike) -> npt.NDArray[Any]:
    """The keys of many addresses: a structured array of addr, length (to the region's end), lkey, rkey, generation.

    :param addresses: integers, converted to a one-dimensional uint64 array.
    :raises NotOursError, RegistrationError, ForkError: at the first address that has no key; the message names it.
    """
    try:
        where = np.ascontiguousarray(addresses)
        if where.size and where.dtype.kind not in "ui":
            raise ConfigError(f"addresses must be integers, not {where.dtype}")
        if where.dtype.kind == "i" and where.size and where.min() < 0:
            raise ConfigError(f"{where.min()} is not an address: it is negative")
        where = where.astype(np.uint64, copy=False)
    except (OverflowError, ValueError) as e:
        raise ConfigError(f"addresses must be integers from 0 to 2**64 - 1: {e}") from None
    out = np.empty(where.shape, KEY_DTYPE)
    if where.size:
        check(
            lib.jemhooks_get_keys(
                where.size, ffi.from_buffer("uint64_t[]", where), ffi.from_buffer("jemhooks_key[]", out), ffi.NULL
            )
        )
    return out


class Region:
    """A region as it was when asked for; ``user`` is live.

    ``base``, ``length``, ``state``, ``lkey``, ``rkey``, ``remote_base``, ``generation`` and ``leases`` are plain
    values; ``arena`` is the :class:`Arena`.
    """

    __slots__ = ("arena", "base", "generation", "leases", "length", "lkey", "remote_base", "rkey", "state", "user")

    def __init__(self, info: Any, keeper: Any, arena: Arena) -> None:
        self.base, self.length = int(info.base), int(info.length)
        self.lkey, self.rkey, self.remote_base = int(info.lkey), int(info.rkey), int(info.remote_base)
        self.generation, self.leases, self.state = int(info.generation), int(info.leases), State(info.state)
        self.arena = arena
        #: 64 bytes of your own, shared by all memory of the region; a writable memoryview that keeps the arena open
        self.user = memoryview(ffi.buffer(keeper, 64))

    @property
    def provider(self) -> Provider | None:
        """Where the memory comes from; None is ``Anonymous()``."""
        return self.arena.provider

    def __repr__(self) -> str:
        return f"<jemhooks.Region of {self.length} bytes at {self.base:#x}, {self.state.name.lower()}>"


def region(obj: Any) -> Region:
    """The region of an object's memory.

    :raises NotOursError: the memory is in no arena of this process. :raises ClosedError: the arena is gone.
    """
    address, _ = span(obj)
    info, user, owner = ffi.new("jemhooks_region_info *"), ffi.new("uintptr_t *"), ffi.new("uintptr_t *")
    _look(address, info, user, owner)
    arena = by_address.get(owner[0])
    if not isinstance(arena, Arena):
        raise NotOursError(f"region: address {address:#x} lies in an arena that was not made in Python")
    if arena._pid != os.getpid():
        raise ForkError(f"region: arena '{arena.name}' was made before the fork and is frozen here; make an arena here")
    if lib.jh_face_enter(arena._face, True):
        raise ClosedError(f"region: arena '{arena.name}' is closed")
    keeper = ffi.gc(ffi.gc(ffi.cast("char *", user[0]), lib.jh_face_leave_region), arena._keeper())
    # Now it cannot end any more; but it may have ended, and another may live here, since the first look.
    _look(address, info, user, owner)
    if owner[0] != arena._address or int(ffi.cast("uintptr_t", keeper)) != user[0]:
        raise ClosedError(f"region: the arena at address {address:#x} is closed")
    return Region(info, keeper, arena)


def rail_key(obj: Any, registrar: Registrar) -> tuple[Region, Key]:
    """The region of an object's memory and its key with this registrar.

    :raises ConfigError: it is not one of the arena's. Else raises as :func:`key` and :func:`region` do.
    """
    home = region(obj)
    for rail, other in enumerate(home.arena.registrars):
        if other is registrar:
            return home, key(obj, rail)
    raise ConfigError(f"the memory of arena '{home.arena.name}' is not registered with {registrar!r}")


def _look(address: int, info: Any, user: Any, owner: Any) -> None:
    """jh_face_region(), until the region is not just changing."""
    while rc := lib.jh_face_region(address, info, user, owner):
        if rc != -errno.EAGAIN:
            raise NotOursError(f"region: address {address:#x} lies in no region of any arena")
