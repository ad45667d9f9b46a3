"""Where an arena's memory comes from."""

from __future__ import annotations

import os
from typing import Any, NamedTuple, SupportsIndex

from ._native import check, ffi, lib
from .errors import ClosedError, ConfigError
from .lifetime import Closing
from .memory import hold, span
from .sizes import size


class ProviderInfo(NamedTuple):
    """What a provider is and can do; sizes in bytes."""

    name: str
    page: int  #: mappings are a multiple of it
    total: int  #: of all its memory; 0: it maps what is asked of it
    free: int  #: of those that arenas share, or left by earlier ones
    host_accessible: bool
    pinnable: bool  #: False: not for registrars that pin
    gives_back: bool  #: free pages
    unmaps: bool  #: the regions of an arena that has ended
    divides: bool  #: False: each range is one region, for one arena at a time
    shares: bool  #: can other processes map it? See :mod:`jemhooks.ipc`


def _made(make: Any, kind: str, **fields: Any) -> Any:
    """A provider of C, from the fields of its config. :raises ConfigError, ProviderError:"""
    config, out = ffi.new(f"jemhooks_{kind}_config *"), ffi.new("jemhooks_provider **")
    config.size = ffi.sizeof(f"jemhooks_{kind}_config")
    for name, value in fields.items():
        setattr(config, name, value)
    check(make(config, out))
    return out[0]


def _path(path: str | os.PathLike[str], kind: str) -> Any:
    """A path as a C string. :raises ConfigError: it is none."""
    try:
        encoded = os.fsencode(path)
    except TypeError:
        raise ConfigError(f"{kind}: {path!r} is not a path") from None
    if not encoded or b"\0" in encoded:
        raise ConfigError(f"{kind}: {path!r} is not a path: it is empty, or has a null byte")
    return ffi.new("char[]", encoded)


class Provider(Closing):
    """The base of all providers; one may serve several arenas (but see Fixed) and lives as long as any of them."""

    host_accessible: bool = True

    def __init__(self, pointer: Any, owner: Any = None) -> None:
        self._open: Any = ffi.gc(pointer, lib.jemhooks_provider_close)
        self.owner = owner  #: the object whose memory it is, if it is one's

    def close(self) -> None:
        """Make no more arenas with it; those that are there keep it. Idempotent.

        A file or a device is then unlocked as soon as no arena uses it. Without close(), when this object is collected.
        """
        given_up, self._open = self._open, None
        if given_up is not None:
            ffi.release(given_up)

    @property
    def _pointer(self) -> Any:
        """Of C. :raises ClosedError:"""
        if self._open is None:
            raise ClosedError(f"this {type(self).__name__} is closed; make another one")
        return self._open

    def info(self) -> ProviderInfo:
        """What it is and can do, and how much of it is free now. :raises ClosedError:"""
        out = ffi.new("jemhooks_provider_info *")
        out.size = ffi.sizeof("jemhooks_provider_info")
        check(lib.jemhooks_provider_get_info(self._pointer, out))
        name, sizes = ffi.string(out.name).decode(), (int(out.page), int(out.total), int(out.free))
        can = [bool(getattr(out, n)) for n in ProviderInfo._fields[4:]]
        return ProviderInfo(name, *sizes, *can)

    def _hold(self) -> tuple[Any, ...] | None:
        """What an arena must keep until it is gone."""
        return None


class Anonymous(Provider):
    """Private anonymous memory.

    :param hugetlb: None for ordinary pages; "2MiB" or "1GiB" for reserved huge pages (vm.nr_hugepages).
    :param thp: let the kernel use transparent huge pages: registering 2 MiB then costs about a thirtieth.
    :param numa_node: bind the memory to this NUMA node; None leaves the choice to the kernel.
    :raises ConfigError, ProviderError: no such page size or node here.
    """

    def __init__(
        self, *, hugetlb: SupportsIndex | str | None = None, thp: bool = True, numa_node: int | None = None
    ) -> None:
        if numa_node is not None and not (isinstance(numa_node, int) and 0 <= numa_node < 2**31):
            raise ConfigError(f"numa_node {numa_node!r} is not a NUMA node; None leaves the choice to the kernel")
        made = _made(
            lib.jemhooks_provider_anonymous,
            "anonymous",
            page_size=0 if hugetlb is None else size(hugetlb, "hugetlb", 1),
            transparent_huge=thp,
            numa_node=-1 if numa_node is None else numa_node,
        )
        super().__init__(made)


class Memfd(Provider):
    """Memory that other processes can map (:mod:`jemhooks.ipc`): a memfd for each arena, sealed against shrinking.

    :param hugetlb: None for ordinary pages; "2MiB" or "1GiB" for reserved huge pages (vm.nr_hugepages).
    :raises ConfigError, ProviderError: no such page size here.
    """

    def __init__(self, *, hugetlb: SupportsIndex | str | None = None) -> None:
        page_size = 0 if hugetlb is None else size(hugetlb, "hugetlb", 1)
        super().__init__(_made(lib.jemhooks_provider_memfd, "memfd", page_size=page_size))


class File(Provider):
    """Memory in files: page cache, or persistent memory itself, where the file system is mounted with dax.

    Other processes can map it (:mod:`jemhooks.ipc`). When the file system is full, allocations fail; nothing crashes.
    Except on tmpfs, the kernel refuses to pin it for long: Verbs (without on-demand access) and Uring refuse it then.

    :param path: a directory: each arena gets a file without a name there, which goes with it. Or a file, for all
        arenas of this provider: a new one, which stays; with ``overwrite`` an existing one. It is locked (flock)
        until the provider is closed, and its arenas too. Whoever truncates it ends the process.
    :param length: of the file, a multiple of 4 KiB; None: the existing file's.
    :param overwrite: use an existing file. Its contents are lost; its length stays.
    :raises ProviderError: the file is there (and not to be overwritten), is too short or in use; the file system is
        full, read-only, or cannot reserve room. :raises ConfigError: not a path, a wrong length.
    """

    def __init__(
        self, path: str | os.PathLike[str], length: SupportsIndex | str | None = None, *, overwrite: bool = False
    ) -> None:
        encoded = _path(path, "File")
        nbytes = 0 if length is None else size(length, "length", 1)
        made = _made(lib.jemhooks_provider_file, "file", path=encoded, length=nbytes, overwrite=overwrite)
        super().__init__(made)


class DevDax(Provider):
    """A dax device, such as /dev/dax0.0: persistent or special memory, mapped whole. It keeps what was written to it.

    It is locked (flock) until the provider is closed, and its arenas too. io_uring pins its memory from Linux 6.5 on.

    :param shared: False: one arena at a time, and the device is one region. True: any number of arenas divide it.
    :raises ProviderError: not a dax device, or locked, or it cannot be opened or mapped.
    """

    def __init__(self, path: str | os.PathLike[str], *, shared: bool = False) -> None:
        encoded = _path(path, "DevDax")
        super().__init__(_made(lib.jemhooks_provider_devdax, "devdax", path=encoded, shared=shared))


def _range(memory: Any, length: SupportsIndex | str | None) -> tuple[int, int]:
    """Address and bytes of memory that is given to an arena."""
    address, have = span(memory, writable=True)
    if have is None and length is None:
        raise ConfigError("Fixed: an address needs a length")
    nbytes = size(have if length is None else length, "length", 1)  # type: ignore[arg-type]
    if have is not None and nbytes > have:
        raise ConfigError(f"Fixed: length {nbytes} is more than the {have} bytes of the buffer")
    return address, nbytes


class Fixed(Provider):
    """Memory that you own, rounded inwards to 4 KiB. It is never given back or unmapped.

    :param memory: a writable buffer (kept alive), or an integer address, which must stay valid as long as the arena; or
        a list of buffers and of (memory, length) pairs: each is then a region of its own.
    :param length: bytes; needed with an address, otherwise the buffer's own length.
    :param host_accessible: False for memory that the CPU must not touch (device memory): it can then be allocated,
        freed and registered, but not zeroed, viewed or copied.
    :param zeroed: the memory holds only zero bytes, which saves clearing it.
    :param shared: False: for one arena at a time, and each range is one region. True: any number of arenas carve their
        regions out of it, which return to it when an arena has ended.
    """

    def __init__(
        self,
        memory: Any,
        length: SupportsIndex | str | None = None,
        *,
        host_accessible: bool = True,
        zeroed: bool = False,
        shared: bool = False,
    ) -> None:
        self._parts: list[tuple[Any, Any]] = [(memory, length)]
        if isinstance(memory, list):
            if length is not None or not memory:
                raise ConfigError("Fixed: a list of ranges has at least one, and each its own length, not one for all")
            self._parts = [part if isinstance(part, tuple) and len(part) == 2 else (part, None) for part in memory]
        ranges = ffi.new("jemhooks_range[]", len(self._parts))
        for out, part in zip(ranges, self._parts, strict=True):
            address, out.length = _range(*part)
            out.base = ffi.cast("void *", address)
        made = _made(
            lib.jemhooks_provider_fixed,
            "fixed",
            ranges=ranges,
            range_count=len(self._parts),
            host_accessible=host_accessible,
            zeroed=zeroed,
            shared=shared,
        )
        super().__init__(made, memory)
        self._spans = [span(part[0], writable=True) for part in self._parts]
        self.host_accessible = host_accessible

    def _hold(self) -> tuple[Any, ...] | None:
        """The objects, exporting their buffers, so that none is resized or closed. :raises ConfigError: one was."""
        held = tuple([hold(part[0]) for part in self._parts])
        for (part, _), was in zip(self._parts, self._spans, strict=True):
            if span(part, writable=True) != was:
                raise ConfigError(f"the memory of this {type(part).__name__} has moved since Fixed() was given it")
        return held
