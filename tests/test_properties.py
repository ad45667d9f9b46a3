"""Random use against a model: contents, keys, leases, accounts, look-ups."""

from __future__ import annotations

import gc
import mmap
import os
from typing import Any

import numpy as np
import pytest
from allocator import RECORDS
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

import jemhooks as jh
from jemhooks.access import access_flags
from jemhooks.sizes import LIMIT, size

pytestmark = pytest.mark.null
SOAK = os.environ.get("JEMHOOKS_SOAK") == "1"
QUICK = settings(
    max_examples=2000 if SOAK else 200, deadline=None, derandomize=not SOAK, suppress_health_check=list(HealthCheck)
)
MiB = 1 << 20


def stripes(nbytes: int, seed: int) -> Any:
    return (np.arange(nbytes, dtype="u4") * np.uint32(2654435761) + np.uint32(seed)).astype("u1")


class Anything(RuleBasedStateMachine):
    """One arena in use; the model is a list of what was asked for and written."""

    arrays = Bundle("arrays")
    leases = Bundle("leases")

    @initialize(
        policy=st.sampled_from(["lazy", "eager"]),
        decay=st.sampled_from([0, None, -1]),
        shards=st.sampled_from([1, 2]),
        provider=st.sampled_from(["anonymous", "small pages", "fixed", "nested"]),
        most=st.sampled_from(["2MiB", "8MiB"]),
        rails=st.integers(1, 2),
    )
    def open(self, policy: Any, decay: int | None, shards: int, provider: str, most: str, rails: int) -> None:
        self.nulls = [jh.Null() for _ in range(rails)]
        self.outer: jh.Arena | None = None
        memory: jh.Provider | None = None
        if provider == "small pages":
            memory = jh.Anonymous(thp=False)
        elif provider == "fixed":
            old = mmap.mmap(-1, 24 * MiB)
            old[:] = b"\xee" * len(old)
            memory = jh.Fixed(old)
        elif provider == "nested":
            self.outer = jh.Arena(name="outer")
            memory = jh.Fixed(self.outer.block(24 * MiB))
        self.arena = jh.Arena(
            self.nulls, policy=policy, dirty_decay_ms=decay, muzzy_decay_ms=decay, shards=shards, provider=memory,
            region_max=most,
        )  # fmt: skip
        self.bounded = memory is not None and provider != "small pages"
        self.live: dict[int, tuple[Any, int]] = {}  # number -> array, seed
        self.held: dict[int, tuple[jh.Lease, int]] = {}  # number -> lease, base of its region
        self.number = self.nbytes = 0

    def _check(self, number: int) -> None:
        array, seed = self.live[number]
        assert (array.reshape(-1, order="A").view("u1") == stripes(array.nbytes, seed)).all(), "contents changed"

    @rule(
        target=arrays,
        nbytes=st.one_of(
            st.integers(1, 300), st.integers(1, 20_000), st.sampled_from([70_000, MiB, 3 * MiB, 5 * MiB + 1])
        ),
        alignment=st.sampled_from([1, 8, 64, 4096, 1 << 16]),
        zero=st.booleans(),
        order=st.sampled_from(["C", "F"]),
        seed=st.integers(0, 255),
    )
    def allocate(self, nbytes: int, alignment: int, zero: bool, order: Any, seed: int) -> Any:
        try:
            make = self.arena.zeros if zero else self.arena.empty
            array = make((nbytes,), "u1", alignment=alignment, order=order)
        except jh.AllocationError:
            assert self.bounded, "anonymous memory does not run out here"
            return multiple()
        where = array.__array_interface__["data"][0]
        assert where % alignment == 0
        if zero:
            assert not array.any(), "zeros, whatever lay there before"
        home = jh.region(array)
        assert home.arena is self.arena
        assert home.base <= where <= where + nbytes <= home.base + home.length, "across the end of a region"
        if self.arena.policy == "eager":
            assert home.state is jh.State.REGISTERED
        array[:] = stripes(nbytes, seed)
        self.number += 1
        self.live[self.number] = array, seed
        self.nbytes += nbytes
        return self.number

    @rule(number=consumes(arrays))
    def free(self, number: int) -> None:
        self._check(number)
        array, _ = self.live.pop(number)
        self.nbytes -= array.nbytes

    @rule(number=arrays, rail=st.integers(0, 1), step=st.sampled_from([1, 2, -1, 3]))
    def key(self, number: int, rail: int, step: int) -> None:
        array, _ = self.live[number]
        view, rail = array[::step], rail % len(self.nulls)
        key, home = jh.key(view, rail), jh.region(array)
        assert home.state is jh.State.REGISTERED
        where = array.__array_interface__["data"][0]
        assert where <= key.addr <= key.addr + key.length <= where + array.nbytes
        assert key.generation == home.generation
        calls = self.nulls[rail].calls()
        row = calls[(calls["lkey"] == key.lkey) & (calls["op"] == 1)][-1]
        assert (row["address"], row["length"]) == (home.base, home.length), "the key is of another registration"
        assert not len(calls[(calls["lkey"] == key.lkey) & (calls["op"] == 2)]), "the key was ended"
        assert jh.keys([where])[0].tolist() == tuple(jh.key(where)), "keys() and key() disagree"

    @rule(target=leases, number=arrays, by_address=st.booleans())
    def lease(self, number: int, by_address: bool) -> int:
        array, _ = self.live[number]
        lease = jh.lease(array.__array_interface__["data"][0] if by_address else array[:1])
        self.number += 1
        self.held[self.number] = lease, jh.region(array).base
        return self.number

    @rule(number=consumes(leases))
    def release(self, number: int) -> None:
        self.held.pop(number)[0].release()

    @rule()
    def trim(self) -> None:
        before = self.arena.regions()
        released = self.arena.trim()
        after = self.arena.regions()
        was = {int(r["base"]): r for r in before}
        gone = [r for r in after if r["state"] == 1 and int(r["base"]) in was and was[int(r["base"])]["state"] == 3]
        assert released == sum(int(r["length"]) for r in gone), "trim tells what it deregistered"
        busy = {jh.region(a).base for a, _ in self.live.values()} | {base for _, base in self.held.values()}
        assert not busy & {int(r["base"]) for r in gone}, "a used or leased region was deregistered"

    @precondition(lambda self: self.arena.policy == "lazy")
    @rule(number=arrays, rail=st.integers(0, 1))
    def fail(self, number: int, rail: int) -> None:
        array, _ = self.live[number]
        null = self.nulls[rail % len(self.nulls)]
        registered = jh.region(array).state is jh.State.REGISTERED
        null.fail("register")
        if registered:
            jh.key(array)
            null.fail("register", 0)
            return
        with pytest.raises(jh.RegistrationError, match="errno 12"):
            jh.key(array)
        assert jh.region(array).state is jh.State.MAPPED, "half-registered"

    @rule(data=st.data())
    def look_up(self, data: Any) -> None:
        table = self.arena.regions()
        near = [int(b) for b in table["base"]] + [
            int(b) + int(n) for b, n in zip(table["base"], table["length"], strict=True)
        ]
        address = data.draw(st.sampled_from(near or [0])) + data.draw(st.integers(-4097, 4097))
        inside = (
            ((table["base"] <= address) & (address < table["base"] + table["length"])).any() if address > 0 else False
        )
        try:
            home = jh.region(address)
        except (jh.NotOursError, jh.ConfigError):
            assert not inside, "an address of a region was not found"
        else:
            assert home.base <= address < home.base + home.length
            assert inside == (home.arena is self.arena), "an address beyond every region was found"

    @invariant()
    def account(self) -> None:
        if not hasattr(self, "arena"):
            return
        stats, table = self.arena.stats(), self.arena.regions()
        kept = len(self.live)
        assert stats.current_count >= kept, "leases on objects may keep more"
        assert stats.current_bytes >= self.nbytes
        assert stats.abandoned == 0
        assert stats.committed == table["committed"].sum()
        held = stats.active + stats.dirty + stats.muzzy
        assert stats.committed == held or (RECORDS and stats.committed > held), "jemalloc 4 commits whole chunks"
        assert stats.registered == table["length"][table["state"] == 3].sum()
        assert table["leases"].sum() == len(self.held)
        for null in self.nulls:
            live = null.stats()
            assert (live.live_bytes, live.errors) == (stats.registered, 0)

    def teardown(self) -> None:
        if not hasattr(self, "arena"):
            return
        for number in self.live:
            self._check(number)
        self.arena.close()
        self.live.clear()
        while self.held:
            self.held.popitem()[1][0].release()
        del self.arena
        if self.outer:
            self.outer.close()
            self.outer = None
        gc.collect()
        for null in self.nulls:
            assert (null.stats().live, null.stats().errors) == (0, 0), "registrations are left"
            null.close()


def test_anything() -> None:
    run_state_machine_as_test(
        Anything,
        settings=settings(
            max_examples=400 if SOAK else 25, stateful_step_count=60 if SOAK else 40, deadline=None,
            derandomize=not SOAK, suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink] if SOAK else [Phase.generate],
        ),
    )  # fmt: skip


# ---- sizes, access ----

UNITS = {
    "": 1,
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


@QUICK
@given(st.integers(-(2**65), 2**65), st.integers(0, 100))
def test_sizes_as_numbers(value: int, least: int) -> None:
    if least <= value <= LIMIT:
        assert size(value, least=least) == value
    else:
        with pytest.raises(jh.ConfigError, match=str(value)):
            size(value, "what", least)


@QUICK
@given(st.integers(0, 10**6), st.sampled_from(list(UNITS)), st.sampled_from(["", " ", "\t"]), st.integers(0, 4))
def test_sizes_as_text(value: int, unit: str, space: str, zeros: int) -> None:
    want = value * UNITS[unit]
    for text in (
        f"{value}{space}{unit}",
        f" {value}{space}{unit} ",
        f"{value}.{'0' * (zeros + 1)}{unit}",
        f"00{value}{unit}",
    ):
        if want <= LIMIT:
            assert size(text) == want, text
        else:
            with pytest.raises(jh.ConfigError):
                size(text)


@QUICK
@given(st.integers(0, 10**9), st.integers(1, 12), st.sampled_from(list(UNITS)))
def test_fractions_are_exact(digits: int, places: int, unit: str) -> None:
    text = f"{digits // 10**places}.{digits % 10**places:0{places}d}{unit}"
    exact, rest = divmod(digits * UNITS[unit], 10**places)
    if rest or exact > LIMIT:
        with pytest.raises(jh.ConfigError, match=r"whole number of bytes|is not between"):
            size(text)
    else:
        assert size(text) == exact, "not a bit off, as floating point would be"


@QUICK
@given(st.one_of(st.text(max_size=12), st.text("0123456789.kKMGTPEiB ", max_size=10), st.binary(max_size=3)))
def test_any_text_is_a_size_or_an_error(text: Any) -> None:
    try:
        value = size(text)
    except jh.ConfigError as e:
        said = str(e)
    else:
        assert 0 <= value <= LIMIT
        return
    assert repr(text) in said or "bytes is not between" in said, "the message names the value"


@QUICK
@given(st.one_of(st.text(max_size=30), st.integers(), st.lists(st.text(max_size=15), max_size=4)))
def test_any_access_is_flags_or_an_error(value: Any) -> None:
    try:
        flags = access_flags(value)
    except jh.ConfigError as e:
        said = str(e)
    else:
        assert 0 <= int(flags) <= 63
        return
    assert len(said) > 20


@given(st.sets(st.sampled_from(list(jh.Access))), st.randoms())
def test_access_by_name(flags: set[jh.Access], random: Any) -> None:
    names = [str(f.name) for f in flags]
    random.shuffle(names)
    want = jh.Access(sum(flags))
    assert access_flags(want) == access_flags([n.lower() for n in names]) == want
    if names:
        assert access_flags(" | ".join(random.choice([n, n.lower(), n.title()]) for n in names)) == want


# ---- look-ups of arbitrary numbers ----


@pytest.fixture(scope="module")
def regions() -> Any:
    with jh.Null() as null, jh.Arena(null, region_max="2MiB") as arena:
        kept = [arena.block("1MiB") for _ in range(20)]
        odd = np.zeros(8 * MiB, "u1")
        with jh.Arena(null, provider=jh.Fixed(odd[777:-555])) as fixed:
            kept.append(fixed.block(5000))
            table = np.concatenate([arena.regions(), fixed.regions()])
            yield [(int(r["base"]), int(r["length"])) for r in table]
        del kept


@QUICK
@given(st.data())
def test_any_number_is_found_or_not(regions: list[tuple[int, int]], data: Any) -> None:
    ends = [base for base, _ in regions] + [base + length for base, length in regions]
    address = data.draw(
        st.one_of(
            st.integers(0, 2**64 - 1),
            st.integers(0, 2**48),
            st.sampled_from([0, 1, 2**21 - 1, 2**47 - 1, 2**47, 2**48 - 1, 2**48, 2**63 - 1, 2**63, 2**64 - 1]),
            st.tuples(st.sampled_from(ends), st.integers(-9000, 9000)).map(sum),
        )
    )
    home = [(base, length) for base, length in regions if base <= address < base + length]
    if home:
        base, length = home[0]
        assert jh.key(address)[:2] == (address, base + length - address), "to the end of its region"
        assert jh.region(address).base == base
        assert jh.keys([address])[0]["length"] == base + length - address
        return
    for call in (jh.key, jh.lkey, jh.rkey, jh.lease, jh.region, lambda a: jh.keys([a])):
        with pytest.raises(jh.NotOursError, match=f"{address:#x} " if address else "0|nil"):
            call(address)


@QUICK
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.lists(
        st.tuples(*[st.sampled_from(v) for v in ([None, 0, 1, -2], [None, None, -1, 9], [1, 2, 3, -1])]), min_size=4
    ),
    st.sampled_from(["u1", "<i2", "f8", "S3", "U2", "M8[D]", "c16", [("a", "u1"), ("b", "f8")]]),
    st.sampled_from(["C", "F"]),
)
def test_key_of_any_view_is_its_extent(shape: list[int], cuts: Any, dtype: Any, order: Any) -> None:
    with jh.Null() as null, jh.Arena(null) as arena:
        view = arena.zeros(shape, dtype, order=order)[tuple(slice(*cut) for cut in cuts[: len(shape)])]
        if view.size:
            low, high = np.lib.array_utils.byte_bounds(view)
            key = jh.key(view)
            assert (key.addr, key.length) == (low, high - low)
        del view
