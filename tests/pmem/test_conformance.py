"""The conformance suite over a dax device, files with dax, ext4, and huge pages, which a host may lack."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
pytest.register_assert_rewrite("conformance", "conformance_ends", "kinds")
from conformance import *  # noqa: E402, F403
from kinds import SIZE, Kind, MiB  # noqa: E402

# The guest is emulated: fewer rounds, and not all tests of all kinds (conftest.py). `limit`: the device's size, and
# what files may take of their file system.
KINDS = [
    Kind("fsdax", "jh.File(place)", "/run/fsdax", limit=80 * MiB, hurry=5),
    Kind("ext4", "jh.File(place)", "/run/ext4", limit=64 * MiB, hurry=5),
]
BOUNDED = [
    Kind("devdax", "jh.DevDax('/dev/dax0.0')", limit=124 * MiB, hurry=5),
    Kind("devdax, shared", "jh.DevDax('/dev/dax0.0', shared=True)", limit=124 * MiB, hurry=5),
    Kind("memfd of huge pages", "jh.Memfd(hugetlb='2MiB')", limit=SIZE, hurry=5),
    Kind("file on fsdax", "jh.File(f'{place}/file', size)", "/run/fsdax", hurry=40),
]


@pytest.fixture(scope="module", autouse=True)
def huge_pages() -> Iterator[None]:
    reserved = Path("/proc/sys/vm/nr_hugepages")
    reserved.write_text(str(SIZE >> 21))
    assert int(reserved.read_text()) == SIZE >> 21, "the guest has memory enough"
    yield
    reserved.write_text("0")


@pytest.fixture(params=KINDS + BOUNDED, ids=lambda kind: kind.name)
def provider_kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind


@pytest.fixture(params=BOUNDED, ids=lambda kind: kind.name)
def bounded_kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind
