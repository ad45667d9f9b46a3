"""Importing always works; the native library loads at first use, or says precisely what to do."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import jemhooks as jh
from jemhooks import loader

if TYPE_CHECKING:
    from conftest import Python

LIBRARY = loader.jemalloc_path()
FAILS_TO_LOAD = """
    import jemhooks as jh
    try:
        jh.Arena().close()
    except jh.LoadError as e:
        print(e)
    else:
        print("loaded")
"""


def test_import_loads_nothing_native(python: Python) -> None:
    out = python.check(
        """
        import sys
        import jemhooks as jh
        with open("/proc/self/maps") as f:
            maps = f.read()
        print("libjemalloc" in maps, "libjemhooks" in maps, "numpy" in sys.modules, "_cffi_backend" in sys.modules)
        print(jh.__version__, sorted(jh.build_config()), jh.ConfigError.__name__, int(jh.Access.REMOTE_WRITE))
        """,
        bare=True,
    )
    first, second = out.splitlines()
    assert first == "False False False False", "import jemhooks must be cheap and must not need libjemalloc"
    assert second.startswith("0.1.0 ['allocator', 'fabric', 'ucx', 'uring', 'verbs'] ConfigError 4"), "known without it"


def test_load_error_names_three_remedies_with_exact_values(python: Python) -> None:
    out = python.check(FAILS_TO_LOAD, bare=True)
    assert LIBRARY is not None
    need = loader.spare_needed(LIBRARY)
    assert "jemhooks.bootstrap()" in out, "remedy 1: restart from the script"
    assert "jemhooks run -- python" in out, "remedy 2: the launcher"
    assert f"GLIBC_TUNABLES={loader.TUNABLE}={need}" in out, "remedy 3: the variable, with this machine's value"
    assert f"LD_PRELOAD={LIBRARY}" in out, "the other variable, with this machine's path"
    assert f"{loader.tls_size(LIBRARY)} bytes" in out, "the cause, with its number"


def test_each_named_remedy_works(python: Python) -> None:
    text = python.check(FAILS_TO_LOAD, bare=True)
    for variable in ("GLIBC_TUNABLES", "LD_PRELOAD"):
        match = re.search(rf"{variable}=([\w./=:-]+)", text)
        assert match, f"the message should have a value for {variable}"
        out = python.check(FAILS_TO_LOAD, bare=True, variables={variable: match[1]}).strip()
        assert out == "loaded", f"{variable}={match[1]} is what the message told the user to set"


def test_load_fails_again_the_same_way(python: Python) -> None:
    """A failed import must not leave half-made modules that raise something else the second time."""
    out = python.check(
        """
        import jemhooks as jh
        for make in (jh.__getattr__, lambda name: getattr(jh, name)) * 2:
            for name in ("Arena", "key", "Null", "Fabric", "Registrar", "Anonymous", "Block"):
                try:
                    make(name)
                except jh.LoadError as e:
                    assert "static thread-local storage" in str(e), e
                else:
                    raise SystemExit(f"{name} did not need the library")
        """,
        bare=True,
    )
    assert out == "", "every attribute that needs the library must raise LoadError each time"


def test_private_mode_leaves_malloc_to_libc(python: Python) -> None:
    out = python.check(
        """
        import jemhooks as jh
        from jemhooks import bench
        with jh.Arena() as arena:
            before = arena.stats().allocated
            junk = [bytearray(100_000) for _ in range(100)]
            print(arena.stats().allocated - before)
        """
    )
    assert out.strip() == "0", "Python's own memory must not come from the arena"


def test_process_mode_works(python: Python) -> None:
    out = python.check(
        """
        import jemhooks as jh
        with jh.Null() as null, jh.Arena(null) as arena:
            a = arena.zeros(1000, "f8")
            print(int(a.sum()), jh.key(a).length)
        """,
        bare=True,
        variables={"LD_PRELOAD": str(LIBRARY)},
    )
    assert out.split() == ["0", "8000"], "with LD_PRELOAD jemhooks must work as in private mode"


def test_dir_and_unknown_attribute() -> None:
    assert set(jh.__all__) <= set(dir(jh)), "dir() should list the lazy names too"
    for name in jh.__all__:
        assert getattr(jh, name) is not None, f"{name} is in __all__, but cannot be had"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        jh.nonsense  # noqa: B018


def test_build_config_agrees_with_the_library() -> None:
    from jemhooks._native import ffi, lib

    native = ffi.string(lib.jemhooks_build_config()).decode()
    assert native == " ".join(f"{k}={v}" for k, v in jh.build_config().items()), "Python and C should say the same"
    assert ffi.string(lib.jemhooks_version()).decode() == jh.__version__, "one version for both"
    assert jh.build_config()["fabric"] == jh.build_config()["uring"] == "on", "the tests need every layer built"


def test_tls_size_is_that_of_readelf() -> None:
    assert LIBRARY is not None
    text = subprocess.check_output(["readelf", "-lW", str(LIBRARY)], text=True, timeout=20)
    line = next(line for line in text.splitlines() if line.split()[:1] == ["TLS"])
    assert loader.tls_size(LIBRARY) == int(line.split()[5], 16), f"PT_TLS MemSiz: {line}"
    assert loader.spare_needed(LIBRARY) >= loader.tls_size(LIBRARY), "less than the library takes cannot be enough"


def test_tls_size_of_other_files(tmp_path: Path) -> None:
    """Whatever lies under the name libjemalloc.so.2, the reader of its header raises what it documents."""
    assert LIBRARY is not None
    whole = LIBRARY.read_bytes()
    for name, content in {
        "empty": b"",
        "text": b"INPUT(-ljemalloc)\n" * 10,
        "cut in the ident": whole[:5],
        "cut in the header": whole[:40],
        "cut in the program headers": whole[:100],
        "32 bit": b"\x7fELF\x01" + bytes(100),
    }.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(OSError):
            loader.tls_size(path)
    with pytest.raises(FileNotFoundError):
        loader.tls_size(tmp_path / "absent")


def test_environment_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LIBRARY is not None
    need = loader.spare_needed(LIBRARY)
    for before, after in {
        "": f"{loader.TUNABLE}={need}",
        "glibc.malloc.check=3": f"glibc.malloc.check=3:{loader.TUNABLE}={need}",
        f"{loader.TUNABLE}=100": f"{loader.TUNABLE}={need}",
        f"{loader.TUNABLE}=100000:glibc.malloc.check=3": f"glibc.malloc.check=3:{loader.TUNABLE}=100000",
        f"{loader.TUNABLE}=nonsense": f"{loader.TUNABLE}={need}",
    }.items():
        monkeypatch.setenv("GLIBC_TUNABLES", before)
        assert loader.environment() == {"GLIBC_TUNABLES": after}, f"{before!r}: others kept, never smaller"
    monkeypatch.setenv("LD_PRELOAD", "libother.so")
    assert loader.environment(process=True) == {"LD_PRELOAD": f"{LIBRARY}:libother.so"}, "other preloads are kept"
    monkeypatch.setenv("LD_PRELOAD", f"{LIBRARY} libother.so")
    assert loader.environment(process=True) == {"LD_PRELOAD": f"{LIBRARY}:libother.so"}, "once; spaces separate too"


def test_explain_other_failures() -> None:
    assert "pip install" in loader.explain(ImportError("cannot import name '_ffi' from 'jemhooks'")), "not built"
    missing = "libjemalloc.so.2: cannot open shared object file"
    assert missing in loader.explain(ImportError(missing)), "what the dynamic linker said is passed on"
