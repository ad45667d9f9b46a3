"""What the tests of persistent memory share. They need the dax device and the file systems of the guest:

ci/vm --pmem python -m pytest tests/pmem
"""

from __future__ import annotations

import gc
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
DAX, FSDAX, EXT4 = "/dev/dax0.0", Path("/run/fsdax"), Path("/run/ext4")
sys.path.insert(0, str(HERE.parents[1] / "examples"))


def _absent() -> Iterator[str]:
    if not (os.path.exists(DAX) and stat.S_ISCHR(os.stat(DAX).st_mode)):
        yield f"dax device {DAX}"
    mounts = {fields[1]: fields[2:4] for fields in map(str.split, Path("/proc/mounts").read_text().splitlines())}
    for place, dax in ((FSDAX, True), (EXT4, False)):
        kind, options = mounts.get(str(place), ("", ""))
        if kind != "ext4" or ("dax=always" in options.split(",")) != dax:
            yield f"ext4 {'with' if dax else 'without'} dax at {place}"


def pytest_sessionstart(session: pytest.Session) -> None:
    """Nothing here may be skipped for want of a device."""
    absent = list(_absent())
    if absent:
        pytest.exit(f"no {', no '.join(absent)}; run `ci/vm --pmem python -m pytest tests/pmem`", returncode=4)


# The guest is emulated, and under MAP_SYNC the first touch of a page commits the journal: of all kinds but the device
# itself these tests of the conformance suite run, and all of them in the soak.
QUICK = {
    "fsdax": ("test_blocks_are_apart", "test_free_pages_are_given_back"),
    "ext4": ("test_blocks_are_apart", "test_free_pages_are_given_back"),
    "devdax, shared": ("test_blocks_are_apart", "test_generations_of_arenas_lose_nothing"),
    "file on fsdax": (),
    "memfd of huge pages": ("test_free_pages_are_given_back", "test_small_memory_can_be_used_to_the_end"),
}


def _takes_long(item: pytest.Item) -> bool:
    test, _, kind = item.name.rstrip("]").partition("[")
    if item.path.name == "test_conformance.py":
        return kind in QUICK and test not in QUICK[kind]
    quick = test == "test_what_is_refused_takes_no_room" or (
        test == "test_full_and_filled_by_others" and "file" not in kind
    )
    return item.path.name == "test_full_disks.py" and not quick


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):  # all items of the run come here
            item.add_marker(pytest.mark.pmem)
    if os.environ.get("JEMHOOKS_SOAK") == "1":
        return
    later = [item for item in items if item.path.is_relative_to(HERE) and _takes_long(item)]
    config.hook.pytest_deselected(items=later)
    items[:] = [item for item in items if item not in later]


@pytest.fixture(scope="session")
def python(python: Any) -> Any:
    """The same, with more patience: the guest is emulated."""

    class Patient(type(python)):  # type: ignore[misc]
        def run(self, *args: Any, timeout: float = 900.0, **more: Any) -> Any:
            return super().run(*args, timeout=timeout, **more)

    return Patient()


@pytest.fixture
def dax() -> str:
    return DAX


def _emptied(place: Path) -> Iterator[Path]:
    """A file system in which the test may leave nothing."""
    yield place
    gc.collect()
    left = sorted(p.name for p in place.iterdir() if p.name != "lost+found")
    assert not left, f"the test left {left} in {place}"


@pytest.fixture
def fsdax() -> Iterator[Path]:
    yield from _emptied(FSDAX)


@pytest.fixture(params=[FSDAX, EXT4], ids=["fsdax", "ext4"])
def place(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Both file systems, one after the other."""
    yield from _emptied(request.param)


def pinned() -> int:
    """Bytes that devices may reach for long, as the kernel counts them."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmPin:")[1].split()[0])


@pytest.fixture(scope="session")
def pins() -> object:
    return pinned
