"""Where an arena's memory comes from."""

from __future__ import annotations

from typing import Any, SupportsIndex

from ._native import check, ffi, lib
from .errors import ConfigError
from .memory import hold, span
from .sizes import size


class Provider:
    """The base of all providers; one may serve several arenas (but see Fixed) and lives as long as any of them."""

    host_accessible: bool = True

    def __init__(self, pointer: Any, owner: Any = None) -> None:
        self._pointer = ffi.gc(pointer, lib.jemhooks_provider_close)
        self.owner = owner  #: the object whose memory it is, if it is one's

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
        config = ffi.new("jemhooks_anonymous_config *")
        config.size = ffi.sizeof("jemhooks_anonymous_config")
        config.page_size = 0 if hugetlb is None else size(hugetlb, "hugetlb", 1)
        config.transparent_huge = thp
        config.numa_node = -1 if numa_node is None else numa_node
        out = ffi.new("jemhooks_provider **")
        check(lib.jemhooks_provider_anonymous(config, out))
        super().__init__(out[0])


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
    """Memory that you own, for one arena at a time; rounded inwards to 4 KiB. It is never given back or unmapped.

    :param memory: a writable buffer (kept alive), or an integer address, which must stay valid as long as the arena; or
        a list of buffers and of (memory, length) pairs: each is then a region of its own.
    :param length: bytes; needed with an address, otherwise the buffer's own length.
    :param host_accessible: False for memory that the CPU must not touch (device memory): it can then be allocated,
        freed and registered, but not zeroed, viewed or copied.
    :param zeroed: the memory holds only zero bytes, which saves clearing it.
    """

    def __init__(
        self,
        memory: Any,
        length: SupportsIndex | str | None = None,
        *,
        host_accessible: bool = True,
        zeroed: bool = False,
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
        config = ffi.new("jemhooks_fixed_config *")
        config.size = ffi.sizeof("jemhooks_fixed_config")
        config.ranges, config.range_count = ranges, len(self._parts)
        config.host_accessible = host_accessible
        config.zeroed = zeroed
        pointer = ffi.new("jemhooks_provider **")
        check(lib.jemhooks_provider_fixed(config, pointer))
        super().__init__(pointer[0], memory)
        self._spans = [span(part[0], writable=True) for part in self._parts]
        self.host_accessible = host_accessible

    def _hold(self) -> tuple[Any, ...] | None:
        """The objects, exporting their buffers, so that none is resized or closed. :raises ConfigError: one was."""
        held = tuple([hold(part[0]) for part in self._parts])
        for (part, _), was in zip(self._parts, self._spans, strict=True):
            if span(part, writable=True) != was:
                raise ConfigError(f"the memory of this {type(part).__name__} has moved since Fixed() was given it")
        return held
