"""What is built, what is in it, that it works where it is installed, and what a failing configuration says."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import jemhooks as jh
from jemhooks import loader

if TYPE_CHECKING:
    from conftest import Python

LEFT_OUT = shutil.ignore_patterns(
    ".git", "build", "dist", ".venv", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info"
)
WORKS = """
import sys, jemhooks as jh
with jh.Null() as null, jh.Arena(null) as arena:
    assert jh.key(arena.zeros(100)).length == 800
for make in (lambda: jh.Uring(slots=4), jh.Fabric):
    with make() as registrar, jh.Arena(registrar) as arena:
        jh.key(arena.zeros(100))
print(jh.__file__)
"""
C_PROGRAM = r"""
#include <stdio.h>
#include <jemhooks.h>
#include <jemhooks_null.h>
#include <jemhooks_uring.h>
#include <jemhooks_fabric.h>
int main(void) {
    const char *kinds[] = {"null", "uring", "fabric"}; /* verbs needs a device */
    for (int i = 0; i < 3; i++) {
        jemhooks_registrar *registrar;
        jemhooks_arena *arena;
        jemhooks_key key;
        if (jemhooks_registrar_open(kinds[i], NULL, &registrar)) return puts(jemhooks_last_error()), 1;
        jemhooks_config config = JEMHOOKS_CONFIG_INIT;
        config.registrars = &registrar;
        config.registrar_count = 1;
        if (jemhooks_arena_create(&config, &arena)) return puts(jemhooks_last_error()), 1;
        void *p = jemhooks_alloc(arena, 1000);
        if (jemhooks_get_key(p, &key) || jemhooks_lookup(p, &key)) return puts(jemhooks_last_error()), 1;
        jemhooks_free(p);
        if (jemhooks_arena_destroy(arena)) return puts(jemhooks_last_error()), 1;
        jemhooks_registrar_close(registrar);
    }
    printf("works %s\n", jemhooks_version());
    return 0;
}
"""


def call(
    *command: str | Path, check: bool = True, timeout: float = 300, **more: Any
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, timeout=timeout, check=False, **more
    )
    assert not check or done.returncode == 0, (
        f"{command}: {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    )
    return done


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with the build requirements: this one if it has them."""
    if importlib.util.find_spec("scikit_build_core"):
        return sys.executable
    home = tmp_path_factory.mktemp("builder")
    call(sys.executable, "-m", "venv", home)
    python = str(home / "bin" / "python")
    call(python, "-m", "pip", "install", "-q", "scikit-build-core>=0.11", "cffi>=2.1")
    return python


def build(builder: str, what: str, source: Path, into: Path, **settings: str) -> Path:
    """A distribution; what pip would ask of the build backend."""
    into.mkdir(exist_ok=True)
    code = f"import sys, scikit_build_core.build as b; print(b.build_{what}(sys.argv[1], {settings!r}))"
    name = call(builder, "-c", code, into, cwd=source).stdout.splitlines()[-1]
    return into / name


@pytest.fixture(scope="module")
def sdist(builder: str, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from a copy of the repository, so that building leaves the original alone."""
    home = tmp_path_factory.mktemp("copy")
    shutil.copytree(root, home / "jemhooks", ignore=LEFT_OUT)
    return build(builder, "sdist", home / "jemhooks", home / "dist")


@pytest.fixture(scope="module")
def source(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution: all else is built from it, which shows that it is complete."""
    home = tmp_path_factory.mktemp("source")
    shutil.unpack_archive(sdist, home, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return next(home.iterdir())


@pytest.fixture(scope="module")
def wheel(builder: str, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(builder, "wheel", source, tmp_path_factory.mktemp("wheel"))


def environment(home: Path) -> str:
    """A fresh environment that finds numpy and cffi where we have them; its Python."""
    call(sys.executable, "-m", "venv", "--without-pip", home)
    site = next((home / "lib").glob("python*")) / "site-packages"
    ours = {str(Path(importlib.util.find_spec(m).origin).parents[1]) for m in ("numpy", "cffi")}  # type: ignore[union-attr, arg-type]
    (site / "dependencies.pth").write_text("\n".join(ours))
    return str(home / "bin" / "python")


def pip_install(python: str, *args: str | Path) -> None:
    call(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", *args)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The Python of an environment with the wheel, and the package's folder there."""
    python = environment(tmp_path_factory.mktemp("installed") / "venv")
    pip_install(python, "--no-index", wheel)
    folder = call(python, "-c", "import jemhooks; print(jemhooks.__path__[0])", cwd="/").stdout.strip()
    return python, Path(folder)


@pytest.fixture
def package(installed: tuple[str, Path], tmp_path: Path) -> Path:
    """A copy of the installed package, to be damaged."""
    copy = tmp_path / "site" / "jemhooks"
    shutil.copytree(installed[1], copy)
    return copy


def try_in(package: Path, installed: tuple[str, Path], python: Python, script: str) -> str:
    """What a script prints that finds the package there."""
    env = python.environment(PYTHONPATH=str(package.parent))
    done = call(installed[0], "-c", textwrap.dedent(script), env=env, cwd="/")
    assert not done.stderr, done.stderr
    return done.stdout


# ---- contents ----


def test_sdist(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "csrc/CMakeLists.txt",
        "csrc/arena.c",
        "csrc/include/jemhooks.h",
    ):
        assert name in names, f"{name} is needed to build"
    for name in ("jemhooks/__init__.py", "jemhooks/py.typed", "tests/conftest.py", "examples/fabric_rma.py"):
        assert name in names, f"{name} belongs to the source"
    junk = [
        n
        for n in names
        if n.startswith((".git/", "build/", ".venv", "dist/")) or "__pycache__" in n or n.endswith(".so")
    ]
    assert not junk, f"not the source's: {junk}"


def test_wheel(wheel: Path, root: Path) -> None:
    assert "cp310-abi3-linux" in wheel.name, "one wheel for every Python from 3.10 on"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read("jemhooks-0.1.0.dist-info/METADATA").decode()
    ours = {n for n in names if n.startswith("jemhooks/")}
    assert {
        f"jemhooks/{p.relative_to(root / 'jemhooks')}"
        for p in (root / "jemhooks").rglob("*.py*")
        if "cache" not in str(p)
    } <= ours
    wanted = {"py.typed", "_build.py", "lib/libjemhooks.so", "lib/pkgconfig/jemhooks.pc", "_ffi.abi3.so"}
    wanted |= {f"lib/jemhooks/registrar_{kind}.so" for kind in ("null", "uring", "fabric", "verbs")}
    wanted |= {f"include/{p.name}" for p in (root / "csrc" / "include").iterdir()}
    assert {f"jemhooks/{n}" for n in wanted} <= ours, "what Python and C programs need"
    others = {n for n in names - ours if ".dist-info/" not in n}
    assert not others, f"nothing else belongs into site-packages: {others}"
    assert not {n for n in names if "/tests/" in n or n.endswith((".c", ".in", ".cmake"))}, "no sources in the wheel"
    for line in (
        "Requires-Dist: cffi",
        "Requires-Dist: numpy",
        "Requires-Python: >=3.10",
        "License-Expression: BSD-2-Clause",
    ):
        assert line in metadata, line
    assert "jemhooks-0.1.0.dist-info/licenses/LICENSE" in names


def test_libraries_name_no_build_folder(installed: tuple[str, Path]) -> None:
    for path in installed[1].rglob("*.so"):
        text = call("readelf", "-dW", path).stdout
        for line in text.splitlines():
            if "RUNPATH" in line or "RPATH" in line:
                paths = line.split("[")[1].rstrip("]").split(":")
                assert all(p.startswith("$ORIGIN") or Path(p).is_dir() for p in paths), f"{path.name}: {line}"
                assert "/tmp" not in line, f"{path.name} looks for libraries where it was built: {line}"
    needed = call("readelf", "-dW", installed[1] / "lib" / "libjemhooks.so").stdout
    assert "libfabric" not in needed, "a machine without libfabric must run the core"
    assert "liburing" not in needed


# ---- installed ----


def test_wheel_works(installed: tuple[str, Path], python: Python, tmp_path: Path) -> None:
    done = call(installed[0], "-c", WORKS, env=python.environment(), cwd=tmp_path)
    assert done.stdout.strip() == str(installed[1] / "__init__.py"), "the installed one, not the repository's"
    command = Path(installed[0]).with_name("jemhooks")
    done = call(command, "run", "--", installed[0], "-c", WORKS, env=python.environment(bare=True), cwd=tmp_path)
    assert done.stdout.strip() == str(installed[1] / "__init__.py"), "the command jemhooks is installed, too"


def test_editable_install(builder: str, source: Path, python: Python, tmp_path: Path) -> None:
    own = environment(tmp_path / "venv")
    isolation = ["--no-build-isolation"] if builder == sys.executable else []  # the requirements are where numpy is
    pip_install(own, *isolation, "-e", source)
    done = call(own, "-c", WORKS, env=python.environment(), cwd=tmp_path)
    assert done.stdout.strip() == str(source / "jemhooks" / "__init__.py"), "the source itself is imported"
    before = (source / "jemhooks" / "sizes.py").read_text()
    (source / "jemhooks" / "sizes.py").write_text(before + "\nEDITED = 5\n")
    done = call(own, "-c", "from jemhooks.sizes import EDITED; print(EDITED)", env=python.environment(), cwd=tmp_path)
    assert done.stdout == "5\n", "an edit shows at once"
    assert call(own, "-c", WORKS, env=python.environment(), cwd=tmp_path).returncode == 0, "and the package still works"
    (source / "jemhooks" / "sizes.py").write_text(before)


def compile_c(folder: Path, pkgconfig: Path, program: str = C_PROGRAM) -> Path:
    """A C program from what pkg-config says alone."""
    (folder / "program.c").write_text(program)
    env = {"PATH": os.environ["PATH"], "PKG_CONFIG_PATH": str(pkgconfig)}
    flags = call("pkg-config", "--cflags", "--libs", "jemhooks", env=env).stdout.split()
    assert "-ljemhooks" in flags
    call("gcc", "-std=c11", "-Wall", "-Werror", "-o", folder / "program", folder / "program.c", *flags)
    return folder / "program"


def test_c_program_by_pkg_config(installed: tuple[str, Path], tmp_path: Path) -> None:
    program = compile_c(tmp_path, installed[1] / "lib" / "pkgconfig")
    done = call(program, env={}, cwd="/")
    assert done.stdout == "works 0.1.0\n", (
        "no LD_LIBRARY_PATH, no GLIBC_TUNABLES: C programs never meet the TLS problem"
    )


def test_pkg_config_file_is_relocatable(package: Path, tmp_path: Path) -> None:
    moved = tmp_path / "somewhere else"
    package.rename(moved)
    home = tmp_path / "c"
    home.mkdir()
    (tmp_path / "no-space").symlink_to(moved)
    program = compile_c(home, tmp_path / "no-space" / "lib" / "pkgconfig")
    assert call(program, env={}, cwd="/").stdout == "works 0.1.0\n", "the package may be moved"


def test_pkg_config_entry_point(installed: tuple[str, Path]) -> None:
    """By which tools such as pkgconf find .pc files in Python environments."""
    code = "from importlib.metadata import entry_points as e; print(e(group='pkg_config')['jemhooks'].value)"
    assert call(installed[0], "-c", code, cwd="/").stdout == "jemhooks.lib.pkgconfig\n"


def test_c_examples_build_and_run(installed: tuple[str, Path], source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(source / "examples" / "c", folder)
    env = {"PATH": os.environ["PATH"], "PKG_CONFIG_PATH": str(installed[1] / "lib" / "pkgconfig")}
    done = call("make", "-C", folder, env=env)
    assert "warning" not in done.stderr, done.stderr
    done = call(folder / "fabric_rma", env={}, timeout=120)
    assert "every byte is right" in done.stdout, done.stdout
    for transports in ("tcp", "posix,self"):
        done = call(folder / "ucx_rma", "1000", env={"UCX_TLS": transports}, timeout=120)
        assert "every byte is right" in done.stdout, done.stdout
        registrations = re.search(r"1000 puts, \d+ bytes, (\d+) registrations", done.stdout)
        assert registrations, done.stdout
        assert int(registrations[1]) <= 20, "registrations are per region, not per buffer"
    done = call(folder / "ucx_rma", "0", env={}, check=False)
    assert (done.returncode, "1 to 1000" in done.stderr) == (2, True), done.stderr


# ---- damaged installations ----


def test_module_is_missing(installed: tuple[str, Path], package: Path, python: Python) -> None:
    (package / "lib" / "jemhooks" / "registrar_fabric.so").unlink()
    out = try_in(
        package,
        installed,
        python,
        """
        import jemhooks as jh
        for _ in range(2):
            try:
                jh.Fabric()
            except jh.LoadError as e:
                print("fabric" in str(e), "development package" in str(e), e.errno)
        with jh.Null() as null, jh.Arena(null) as arena:
            print(jh.key(arena.zeros(3)).length)
        with jh.Uring(slots=2):
            print("uring")
        """,
    )
    assert out == "True True 2\nTrue True 2\n24\nuring\n", "LoadError with the remedy; everything else works"


def replace_bytes(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert content.count(old + b"\0") >= 1, f"{path.name} does not name {old!r}"
    path.write_bytes(content.replace(old + b"\0", new + b"\0"))


@pytest.mark.parametrize(
    ("kind", "make", "library"),
    [
        ("fabric", "jh.Fabric()", "libfabric.so.1"),
        ("uring", "jh.Uring()", "liburing.so.2"),
        ("ucx", "jh.Ucx()", "libucp.so.0"),
    ],
)
def test_library_of_a_registrar_is_missing(
    installed: tuple[str, Path], package: Path, python: Python, kind: str, make: str, library: str
) -> None:
    absent = library.replace("lib", "liX", 1)
    replace_bytes(package / "lib" / "jemhooks" / f"registrar_{kind}.so", library.encode(), absent.encode())
    out = try_in(
        package,
        installed,
        python,
        f"""
        import jemhooks as jh
        try:
            {make}
        except jh.LoadError as e:
            print("{absent}: cannot open shared object file" in str(e), "install" in str(e), "{kind}" in str(e))
        with jh.Null() as null, jh.Arena(null) as arena:
            print(jh.key(arena.zeros(3)).length)
        """,
    )
    assert out == "True True True\n24\n", "the missing library is named; the core works"


def test_module_is_something_else(installed: tuple[str, Path], package: Path, python: Python) -> None:
    modules = package / "lib" / "jemhooks"
    (modules / "registrar_uring.so").write_bytes(b"not a library")
    shutil.copy("/lib/x86_64-linux-gnu/libm.so.6", modules / "registrar_fabric.so")
    out = try_in(
        package,
        installed,
        python,
        """
        import jemhooks as jh
        for make in (jh.Uring, jh.Fabric):
            try:
                make()
            except jh.LoadError as e:
                print(e)
        """,
    )
    first, second = out.splitlines()
    assert "registrar uring: its module cannot be loaded" in first
    assert "is not a jemhooks module" in second


def test_jemalloc_is_missing(installed: tuple[str, Path], package: Path, python: Python) -> None:
    replace_bytes(package / "lib" / "libjemhooks.so", b"libjemalloc.so.2", b"libjemalloX.so.2")
    out = try_in(
        package,
        installed,
        python,
        """
        import jemhooks as jh
        try:
            jh.Arena()
        except jh.LoadError as e:
            print(e)
        """,
    )
    assert "libjemalloX.so.2: cannot open shared object file" in out, out
    assert "install" in out, out


def test_not_built_at_all(installed: tuple[str, Path], root: Path, python: Python, tmp_path: Path) -> None:
    """The plain sources, as after `git clone` and `cd`."""
    shutil.copytree(root / "jemhooks", tmp_path / "jemhooks", ignore=shutil.ignore_patterns("*.so", "_build.py", "lib"))
    out = try_in(
        tmp_path / "jemhooks",
        installed,
        python,
        """
        import jemhooks as jh
        for use in (lambda: jh.Arena(), lambda: jh.key(5), jh.build_config, lambda: jh.__version__, jh.bootstrap):
            try:
                use()
            except jh.LoadError as e:
                print("pip install" in str(e))
        """,
    )
    assert out == "True\n" * 5, "sources that were not built say so, whatever is asked of them"


# ---- configuration ----

Configure = Callable[..., str]


@pytest.fixture
def configure(source: Path, tmp_path: Path) -> Configure:
    """Configure with only the given .pc files to be found; the output, which must be of a failure unless ok=True."""

    def run(*options: str, pc: dict[str, str | None], ok: bool = False) -> str:
        folder = tmp_path / "pc"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, version in pc.items():
            real = Path(call("pkg-config", "--variable=pcfiledir", name).stdout.strip()) / f"{name}.pc"
            lines = real.read_text().splitlines()
            if version:
                lines = [f"Version: {version}" if line.startswith("Version:") else line for line in lines]
            (folder / f"{name}.pc").write_text("\n".join(lines) + "\n")
            for part in real.parent.glob(f"{name}-*.pc"):  # what it requires of itself
                shutil.copy(part, folder)
        env = {**os.environ, "PKG_CONFIG_LIBDIR": str(folder)} | {"PKG_CONFIG_PATH": ""}
        home = tmp_path / "build"
        shutil.rmtree(home, ignore_errors=True)
        done = call("cmake", "-G", "Ninja", "-S", source / "csrc", "-B", home, *options, check=False, env=env)
        text = " ".join((done.stdout + done.stderr).split())
        assert (done.returncode == 0) == ok, text
        return text

    return run


ALL = {"jemalloc": None, "libfabric": None, "liburing": None, "libibverbs": None, "ucx": None}


def test_configuration_is_reported(configure: Configure) -> None:
    assert "allocator=jemalloc fabric=on uring=on ucx=on verbs=on" in configure(pc=ALL, ok=True)
    none = "allocator=jemalloc fabric=off uring=off ucx=off verbs=off"
    assert none in configure(pc={"jemalloc": None}, ok=True), "auto: what is there"
    options = ("-DJEMHOOKS_FABRIC=off", "-DJEMHOOKS_URING=OFF", "-DJEMHOOKS_VERBS=Off", "-DJEMHOOKS_UCX=off")
    off = configure(*options, pc=ALL, ok=True)
    assert none in off, "off: although it is there"


def test_no_jemalloc(configure: Configure) -> None:
    text = configure(pc={})
    assert "libjemalloc-dev" in text, "the package to install"
    assert "5.0.1" in text, "the version needed"


@pytest.mark.parametrize("version", ["4.0.4", "3.6.0", "5.0.0", "5.0.0-0-gdeadbeef"])
def test_jemalloc_is_too_old(configure: Configure, version: str) -> None:
    text = configure(pc={"jemalloc": version})
    assert version in text, "the version found"
    assert "5.0.1 or later, or 4.1 to 4.5" in text, "the versions needed"
    assert "libjemalloc-dev" in text, "the package to install"


def test_jemalloc_without_a_version_is_taken(configure: Configure) -> None:
    """Builds from a bare tree say 0.0.0; what they can do is found out at run time."""
    assert "allocator=jemalloc" in configure(
        pc={"jemalloc": "0.0.0-0-g0000000000000000000000000000000000000000"}, ok=True
    )


@pytest.mark.parametrize(
    ("option", "pc", "said"),
    [
        ("JEMHOOKS_FABRIC=on", {"jemalloc": None}, "libfabric-dev"),
        ("JEMHOOKS_URING=ON", {"jemalloc": None}, "liburing-dev"),
        ("JEMHOOKS_VERBS=on", {"jemalloc": None}, "libibverbs-dev"),
        ("JEMHOOKS_UCX=on", {"jemalloc": None}, "libucx-dev"),
        ("JEMHOOKS_FABRIC=on", {"jemalloc": None, "libfabric": "1.11.0"}, "libfabric-dev"),
        ("JEMHOOKS_FABRIC=maybe", {"jemalloc": None}, "JEMHOOKS_FABRIC=maybe is not one of auto, on and off"),
        ("JEMHOOKS_ALLOCATOR=tcmalloc", {"jemalloc": None}, "the choices are: jemalloc"),
    ],
)
def test_wrong_options(configure: Configure, option: str, pc: dict[str, str | None], said: str) -> None:
    text = configure(f"-D{option}", pc=pc)
    assert said in text, text
    assert option.lower() in text.lower(), "the option is named"


def test_built_without_registrars(
    installed: tuple[str, Path], builder: str, source: Path, python: Python, tmp_path: Path
) -> None:
    settings = {
        "cmake.define.JEMHOOKS_FABRIC": "off",
        "cmake.define.JEMHOOKS_URING": "off",
        "cmake.define.JEMHOOKS_VERBS": "off",
        "cmake.define.JEMHOOKS_UCX": "off",
        "build-dir": str(tmp_path / "b"),
    }
    wheel = build(builder, "wheel", source, tmp_path / "dist", **settings)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    out = try_in(
        tmp_path / "site" / "jemhooks",
        installed,
        python,
        """
        import jemhooks as jh
        from jemhooks.doctor import doctor
        print(jh.build_config())
        for make in (jh.Fabric, jh.Uring, jh.Ucx, jh.Verbs):
            try:
                make()
            except jh.LoadError as e:
                print("was built without it" in str(e), "install its development package" in str(e))
        with jh.Null() as null, jh.Arena(null) as arena:
            print(jh.key(arena.zeros(3)).length)
        print("status", doctor())
        """,
    )
    lines = out.splitlines()
    assert lines[0] == "{'allocator': 'jemalloc', 'fabric': 'off', 'uring': 'off', 'ucx': 'off', 'verbs': 'off'}"
    assert lines[1:6] == ["True True"] * 4 + ["24"], "LoadError with the remedy; the core works"
    assert lines[-1] == "status 0", "what was left out on purpose is no failure"


def test_loader_knows_the_library_it_was_linked_with() -> None:
    path = loader.jemalloc_path()
    assert path
    assert path.name == "libjemalloc.so.2"
    with open("/proc/self/maps") as maps:
        assert str(path.resolve()) in maps.read(), "what is named in remedies is what is loaded"
    assert jh.build_config()["allocator"] == "jemalloc"
