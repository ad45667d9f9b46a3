"""What memory belongs to: keys, regions, leases. Memory is named by anything that :mod:`jemhooks.memory` takes."""

from __future__ import annotations

import enum
import struct
import warnings
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ._native import check, error, ffi, lib
from .arena import Arena
from .errors import ClosedError, ConfigError, NotOursError
from .lifetime import by_address, drain
from .memory import span

KEY_DTYPE = np.dtype([(n, "u8") for n in ("addr", "length", "lkey", "rkey", "generation")])
_KEY = struct.Struct("5Q")
_NO_PAIR = 2**64 - 1  # jh_face_packed_keys: no key, or one of more than 32 bits


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


def _outside(address: int, nbytes: int, reach: int) -> ConfigError:
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
    rc = lib.jh_face_rail_key(address, rail, out) if rail else lib.jh_face_key(address, out)
    if rc:
        raise error(rc)
    addr, reach, lkey_, rkey_, generation = _KEY.unpack(ffi.buffer(out))
    if nbytes is None:
        nbytes = reach
    elif nbytes > reach:
        raise _outside(address, nbytes, reach)
    return Key(addr, nbytes, lkey_, rkey_, generation)


def _pair(obj: Any) -> tuple[int, int]:
    pair = lib.jh_face_packed_keys(span(obj)[0])
    if pair != _NO_PAIR:
        return pair & 0xFFFFFFFF, pair >> 32
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

    def __init__(self, info: Any, user: int, arena: Arena) -> None:
        self.base, self.length = int(info.base), int(info.length)
        self.lkey, self.rkey, self.remote_base = int(info.lkey), int(info.rkey), int(info.remote_base)
        self.generation, self.leases, self.state = int(info.generation), int(info.leases), State(info.state)
        self.arena = arena
        #: 64 bytes of your own, shared by all memory of the region; a writable memoryview that keeps the arena open
        self.user = memoryview(ffi.buffer(ffi.gc(ffi.cast("char *", user), lambda _: arena._leave()), 64))

    def __repr__(self) -> str:
        return f"<jemhooks.Region of {self.length} bytes at {self.base:#x}, {self.state.name.lower()}>"


def region(obj: Any) -> Region:
    """The region of an object's memory.

    :raises NotOursError: the memory is in no arena of this process. :raises ClosedError: the arena is gone.
    """
    address, _ = span(obj)
    info, user, owner = ffi.new("jemhooks_region_info *"), ffi.new("uintptr_t *"), ffi.new("uintptr_t *")
    if lib.jh_face_region(address, info, user, owner):
        raise NotOursError(f"region: address {address:#x} lies in no region of any arena")
    arena = by_address.get(owner[0])
    if not isinstance(arena, Arena):
        raise NotOursError(
            f"region: address {address:#x} lies in an arena that was not made here (in C, or before a fork)"
        )
    if lib.jh_face_enter(arena._face, True):
        raise ClosedError(f"region: arena '{arena.name}' is closed")
    return Region(info, user[0], arena)


class Lease:
    """A promise that a region stays registered; a context manager that gives the :class:`Key`.

    It keeps the object and the arena. Thread-safe but for releasing it from two threads at once.
    """

    def __init__(self, address: int, key: Key, *kept: Any) -> None:
        self.key, self._address, self._kept, self._held = key, address, kept, True

    def release(self) -> None:
        """End the lease. :raises ClosedError: it has ended already."""
        if not self._held:
            raise ClosedError(f"the lease on {self._address:#x} has been released already; take a new one")
        self._held = False
        check(lib.jh_face_release(self._address))
        self._kept = ()

    def __enter__(self) -> Key:
        if not self._held:
            raise ClosedError(f"the lease on {self._address:#x} has been released already; take a new one")
        return self.key

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._held:
            self.release()

    def __del__(self) -> None:
        if self.__dict__.get("_held"):
            text = f"the lease on {self._address:#x} was not released; use it in a with statement"
            warnings.warn(text, ResourceWarning, stacklevel=2, source=self)
            lib.jh_face_release(self._address)


def lease(obj: Any) -> Lease:
    """Keep an object's region registered, whatever happens, until the lease is released; registers where needed.

    The lease keeps ``obj``, so the memory too, unless it is an integer address. Raises as :func:`key` does.
    """
    drain()
    address, nbytes = span(obj)
    out = ffi.new("jemhooks_key *")
    check(lib.jh_face_lease(address, out))
    try:
        reached = Key(*_KEY.unpack(ffi.buffer(out)))
        if nbytes is not None and nbytes > reached.length:
            raise _outside(address, nbytes, reached.length)
        home = region(address)
    except BaseException:
        lib.jh_face_release(address)
        raise
    return Lease(address, reached if nbytes is None else reached._replace(length=nbytes), obj, home)
