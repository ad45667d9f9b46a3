"""The examples run, and say what went wrong where something does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Python

pytestmark = pytest.mark.fabric


def rma(python: Python, root: Path, *args: str, **more: Any) -> Any:
    script = str(root / "examples" / "fabric_rma.py")
    return python.run(None, script, *args, **{"options": (), "bare": True, "timeout": 120, **more})


@pytest.mark.parametrize(
    ("provider", "policy"),
    [("tcp", "eager"), ("sockets", "eager"), ("tcp", "lazy"), ("sockets", "lazy")],
)
def test_fabric_rma(python: Python, root: Path, provider: str, policy: str) -> None:
    done = rma(python, root, "--provider", provider, "--policy", policy, "--size", "300000", "--count", "120")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"provider +\S*{provider}", done.stdout), done.stdout
    assert "transfers       240 (" in done.stdout, done.stdout
    assert "every byte checked: 0 wrong" in done.stdout, done.stdout
    there = re.search(r"registrations +(\d+) at the target", done.stdout)
    assert there, done.stdout
    assert 0 < int(there[1]) <= 20, "registrations are per region, not per transfer"


@pytest.mark.parametrize("provider", ["nonsense", "verbs"])
def test_a_bad_provider(python: Python, root: Path, provider: str) -> None:
    done = rma(python, root, "--provider", provider)
    assert done.returncode == 1, f"a provider that cannot do this is a failure: {done.stdout}{done.stderr}"
    ours = [line for line in done.stderr.splitlines() if line.startswith("fabric_rma: ")]
    assert len(ours) == 1, f"one clear line from the program itself:\n{done.stderr}"
    assert provider in ours[0], f"which names the provider: {ours[0]}"
    assert "Traceback" not in done.stderr, f"a wrong option is no reason for a traceback:\n{done.stderr}"


@pytest.mark.parametrize(
    "args", [("--size", "8"), ("--size", "x"), ("--count", "0"), ("--count", "-1"), ("--policy", "often"), ("extra",)]
)
def test_wrong_options(python: Python, root: Path, args: tuple[str, ...]) -> None:
    done = rma(python, root, *args)
    assert done.returncode == 2, f"{args}: {done.stderr}"
    assert "usage: fabric_rma.py" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_smallest(python: Python, root: Path) -> None:
    done = rma(python, root, "--size", "16", "--count", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 wrong" in done.stdout


def test_help(python: Python, root: Path) -> None:
    done = rma(python, root, "--help")
    assert done.returncode == 0, done.stderr
    assert "--provider" in done.stdout


def test_shared_kv(python: Python, root: Path) -> None:
    script = str(root / "examples" / "shared_kv.py")
    done = python.run(None, script, "--readers", "3", "--arrays", "20", "--size", "300000", options=(), bare=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"reader \d+: 20 arrays, 6000000 bytes, in \d mapped regions; all checked", done.stdout)) == 3
    assert "killed (-9)" in done.stdout, "one of them in the middle of it"
    assert "left behind: 0 descriptors, 0 bytes of shared memory" in done.stdout, done.stdout
    wrong = python.run(None, script, "--readers", "0", options=(), bare=True)
    assert (wrong.returncode, "at least 1" in wrong.stderr) == (2, True), wrong.stderr
