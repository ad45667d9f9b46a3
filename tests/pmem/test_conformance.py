"""The conformance suite over persistent memory: a dax device, files with dax; and over ext4 for comparison."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
pytest.register_assert_rewrite("conformance", "conformance_ends", "kinds")
from conformance import *  # noqa: E402, F403
from kinds import Kind, MiB  # noqa: E402

SOAK = os.environ.get("JEMHOOKS_SOAK") == "1"

# The guest is emulated: fewer rounds. `limit`: the device's size, and what files may take of their file system.
KINDS = [Kind("ext4", "jh.File(place)", "/run/ext4", limit=64 * MiB, hurry=5)]
BOUNDED = [
    Kind("devdax", "jh.DevDax('/dev/dax0.0')", limit=124 * MiB, hurry=5),
    Kind("devdax, shared", "jh.DevDax('/dev/dax0.0', shared=True)", limit=124 * MiB, hurry=5),
]
if SOAK:  # half an hour: with MAP_SYNC, each first touch of a page is a commit of the journal
    KINDS.append(Kind("fsdax", "jh.File(place)", "/run/fsdax", limit=80 * MiB, hurry=10))
    BOUNDED.append(Kind("file on fsdax", "jh.File(f'{place}/file', size)", "/run/fsdax", hurry=10))


@pytest.fixture(params=KINDS + BOUNDED, ids=lambda kind: kind.name)
def provider_kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind


@pytest.fixture(params=BOUNDED, ids=lambda kind: kind.name)
def bounded_kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind
