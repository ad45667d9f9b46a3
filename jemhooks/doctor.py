"""``jemhooks doctor``: what is here, what works, and what to do about what does not."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from . import build_config
from .errors import JemhooksError, LoadError
from .loader import TUNABLE, allocator, environment, jemalloc_path, spare_needed, spare_set, tls_size

_MiB = 1 << 20
_ABSENT = "not readable"


def _line(good: bool | None, what: str, text: object, remedy: str = "") -> str:
    mark = {True: "ok  ", False: "FAIL", None: "    "}[good]
    return f"{mark} {what:<16}{text}" + (f"\n     {'':<16}-> {remedy}" if remedy else "")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value / _MiB:g} MiB"


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return _ABSENT


def _file_of_malloc() -> str:
    class Info(ctypes.Structure):
        _fields_ = (
            ("file", ctypes.c_char_p),
            ("base", ctypes.c_void_p),
            ("name", ctypes.c_char_p),
            ("at", ctypes.c_void_p),
        )

    process, info = ctypes.CDLL(None), Info()
    found = process.dladdr(ctypes.cast(process.malloc, ctypes.c_void_p), ctypes.byref(info))
    return os.fsdecode(info.file) if found else _ABSENT


def jemalloc_notes(version: str, variable: str) -> Iterator[str]:
    """What to know of this jemalloc, with the options in this variable: nothing of 5, whose limits are none here."""
    if not version.startswith("4."):
        return
    decays = "purge:decay" in os.environ.get(variable, "")
    remedy = "" if decays else f"{variable}=purge:decay gives free pages up in time, which else only trim() does"
    yield _line(
        None, "", "no thread caches; one chunk of each arena stays; its records are in registered memory", remedy
    )


def _allocator() -> Iterator[str]:
    path = jemalloc_path()
    if allocator() != "jemalloc":
        from ._native import ffi, lib

        yield _line(True, "allocator", ffi.string(lib.jemhooks_allocator_version()).decode())
        return
    if path is None:
        yield _line(False, "libjemalloc", "not found", "install libjemalloc2 (Debian) or jemalloc (Fedora)")
        return
    need, have = spare_needed(path), spare_set()
    yield _line(None, "libjemalloc", f"{path}, thread-local storage {tls_size(path)} bytes (PT_TLS)")
    try:
        from ._native import ffi, lib
    except LoadError as e:
        yield _line(
            False, "loading", f"{TUNABLE} is {have} bytes, {need} would do", str(e).replace("\n", "\n" + " " * 24)
        )
        yield _line(None, "", f"or: export GLIBC_TUNABLES={environment()['GLIBC_TUNABLES']}")
        return
    yield _line(True, "loading", f"{TUNABLE} is {have} bytes")
    version: str = ffi.string(lib.jemhooks_allocator_version()).decode()
    ours = ffi.string(lib.jemhooks_allocator_file()).decode()
    options = ffi.string(lib.jemhooks_allocator_options()).decode()
    yield _line(True, "jemalloc", f"{version}, options in {options}, of {ours}")
    yield from jemalloc_notes(version, options)
    whose = _file_of_malloc()
    two = whose != ours and Path(whose).is_file() and b"<jemalloc>" in Path(whose).read_bytes()
    remedy = "another jemalloc than the arenas': neither can free the other's blocks" if two else ""
    yield _line(None, "malloc", f"the process's own, of {whose}", remedy)


def _machine() -> Iterator[str]:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    small = soft != resource.RLIM_INFINITY and soft < 64 * _MiB
    remedy = "ulimit -l unlimited, or LimitMEMLOCK= of the service, if registrations fail" if small else ""
    yield _line(None, "memlock", f"soft {_limit(soft)}, hard {_limit(hard)} (root is exempt)", remedy)
    thp = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    yield _line(
        None, "huge pages", f"transparent: {thp}", "" if "[never]" not in thp else "madvise makes registration cheaper"
    )
    for size in ("2048", "1048576"):
        pages = _read(f"/sys/kernel/mm/hugepages/hugepages-{size}kB/nr_hugepages")
        yield _line(None, "", f"reserved, {int(size) // 1024} MiB each: {pages}")
    yield _line(None, "io_uring", f"kernel.io_uring_disabled = {_read('/proc/sys/kernel/io_uring_disabled')}")


def _try(open_registrar: Callable[[], Any]) -> str:
    """Open a registrar, register a region with it, deregister it; which of its kind it is."""
    from .arena import Arena
    from .lookup import key

    with open_registrar() as registrar, Arena(registrar, region_max="2MiB") as arena:
        where = key(arena.block(1))
        detail = {
            "fabric": lambda: f"{registrar.info().provider}, ",
            "verbs": lambda: f"{registrar.info().device}, ",
            "ucx": lambda: f"UCX {registrar.info().version}, ",
        }
        return f"{detail.get(registrar.name, str)()}registered a region (rkey {where.rkey:#x})"


def _can(info: Any) -> str:
    """The capabilities of a provider, in words."""
    return ", ".join(
        (
            "gives pages back" if info.gives_back else "gives no pages back",
            "pinnable" if info.pinnable else "not pinnable",
            "for other processes, too" if info.shares else "private",
        )
    )


def _providers() -> Iterator[str]:
    """What each kind of provider can do here, by making an arena over it; devices only where there are some."""
    try:
        from .providers import Anonymous, DevDax, File, Memfd
    except LoadError:
        yield _line(None, "providers", "cannot be tried before the library loads")
        return
    from .arena import Arena

    here, devices = tempfile.gettempdir(), sorted(map(str, Path("/dev").glob("dax*")))
    kinds: dict[str, Callable[[], Any]] = {
        "anonymous": Anonymous,
        "hugetlb": lambda: Anonymous(hugetlb="2MiB"),
        "memfd": Memfd,
        "memfd, hugetlb": lambda: Memfd(hugetlb="2MiB"),
        f"file in {here}": lambda: File(here),
        "file in /dev/shm": lambda: File("/dev/shm"),
        **{f"devdax {path}": partial(DevDax, path) for path in devices},
    }
    for name, make in kinds.items():
        try:
            provider = make()
            with Arena(provider=provider) as arena:
                arena.block(1)
            yield _line(True, "provider", f"{name}: {_can(provider.info())}")
        except JemhooksError as e:
            optional = name not in ("anonymous", "memfd")  # what a machine may lack is no fault
            yield _line(None if optional else False, "provider", f"{name}: {type(e).__name__}", str(e))
    if not devices:
        yield _line(None, "provider", "devdax: no /dev/dax*", "ndctl create-namespace --mode=devdax makes one of pmem")
    scope = _read("/proc/sys/kernel/yama/ptrace_scope")
    yield _line(None, "ipc", f"kernel.yama.ptrace_scope = {'0 (there is no Yama)' if scope == _ABSENT else scope}")


def _registrars() -> Iterator[str]:
    try:
        from .registrars.fabric import Fabric
        from .registrars.null import Null
        from .registrars.ucx import Ucx
        from .registrars.uring import Uring
        from .registrars.verbs import Verbs
    except LoadError:
        yield _line(None, "registrars", "cannot be tried before the library loads")
        return
    kinds: dict[str, Callable[[], Any]] = {
        "null": Null,
        "uring": lambda: Uring(slots=8),
        "fabric": Fabric,
        "ucx": Ucx,
        "verbs": Verbs,
    }
    for name, open_registrar in kinds.items():
        try:
            yield _line(True, name, _try(open_registrar))
        except JemhooksError as e:
            no_device = name == "verbs" and e.errno == errno.ENODEV  # which is no fault
            yield _line(None if no_device else False, name, type(e).__name__, str(e))


def doctor() -> int:
    """Print the findings; 0 if everything that was built works, else 1."""
    libc = " ".join(platform.libc_ver())
    python = f"{platform.python_version()} at {sys.executable}, {libc}, Linux {platform.release()}"
    lines = [
        _line(None, "jemhooks", " ".join(f"{k}={v}" for k, v in build_config().items())),
        _line(None, "python", python),
        *_allocator(),
        *_machine(),
        *_registrars(),
        *_providers(),
    ]
    print("\n".join(lines))
    absent = {k for k, v in build_config().items() if v == "off"}
    return int(any(line.startswith("FAIL") and line[5:].split()[0] not in absent for line in lines))
