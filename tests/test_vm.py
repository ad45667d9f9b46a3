"""ci/vm: what it says and returns when it cannot do what is asked. That it can, the tests in the guest show."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.verbs


def vm(root: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(root / "ci" / "vm"), *args], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("--timeout", "5"),
        ("--timeout", "x", "true"),
        ("--boot-timeout", "0", "true"),
        ("--hosts", "3", "true"),
        ("--hosts", "2", "true"),
        ("--hosts",),
        ("--pmem",),
        ("--pmem", "--hosts", "2", "true", "--", "true"),
    ],
)
def test_usage(root: Path, args: tuple[str, ...]) -> None:
    done = vm(root, *args)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "ci/vm [--timeout SECONDS] [--boot-timeout SECONDS] [--pmem] COMMAND" in done.stderr


def guests() -> set[str]:
    return {p.name for p in Path("/proc").iterdir() if p.name.isdigit() and _is_guest(p)}


def _is_guest(process: Path) -> bool:
    try:
        return b"qemu-system" in (process / "cmdline").read_bytes()
    except OSError:
        return False


def test_a_guest_that_does_not_come_up_is_a_failure(root: Path) -> None:
    before = guests()
    done = vm(root, "--timeout", "2", "true")
    assert done.returncode == 125, "not that of a command, and never 0"
    assert "host 1 took more than 2 s" in done.stderr
    assert "did not come up, or died; its console:" in done.stderr
    assert guests() <= before, "no guest is left behind"


def test_a_guest_that_is_slow_to_come_up_is_booted_anew(root: Path) -> None:
    before = guests()
    done = vm(root, "--timeout", "60", "--boot-timeout", "1", "true")
    assert done.returncode == 125
    assert re.findall(r"was not up after 1 s \(boot (\d) of 3\)", done.stderr) == ["1", "2", "3"], done.stderr
    assert guests() <= before, "no guest is left behind"
