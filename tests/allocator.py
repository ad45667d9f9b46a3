"""The allocator that jemhooks is built with, as far as tests must know it."""

from __future__ import annotations

from jemhooks import build_config
from jemhooks._native import ffi, lib

VERSION: str = ffi.string(lib.jemhooks_allocator_version()).decode()
OPTIONS: str = ffi.string(lib.jemhooks_allocator_options()).decode()  #: the variable that its options are read from
PREFIX = OPTIONS.removesuffix("MALLOC_CONF").lower()  #: of its functions; malloc() is libc's where there is one
#: Bytes of its records at the start of each 2 MiB of memory, where peers must not write.
RECORDS = 13 * 4096 if VERSION.startswith("4.") else 0
#: Bytes that it takes at a time, and that a region has at least.
PIECE = {"tbbmalloc": (1 << 20) + 4096, "mimalloc": 32 << 20}.get(
    build_config()["allocator"], 2 << 20 if RECORDS else 4096
)
