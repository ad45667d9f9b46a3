"""What type checkers and linters say: of the package, of these tests, and of code that uses the package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

USER = """
import numpy as np
import jemhooks as jh

def use(arena: jh.Arena, null: jh.Null, fabric: jh.Fabric, uring: jh.Uring) -> None:
    reveal_type(arena.block(8))                     # jemhooks.block.Block
    reveal_type(arena.block("8KiB").address)        # int
    reveal_type(arena.block(8).memoryview())        # memoryview
    reveal_type(arena.empty((2, 3), "f4"))          # ndarray
    reveal_type(arena.stats().regions)              # int
    reveal_type(arena.stats().current_bytes)        # int
    reveal_type(arena.regions())                    # ndarray
    reveal_type(arena.trim())                       # int
    reveal_type(jh.key(5))                          # jemhooks.lookup.Key
    reveal_type(jh.key(5).rkey)                     # int
    reveal_type(jh.lkey(5))                         # int
    reveal_type(jh.keys([1, 2]))                    # ndarray
    reveal_type(jh.region(5))                       # jemhooks.lookup.Region
    reveal_type(jh.region(5).state)                 # State
    reveal_type(jh.region(5).user)                  # memoryview
    reveal_type(jh.region(5).arena)                 # jemhooks.arena.Arena
    reveal_type(null.stats().live)                  # int
    reveal_type(fabric.info().provider)             # str
    reveal_type(fabric.put(0, b"", (1, 2)))         # Transfer
    reveal_type(uring.read_into(3, b""))            # int
    reveal_type(jh.build_config())                  # dict[str, str]
    with jh.lease(5) as key:
        reveal_type(key)                            # jemhooks.lookup.Key
    with jh.Arena() as opened:
        reveal_type(opened)                         # jemhooks.arena.Arena
    with jh.Null() as n:
        reveal_type(n)                              # jemhooks.registrars.null.Null
    with jh.Fabric("tcp") as f, jh.Uring() as u:
        reveal_type(f)                              # jemhooks.registrars.fabric.Fabric
        reveal_type(u)                              # jemhooks.registrars.uring.Uring
    try:
        pass
    except jh.RegistrationError as e:
        reveal_type(e.errno)                        # int

class Mine(jh.Registrar):
    def register(self, addr: int, length: int, access: jh.Access) -> tuple[int, int, object]:
        return 1, 2, addr
    def deregister(self, handle: object) -> None: ...

jh.Arena(Mine(), policy="eager", access=jh.Access.REMOTE_READ, region_max="2MiB", provider=jh.Anonymous())
jh.Arena([Mine(), jh.Null()], access=["remote_read"], dirty_decay_ms=None, region_min=np.int64(2 << 20))
version: str = jh.__version__
"""
WRONG = """
import jemhooks as jh
jh.Arena(policy="often")
jh.Arena(registrars=["null"])
jh.Arena(provider="anonymous")
jh.Arena().block(1.5)
jh.Null(max_mr="2")
jh.Null().fail("nonsense")
jh.Fabric(provider=5)
jh.nonsense
"""


def run(root: Path, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=root, capture_output=True, text=True, timeout=240, check=False, env={**os.environ, **more},
    )  # fmt: skip


def mypy(root: Path, path: Path, source: str) -> list[str]:
    path.write_text(source)
    done = run(root, "mypy", "--strict", "--no-error-summary", str(path), MYPYPATH=str(root))
    return done.stdout.splitlines() + done.stderr.splitlines()


def test_package_is_strictly_typed(root: Path) -> None:
    done = run(root, "mypy", "--strict")
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing(root: Path) -> None:
    done = run(root, "ruff", "check", "--no-cache", "jemhooks", "tests", "examples")
    assert done.returncode == 0, done.stdout


def test_types_that_users_see(root: Path, tmp_path: Path) -> None:
    said = mypy(root, tmp_path / "user.py", USER)
    errors = [line for line in said if " error: " in line]
    assert not errors, "code as in the documentation must type-check:\n" + "\n".join(errors)
    revealed = [re.search(r'Revealed type is "(.*)"', line) for line in said]
    types = [m[1] for m in revealed if m]
    wanted = re.findall(r"reveal_type\(.*# (.*)", USER)
    assert len(types) == len(wanted), "\n".join(said)
    for got, want in zip(types, wanted, strict=True):
        assert want in got, f"{want} was expected, {got} was revealed"
        assert got != "Any", f"{want} was expected, Any was revealed"


def test_mistakes_that_type_checkers_find(root: Path, tmp_path: Path) -> None:
    said = mypy(root, tmp_path / "wrong.py", WRONG)
    lines = {int(m[1]) for m in (re.search(r"wrong\.py:(\d+): error", line) for line in said) if m}
    wanted = set(range(3, 3 + WRONG.count("jh.")))
    assert wanted <= lines, f"mypy must object to lines {sorted(wanted - lines)}:\n" + "\n".join(said)


@pytest.mark.parametrize("module", ["jemhooks", "jemhooks.registrars"])
def test_package_says_that_it_is_typed(module: str) -> None:
    from importlib.resources import files

    assert (files("jemhooks") / "py.typed").is_file(), "without py.typed nobody sees the types"
    assert (files("jemhooks") / "_ffi.pyi").is_file()


def test_stub_of_the_native_module_is_complete(root: Path) -> None:
    """Every function of cdef.h that the package calls is in the stub, and the stub has none that is not there."""
    from jemhooks._native import lib

    stub = (root / "jemhooks" / "_ffi.pyi").read_text()
    named = set(re.findall(r"^    (?:def )?(j\w+)[(:]", stub, re.M))
    there = {name for name in dir(lib) if name.startswith("j")}
    assert named <= there, f"the stub has functions that do not exist: {named - there}"
    used = set()
    for path in (root / "jemhooks").rglob("*.py"):
        used |= set(re.findall(r"\blib\.(j\w+)", path.read_text()))
    assert used <= named, f"used, but not in the stub: {used - named}"
