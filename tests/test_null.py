"""The registrar that registers nothing: its log, its limits, its failures on demand."""

from __future__ import annotations

import errno
import gc

import pytest

import jemhooks as jh

pytestmark = pytest.mark.null
MiB = 1 << 20


def test_counts_and_log() -> None:
    with jh.Null() as null:
        with jh.Arena(null, access="remote_read", region_max="2MiB") as arena:
            blocks = [arena.block("1MiB") for _ in range(4)]
            keys = [jh.key(b) for b in blocks]
            stats = null.stats()
            assert stats.live == stats.registers == arena.stats().regions == 4
            assert stats.live_bytes == arena.stats().registered
            del blocks
        stats = null.stats()
        assert (stats.registers, stats.deregisters, stats.live, stats.live_bytes) == (4, 4, 0, 0), "all ended"
        assert (stats.live_peak, stats.errors) == (4, 0)
        calls = null.calls()
        assert calls["op"].tolist() == [1] * 4 + [2] * 4, "four registrations, four ends"
        assert calls["sequence"].tolist() == list(range(1, 9)), "counted from 1"
        assert calls["lkey"][:4].tolist() == [k.lkey for k in keys]
        assert sorted(calls["address"][:4]) == sorted(calls["address"][4:]), "what was registered was ended"
        assert set(calls["access"][:4].tolist()) == {2}, "remote_read"
        assert not calls["result"].any()


def test_log_keeps_the_latest() -> None:
    with jh.Null() as null, jh.Arena(null) as arena:
        for _ in range(2100):
            jh.key(arena.block(8))
            arena.trim()
        calls = null.calls()
        assert len(calls) == 4096, "the log is bounded"
        assert calls["sequence"].tolist() == list(range(105, 4201)), "and keeps the latest, oldest first"


def test_keys_are_never_reused() -> None:
    with jh.Null() as null, jh.Arena(null) as arena:
        seen = set()
        for _ in range(50):
            block = arena.block(8)
            seen |= {jh.lkey(block), jh.rkey(block)}
            del block
            arena.trim()
        assert len(seen) == 100, "a stale key must not open what came later"


def test_remote_offset() -> None:
    with jh.Null(remote_offset=True) as null, jh.Arena(null) as arena:
        a = arena.zeros(10)
        assert jh.key(a).addr == a.__array_interface__["data"][0] - jh.region(a).base, "peers count from the region"
        assert jh.region(a).remote_base == 0
        del a


@pytest.mark.parametrize("policy", ["lazy", "eager"])
@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EINVAL, errno.ENOSPC, 4095])
def test_fails_on_demand(policy: str, code: int) -> None:
    with jh.Null() as null, jh.Arena(null, policy=policy) as arena:  # type: ignore[arg-type]
        null.fail("register", nth=2, error=code)
        first = arena.block("3MiB")
        jh.key(first)
        kept: list[jh.Block] = []
        with pytest.raises(jh.RegistrationError) as e:  # noqa: PT012
            kept.append(arena.block("3MiB"))
            jh.key(kept[-1])
        assert e.value.errno == code, "the registrar's errno comes through"
        assert f"errno {code}" in str(e.value)
        assert len(kept) == (policy == "lazy"), "eager: a block that cannot be registered is not handed out"
        assert arena.stats().current_count == 1 + len(kept), "and does not leak"
        kept.append(arena.block("3MiB"))
        assert all(jh.key(b).length == 3 * MiB for b in [first, *kept]), "after it, everything works"
        assert null.stats().errors == 0
        del first, kept, e
        gc.collect()
        arena.trim()
        assert null.stats().live == 0


def test_fail_at_in_the_constructor_and_disarming() -> None:
    with jh.Null(fail_at=1, fail_errno=errno.EPERM) as null, jh.Arena(null) as arena:
        block = arena.block(8)
        with pytest.raises(jh.RegistrationError) as e:
            jh.key(block)
        assert e.value.errno == errno.EPERM
        null.fail("register")
        null.fail("register", 0)
        assert jh.key(block).lkey == 1, "0 disarms"


def test_max_mr() -> None:
    with jh.Null(max_mr=2) as null, jh.Arena(null, region_max="2MiB") as arena:
        null.budget.set(None)  # else it would not even be asked
        blocks = [arena.block("1536KiB") for _ in range(3)]
        jh.key(blocks[0])
        jh.key(blocks[1])
        with pytest.raises(jh.RegistrationError, match="exceeds max_mr 2") as e:
            jh.key(blocks[2])
        assert e.value.errno == errno.ENOSPC
        assert "trim" in str(e.value), "the remedy"
        del blocks[0], e
        gc.collect()
        assert arena.trim() > 0
        assert jh.key(blocks[-1]).length > 0, "room was made"
        assert null.stats().live == 2
        del blocks


def test_max_mr_size_bounds_regions() -> None:
    with jh.Null(max_mr_size="6MiB") as null, jh.Arena(null, region_max="64MiB") as arena:
        blocks = [arena.block("1MiB") for _ in range(50)]
        for b in blocks:
            jh.key(b)
        assert arena.regions()["length"].max() <= 6 * MiB, "no region may be larger than a registration can be"
        with pytest.raises(jh.AllocationError, match="at most 6291456 bytes"):
            arena.block("7MiB")
        assert null.calls()["length"].max() <= 6 * MiB
        del blocks


def test_all_rails_or_none(null: jh.Null) -> None:
    with jh.Null() as second, jh.Arena([null, second], name="twin") as arena:
        block = arena.block(8)
        second.fail("register", error=errno.EAGAIN)
        with pytest.raises(jh.RegistrationError, match="arena 'twin': null failed to register") as e:
            jh.key(block)
        assert e.value.errno == errno.EAGAIN
        assert (null.stats().live, second.stats().live) == (0, 0), "the first rail was undone"
        assert (null.stats().registers, null.stats().deregisters) == (1, 1)
        assert jh.region(block).state is jh.State.MAPPED
        assert jh.key(block, 1).lkey == 1, "the next try registers with both"
        assert (null.stats().live, second.stats().live) == (1, 1)
        del block, e
        gc.collect()
        arena.trim()
        assert (null.stats().live, second.stats().live) == (0, 0), "trim ends both"
        assert (null.stats().errors, second.stats().errors) == (0, 0)


def test_rail_that_can_neither_be_made_nor_undone() -> None:
    """The first rail's end fails after the second's registration did: an error, no crash, memory kept."""
    with jh.Null() as first, jh.Null() as second:
        arena = jh.Arena([first, second])
        block = arena.block(8)
        second.fail("register")
        first.fail("deregister", error=errno.EBUSY)
        with pytest.raises(jh.RegistrationError, match=r"failed to register 2097152 bytes .* errno 12"):
            jh.key(block)
        assert first.stats().live == 1, "it could not be undone"
        assert jh.region(block).state is jh.State.REGISTERED, "the region says what is true"
        assert jh.key(block, 1).rkey, "what was left out is registered when it is asked for"
        del block
        arena.close()
        assert first.stats().live == 0, "the end was tried again"
        assert first.stats().errors == second.stats().errors == 0


@pytest.mark.parametrize("code", [errno.EIO, errno.EBUSY, errno.ECHILD, errno.EINVAL])
def test_deregistration_that_fails(code: int) -> None:
    """Also with the numbers that the library itself uses for "not idle", "still in use" and "forked"."""
    from jemhooks._native import lib

    with jh.Null() as null:
        arena = jh.Arena(null, name="stuck")
        jh.key(arena.block(8))
        stranded = lib.jemhooks_stranded_bytes()
        null.fail("deregister", error=code)
        with pytest.raises(jh.RegistrationError, match=r"arena 'stuck': null failed to deregister 2097152 bytes") as e:
            arena.trim()
        assert e.value.errno == code
        assert null.stats().live == 1
        assert arena.regions()["state"].tolist() == [int(jh.State.REGISTERED)], "still registered, and said so"
        block = arena.full(4, 2.0)
        assert jh.key(block).lkey == 1, "the arena goes on; the key is still good"
        del block
        assert arena.trim() == 2 * MiB, "the next try succeeds"
        jh.key(arena.block(8))
        null.fail("deregister", error=code)
        with pytest.raises(jh.RegistrationError, match="stays registered and mapped") as f:
            arena.close()
        gone = errno.EIO if code in (errno.EBUSY, errno.ECHILD) else code  # those two would say that the arena is there
        assert f.value.errno == gone
        arena.close()
        assert lib.jemhooks_stranded_bytes() == stranded + 2 * MiB, "the region stays mapped for good, and is counted"
        with pytest.raises(jh.ClosedError):
            arena.block(8)
        where = int(null.calls()["address"][-1])
        with open("/proc/self/maps") as f2:
            assert any(int(r[0], 16) <= where < int(r[1], 16) for r in (li.split()[0].split("-") for li in f2)), (
                "a device may still write there, so it must not be unmapped"
            )
        with pytest.raises(jh.NotOursError):
            jh.region(where)


def test_stranded_fixed_memory_is_kept() -> None:
    """What a device may still write to must not be freed, whoever owns it."""
    import weakref

    import numpy as np

    with jh.Null() as null:
        memory = np.zeros(4 * MiB, "u1")
        alive = weakref.ref(memory)
        arena = jh.Arena(null, provider=jh.Fixed(memory))
        del memory
        jh.key(arena.block(8))
        null.fail("deregister")
        with pytest.raises(jh.RegistrationError):
            arena.close()
        del arena
        gc.collect()
        assert null.stats().live == 1
        assert alive() is not None, "the memory is still registered, and was given back to numpy"
