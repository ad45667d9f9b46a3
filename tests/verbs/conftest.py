"""What the tests in the guest share. They need the Soft-RoCE devices rxe0 and rxe1:

ci/vm python -m pytest tests/verbs
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEVICES = ("rxe0", "rxe1")
sys.path.insert(0, str(ROOT / "examples"))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Nothing here may be skipped for want of a device."""
    absent = [d for d in DEVICES if not Path("/sys/class/infiniband", d).exists()]
    if absent:
        pytest.exit(f"no device {', '.join(absent)}; run `ci/vm python -m pytest tests/verbs`", returncode=4)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):  # all items of the run come here
            item.add_marker(pytest.mark.verbs)


@pytest.fixture(scope="session")
def devices() -> Iterator[tuple[Any, Any]]:
    """Both, opened by pyverbs, each with a protection domain: what a Python user brings along."""
    from verbs_rc import Device

    opened = tuple(Device(name) for name in DEVICES)
    yield opened
    for device in opened:
        device.close()


@pytest.fixture
def device(devices: tuple[Any, Any]) -> Any:
    return devices[0]


class Loop:
    """Two queue pairs of one device, connected to each other; `here` initiates. Renewed after a failed transfer."""

    def __init__(self, device: Any, **how: int) -> None:
        from verbs_rc import QueuePair

        self.here, self.there = QueuePair(device), QueuePair(device)
        self.here.connect(self.there.address(), **how)
        self.there.connect(self.here.address(), **how)

    def close(self) -> None:
        self.here.close()
        self.there.close()


@pytest.fixture
def loop() -> Iterator[Callable[..., Any]]:
    """A function: a new :class:`Loop` on a device, closed at the end."""
    made: list[Loop] = []

    def make(device: Any, **how: int) -> Loop:
        made.append(Loop(device, **how))
        return made[-1]

    yield make
    for one in made:
        one.close()


def mr_count(pid: int | None = None) -> int:
    """How many MRs the kernel holds, of one process (this one)."""
    found = subprocess.run(["rdma", "-j", "resource", "show", "mr"], capture_output=True, text=True, check=True).stdout
    return sum(mr.get("pid") == (pid or os.getpid()) for mr in json.loads(found or "[]"))


@pytest.fixture(scope="session")
def mrs() -> Callable[..., int]:
    return mr_count
