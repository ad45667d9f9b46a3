"""Arena, registrar, protection domain and context end in any order, by whatever means: no crash, no MR left."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("endings.py")
CASES = [
    f.name
    for f in ast.parse(PROGRAM.read_text()).body
    if isinstance(f, ast.FunctionDef) and any(isinstance(d, ast.Name) and d.id == "case" for d in f.decorator_list)
]


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[int, str]]:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(PROGRAM)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, done.stdout.splitlines())
    return {name: (status, said) for name, status, said in lines}


@pytest.mark.parametrize("case", CASES)
def test_ending(results: dict[str, tuple[int, str]], case: str) -> None:
    status, said = results[case]
    assert status == 0, f"ended with {status}\n{said}"
    assert not said, f"ended well, but complained\n{said}"


def test_there_are_cases() -> None:
    assert len(CASES) > 15
