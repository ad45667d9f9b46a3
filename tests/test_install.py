"""An install by plain CMake into a prefix; a runtime that finds it by its own CMake or autoconf, shared and static."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
pytest.register_assert_rewrite("installed")
from allocator import PREFIX  # noqa: E402
from installed import LEAN, ROOT, call, prefix_fixture  # noqa: E402, F401

pytestmark = pytest.mark.null
RUNTIME = ROOT / "examples" / "c" / "runtime"


def says_it_works(program: Path) -> None:
    said = call(program)
    assert re.search(r"allocator +jemhooks [\d.]+ over \d", said), said
    assert "1000, of which 1000 have keys" in said, said
    assert "registrations   1\n" in said, "a thousand objects, one registration"


def says_malloc(program: Path) -> None:
    said = call(program)
    assert "allocator       malloc\n" in said, said
    assert "of which 0 have keys" in said, "plain malloc has none"


# ---- CMake ----


def cmake(into: Path, prefix: Path, *options: str, ok: bool = True) -> str:
    said = call("cmake", "-G", "Ninja", "-S", RUNTIME, "-B", into, f"-DCMAKE_PREFIX_PATH={prefix}", *options, ok=ok)
    if ok:
        call("cmake", "--build", into)
    return said


@pytest.mark.parametrize("static", ["OFF", "ON"])
def test_runtime_by_cmake(prefix: Path, tmp_path: Path, static: str) -> None:
    said = cmake(tmp_path, prefix, f"-DRT_STATIC={static}")
    assert "memory from jemhooks allocator=jemalloc fabric=off" in said, "what was found"
    says_it_works(tmp_path / "hello")
    needed = call("readelf", "-d", tmp_path / "librt.so")
    assert ("libjemhooks.so.0" in needed) == (static == "OFF"), needed
    assert ("libjemalloc.so.2" in needed) == (static == "ON"), "whoever takes the static library needs jemalloc itself"


def test_runtime_by_cmake_without_jemhooks(tmp_path: Path) -> None:
    cmake(tmp_path / "malloc", tmp_path, "-DRT_ALLOCATOR=malloc")
    says_malloc(tmp_path / "malloc" / "hello")
    assert "neither jemhooks nor malloc" in cmake(tmp_path / "wrong", tmp_path, "-DRT_ALLOCATOR=tcmalloc", ok=False)


def test_cmake_asks_for_a_later_version(prefix: Path, tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.20)\nproject(x C)\nfind_package(jemhooks 7.0 REQUIRED)\n"
    )
    said = call("cmake", "-S", tmp_path, "-B", tmp_path / "b", f"-DCMAKE_PREFIX_PATH={prefix}", ok=False)
    assert "0.1.0" in said, "which one is there"


# ---- autoconf ----


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs the runtime's configure script in a folder, and make; what configure said."""
    source = tmp_path_factory.mktemp("autoconf") / "runtime"
    shutil.copytree(RUNTIME, source, ignore=shutil.ignore_patterns("autom4te.cache", "configure"))
    call("autoconf", cwd=source)

    def run(folder: Path, *options: str, ok: bool = True, **variables: str) -> str:
        said = call(source / "configure", *options, ok=ok, cwd=folder, **variables)
        if ok:
            call("make", cwd=folder)
        return said

    return run


def test_runtime_by_autoconf(prefix: Path, tmp_path: Path, configured: Callable[..., str]) -> None:
    assert "by pkg-config" in configured(tmp_path, PKG_CONFIG_PATH=str(prefix / "lib" / "pkgconfig"))
    says_it_works(tmp_path / "hello")


def test_runtime_by_autoconf_and_jemhooks_config(prefix: Path, tmp_path: Path, configured: Callable[..., str]) -> None:
    path = f"{prefix / 'bin'}:{os.environ['PATH']}"
    assert "jemhooks-config" in configured(tmp_path, PATH=path, PKG_CONFIG_PATH="")
    says_it_works(tmp_path / "hello")


def test_runtime_by_autoconf_without_jemhooks(tmp_path: Path, configured: Callable[..., str]) -> None:
    configured(tmp_path, "--with-allocator=malloc")
    says_malloc(tmp_path / "hello")
    missing = configured(tmp_path, ok=False, PKG_CONFIG_PATH="")
    assert "set PKG_CONFIG_PATH, or choose --with-allocator=malloc" in missing
    assert "neither jemhooks nor malloc" in configured(tmp_path, "--with-allocator=x", ok=False)


# ---- pkg-config and jemhooks-config ----


def compiled(folder: Path, *flags: str) -> Path:
    call("gcc", "-DRT_WITH_JEMHOOKS", RUNTIME / "hello.c", RUNTIME / "rt.c", "-o", folder / "hello", *flags)
    return folder / "hello"


def test_static_by_pkg_config(prefix: Path, tmp_path: Path) -> None:
    pc = {"PKG_CONFIG_PATH": f"{prefix / 'lib' / 'pkgconfig'}:{os.environ.get('PKG_CONFIG_PATH', '')}"}
    private = call("pkg-config", "--libs", "--static", "jemhooks", **pc).split()
    assert "-ljemalloc" in private, "what the static library needs"
    assert "-ljemalloc" not in call("pkg-config", "--libs", "jemhooks", **pc).split(), "and the shared one has itself"
    flags = ["-l:libjemhooks.a" if flag == "-ljemhooks" else flag for flag in private]
    hello = compiled(tmp_path, *call("pkg-config", "--cflags", "jemhooks", **pc).split(), *flags)
    assert "libjemhooks" not in call("readelf", "-d", hello)
    assert call(hello), "it finds jemalloc"


@pytest.mark.parametrize("how", [("--libs",), ("--libs", "--static")])
def test_jemhooks_config(prefix: Path, tmp_path: Path, how: tuple[str, ...]) -> None:
    config = prefix / "bin" / "jemhooks-config"
    hello = compiled(tmp_path, *call(config, "--cflags").split(), *call(config, *how).split())
    if "--static" not in how:
        says_it_works(hello)
    assert call(config, "--version").strip() == "0.1.0"
    assert call(config, "--prefix").strip() == str(prefix), "it has been moved"
    assert (Path(call(config, "--pkgconfigdir").strip()) / "jemhooks.pc").exists()
    assert (Path(call(config, "--jemalloc").strip()) / "libjemalloc.so.2").exists()
    assert "allocator=jemalloc" in call(config, "--config")
    assert "unknown option --nonsense" in call(config, "--nonsense", ok=False)
    assert "usage" in call(config, ok=False)


def test_static_finds_its_modules_where_it_was_installed(prefix: Path, tmp_path: Path) -> None:
    """The program that it is part of may be anywhere; the folder is that of the configuration."""
    configured = prefix.parent / "p"
    config = configured / "bin" / "jemhooks-config"
    flags = [*call(config, "--cflags").split(), *call(config, "--libs", "--static").split()]
    says_it_works(compiled(tmp_path, *flags))


def test_soname(prefix: Path) -> None:
    library = prefix / "lib" / "libjemhooks.so"
    assert library.is_symlink()
    assert "soname: [libjemhooks.so.0]" in call("readelf", "-d", library)
    names = call("nm", "--dynamic", "--defined-only", "--format=posix", library).split("\n")
    strange = [name for name in names if name and not name.startswith("jemhooks_")]
    assert not strange, "only the public functions can be seen"


# ---- jemalloc, found at configure time ----


def jemalloc_pc(folder: Path, libs: str, cflags: str) -> dict[str, str]:
    """A jemalloc of our own making: what pkg-config says of it."""
    (folder / "jemalloc.pc").write_text(
        f"libdir={folder}\nName: jemalloc\nDescription: a test's\nVersion: 5.3.0\nLibs: {libs}\nCflags: {cflags}\n"
    )
    return {"PKG_CONFIG_LIBDIR": str(folder), "PKG_CONFIG_PATH": ""}


def configure(into: Path, *options: str, ok: bool = True, **variables: str) -> str:
    said = call("cmake", "-G", "Ninja", "-S", ROOT / "csrc", "-B", into, *LEAN, *options, ok=ok, **variables)
    return " ".join(said.split())


def test_rpath_and_no_rpath(tmp_path: Path) -> None:
    where = call("pkg-config", "--variable=libdir", "jemalloc").strip()
    (tmp_path / "libjemalloc.so").symlink_to(f"{where}/libjemalloc.so.2")
    (tmp_path / "libjemalloc.so.2").symlink_to(f"{where}/libjemalloc.so.2")
    cflags = call("pkg-config", "--cflags", "jemalloc").strip()
    pc = jemalloc_pc(tmp_path, f"-L{tmp_path} -ljemalloc", cflags)
    for option, wanted in (("ON", True), ("OFF", False)):
        build, into = tmp_path / f"b{option}", tmp_path / f"p{option}"
        configure(build, f"-DJEMHOOKS_RPATH={option}", f"-DCMAKE_INSTALL_PREFIX={into}", **pc)
        call("cmake", "--build", build)
        call("cmake", "--install", build)
        dynamic = call("readelf", "-d", into / "lib" / "libjemhooks.so")
        assert (str(tmp_path) in dynamic) == wanted, f"the rpath of jemalloc, with JEMHOOKS_RPATH={option}\n{dynamic}"
        assert ("-rpath" in (into / "lib" / "pkgconfig" / "jemhooks.pc").read_text()) == wanted
        config = into / "bin" / "jemhooks-config"
        assert ("-rpath" in call(config, "--libs")) == wanted
        of_jemalloc = f"-Wl,-rpath,{tmp_path}"
        assert (of_jemalloc in call(config, "--libs", "--static").split()) == wanted, "whoever takes the static one"
        pc_path = {"PKG_CONFIG_PATH": str(into / "lib" / "pkgconfig"), "PKG_CONFIG_LIBDIR": str(tmp_path)}
        assert (of_jemalloc in call("pkg-config", "--libs", "--static", "jemhooks", **pc_path).split()) == wanted


def test_header_and_library_with_different_prefixes(tmp_path: Path) -> None:
    other = "" if PREFIX else "je_"
    mapped = "".join(f"#define je_{name} {other}{name}\n" for name in ("mallocx", "dallocx", "mallctl") if not other)
    (tmp_path / "jemalloc").mkdir()
    (tmp_path / "jemalloc" / "jemalloc.h").write_text(
        f"{mapped}#include <stddef.h>\nvoid *je_mallocx(size_t, int);\nvoid je_dallocx(void *, int);\n"
        "int je_mallctl(const char *, void *, size_t *, void *, size_t);\n"
    )
    where = call("pkg-config", "--variable=libdir", "jemalloc").strip()
    pc = jemalloc_pc(tmp_path, f"-L{where} -ljemalloc", f"-I{tmp_path}")
    said = configure(tmp_path / "b", ok=False, **pc)
    assert "header and library have different prefixes" in said, said
    assert f"`{other}mallocx'" in said, "what the linker missed"


def test_static_jemalloc_that_is_not_position_independent(tmp_path: Path) -> None:
    (tmp_path / "jemalloc").mkdir()
    (tmp_path / "jemalloc" / "jemalloc.h").write_text(
        "#include <stddef.h>\nvoid *je_mallocx(size_t, int);\nvoid je_dallocx(void *, int);\n"
        "int je_mallctl(const char *, void *, size_t *, void *, size_t);\n"
    )
    (tmp_path / "j.c").write_text(
        "#include <jemalloc/jemalloc.h>\nstatic char room[100]; char *top = room;\n"
        "void *je_mallocx(size_t n, int f) { (void)n, (void)f; return room; }\n"
        "void je_dallocx(void *p, int f) { (void)f; top = p; }\n"
        "int je_mallctl(const char *n, void *a, size_t *b, void *c, size_t d) {"
        " (void)n, (void)a, (void)b, (void)c, (void)d; return 0; }\n"
    )
    call("gcc", "-fno-pic", "-fno-pie", "-c", "j.c", "-I.", "-o", "j.o", cwd=tmp_path)
    call("ar", "rc", "libjemalloc.a", "j.o", cwd=tmp_path)
    said = configure(tmp_path / "b", ok=False, **jemalloc_pc(tmp_path, f"-L{tmp_path} -ljemalloc", f"-I{tmp_path}"))
    assert "only a static jemalloc was found" in said, said
    assert "libjemalloc_pic.a" in said, "the remedy"


@pytest.mark.parametrize("allocator", ["direct", "tbbmalloc", "mimalloc"])
def test_others_need_no_jemalloc(tmp_path: Path, allocator: str) -> None:
    none = {"PKG_CONFIG_LIBDIR": str(tmp_path), "PKG_CONFIG_PATH": ""}
    if allocator == "mimalloc" and re.search("MI_MALLOC_VERSION 3", Path("/usr/include/mimalloc.h").read_text()):
        said = configure(tmp_path / "b", "-DJEMHOOKS_ALLOCATOR=mimalloc", ok=False, **none)
        assert "not version 3, which has no block of 32 MiB" in said, said
        return
    chosen = f"-DJEMHOOKS_ALLOCATOR={allocator}", f"-DCMAKE_INSTALL_PREFIX={tmp_path / 'p'}"
    said = configure(tmp_path / "b", *chosen, **none)
    assert f"allocator={allocator}" in said
    call("cmake", "--build", tmp_path / "b")
    call("cmake", "--install", tmp_path / "b")
    pc = {"PKG_CONFIG_LIBDIR": str(tmp_path / "p" / "lib" / "pkgconfig"), "PKG_CONFIG_PATH": ""}
    hello = compiled(tmp_path, *call("pkg-config", "--cflags", "--libs", "jemhooks", **pc).split())
    assert f"over {allocator}" in call(hello)
    if allocator == "mimalloc":
        threads = tmp_path / "threads"
        flags = call("pkg-config", "--cflags", "--libs", "jemhooks", **pc).split()
        call("gcc", ROOT / "tests" / "c" / "threads.c", "-o", threads, *flags)
        call(threads)
    flags = call("pkg-config", "--cflags", "--libs", "--static", "jemhooks", **pc).split()
    hello = compiled(tmp_path, *("-l:libjemhooks.a" if flag == "-ljemhooks" else flag for flag in flags))
    assert f"over {allocator}" in call(hello), "its own libraries are among those of the static one"


@pytest.mark.parametrize(("allocator", "package"), [("tbbmalloc", "libtbb-dev"), ("mimalloc", "libmimalloc-dev")])
def test_another_allocator_is_not_there(tmp_path: Path, allocator: str, package: str) -> None:
    home = Path(call("gcc", f"-print-file-name=lib{allocator}.so").strip()).parent.resolve()
    nowhere = f"-DCMAKE_IGNORE_PATH={home};/lib/{home.name}"
    none = {"PKG_CONFIG_LIBDIR": str(tmp_path), "PKG_CONFIG_PATH": ""}
    said = configure(tmp_path / "b", f"-DJEMHOOKS_ALLOCATOR={allocator}", nowhere, ok=False, **none)
    assert package in said, said
