"""Random use of two arenas under budgets, against a model of what must be registered and what must not."""

from __future__ import annotations

import errno
import gc
import os
import traceback
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

import jemhooks as jh

pytestmark = pytest.mark.null
SOAK = os.environ.get("JEMHOOKS_SOAK") == "1"
REGION = 2 << 20
LIMITS = st.sampled_from([None, 1, 2, 3, 5])  # in regions


class Policy(RuleBasedStateMachine):
    """Every region is of 2 MiB; the larger blocks have one to themselves."""

    blocks = Bundle("blocks")
    leases = Bundle("leases")

    @initialize(
        evict=st.sampled_from(["idle", "unleased"]),
        ttl=st.sampled_from([None, 0]),
        decay=st.sampled_from([0, -1]),
        own=LIMITS,
        all_=LIMITS,
        rails=st.integers(1, 2),
    )
    def open(self, evict: Any, ttl: float | None, decay: int, own: int | None, all_: int | None, rails: int) -> None:
        self.nulls = [jh.Null() for _ in range(rails)]
        self.events = jh.Events(kinds="register|deregister")
        self.told: set[tuple[str, int]] = set()  # which regions are registered, as far as subscribers know
        self.arenas = [
            jh.Arena(
                self.nulls,
                name=name,
                region_max="2MiB",
                dirty_decay_ms=decay,
                muzzy_decay_ms=decay,
                evict=evict,
                idle_ttl=ttl,
                max_regions=own if name == "a" else None,
            )
            for name in ("a", "b")
        ]
        self.evict, self.ttl, self.decay = evict, ttl, decay
        self.limits: dict[str, int | None] = {"a": own, "b": None, "all": None}
        if all_:
            self.set_limit("all", all_)
        self.live: dict[int, tuple[jh.Block, int]] = {}  # number -> block, which arena
        self.keyed: dict[int, int] = {}  # number -> generation of its region when its key was given
        self.held: dict[int, tuple[jh.Lease, int, int]] = {}  # number -> lease, address, generation
        self.number = 0

    def budgets(self, name: str) -> list[jh.Budget]:
        return [n.budget for n in self.nulls] if name == "all" else [self.arenas["ab".index(name)].budget]

    def tables(self) -> list[Any]:
        return [a.regions() for a in self.arenas]

    def in_use(self, name: str) -> int:
        """Registered regions of a budget that must stay."""
        count = 0
        for table in self.tables() if name == "all" else [self.tables()["ab".index(name)]]:
            held = table["leases"] > 0 if self.evict == "unleased" else (table["leases"] > 0) | (table["committed"] > 0)
            count += int(((table["state"] == 3) & held).sum())
        return count

    def refused(self, arena: int) -> None:
        """PinLimitError was right only if a budget is full of what must stay."""
        full = [n for n in ("ab"[arena], "all") if self.limits[n] is not None and self.in_use(n) >= self.limits[n]]
        assert full, f"there was room, or something to evict: {self.limits}"

    @rule(target=blocks, nbytes=st.sampled_from([100, 100_000, 1_500_000]), arena=st.integers(0, 1))
    def allocate(self, nbytes: int, arena: int) -> int:
        self.number += 1
        block = self.arenas[arena].block(nbytes)
        self.live[self.number] = block, arena
        block.memoryview()[:8] = self.number.to_bytes(8, "little")
        return self.number

    @rule(number=consumes(blocks))
    def free(self, number: int) -> None:
        block, arena = self.live.pop(number)
        assert bytes(block.memoryview()[:8]) == number.to_bytes(8, "little"), "contents changed"
        self.keyed.pop(number, None)
        base = jh.region(block).base
        del block
        home = next(r for r in self.tables()[arena] if r["base"] == base)
        if self.ttl == 0 and not home["committed"] and not home["leases"]:
            assert home["state"] == 1, "an idle region was to go at once"

    @rule(number=blocks)
    def key(self, number: int) -> None:
        block, arena = self.live[number]
        try:
            key = jh.key(block)
        except jh.PinLimitError:
            self.refused(arena)
            return
        home = jh.region(block)
        assert home.state is jh.State.REGISTERED
        assert key.generation == home.generation
        self.keyed[number] = key.generation

    @rule(target=leases, number=blocks)
    def lease(self, number: int) -> Any:
        block, arena = self.live[number]
        try:
            lease = jh.lease(block.address)
        except jh.PinLimitError:
            self.refused(arena)
            return multiple()
        self.number += 1
        self.held[self.number] = lease, block.address, jh.region(block).generation
        return self.number

    @rule(number=consumes(leases))
    def release(self, number: int) -> None:
        self.held.pop(number)[0].release()

    @rule(arena=st.integers(0, 1))
    def trim(self, arena: int) -> None:
        self.arenas[arena].trim()
        table = self.arenas[arena].regions()
        idle = (table["state"] == 3) & (table["committed"] == 0) & (table["leases"] == 0)
        assert not idle.any(), "trim leaves no idle region registered"

    @rule(name=st.sampled_from(["a", "b", "all"]), limit=LIMITS)
    def set_limit(self, name: str, limit: int | None) -> None:
        self.limits[name] = limit
        for budget in self.budgets(name):
            budget.set(None if limit is None else limit * REGION, limit)

    @rule(number=blocks, rail=st.integers(0, 1))
    def registrar_refuses(self, number: int, rail: int) -> None:
        block, arena = self.live[number]
        null = self.nulls[rail % len(self.nulls)]
        before = jh.region(block).state
        null.fail("register", error=errno.EPERM)  # no eviction helps
        try:
            jh.key(block)
        except jh.PinLimitError:
            self.refused(arena)
        except jh.RegistrationError:
            assert before is jh.State.MAPPED is jh.region(block).state, "half registered"
        else:
            assert before is jh.State.REGISTERED
        null.fail("register", 0)

    @rule(arena=st.integers(0, 1), rail=st.integers(0, 1))
    def registrar_keeps(self, arena: int, rail: int) -> None:
        """A deregistration fails: its region stays as it is."""
        null = self.nulls[rail % len(self.nulls)]
        null.fail("deregister")
        before = null.stats()
        try:
            self.arenas[arena].trim()
        except jh.RegistrationError:
            assert null.stats().live >= 1
            self.arenas[arena].trim()  # the other rail may have let go already
        else:
            assert null.stats().deregisters == before.deregisters, "a failure went unnoticed"
        null.fail("deregister", 0)

    @rule()
    def fork(self) -> None:
        pid = os.fork()
        if not pid:
            try:
                self._child()
            except BaseException as e:
                os.write(2, f"in a child: {e!r}\n".encode())
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    def _child(self) -> None:
        for arena in self.arenas:
            with pytest.raises(jh.ForkError):
                arena.block(100)
        for block, _ in self.live.values():
            with pytest.raises(jh.ForkError):
                jh.key(block)
        self.live.clear()
        with jh.Null() as null, jh.Arena(null, max_regions=1) as mine:
            assert jh.key(mine.block(100)).length > 0
            assert null.stats().live == 1

    @invariant()
    def what_must_be_registered(self) -> None:
        if not hasattr(self, "arenas"):
            return
        for lease, where, generation in self.held.values():
            assert jh.region(where).generation == generation, f"a leased region lost its registration: {lease}"
        if self.evict == "idle":
            for number, generation in self.keyed.items():
                assert jh.region(self.live[number][0]).generation == generation, "a live block lost its key"
        for name, limit in self.limits.items():
            for budget in self.budgets(name):
                assert limit is None or budget.regions <= max(limit, self.in_use(name)), f"beyond the limit of {name}"
        for event in self.events:
            (self.told.add if event.kind is jh.EventKind.REGISTER else self.told.remove)((event.arena, event.base))
        registered = {
            (arena.name, int(base))
            for arena, table in zip(self.arenas, self.tables(), strict=True)
            for base in table["base"][table["state"] == 3]
        }
        assert self.told == registered, "subscribers believe something else than what is registered"
        assert self.events.lost == 0
        lengths = [int(t["length"][t["state"] == 3].sum()) for t in self.tables()]
        assert [a.budget.registered for a in self.arenas] == lengths
        for null in self.nulls:
            live = null.stats()
            assert (live.live_bytes, live.errors) == (sum(lengths), 0)
            assert null.budget.registered == sum(lengths)

    def teardown(self) -> None:
        if not hasattr(self, "arenas"):
            return
        self.live.clear()
        while self.held:
            self.held.popitem()[1][0].release()
        for arena in self.arenas:
            arena.close()
        gc.collect()
        for null in self.nulls:
            assert (null.stats().live, null.stats().errors, null.budget.registered) == (0, 0, 0)
            null.close()
        for event in self.events:
            self.told.remove((event.arena, event.base))
        assert not self.told, "the end of a registration was not told of"
        self.events.close()


def steps(examples: int) -> None:
    """A hundred for each example."""
    run_state_machine_as_test(
        Policy,
        settings=settings(
            max_examples=examples, stateful_step_count=100, deadline=None, derandomize=not SOAK,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink] if SOAK else [Phase.generate],
        ),
    )  # fmt: skip


@pytest.mark.parametrize("part", range(100 if SOAK else 1))
def test_policy(part: int) -> None:
    """20,000 steps; a million in the soak, in 100 parts, each in a process of its own: what hypothesis remembers, and
    what jemalloc keeps of each arena that was, slows down forks and collections."""
    if not SOAK:
        steps(200)
        return
    pid = os.fork()
    if not pid:
        try:
            gc.freeze()  # what is there already would be half the time of each collection
            seed(os.getpid())(Policy)  # else all parts would be the same
            steps(100)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "see what it said"
