"""C++ libraries in a process that loaded libjemalloc privately keep their own memory: whoever is loaded first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = r"""
#include <sstream>
#include <string>
extern "C" long work(int n) { // memory that libstdc++ allocates inside and inlined code frees, and the other way round
    long sum = 0;
    for (int i = 1; i < n; i++) {
        std::string s;
        for (int k = 0; k < i; k++) s += "abc";
        std::ostringstream o;
        o << s << i;
        sum += (long)o.str().size();
    }
    return sum;
}
"""
PROGRAM = """
import ctypes, sys
load = lambda: ctypes.CDLL(sys.argv[1]).work(200)
def jemhooks():
    import jemhooks._native  # before numpy, which would load libstdc++ first
    import jemhooks as jh
    with jh.Null() as null, jh.Arena(null) as arena:
        jh.key(arena.empty(1000))
    return 60189
for step in {order}:
    assert step() == 60189, step
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cxx")
    (folder / "work.cc").write_text(SOURCE)
    subprocess.run(
        ["g++", "-O1", "-shared", "-fPIC", "-o", folder / "work.so", folder / "work.cc"], check=True, timeout=120
    )
    return folder / "work.so"


@pytest.mark.parametrize("order", ["[jemhooks, load]", "[load, jemhooks, load]", "[jemhooks, load, jemhooks]"])
def test_cxx_memory_is_its_own(library: Path, order: str) -> None:
    command = [sys.executable, "-c", PROGRAM.format(order=order), library]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, f"a C++ library crashed beside a private libjemalloc: {run.returncode} {run.stderr}"
