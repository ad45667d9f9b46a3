"""Regions made ready ahead of their use, and what peers with an old key find: zero_on_free and rotate_keys."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import jemhooks as jh
from jemhooks import State

if TYPE_CHECKING:
    from conftest import Python

pytestmark = pytest.mark.null


def fresh(arena: jh.Arena) -> bool:
    table = arena.regions()
    return bool(((table["state"] == State.REGISTERED) & (table["committed"] == 0)).any())


def test_a_region_is_ready_before_the_first_block(null: jh.Null) -> None:
    with jh.Arena(null, policy="eager", prepare="ahead") as arena:
        arena.wait_ready()
        assert fresh(arena), "no region was made ready"
        before = null.stats().registers
        block = arena.block("1MiB")
        assert jh.region(block).state is State.REGISTERED
        assert jh.key(block).length == 1 << 20
        assert null.stats().registers - before <= 1, "the allocation registered, beside the arena's thread"


def test_close_with_blocks_alive(null: jh.Null) -> None:
    arena = jh.Arena(null, policy="eager", prepare="ahead")
    array = arena.full(1000, 3.0)
    arena.close()
    assert array.sum() == 3000.0
    del array  # the last block: the thread ends and the arena goes, here


@pytest.mark.parametrize("how", ["sys.exit(0)", "os._exit(0)", "arena.close()", "del arena"])
def test_the_interpreter_ends(python: Python, how: str) -> None:
    warned = how != "arena.close()" and how != "os._exit(0)"
    options = ("-W", "ignore::ResourceWarning" if warned else "error", "-X", "faulthandler")
    python.check(
        f"""
        import os, sys
        import jemhooks as jh
        arena = jh.Arena(jh.Null(), policy="eager", prepare="ahead")
        array = arena.full(100_000, 1.0)
        {how}
        """,
        options=options,
    )


def test_fork_with_a_thread_at_work(python: Python, soak: int) -> None:
    """The child has no such thread, may make one, and exits; the parent's goes on."""
    python.check(
        f"""
        import os
        import jemhooks as jh
        null = jh.Null()
        arena = jh.Arena(null, policy="eager", prepare="ahead", region_max="4MiB")
        blocks = []
        for i in range({30 * soak}):
            blocks.append(arena.block("700KiB"))
            pid = os.fork()
            if not pid:
                with jh.Null() as own, jh.Arena(own, policy="eager", prepare="ahead") as fresh:
                    fresh.full(1000, 1.0)
                del blocks
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            if len(blocks) > 20:
                blocks.clear()
        del blocks
        arena.close()
        null.close()
        """,
        timeout=120 * soak,
    )


def test_nothing_is_registered_ahead_after_a_revoke(null: jh.Null) -> None:
    """What ends registrations for good, as the end of a protection domain, must not be undone by the thread."""
    with jh.Arena(null, policy="eager", prepare="ahead", region_max="2MiB", idle_ttl=0.1) as arena:
        for _ in range(20):
            arena.wait_ready()
            assert fresh(arena)
            arena._revoke()
            before = null.stats().registers
            assert null.stats().live == 0
            for _ in range(200):
                assert null.stats().registers == before, "a region was registered again, though nothing was used"
        arena.trim()
        arena.wait_ready()
        assert fresh(arena), "after a trim nothing is made ready any more"


def test_a_failure_ahead_is_made_good() -> None:
    with jh.Null(fail_at=1) as null, jh.Arena(null, policy="eager", prepare="ahead", region_max="2MiB") as arena:
        arena.wait_ready()
        arena.wait_ready()
        assert fresh(arena), "one failure, and no region is made ready any more"
        stats = arena.stats()
        assert (stats.registrations, stats.registration_failures, stats.regions) == (1, 1, 1)
        arena.block(100)
        assert arena.stats().hits == 0, "the first use of a prepared region is no hit"


def test_registrars_in_python_are_refused() -> None:
    class Mine(jh.Registrar):
        name = "mine"

        def register(self, addr: int, length: int, access: jh.Access) -> tuple[int, int, object]:
            return 1, 1, None

        def deregister(self, handle: Any) -> None: ...

    with pytest.raises(jh.ConfigError, match="mine runs only on the threads that call"):
        jh.Arena(Mine(), prepare="ahead")
    with pytest.raises(jh.ConfigError, match="mine is not called when something is freed"):
        jh.Arena(Mine(), rotate_keys=True)


def test_pinned_ahead_within_the_budget() -> None:
    with jh.Uring() as uring, jh.Arena(uring, policy="eager", prepare="ahead", pin_limit="16MiB") as arena:
        arena.wait_ready()
        assert fresh(arena), "no region was made ready"
        blocks: list[Any] = []

        def fill() -> None:
            while True:
                blocks.append(arena.full(100_000, 1.0))

        with pytest.raises(jh.PinLimitError):
            fill()
        assert arena.budget.peak <= 16 << 20
        assert all(block.sum() == 100_000 for block in blocks)
        blocks.clear()
        arena.trim()
        arena.full(10, 1.0)


# ---- what is left of freed blocks ------------------------------------------------------------------------------------


def bytes_at(address: int, nbytes: int) -> Any:
    """As a peer with the region's key would read them."""
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), "u1").copy()


@pytest.mark.parametrize("nbytes", [100, 5000, 100_000, 3 << 20])
@pytest.mark.parametrize("zero_on_free", ["eager", "lazy"])
def test_freed_bytes(null: jh.Null, nbytes: int, zero_on_free: Any) -> None:
    """Lazy shows that the test can see them at all."""
    with jh.Arena(null, zero_on_free=zero_on_free, dirty_decay_ms=-1) as arena:
        kept = arena.block(100)  # so that the region stays registered
        block = arena.block(nbytes)
        ctypes.memset(block.address, 0xAA, nbytes)
        address = block.address
        jh.key(block)
        del block
        left = int((bytes_at(address, nbytes) == 0xAA).sum())
        assert jh.key(kept).length
    if zero_on_free == "eager":
        assert left == 0, f"{left} of {nbytes} bytes can be read after they were freed"
    else:
        assert left > nbytes // 2, "a freed block was cleared, so this test sees nothing"


def test_zero_on_free_needs_memory_that_the_host_can_touch() -> None:
    device = jh.Fixed(0x7F00_0000_0000, 1 << 21, host_accessible=False)
    with pytest.raises(jh.ConfigError, match="zero_on_free"):
        jh.Arena(provider=device, zero_on_free="eager")


def test_keys_end_with_their_data(null: jh.Null) -> None:
    with jh.Arena(null, rotate_keys=True) as arena:
        seen = set()
        for _ in range(3):
            block = arena.block(100)
            seen.add(jh.key(block).rkey)
            del block
        assert len(seen) == 3, "an old key reaches the next small block"
        block = arena.block("1MiB")
        first = jh.key(block)
        assert null.stats().live == 1
        del block
        assert null.stats().live == 0, "the region of a freed block is still registered"
        block = arena.block("1MiB")
        assert jh.key(block).rkey != first.rkey, "an old key reaches new data"
        with jh.lease(block.address):
            del block
            assert null.stats().live == 1, "a lease does not hold"
        assert null.stats().live == 0, "the region of an ended lease is still registered"


@pytest.mark.parametrize(
    "wrong", [{"prepare": "now"}, {"zero_on_free": True}, {"prepare": None}, {"rotate_keys": "no"}]
)
def test_bad_arguments(null: jh.Null, wrong: dict[str, Any]) -> None:
    with pytest.raises(jh.ConfigError, match=next(iter(wrong))):
        jh.Arena(null, **wrong)
