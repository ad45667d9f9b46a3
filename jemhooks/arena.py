"""Arenas: memory that registrars have registered, as numpy arrays and raw blocks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, SupportsFloat, SupportsIndex

import numpy.typing as npt

from ._native import check, error, ffi, lib
from .access import Access, access_flags
from .arrays import Arrays
from .block import Block
from .budget import Budget
from .config import arena_config, registrars_of
from .errors import ClosedError
from .lifetime import Closing, by_address, drain
from .providers import Provider
from .registrars.base import Registrar
from .scatter import scatter_list
from .sizes import LIMIT, ranged, size, text
from .stats import Stats, regions_of, stats_of


class Arena(Arrays, Closing):
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
    :param pin_limit, max_regions: how many bytes and regions may be registered at a time; None: no limit of the
        arena's own, only those of its registrars. See :class:`Budget`. Regions stay below an eighth of the limit.
    :param idle_ttl: seconds that idle regions stay registered, None: for ever. Looked at when something is
        registered; 0: also when something is freed, if the registrars are native.
    :param evict: what a full budget may take: "idle" regions, or all "unleased" ones, with live blocks in them, too,
        for those who lease around every transfer.
    :param prepare: "ahead": a thread of the arena maps, populates and registers the next region, of ``region_max``,
        before it is needed, if the budgets have room. Not with registrars written in Python.
    :param zero_on_free: "eager" clears a block when it is freed, before peers with the key of its region read it;
        "lazy" at its pages' next use.
    :param rotate_keys: deregister regions as soon as they are idle: keys end with their data. ``idle_ttl`` is 0,
        and so are the decay times, unless given.
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
        pin_limit: SupportsIndex | str | None = None,
        max_regions: SupportsIndex | None = None,
        idle_ttl: SupportsFloat | None = 10.0,
        evict: Literal["idle", "unleased"] = "idle",
        prepare: Literal["nothing", "ahead"] = "nothing",
        zero_on_free: Literal["lazy", "eager"] = "lazy",
        rotate_keys: bool = False,
        name: str = "arena",
    ) -> None:
        self._closed = True  # until it is open
        self._pid = os.getpid()
        drain()
        encoded = ffi.new("char[]", text(name, "name"))
        self.name, self.provider, self.access = name, provider, access_flags(access)
        self.registrars = registrars_of(name, registrars)
        default = "lazy" if self.registrars else "none"
        self.policy = default if policy is None else policy
        config = arena_config(
            name,
            encoded,
            provider,
            rails=len(self.registrars),
            access=int(self.access),
            policy=self.policy,
            region_min=region_min,
            region_max=region_max,
            shards=shards,
            dirty_decay_ms=dirty_decay_ms,
            muzzy_decay_ms=muzzy_decay_ms,
            pin_limit=pin_limit,
            max_regions=max_regions,
            idle_ttl=idle_ttl,
            evict=evict,
            prepare=prepare,
            zero_on_free=zero_on_free,
            rotate_keys=rotate_keys,
        )
        out = ffi.new("jh_face **")
        with ExitStack() as stack:
            pointers = [
                stack.enter_context(r._native()) for r in self.registrars
            ]  # kept, though they be closed meanwhile
            rails = ffi.new("jemhooks_registrar *[]", pointers)
            config.registrars = rails
            held = None if provider is None else provider._hold()
            in_python = any(r.in_python for r in self.registrars)
            check(lib.jh_face_open(config, in_python, 0 if held is None else id(held), out))
        self._face = out[0]
        self._address = int(ffi.cast("uintptr_t", lib.jh_face_arena(self._face)))
        self._host_accessible = provider is None or provider.host_accessible
        self._closed = False
        by_address[self._address] = self
        for registrar in self.registrars:
            registrar._joined(self)

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
            by_address.pop(self._address, None)
            lib.jh_face_defer(self._face)
            drain()

    def __del__(self) -> None:
        face = self.__dict__.get("_face")
        if face is None or self._pid != os.getpid():
            return
        try:
            if not self._closed:
                self._closed = True
                message = f"arena '{self.name}' was not closed; use it in a with statement"
                warnings.warn(message, ResourceWarning, stacklevel=2, source=self)
        finally:  # a filter may turn the warning into an exception
            lib.jh_face_abandon(face)

    def _revoke(self) -> None:
        """End every registration now: a registrar's resource is about to go. Nothing to do if the arena is gone."""
        if lib.jh_face_enter(self._face, True):
            return
        try:
            check(lib.jemhooks_revoke(lib.jh_face_arena(self._face)))
        finally:
            lib.jh_face_leave(self._face)

    def _keeper(self) -> Any:
        """A destructor that keeps the arena and does nothing, not even run Python code."""
        return self.__eq__

    def __repr__(self) -> str:
        return f"<jemhooks.Arena '{self.name}' {self.policy}{' closed' if self._closed else ''}>"

    # ---- blocks; the arrays are in Arrays ---------------------------------------------------------------------------

    def _allocate(self, nbytes: int, alignment: int, zero: bool) -> Any:
        """An owning ``char *``: whatever refers to it keeps the block, and the block keeps the arena."""
        drain()
        address = 1 if self._closed else lib.jh_face_alloc(self._face, nbytes, alignment, zero)
        if address == 0:
            raise error(-ffi.errno)
        if address == 1:
            raise ClosedError(f"arena '{self.name}' is closed; allocate from another one")
        # Freed by C, in whatever order a garbage collection clears things; the outer one only keeps the arena.
        return ffi.gc(ffi.gc(ffi.cast("char *", address), lib.jh_face_free), self._keeper())

    def block(self, nbytes: SupportsIndex | str, *, alignment: int = 64, zero: bool = False) -> Block:
        """Raw memory: ``nbytes`` bytes on ``alignment``, a power of two of at most 1 GiB.

        :raises AllocationError: no room. :raises ConfigError: a wrong size or alignment.
        :raises RegistrationError: eager, and the region cannot be registered. :raises ClosedError, ForkError:
        """
        n = size(nbytes, "block", 1)
        owner = self._allocate(n, ranged(alignment, "alignment", 1, LIMIT), zero)
        return Block(owner, n, self._host_accessible)

    def sges(self, objects: Iterable[Any], rail: int = 0) -> npt.NDArray[Any]:
        """The scatter list of several pieces of this arena's memory, registering where needed: addr, length, lkey.

        A structured array, laid out as ``struct ibv_sge``. For pyverbs: ``[SGE(*s) for s in arena.sges(…).tolist()]``.

        :param objects: blocks, contiguous arrays, buffers. :param rail: whose local keys.
        :raises NotOursError: one is not of this arena. :raises ConfigError: one is empty, or has 4 GiB or more.
        """
        with self._using():
            return scatter_list(self._face, self.name, objects, rail)

    # ---- the arena as a whole ---------------------------------------------------------------------------------------

    @contextmanager
    def _using(self) -> Iterator[Any]:
        """The C arena, which stays open meanwhile. :raises ClosedError:"""
        drain()
        if self._closed or lib.jh_face_enter(self._face, False):
            raise ClosedError(f"arena '{self.name}' is closed")
        try:
            yield lib.jh_face_arena(self._face)
        finally:
            lib.jh_face_leave(self._face)

    def trim(self) -> int:
        """Return all free pages, deregister every idle unleased region; the bytes deregistered.

        Idle is a region in which nothing is allocated; memory in other threads' caches counts as allocated.
        """
        released = ffi.new("size_t *")
        with self._using() as arena:
            check(lib.jemhooks_trim(arena, released))
        return int(released[0])

    def wait_ready(self) -> None:
        """Return when what ``prepare="ahead"`` can make ready is ready; for warming up. At once where nothing is."""
        with self._using() as arena:
            check(lib.jemhooks_wait_ready(arena))

    def regions(self) -> npt.NDArray[Any]:
        """A table of the regions: base, length, committed, lkey, rkey, remote_base, generation, state, leases."""
        with self._using() as arena:
            return regions_of(arena)

    def stats(self) -> Stats:
        """The arena's account; see :class:`Stats`."""
        with self._using() as arena:
            return stats_of(arena, self._face)

    @property
    def budget(self) -> Budget:
        """The arena's own limits, and what is registered under them. :raises ClosedError:"""
        with self._using() as arena:
            return Budget._of(lib.jemhooks_arena_budget(arena))
