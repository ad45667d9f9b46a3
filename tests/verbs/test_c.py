"""The C program tests/c/verbs.c: as it is, and with a rule of the hook contract broken on purpose, to be noticed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

BUILD = Path(__file__).resolve().parents[2] / "build" / "verbs"


def run(*args: str, program: str = "test_verbs", **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BUILD / program), *args],
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
        env={**os.environ, **variables},
    )


@pytest.mark.parametrize(
    ("transfers", "variables"),
    [
        (2500, {"MALLOC_CONF": "retain:true"}),
        (500, {"MALLOC_CONF": "retain:false", "RDMAV_FORK_SAFE": "1", "RDMAV_HUGEPAGES_SAFE": "1"}),
    ],
)
def test_as_it_is(transfers: int, variables: dict[str, str], soak: int) -> None:
    """Of the storm, by each of two threads: 5,000 in all, or 100,000 in the soak."""
    done = run(f"transfers={transfers * soak}", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cases=3 ok" in done.stdout, done.stdout


def test_under_a_budget(soak: int) -> None:
    """5,000 transfers (soak: 100,000) while regions are evicted all the time; the kernel counts what is pinned."""
    done = run("case=storm", "limit=12", f"transfers={2500 * soak}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cases=1 ok" in done.stdout, done.stdout


def test_a_fault_is_noticed() -> None:
    """Were pages dropped under a registration, the device and the CPU would see different bytes."""
    done = run("case=storm", "transfers=3000", JEMHOOKS_FAULT="decommit_drops")
    assert done.returncode != 0, f"it went unnoticed: {done.stdout}"
    assert "VIOLATED stale" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("told", [1, 0])
def test_libfabrics_cache_keeps_nothing_stale(told: int) -> None:
    """Beside a monitor that does not see us it does, which shows that the test can see it."""
    done = run("case=cached", f"told={told}", program="test_fabric_cache")
    if told:
        assert done.returncode == 0, done.stdout + done.stderr
    else:
        assert "VIOLATED stale" in done.stdout, done.stdout + done.stderr
        assert "setup" not in done.stdout, done.stdout


@pytest.mark.parametrize("case", ["foreign", "late", "disabled"])
def test_libfabrics_cache_and_others(case: str) -> None:
    done = run(f"case={case}", program="test_fabric_cache")
    assert done.returncode == 0, done.stdout + done.stderr
