"""Where libjemalloc is and what a running Python needs in order to load it.

Most libjemallocs use initial-exec thread-local storage: a few kilobytes in a block that glibc sizes when the process
starts. Loaded later, they need more of it than glibc keeps spare. Nothing here loads the native library.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from .errors import LoadError

_PT_TLS = 7  # elf.h
_DEFAULT_SPARE = 512  # glibc.rtld.optional_static_tls as glibc ships it
TUNABLE = "glibc.rtld.optional_static_tls"


def built() -> ModuleType:
    """What CMake wrote down when jemhooks was built. :raises LoadError: it is not built."""
    try:
        from . import _build
    except ImportError:
        raise LoadError("jemhooks is not built here; install it with: pip install .") from None
    return _build


def allocator() -> str:
    """The allocator that was chosen when jemhooks was configured. :raises LoadError: it is not built."""
    config: str = built().BUILD_CONFIG
    return dict(item.split("=", 1) for item in config.split())["allocator"]


def jemalloc_path() -> Path | None:
    """The libjemalloc that the native library is linked with; None if it is with none, or that is not to be found."""
    with suppress(LoadError):
        if allocator() != "jemalloc":
            return None
        folder = built().JEMALLOC_LIBDIR
        if folder and (Path(folder) / "libjemalloc.so.2").exists():
            return Path(folder) / "libjemalloc.so.2"
    try:
        cache = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    for line in cache.splitlines():
        if line.strip().startswith("libjemalloc.so.2 "):
            return Path(line.split("=>")[-1].strip())
    return None


def tls_size(library: Path) -> int:
    """Bytes of thread-local storage (PT_TLS) of an ELF library; 0 if it has none. OSError if it cannot be read."""
    with library.open("rb") as f:
        head = f.read(64)
        if len(head) < 64 or head[:5] != b"\x7fELF\x02":
            raise OSError(f"{library} is not a 64-bit ELF file")
        order = "<" if head[5] == 1 else ">"
        (offset,) = struct.unpack_from(order + "Q", head, 32)
        size, count = struct.unpack_from(order + "HH", head, 54)
        f.seek(offset)
        headers = f.read(size * count)
    try:
        for i in range(count):
            kind, _, _, _, _, _, memsz, _ = struct.unpack_from(order + "IIQQQQQQ", headers, i * size)
            if kind == _PT_TLS:
                return int(memsz)
    except struct.error:
        raise OSError(f"{library} is cut short: its program headers are missing") from None
    return 0


def spare_needed(library: Path) -> int:
    """The value of glibc's tunable with which the library loads into a running process, in bytes."""
    return (tls_size(library) + 2 * _DEFAULT_SPARE + 511) // 512 * 512


def spare_set() -> int:
    """The value of that tunable in this process, in bytes."""
    for item in os.environ.get("GLIBC_TUNABLES", "").split(":"):
        name, _, value = item.partition("=")
        if name == TUNABLE and value.isdigit():
            return int(value)
    return _DEFAULT_SPARE


def environment(process: bool = False) -> dict[str, str]:
    """The variables to set so that a new process can load libjemalloc; existing values are kept and merged.

    :param process: True: jemalloc for every malloc of the process (LD_PRELOAD); False: for jemhooks alone.
    """
    path = jemalloc_path()
    if path is None:
        return {}
    if process:
        others = [p for p in os.environ.get("LD_PRELOAD", "").replace(":", " ").split() if p != str(path)]
        return {"LD_PRELOAD": ":".join([str(path), *others])}
    kept = [t for t in os.environ.get("GLIBC_TUNABLES", "").split(":") if t and not t.startswith(TUNABLE + "=")]
    value = max(spare_needed(path), spare_set())
    return {"GLIBC_TUNABLES": ":".join([*kept, f"{TUNABLE}={value}"])}


def settle_cxx() -> None:
    """Let libstdc++, which most libjemallocs need, bind its symbols before a libjemalloc is loaded beside it.

    Loaded as a part of libjemalloc, it would find ``operator new`` there; every other C++ library of the process (numpy
    is one) would then free jemalloc's memory with libc's ``free`` and crash.
    """
    with suppress(OSError):  # there is none, so nobody needs it
        ctypes.CDLL("libstdc++.so.6", os.RTLD_NOW | os.RTLD_LOCAL)


def explain(failure: ImportError) -> str:
    """Say why the native library did not load, and what to do about it on this machine."""
    text = str(failure)
    if "static TLS" not in text:
        if "_ffi" in text and ("cannot import" in text or "No module" in text):
            return f"jemhooks is not built ({text}); install it with: pip install ."
        return f"the native library of jemhooks cannot be loaded: {text}; install the library that it names"
    path = jemalloc_path()
    if path is None:
        return (
            f"libjemalloc cannot be loaded into a running Python ({text}), nor is it where jemhooks was built with it"
        )
    tunables = environment()["GLIBC_TUNABLES"]
    return (
        f"{path} needs {tls_size(path)} bytes of static thread-local storage, more than is spare here.\n"
        "  * Put `import jemhooks; jemhooks.bootstrap()` first in the script: it restarts Python once, with room.\n"
        "  * Or start the program with `jemhooks run -- python …`.\n"
        f"  * Or set GLIBC_TUNABLES={tunables} yourself (or LD_PRELOAD={path}, for every malloc)"
    )
