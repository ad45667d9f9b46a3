"""A jemhooks that plain CMake has installed into a prefix, and the commands around it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LEAN = ("-DJEMHOOKS_FABRIC=off", "-DJEMHOOKS_URING=off", "-DJEMHOOKS_UCX=off", "-DJEMHOOKS_VERBS=off")


def call(*command: str | Path, ok: bool = True, cwd: Path | None = None, **variables: str) -> str:
    """The output of a command that must succeed (or, ok=False, fail)."""
    done = subprocess.run(
        [str(c) for c in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
        cwd=cwd,
        env={**os.environ, **variables},
    )
    assert (done.returncode == 0) == ok, f"{command}: {done.returncode}\n{done.stdout[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module", name="prefix")
def prefix_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a jemhooks with no registrar but null is installed. It has been moved since, as packages are."""
    home = tmp_path_factory.mktemp("install")
    call("cmake", "-G", "Ninja", "-S", ROOT / "csrc", "-B", home / "b", f"-DCMAKE_INSTALL_PREFIX={home / 'p'}", *LEAN)
    call("cmake", "--build", home / "b")
    call("cmake", "--install", home / "b", "--prefix", home / "first")
    call("cmake", "--install", home / "b")
    shutil.move(home / "first", home / "moved")
    return home / "moved"
