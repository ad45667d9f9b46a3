"""How jemalloc gets into a process: whose malloc is then whose; and what becomes of two jemallocs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jemhooks import loader

sys.path.insert(0, str(Path(__file__).resolve().parent))
pytest.register_assert_rewrite("installed")
from allocator import OPTIONS, PREFIX  # noqa: E402
from installed import call, prefix_fixture  # noqa: E402, F401

if TYPE_CHECKING:
    from conftest import Python

pytestmark = pytest.mark.null
# What one arena can do, and where malloc() and its own jemalloc are from; a pointer of malloc's must be refused.
PROGRAM = r"""
#include <dlfcn.h>
#include <jemhooks.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *name(const char *path) {
    return strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
}

static const char *file_of(void *function) {
    Dl_info info;
    return dladdr(function, &info) ? name(info.dli_fname) : "nowhere";
}

int main(void) {
    jemhooks_arena *arena;
    jemhooks_registrar *null;
    jemhooks_config config = JEMHOOKS_CONFIG_INIT;
    jemhooks_key key;
    config.registrars = &null;
    config.registrar_count = 1;
    if (jemhooks_registrar_open("null", NULL, &null) || jemhooks_arena_create(&config, &arena)) {
        puts(jemhooks_last_error());
        return 1;
    }
    char *ours[1000], *others[1000];
    for (int i = 0; i < 1000; i++) {
        ours[i] = jemhooks_alloc(arena, 1000);
        others[i] = malloc(1000);
        if (!ours[i] || jemhooks_get_key(ours[i], &key) || key.length < 1000) return 2;
        if (!jemhooks_get_key(others[i], &key) || !jemhooks_free(others[i])) return 3;
        memset(ours[i], 1, 1000);
        memset(others[i], 2, 1000);
    }
    for (int i = 0; i < 1000; i++) {
        if (ours[i][999] != 1 || others[i][999] != 2 || jemhooks_free(ours[i])) return 4;
        free(others[i]);
    }
    printf("malloc of %s, arenas of %s", file_of((void *)malloc), name(jemhooks_allocator_file()));
    return jemhooks_arena_destroy(arena) ? 5 : 0;
}
"""
STATIC = "libjemalloc_pic.a"
IN_PROGRAM = [f"-l:{STATIC}", "-lpthread", "-lm", "-lstdc++", "-ldl"]


@pytest.fixture
def build(prefix: Path, tmp_path: Path) -> Callable[..., Path]:
    def compiled(*flags: str) -> Path:
        (tmp_path / "program.c").write_text("#define _GNU_SOURCE\n" + PROGRAM)
        where = call("pkg-config", "--variable=libdir", "jemalloc").strip()
        config = prefix / "bin" / "jemhooks-config"
        hooked = [*call(config, "--cflags").split(), *call(config, "--libs").split()]
        call("gcc", tmp_path / "program.c", "-o", tmp_path / "program", *hooked, f"-L{where}", *flags)
        return tmp_path / "program"

    return compiled


LIBC, JEMALLOC = "libc.so.6", "libjemalloc.so.2"


def jemalloc() -> str:
    path = loader.jemalloc_path()
    assert path, "jemhooks was built with one"
    return str(path)


@pytest.mark.parametrize(
    ("flags", "preload", "whose"),
    [([], False, LIBC), (["-ljemalloc"], False, JEMALLOC), ([], True, JEMALLOC)],
    ids=["by jemhooks", "by the program", "preloaded"],
)
def test_whose_malloc(build: Callable[..., Path], flags: list[str], preload: bool, whose: str) -> None:
    variables = {"LD_PRELOAD": jemalloc()} if preload else {}
    said = call(build(*flags), **{OPTIONS: ""}, **variables)
    assert said == f"malloc of {LIBC if PREFIX else whose}, arenas of {JEMALLOC}", (
        "and keys work, and a pointer of malloc's is refused"
    )


@pytest.mark.parametrize(
    ("flags", "whose"),
    [([], "program"), (["-Wl,--exclude-libs,ALL"], JEMALLOC)],
    ids=["open", "hidden"],
)
def test_a_static_jemalloc_beside_the_shared_one(build: Callable[..., Path], flags: list[str], whose: str) -> None:
    """Each is whole: a pointer of the program's own jemalloc is no arena's, and is refused."""
    assert call(build(*flags, *IN_PROGRAM)) == f"malloc of {LIBC if PREFIX else 'program'}, arenas of {whose}"


@pytest.mark.parametrize("function", ["mallocx", "dallocx", "mallctl", "mallctlbymib"])
def test_parts_of_two_jemallocs(build: Callable[..., Path], tmp_path: Path, function: str) -> None:
    """Someone else's function of that name comes first: arenas of one jemalloc, blocks of another."""
    function = f"{PREFIX}{function}"
    (tmp_path / "other.c").write_text(f"void *{function}(void) {{ return 0; }}\n")
    call("gcc", "-shared", "-fPIC", "-o", tmp_path / "other.so", tmp_path / "other.c", "-fno-builtin")
    said = call(build(), ok=False, LD_PRELOAD=str(tmp_path / "other.so"))
    assert "there are two jemallocs in this process" in said, said
    assert f"{function} is that of {tmp_path}/other.so" in said or f"and {function} that of {tmp_path}/other.so" in said
    assert JEMALLOC in said, "both are named"
    assert "preload and link only one" in said, "and the remedy"


@pytest.mark.parametrize(("process", "whose"), [(False, LIBC), (True, JEMALLOC)])
def test_doctor_says_whose_malloc(python: Python, process: bool, whose: str) -> None:
    preload = {"LD_PRELOAD": jemalloc()} if process else {}
    said = python.run(None, "-m", "jemhooks", "doctor", bare=process, variables=preload).stdout
    [line] = [line for line in said.splitlines() if line[5:].startswith("malloc ")]
    assert line.endswith(LIBC if PREFIX else whose), said
    assert "another jemalloc" not in said, said
    [line] = [line for line in said.splitlines() if line[5:].startswith("jemalloc ")]
    assert line.endswith(JEMALLOC), said
    assert f"options in {OPTIONS}," in line, said


def test_doctor_warns_of_another_jemalloc(python: Python, tmp_path: Path) -> None:
    """The process's own malloc is of one, and the arenas are of another."""
    where = call("pkg-config", "--variable=libdir", "jemalloc").strip()
    exports = "malloc;free;calloc;realloc;posix_memalign;aligned_alloc;memalign;malloc_usable_size;valloc"
    (tmp_path / "only").write_text("{ global: " + exports + "; local: *; };")
    keep = [f"-Wl,-u,{PREFIX}{name}" for name in ("malloc", "calloc")]
    if PREFIX:
        keep += [f"-Wl,--defsym={name}={PREFIX}{name}" for name in exports.split(";")]
    call(
        "gcc",
        "-shared",
        "-o",
        tmp_path / "own.so",
        *keep,
        f"-L{where}",
        *IN_PROGRAM,
        f"-Wl,--version-script={tmp_path}/only",
    )
    said = python.run(None, "-m", "jemhooks", "doctor", variables={"LD_PRELOAD": str(tmp_path / "own.so")}).stdout
    [line] = [line for line in said.splitlines() if line[5:].startswith("malloc ")]
    assert line.endswith("own.so"), said
    assert "another jemalloc than the arenas'" in said, said
