"""Registrars written in Python: what they get, what they may do, and what happens when they misbehave."""

from __future__ import annotations

import errno
import gc
import threading
from typing import Any

import numpy as np
import pytest

import jemhooks as jh

pytestmark = pytest.mark.null


class Recorder(jh.Registrar):
    """Keeps what it was asked; a dictionary of what is registered."""

    name = "recorder"

    def __init__(self) -> None:
        self.live: dict[int, tuple[int, int]] = {}
        self.log: list[tuple[str, int]] = []
        self.access = jh.Access(0)
        self._next = 0

    def register(self, addr: int, length: int, access: jh.Access) -> tuple[int, int, object]:
        self._next += 1
        self.live[self._next] = (addr, length)
        self.log.append(("register", self._next))
        self.access = access
        return self._next, self._next + 1000, self._next

    def deregister(self, handle: Any) -> None:
        del self.live[handle]
        self.log.append(("deregister", handle))


def test_calls_and_keys() -> None:
    registrar = Recorder()
    with jh.Arena(registrar, access="remote_read|local_write") as arena:
        a = arena.zeros(10)
        assert registrar.log == [], "lazy"
        key = jh.key(a)
        home = jh.region(a)
        assert registrar.live == {1: (home.base, home.length)}, "whole regions are registered"
        assert (key.lkey, key.rkey) == (1, 1001)
        assert registrar.access is jh.Access.REMOTE_READ | jh.Access.LOCAL_WRITE, "flags, not a number"
        assert key.addr == a.__array_interface__["data"][0]
        del a
        assert arena.trim() == home.length
        assert registrar.log == [("register", 1), ("deregister", 1)]
        jh.key(arena.zeros(3))
        del home
    assert registrar.live == {}, "close() ended what was registered"
    assert repr(registrar) == "<jemhooks.Recorder>"


def test_base_class_says_what_to_write() -> None:
    with jh.Arena(jh.Registrar(), name="bare") as arena:
        a = arena.zeros(3)
        with pytest.raises(jh.RegistrationError, match=r"Registrar\.register\(addr, length, access\)") as e:
            jh.key(a)
        assert isinstance(e.value.__cause__, NotImplementedError)


@pytest.mark.parametrize(
    ("kind", "args", "code"),
    [
        (RuntimeError, ("no way",), errno.EIO),
        (OSError, (errno.ENOSPC, "device full"), errno.ENOSPC),
        (PermissionError, (errno.EPERM, "not you"), errno.EPERM),
        (OSError, ("without a number",), errno.EIO),
        (ValueError, ("percent %s %n and a ü" + "x" * 2000,), errno.EIO),
        (ValueError, ("half a surrogate \udcff",), errno.EIO),
        (MemoryError, (), errno.EIO),
        (StopIteration, (), errno.EIO),
        (jh.ConfigError, ("one of ours",), errno.EIO),
    ],
    ids=repr,
)
@pytest.mark.parametrize("policy", ["lazy", "eager"])
def test_register_raises(kind: type[Exception], args: tuple[Any, ...], code: int, policy: str) -> None:
    class Fails(Recorder):
        broken = True

        def register(self, addr: int, length: int, access: jh.Access) -> tuple[int, int, object]:
            if self.broken:
                raise kind(*args)
            return super().register(addr, length, access)

    registrar = Fails()
    with jh.Arena(registrar, policy=policy, name="failing") as arena:  # type: ignore[arg-type]
        with pytest.raises(
            jh.RegistrationError, match=r"arena 'failing': recorder failed to register 2097152 bytes"
        ) as e:
            jh.key(arena.block(8))
        assert e.value.errno == code, "an OSError's errno comes through"
        assert type(e.value.__cause__) is kind, "what it raised is the cause"
        assert e.value.__cause__.args == args
        assert kind.__name__ in str(e.value), "and is named"
        del e
        gc.collect()
        assert arena.stats().current_count == 0, "the block of a refused call is freed"
        registrar.broken = False
        assert jh.key(arena.block(8)).lkey == 1, "the arena works as before"
    assert registrar.live == {}


def test_an_exception_that_cannot_be_shown_is_still_a_failure() -> None:
    """Above all, it must never look like a success: the key would be of nothing."""

    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

        def __getattribute__(self, name: str) -> Any:
            if name == "errno":
                raise RuntimeError("no number")
            return super().__getattribute__(name)

    class Fails(Recorder):
        def register(self, addr: int, length: int, access: jh.Access) -> tuple[int, int, object]:
            raise Unspeakable

    with jh.Arena(Fails()) as arena:
        block = arena.block(8)
        with pytest.raises(jh.RegistrationError, match="Unspeakable"):
            jh.key(block)
        assert jh.region(block).state is jh.State.MAPPED


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("call", ["key", "lkey", "lease", "keys", "eager", "trim", "close"])
def test_interrupts_pass_through(kind: type[BaseException], call: str) -> None:
    """Ctrl-C in a registrar is the program's to see, not the registrar's failure."""

    class Interrupted(Recorder):
        armed: str = ""

        def register(self, addr: int, length: int, access: jh.Access) -> tuple[int, int, object]:
            if self.armed == "register":
                self.armed = ""
                raise kind
            return super().register(addr, length, access)

        def deregister(self, handle: Any) -> None:
            if self.armed == "deregister":
                self.armed = ""
                raise kind
            super().deregister(handle)

    registrar = Interrupted()
    arena = jh.Arena(registrar, policy="eager" if call == "eager" else "lazy")
    block = None if call == "eager" else arena.block(8)
    calls = {
        "key": lambda: jh.key(block),
        "lkey": lambda: jh.lkey(block),
        "lease": lambda: jh.lease(block).release(),
        "keys": lambda: jh.keys([block.address]),  # type: ignore[union-attr]
        "eager": lambda: arena.block(8),
        "trim": arena.trim,
        "close": arena.close,
    }
    if call in ("trim", "close"):
        jh.key(block)
        del block
    registrar.armed = "deregister" if call in ("trim", "close") else "register"
    with pytest.raises(kind):
        calls[call]()
    if call == "close":
        assert len(registrar.live) == 1, "the registration could not be ended"
        return
    again = arena.block(8)
    assert jh.key(again).lkey == 1, "the arena works as before"
    block = again = None  # type: ignore[assignment]
    gc.collect()
    arena.close()
    assert registrar.live == {}


@pytest.mark.parametrize(
    "answer",
    [
        None,
        5,
        (),
        (1,),
        (1, 2),
        (1, 2, 3, 4),
        "abc",
        (None, 1, 2),
        ("1", "2", 3),
        (1.5, 2, 3),
        (-1, 2, 3),
        (1, 2**64, 3),
    ],
)
def test_register_returns_nonsense(answer: object) -> None:
    ended: list[object] = []

    class Nonsense(jh.Registrar):
        def register(self, addr: int, length: int, access: jh.Access) -> Any:
            return answer

        def deregister(self, handle: object) -> None:
            ended.append(handle)

    with jh.Arena(Nonsense(), name="nonsense") as arena:
        block = arena.block(8)
        with pytest.raises(jh.RegistrationError, match="arena 'nonsense': python failed to register") as e:
            jh.key(block)
        assert isinstance(e.value.__cause__, jh.ConfigError), "the registrar's author is told what is wrong"
        assert jh.region(block).state is jh.State.MAPPED
        if isinstance(answer, tuple) and len(answer) == 3:
            assert ended == [answer[2]], "what it registered is ended"


@pytest.mark.parametrize("base", [None, "x", -1, 2**64, 1.5, RuntimeError("cannot tell")])
def test_remote_base_is_nonsense(base: object) -> None:
    class Nowhere(Recorder):
        def remote_base(self, addr: int, handle: Any) -> Any:
            if isinstance(base, Exception):
                raise base
            return base

    registrar = Nowhere()
    with jh.Arena(registrar) as arena:
        block = arena.block(8)
        with pytest.raises(jh.RegistrationError):
            jh.key(block)
        assert registrar.live == {}, "what it had registered by then is ended, or it would stay for good"
        assert jh.region(block).state is jh.State.MAPPED


@pytest.mark.parametrize("name", ["max_mr_size", "max_mr"])
@pytest.mark.parametrize("value", ["2MiB", None, -1, 2**64, 1.5])
def test_limits_are_nonsense(name: str, value: object) -> None:
    registrar = Recorder()
    setattr(registrar, name, value)
    with pytest.raises(jh.ConfigError, match=name):
        jh.Arena(registrar).close()


def test_limits_are_kept() -> None:
    registrar = Recorder()
    registrar.max_mr_size = 4 << 20
    with jh.Arena(registrar) as arena:
        blocks = [arena.block("1MiB") for _ in range(20)]
        for block in blocks:
            jh.key(block)
        assert max(n for _, n in registrar.live.values()) <= 4 << 20, (
            "no registration is larger than the registrar takes"
        )


def test_a_registrar_that_asks_for_its_own_region() -> None:
    """It would wait for itself; so it is refused, and can go on."""
    seen: list[str] = []

    class Curious(Recorder):
        def register(self, addr: int, length: int, access: jh.Access) -> tuple[int, int, object]:
            for call in (jh.key, jh.lkey, jh.lease, lambda a: jh.keys([a])):
                with pytest.raises(jh.RegistrationError, match="asked for the region at") as e:
                    call(addr)
                assert e.value.errno == errno.EDEADLK
            seen.append(jh.region(addr).state.name)
            return super().register(addr, length, access)

        def deregister(self, handle: Any) -> None:
            with pytest.raises(jh.RegistrationError, match="asked for the region at"):
                jh.key(self.live[handle][0])
            seen.append(jh.region(self.live[handle][0]).state.name)
            super().deregister(handle)

    registrar = Curious()
    with jh.Arena(registrar) as arena:
        assert jh.key(arena.zeros(3)).lkey == 1
        gc.collect()
        assert arena.trim() > 0
        assert seen == ["REGISTERING", "DEREGISTERING"], "look-up works meanwhile"


def test_a_registrar_may_use_other_memory() -> None:
    class Nested(Recorder):
        def __init__(self, other: jh.Arena) -> None:
            super().__init__()
            self.other, self.kept = other, []  # type: tuple[jh.Arena, list[Any]]

        def register(self, addr: int, length: int, access: jh.Access) -> tuple[int, int, object]:
            self.kept.append(self.other.full(10, len(self.kept)))
            jh.key(self.kept[-1])
            self.other.trim()
            with jh.Arena(jh.Null()) as third:
                jh.key(third.zeros(3))
            return super().register(addr, length, access)

    with jh.Null() as null, jh.Arena(null) as other:
        registrar = Nested(other)
        with jh.Arena(registrar, region_min="4MiB", region_max="4MiB") as arena:
            blocks = [arena.block("3MiB") for _ in range(5)]
            assert [jh.key(b).lkey for b in blocks] == [1, 2, 3, 4, 5]
            assert [k[0] for k in registrar.kept] == [0, 1, 2, 3, 4]
        registrar.kept.clear()


def test_a_registrar_that_allocates_from_its_own_arena() -> None:
    class Greedy(Recorder):
        arena: jh.Arena

        def register(self, addr: int, length: int, access: jh.Access) -> tuple[int, int, object]:
            self.arena.full(10, 1.0)
            self.arena.block("4MiB")
            return super().register(addr, length, access)

    registrar = Greedy()
    with jh.Arena(registrar) as arena:
        registrar.arena = arena
        a = arena.zeros(10)
        assert jh.key(a).lkey == 1, "allocating needs no key, so it works under way"
        assert (a == 0).all()
        del registrar.arena, a


@pytest.mark.parametrize("policy", ["lazy", "eager"])
def test_a_registrar_that_collects_garbage(policy: str) -> None:
    """Finalisers of other arrays and arenas run inside the registrar; those of its own arena, too."""

    class Collects(Recorder):
        arena: jh.Arena

        def litter(self) -> None:
            inner = jh.Arena(self)
            ring: list[Any] = [self.arena.block(100), inner, inner.block(8)]
            ring.append(ring)
            inner.close()

        def register(self, addr: int, length: int, access: jh.Access) -> tuple[int, int, object]:
            if policy == "lazy":
                self.litter()
            gc.collect()
            return super().register(addr, length, access)

        def deregister(self, handle: Any) -> None:
            gc.collect()
            super().deregister(handle)

    registrar = Collects()
    with jh.Arena(registrar, policy=policy) as arena:  # type: ignore[arg-type]
        registrar.arena = arena
        kept = [arena.full(100_000, i) for i in range(10)]
        for a in kept:
            jh.key(a)
        assert all((a == i).all() for i, a in enumerate(kept))
        del kept[::2], a
        arena.trim()
        del registrar.arena, kept
    jh.Arena().close()
    assert registrar.live == {}, "arenas that ended inside a registrar end with the next call"


def test_a_registrar_that_closes_its_arena() -> None:
    class Closes(Recorder):
        arena: jh.Arena | None = None

        def register(self, addr: int, length: int, access: jh.Access) -> tuple[int, int, object]:
            if self.arena:
                self.arena.close()
            return super().register(addr, length, access)

        def deregister(self, handle: Any) -> None:
            if self.arena:
                self.arena.close()
            super().deregister(handle)

    registrar = Closes()
    registrar.arena = arena = jh.Arena(registrar)
    a = arena.full(3, 2.0)
    assert jh.key(a).lkey == 1, "the array keeps the arena"
    with pytest.raises(jh.ClosedError):
        arena.block(8)
    assert a.tolist() == [2.0] * 3
    registrar.arena = None
    del a, arena
    jh.Arena().close()
    assert registrar.live == {}


def test_deregister_raises() -> None:
    class Stuck(Recorder):
        broken = True

        def deregister(self, handle: Any) -> None:
            if self.broken:
                raise OSError(errno.ENODEV, "in use")
            super().deregister(handle)

    registrar = Stuck()
    with jh.Arena(registrar, name="stuck") as arena:
        jh.key(arena.block(8))
        with pytest.raises(jh.RegistrationError, match=r"arena 'stuck': recorder failed to deregister .* in use") as e:
            arena.trim()
        assert e.value.errno == errno.ENODEV
        assert isinstance(e.value.__cause__, OSError)
        assert jh.key(arena.block(8)).lkey == 1, "raising means: still registered"
        registrar.broken = False
        assert arena.trim() > 0
    assert registrar.live == {}


def test_one_registrar_in_many_arenas_at_the_same_address() -> None:
    """An arena within another's block may begin where the outer region begins; each has its own registration."""
    registrar = Recorder()
    memory = np.zeros(64 << 20, "u1")
    with jh.Arena(registrar, provider=jh.Fixed(memory), name="outer") as outer:
        jh.key(outer.block(8))
        with jh.Arena([registrar, registrar], name="twin rails") as twins:
            a = twins.zeros(3)
            assert len({jh.key(a, 0).lkey, jh.key(a, 1).lkey}) == 2, (
                "the same registrar on two rails: two registrations"
            )
            assert len(registrar.live) == 3
            del a
        assert len(registrar.live) == 1, "both were ended"
        home = outer.block(16 << 20, alignment=4096)  # a live block, wherein other arenas may lie
        base = home.address
        with jh.Arena(registrar, provider=jh.Fixed(base, 6 << 20), policy="none", name="inner"):
            pass
        inner = jh.Arena(registrar, provider=jh.Fixed(base + (8 << 20), 6 << 20), name="inner")
        jh.key(inner.block(8))
        assert len(registrar.live) == 2
        inner.close()
        assert list(registrar.live) == [1], "the inner arena's end must not end the outer registration"
        del home
    assert registrar.live == {}


def test_a_registrar_from_many_threads() -> None:
    registrar, lock = Recorder(), threading.Lock()
    plain = registrar.register

    def guarded(addr: int, length: int, access: jh.Access) -> tuple[int, int, object]:
        with lock:
            return plain(addr, length, access)

    registrar.register = guarded  # type: ignore[method-assign]
    with jh.Arena(registrar, region_max="2MiB") as arena:
        failures: list[BaseException] = []

        def work() -> None:
            try:
                for _ in range(30):
                    block = arena.block("1536KiB")
                    assert jh.key(block).length == 1536 << 10
                    del block
                    arena.trim()
            except BaseException as e:
                failures.append(e)

        threads = [threading.Thread(target=work) for _ in range(5)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        assert not failures, failures[0]
    assert registrar.live == {}


def test_closed_python_registrar() -> None:
    registrar = Recorder()
    with jh.Arena(registrar) as arena:
        with registrar:
            pass
        with pytest.raises(jh.ClosedError, match="registrar recorder is closed"):
            jh.Arena(registrar)
        assert jh.key(arena.block(8)).lkey == 1, "an arena that has it goes on"
    assert repr(registrar) == "<jemhooks.Recorder closed>"
    assert registrar.live == {}


def test_finalisers_never_call_a_python_registrar() -> None:
    """The last array may die anywhere, also inside other locks: the end is left to the next call."""
    registrar = Recorder()
    arena = jh.Arena(registrar)
    a = arena.zeros(3)
    jh.key(a)
    arena.close()
    del a, arena
    assert len(registrar.live) == 1, "not from the finaliser"
    jh.Arena().close()
    assert registrar.live == {}, "but from the next call"


def test_an_arena_whose_last_block_dies_inside_a_registrar_ends_later() -> None:
    """Another thread may be evicting from it, so it must not be destroyed there."""
    with jh.Null() as null:
        other = jh.Arena(null)
        held = [other.block(100)]
        jh.key(held[0])
        other.close()

        class Drops(jh.Registrar):
            def register(self, addr: int, length: int, access: jh.Access) -> tuple[int, int, object]:
                held.clear()
                gc.collect()
                assert null.stats().live == 1, "not while a registrar is at work"
                return 1, 2, None

            def deregister(self, handle: object) -> None:
                pass

        with jh.Arena(Drops()) as arena:
            jh.key(arena.block(100))
            arena.stats()
            assert null.stats().live == 0, "but with the next call"
