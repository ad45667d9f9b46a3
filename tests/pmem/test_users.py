"""Memory of one process in another, where that takes a privileged user or huge pages: a host may lack them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import jemhooks as jh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
pytest.register_assert_rewrite("ipc_peer", "test_ipc", "test_ipc_limits")
from ipc_peer import (  # noqa: E402, F401
    arena_fixture,
    nothing_mapped_fixture,
    peer_fixture,
    peers_fixture,
    zygote_fixture,
)
from test_ipc import huge_pages_fixture, test_the_same_bytes_everywhere  # noqa: E402, F401
from test_ipc_limits import (  # noqa: E402, F401
    test_a_process_without_the_capability,
    test_an_exporter_that_may_not_be_looked_at,
    test_another_user,
)


@pytest.fixture
def provider(huge_pages: bool) -> jh.Provider:
    assert huge_pages, "root may have the kernel lend them"
    return jh.Memfd(hugetlb="2MiB")
