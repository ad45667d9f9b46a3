"""Arenas: memory that registrars have registered, as numpy arrays and raw blocks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Literal, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from ._native import callbacks, check, error, ffi, lib
from .access import Access, access_flags
from .arrays import Arrays
from .block import Block
from .errors import ClosedError, ConfigError
from .lifetime import by_address, drain, unfinished
from .providers import Provider
from .registrars.base import Registrar
from .sizes import LIMIT, ranged, size

_POLICIES = {"lazy": 0, "eager": 1, "none": 2}  # enum jemhooks_policy
_DECAY_DEFAULT = -2  # JEMHOOKS_DECAY_DEFAULT
REGION_DTYPE = np.dtype(
    [(n, "u8") for n in ("base", "length", "committed", "lkey", "rkey", "remote_base", "generation")]
    + [("state", "u4"), ("leases", "u4")]
)
_STATS = ("regions", "mapped", "committed", "registered", "registered_peak", "registrations", "deregistrations",
          "registration_failures", "active", "dirty", "muzzy", "abandoned", "allocated")  # fmt: skip
_BLOCK_STATS = ("current_bytes", "current_count", "peak_bytes", "peak_count", "total_bytes", "total_count")

Stats = NamedTuple("Stats", [(n, int) for n in _BLOCK_STATS + _STATS])  # type: ignore[misc]
Stats.__doc__ = "An arena's account: its blocks in bytes and counts, then its regions in bytes (but for the counts)."


class Arena(Arrays):
    """Memory in regions that registrars have registered.

    :param registrars: one registrar or up to four (rails); a region is registered with all of them or with none.
    :param provider: where the memory comes from; default ``Anonymous()``.
    :param access: what devices may do: any of "local_write", "remote_read", "remote_write", "remote_atomic",
        "relaxed_ordering", "on_demand", as a string joined by "|", an iterable, or :class:`Access` flags.
    :param policy: "lazy" registers a region when a key in it is first asked for, "eager" before its first block is
        handed out, "none" never. Default: lazy, or none where there are no registrars.
    :param region_min, region_max: regions grow from the one to the other; multiples of 2 MiB, at most 1 GiB. Larger
        blocks get a region of their own. Small regions pin less for one key, large ones need fewer registrations.
    :param shards: jemalloc arenas to spread threads over, 1 to 64.
    :param dirty_decay_ms, muzzy_decay_ms: how long jemalloc keeps freed pages: 0 gives them back at once, -1 never;
        None is jemalloc's own setting.
    :param name: for error messages.

    Thread-safe. A closed arena lives on until its last block, array, lease and region is gone.
    """

    def __init__(
        self,
        registrars: Registrar | Iterable[Registrar] = (),
        *,
        provider: Provider | None = None,
        access: str | Iterable[str] | Access = Access.REMOTE_READ | Access.REMOTE_WRITE,
        policy: Literal["lazy", "eager", "none"] | None = None,
        region_min: SupportsIndex | str = "2MiB",
        region_max: SupportsIndex | str = "64MiB",
        shards: int = 1,
        dirty_decay_ms: int | None = None,
        muzzy_decay_ms: int | None = None,
        name: str = "arena",
    ) -> None:
        self._closed = True  # until it is open
        self._pid = os.getpid()
        drain()
        self.registrars = (registrars,) if isinstance(registrars, Registrar) else tuple(registrars)
        self.provider, self.access, self.name = provider, access_flags(access), name
        for item in self.registrars:
            if not isinstance(item, Registrar):
                raise ConfigError(f"arena '{name}': {item!r} is not a Registrar")
        if provider is not None and not isinstance(provider, Provider):
            raise ConfigError(f"arena '{name}': {provider!r} is not a Provider")
        self.policy = policy or ("lazy" if self.registrars else "none")
        if self.policy not in _POLICIES:
            raise ConfigError(f"arena '{name}': policy {policy!r} is not one of {', '.join(_POLICIES)}")
        encoded = ffi.new("char[]", name.encode())
        config = ffi.new("jemhooks_config *")
        config.size = ffi.sizeof("jemhooks_config")
        config.name = encoded
        config.provider = ffi.NULL if provider is None else provider._pointer
        config.registrar_count = len(self.registrars)
        config.access, config.policy = int(self.access), _POLICIES[self.policy]
        config.region_min = size(region_min, "region_min", 1)
        config.region_max = size(region_max, "region_max", 1)
        config.shards = ranged(shards, "shards", 1, 64)
        config.dirty_decay_ms = ranged(
            _DECAY_DEFAULT if dirty_decay_ms is None else dirty_decay_ms, "dirty_decay_ms", -2, LIMIT
        )
        config.muzzy_decay_ms = ranged(
            _DECAY_DEFAULT if muzzy_decay_ms is None else muzzy_decay_ms, "muzzy_decay_ms", -2, LIMIT
        )
        out = ffi.new("jh_face **")
        with ExitStack() as stack:
            rails = ffi.new("jemhooks_registrar *[]", [stack.enter_context(r._native()) for r in self.registrars])
            config.registrars = rails
            check(lib.jh_face_open(config, out))
        self._face = out[0]
        self._address = int(ffi.cast("uintptr_t", lib.jh_face_arena(self._face)))
        self._host_accessible = provider is None or provider.host_accessible
        self._closed = False
        by_address[self._address] = self

    # ---- life -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop allocating; destroy the arena now, or when its last block, array or lease is gone. Idempotent.

        :raises RegistrationError: a registrar failed to deregister a region, which then stays mapped for good.
        """
        drain()
        if self._closed:
            return
        self._closed = True
        if self._pid == os.getpid() and lib.jh_face_close(self._face):
            self._finish()

    def _finish(self) -> None:
        if callbacks.depth:
            unfinished.append(self)
            return
        by_address.pop(self._address, None)
        rc = lib.jh_face_finish(self._face)
        if rc < 0 and self._pid == os.getpid():
            raise error(rc)

    def _leave(self) -> None:
        """End a use; may run in a finaliser on any thread, where no Python registrar may be called."""
        if lib.jh_face_leave(self._face):
            self._last_use_ended()

    def _last_use_ended(self) -> None:
        if any(r.in_python for r in self.registrars):
            unfinished.append(self)
        else:
            self._finish()

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._closed and self._pid == os.getpid():
            warnings.warn(
                f"arena '{self.name}' was not closed; use it in a with statement",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )
            self._closed = True
            if lib.jh_face_close(self._face):
                self._last_use_ended()

    def __repr__(self) -> str:
        return f"<jemhooks.Arena '{self.name}' {self.policy}{' closed' if self._closed else ''}>"

    # ---- blocks; the arrays are in Arrays ---------------------------------------------------------------------------

    def _allocate(self, nbytes: int, alignment: int, zero: bool) -> Any:
        """An owning ``char *``: whatever refers to it keeps the block, and the block keeps the arena."""
        if unfinished:
            drain()
        address = 1 if self._closed else lib.jh_face_alloc(self._face, nbytes, alignment, zero)
        if address == 0:
            raise error(-ffi.errno)
        if address < 3:
            if address == 2:
                self._last_use_ended()
            raise ClosedError(f"arena '{self.name}' is closed; allocate from another one")
        return ffi.gc(ffi.cast("char *", address), partial(self._free, address, nbytes))

    def _free(self, address: int, nbytes: int, _: Any) -> None:
        if lib.jh_face_free(self._face, address, nbytes):
            self._last_use_ended()

    def block(self, nbytes: SupportsIndex | str, *, alignment: int = 64, zero: bool = False) -> Block:
        """Raw memory: ``nbytes`` bytes on ``alignment``, a power of two of at most 1 GiB.

        :raises AllocationError: no room. :raises ConfigError: a wrong size or alignment.
        :raises RegistrationError: eager, and the region cannot be registered. :raises ClosedError, ForkError:
        """
        n = size(nbytes, "block", 1)
        owner = self._allocate(n, ranged(alignment, "alignment", 1, LIMIT), zero)
        return Block(owner, n, self._host_accessible)

    # ---- the arena as a whole ---------------------------------------------------------------------------------------

    def _use(self) -> Any:
        drain()
        if self._closed or lib.jh_face_enter(self._face, False):
            raise ClosedError(f"arena '{self.name}' is closed")
        return lib.jh_face_arena(self._face)

    def trim(self) -> int:
        """Return all free pages, deregister every idle unleased region; the bytes deregistered.

        Idle is a region in which nothing is allocated; memory in other threads' caches counts as allocated.
        """
        released = ffi.new("size_t *")
        arena = self._use()
        try:
            check(lib.jemhooks_trim(arena, released))
        finally:
            self._leave()
        return int(released[0])

    def regions(self) -> npt.NDArray[Any]:
        """A table of the regions: base, length, committed, lkey, rkey, remote_base, generation, state, leases."""
        arena = self._use()
        try:
            room, count = 0, ffi.new("size_t *")
            while True:
                table = np.zeros(room, REGION_DTYPE)
                count[0] = room
                at = ffi.cast("jemhooks_region_info *", ffi.from_buffer(table)) if room else ffi.NULL
                check(lib.jemhooks_regions(arena, at, count))
                if count[0] <= room:
                    return table[: count[0]]
                room = count[0] + 8
        finally:
            self._leave()

    def stats(self) -> Stats:
        """The arena's account; see :class:`Stats`."""
        native, blocks = ffi.new("jemhooks_stats *"), ffi.new("jh_face_stats *")
        native.size = ffi.sizeof("jemhooks_stats")
        arena = self._use()
        try:
            check(lib.jemhooks_get_stats(arena, native))
            lib.jh_face_get_stats(self._face, blocks)
        finally:
            self._leave()
        return Stats(*(getattr(blocks, n) for n in _BLOCK_STATS), *(getattr(native, n) for n in _STATS))
