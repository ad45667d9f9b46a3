"""Leases: a region stays registered as long as one is held."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

import jemhooks as jh

pytestmark = pytest.mark.null


@pytest.fixture
def arena(null: jh.Null) -> Iterator[jh.Arena]:
    with jh.Arena(null) as a:
        yield a


def test_lease_registers_and_gives_the_key(arena: jh.Arena) -> None:
    a = arena.zeros(10)
    with jh.lease(a) as key:
        assert key == jh.key(a), "the lease's key is the key"
        assert jh.region(a).leases == 1
        with jh.lease(a), jh.lease(a[2:5]) as part:
            assert part.length == 24, "the key of the part"
            assert jh.region(a).leases == 3, "leases are counted"
    assert jh.region(a).leases == 0
    assert jh.region(a).state is jh.State.REGISTERED, "the end of a lease does not deregister"
    del a


def test_lease_keeps_memory_and_registration(arena: jh.Arena, null: jh.Null) -> None:
    a = arena.full(10, 5.0)
    lease = jh.lease(a)
    del a
    assert arena.stats().current_count == 1, "a lease on an object keeps the object"
    assert arena.trim() == 0, "a leased region is not deregistered"
    lease.release()
    assert arena.stats().current_count == 0, "and lets go of it"
    assert arena.trim() > 0
    assert null.stats().live == 0


def test_lease_on_an_address_keeps_the_registration_only(arena: jh.Arena, null: jh.Null) -> None:
    block = arena.block(8)
    lease = jh.lease(block.address)
    del block
    assert arena.stats().current_count == 0, "an integer keeps nothing"
    assert arena.trim() == 0, "but its region stays registered"
    assert null.stats().live == 1
    lease.release()
    assert arena.trim() > 0
    assert null.stats().live == 0


def test_use_after_release(arena: jh.Arena) -> None:
    lease = jh.lease(arena.zeros(4))
    lease.release()
    with pytest.raises(jh.ClosedError, match="has been released already"):
        lease.release()
    with pytest.raises(jh.ClosedError, match="take a new one"), lease:
        pass
    other = jh.lease(arena.zeros(4))
    with other:
        other.release()  # within its own with: the end of it does nothing more
    assert arena.regions()["leases"].sum() == 0, "no release may end someone else's lease"


def test_a_lease_ends_with_an_exception(arena: jh.Arena) -> None:
    a = arena.zeros(4)
    with pytest.raises(ZeroDivisionError), jh.lease(a):
        raise ZeroDivisionError
    assert jh.region(a).leases == 0
    del a


def test_forgotten_lease(arena: jh.Arena, null: jh.Null) -> None:
    lease = jh.lease(arena.zeros(4))
    with pytest.warns(ResourceWarning, match=r"the lease on 0x[0-9a-f]+ was not released"):
        del lease
    assert arena.regions()["leases"].sum() == 0, "it is released all the same"
    assert arena.trim() > 0


@pytest.mark.filterwarnings("error::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_forgotten_lease_where_warnings_are_errors(arena: jh.Arena) -> None:
    lease = jh.lease(arena.zeros(4))
    del lease
    gc.collect()
    assert arena.regions()["leases"].sum() == 0, "a warning that raises must not keep the lease for good"


def test_refused_lease_holds_nothing() -> None:
    with jh.Null() as null, jh.Arena(null) as arena:
        a = arena.zeros(4)
        null.fail("register", error=5)
        with pytest.raises(jh.RegistrationError, match="errno 5") as e:
            jh.lease(a)
        assert e.value.errno == 5
        assert jh.region(a).leases == 0
        assert jh.region(a).state is jh.State.MAPPED
        with jh.lease(a):
            assert jh.region(a).leases == 1, "the next one works"
        del a, e


def test_close_with_leases_finishes_with_the_last(null: jh.Null) -> None:
    """A closed arena lives on until its last block, array, lease and region is gone."""
    for by_address in (False, True):
        arena = jh.Arena(null)
        block = arena.block(8)
        leases = [jh.lease(block.address if by_address else block) for _ in range(3)]
        del block
        arena.close()
        assert null.stats().live == 1, f"by_address={by_address}: leased, so still registered"
        for lease in leases:
            lease.release()
        del lease, leases
        gc.collect()
        assert null.stats().live == 0, f"by_address={by_address}: the last lease's end finishes the arena"


def test_leases_from_many_threads(arena: jh.Arena, soak: int) -> None:
    a = arena.zeros(4)
    failures: list[BaseException] = []
    begin = threading.Barrier(6)

    def work() -> None:
        try:
            begin.wait(20)
            for _ in range(300 * soak):
                with jh.lease(a) as key:
                    assert key.rkey == jh.rkey(a)
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not failures, failures
    assert jh.region(a).leases == 0, "as many releases as leases"
    assert arena.stats().registrations == 1


def test_trim_beside_leases_and_frees(arena: jh.Arena, null: jh.Null, soak: int) -> None:
    """Whatever trim() does meanwhile, a held lease means a registered region and a right key."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def trimmer() -> None:
        while not stop.is_set():
            arena.trim()

    def user() -> None:
        try:
            for i in range(100 * soak):
                a = arena.full(1000, i)
                with jh.lease(a) as key:
                    home = jh.region(a)
                    assert home.state is jh.State.REGISTERED, "a lease promises it"
                    assert home.rkey == key.rkey
                    assert (a == i).all(), "trim() touched live memory"
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=user) for _ in range(3)]
    other = threading.Thread(target=trimmer)
    other.start()
    for t in threads:
        t.start()
    for t in threads:
        t.join(100)
    stop.set()
    other.join(20)
    assert not failures, failures[0]
    arena.trim()
    assert null.stats().errors == 0


def test_release_twice_at_the_same_time(arena: jh.Arena) -> None:
    """Two threads that release one lease: one succeeds, and a third party's lease stays."""
    a = arena.zeros(4)
    for _ in range(200):
        lease = jh.lease(a)
        with jh.lease(a):
            begin, outcomes = threading.Barrier(2), []

            def work(lease: jh.Lease = lease, begin: threading.Barrier = begin, outcomes: list[str] = outcomes) -> None:
                begin.wait(10)
                try:
                    lease.release()
                    outcomes.append("released")
                except jh.ClosedError:
                    outcomes.append("was released")

            threads = [threading.Thread(target=work) for _ in range(2)]
            for t in threads:
                t.start()
            for t in threads:
                t.join(10)
            assert sorted(outcomes) == ["released", "was released"]
            assert jh.region(a).leases == 1, "the other lease must not be ended"
