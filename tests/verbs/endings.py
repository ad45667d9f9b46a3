"""How things end: each case in a forked child of its own, which then ends as Python does. Prints a JSON line each.

Started by test_endings.py; arguments, if any, name the cases to run. The modules are imported once, before the forks;
devices, arenas and registrars are the child's own.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import ibverbs
import pyverbs.mr  # noqa: F401
from pyverbs.device import Context
from pyverbs.pd import PD

import jemhooks as jh

CASES: dict[str, Callable[[], None]] = {}
Arena = jh.Arena  # so that jemhooks' own modules are imported, too
left: dict[str, Any] = {}  # what a case leaves to the end of the interpreter


def case(f: Callable[[], None]) -> Callable[[], None]:
    CASES[f.__name__] = f
    return f


def mrs() -> int:
    """How many MRs the kernel holds for this process."""
    found = subprocess.run(["rdma", "-j", "resource", "show", "mr"], capture_output=True, text=True, check=True).stdout
    return sum(mr.get("pid") == os.getpid() for mr in json.loads(found or "[]"))


class Things:
    def __init__(self, policy: Any = "lazy") -> None:
        self.ctx = Context(name="rxe0")
        self.pd = PD(self.ctx)
        self.verbs = jh.Verbs(pd=self.pd)
        self.arena = Arena(self.verbs, policy=policy, region_max="2MiB")
        self.arrays = [self.arena.full(300_000, i, "u1") for i in range(15)]
        self.keys = [jh.key(a) for a in self.arrays]
        assert self.arena.stats().registrations >= 3


def must_fail(f: Callable[[], Any], said: str) -> None:
    heard = ""
    try:
        f()
    except Exception as e:
        heard = str(e)
    assert said in heard, f"nothing was raised that says '{said}', but '{heard}'"


def intact(t: Things) -> None:
    assert all((a == i).all() for i, a in enumerate(t.arrays)), "bytes were lost"


@case
def arena_first() -> None:
    t = Things()
    t.arrays.clear()
    t.arena.close()
    assert mrs() == 0, "an arena's end leaves no MR"
    t.pd.close()
    t.ctx.close()


@case
def pd_first() -> None:
    t = Things()
    t.pd.close()
    assert mrs() == 0, "a closed PD has no MR"
    must_fail(lambda: jh.key(t.arrays[0]), "is closed")
    intact(t)
    t.arrays.clear()
    t.arena.close()
    t.ctx.close()


@case
def ctx_first() -> None:
    t = Things("eager")
    t.ctx.close()
    assert mrs() == 0
    must_fail(lambda: t.arena.full(3_000_000, 1, "u1"), "is closed")
    intact(t)
    t.arena.trim()
    t.arrays.clear()
    t.arena.trim()
    t.arena.close()
    t.pd.close()


@case
def registrar_first() -> None:
    t = Things()
    t.verbs.close()
    assert jh.key(t.arrays[0]) == t.keys[0], "an arena keeps its registrar"
    t.pd.close()
    t.arrays.clear()
    t.arena.close()


@case
def only_the_arena_is_kept() -> None:
    t = Things()
    arena, arrays, keys = t.arena, t.arrays, t.keys
    del t
    gc.collect()
    assert [jh.key(a) for a in arrays] == keys, "the arena keeps the PD"
    arrays.clear()
    arena.close()
    del arena
    gc.collect()
    assert mrs() == 0


@case
def only_an_array_is_kept() -> None:
    t = Things()
    a, key = t.arrays[7], t.keys[7]
    t.arena.close()
    del t
    gc.collect()
    assert (a == 7).all()
    assert jh.key(a) == key
    del a
    gc.collect()
    jh.Arena().close()  # drains what a finaliser left to do
    assert mrs() == 0


@case
def pd_closed_twice_between() -> None:
    t = Things()
    t.pd.close()
    t.pd.close()
    t.arrays.clear()
    t.arena.close()
    t.pd.close()


@case
def leased() -> None:
    t = Things()
    with jh.lease(t.arrays[0]) as key:
        assert key == t.keys[0]
        t.ctx.close()
        assert mrs() == 0
        intact(t)
    t.arrays.clear()
    t.arena.close()


@case
def a_cycle_is_collected() -> None:
    t: Any = Things()
    t.arena.close()
    t.more = [t.arrays, t.pd, t.ctx, t]
    t.me = t
    del t
    gc.collect()
    jh.Arena().close()
    assert mrs() == 0, "collected, and its MRs with it"


@case
def an_exception_in_between() -> None:
    with (
        contextlib.suppress(ZeroDivisionError),
        Context(name="rxe0") as ctx,
        PD(ctx) as pd,
        jh.Verbs(pd=pd) as verbs,
        jh.Arena(verbs) as arena,
    ):
        a = arena.zeros(1000)
        with jh.lease(a):
            _ = 1 / 0
    del a
    jh.Arena().close()
    assert mrs() == 0


@case
def an_exception_while_registering() -> None:
    t = Things()
    register = t.verbs.register

    def fails(*args: Any) -> Any:
        t.verbs.deregister(register(*args)[2])
        raise KeyboardInterrupt

    t.verbs.register = fails  # type: ignore[method-assign]
    count = mrs()
    with contextlib.suppress(KeyboardInterrupt):
        jh.key(t.arena.full(1_900_000, 1, "u1"))
        raise AssertionError("KeyboardInterrupt was lost")
    assert mrs() == count
    t.arrays.clear()
    t.arena.close()
    t.ctx.close()


@case
def in_another_thread() -> None:
    t = Things()
    box = [t]
    del t

    def end() -> None:
        box[0].ctx.close()
        box[0].arrays.clear()
        box[0].arena.close()
        box.clear()

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    assert mrs() == 0


@case
def all_open_at_exit() -> None:
    left["t"] = Things()


@case
def all_open_at_exit_in_a_cycle() -> None:
    t: Any = Things("eager")
    t.arena.me = t
    left["t"] = t
    sys.modules["kept"] = t  # type: ignore[assignment]


@case
def arena_closed_at_exit_in_a_cycle() -> None:
    t: Any = Things()
    t.arrays.clear()
    t.arena.close()
    t.me = [t, t.ctx, t.pd]
    left["t"] = t


@case
def pd_closed_at_exit() -> None:
    left["t"] = Things()
    left["t"].pd.close()


@case
def leased_at_exit() -> None:
    left["t"] = Things()
    left["lease"] = jh.lease(left["t"].arrays[0])


@case
def system_exit_inside() -> None:
    with Context(name="rxe0") as ctx, PD(ctx) as pd, jh.Arena(jh.Verbs(pd=pd)) as arena:
        left["a"] = arena.zeros(5)
        jh.key(left["a"])
        raise SystemExit(0)


@case
def own_device_open_at_exit() -> None:
    left["arena"] = arena = jh.Arena(jh.Verbs("rxe0"))
    left["a"] = arena.zeros(5)
    assert jh.key(left["a"]).lkey


@case
def threads_use_it_while_the_pd_closes() -> None:
    for policy in ("lazy", "eager") * 3:
        t = Things(policy)
        ended: list[str] = []

        def use(t: Things, ended: list[str]) -> None:
            try:
                while True:
                    a = t.arena.full(500_000, 9, "u1")
                    with jh.lease(a):
                        assert (a == 9).all()
                    del a
                    t.arena.trim()
            except jh.RegistrationError as e:
                ended.append(str(e))

        threads = [threading.Thread(target=use, args=(t, ended)) for _ in range(3)]
        for thread in threads:
            thread.start()
        while t.arena.stats().registrations < 30:
            pass
        t.pd.close()
        assert mrs() == 0
        for thread in threads:
            thread.join()
        assert len(ended) == 3
        assert all("closed" in text for text in ended), ended
        intact(t)
        t.arrays.clear()
        t.arena.close()
        t.ctx.close()


@case
def arenas_end_while_the_pd_closes() -> None:
    for _ in range(20):
        t = Things()
        more = [Arena(t.verbs, region_max="2MiB") for _ in range(10)]
        blocks = [arena.full(100_000, 1, "u1") for arena in more]
        for block in blocks:
            jh.key(block)

        def end(blocks: list[Any], more: list[Any]) -> None:
            blocks.clear()
            for arena in more:
                arena.close()

        thread = threading.Thread(target=end, args=(blocks, more))
        del block
        thread.start()
        t.pd.close()
        thread.join()
        assert mrs() == 0
        intact(t)
        t.arrays.clear()
        t.arena.close()
        t.ctx.close()


@case
def others_keep_their_registrations() -> None:
    """Also where one's memory is a block of the other, at the very address at which its region begins."""
    outer, inner = Things(), Things()
    block = outer.arena.block("8MiB", alignment=2 << 20)
    with Arena(inner.verbs, provider=jh.Fixed(block.array())) as nested:
        a = nested.full(100_000, 7, "u1")
        key = jh.key(a)
        outer.pd.close()
        assert jh.key(a) == key, "that is another PD's"
        assert [jh.key(x) for x in inner.arrays] == inner.keys
        must_fail(lambda: jh.key(outer.arrays[0]), "closed")
        assert (a == 7).all()
        del a
    del block
    inner.pd.close()
    assert mrs() == 0
    intact(outer)
    intact(inner)
    for t in (outer, inner):
        t.arrays.clear()
        t.arena.close()


def refuse_to_end(t: Things) -> Callable[[Any], None]:
    """Let every deregistration fail; what is to be put back."""

    def fails(handle: Any) -> None:
        handle.failed = True
        raise OSError(16, "a window is bound")

    deregister = t.verbs.deregister
    t.verbs.deregister = fails  # type: ignore[method-assign]
    return deregister


@case
def a_registration_that_does_not_end() -> None:
    t = Things()
    deregister = refuse_to_end(t)
    must_fail(t.pd.close, "a window is bound")
    assert jh.rkey(t.arrays[0]) == t.keys[0].rkey, "what is still registered still has its key"
    t.verbs.deregister = deregister  # type: ignore[method-assign]
    t.arrays.clear()
    t.arena.close()
    assert mrs() == 0
    t.pd.close()
    t.ctx.close()


@case
def a_registration_that_never_ends() -> None:
    """Its region is kept, and found no more; closing the PD ends it after all."""
    t = Things()
    deregister = refuse_to_end(t)
    t.arrays.clear()
    must_fail(t.arena.close, "a window is bound")
    t.verbs.deregister = deregister  # type: ignore[method-assign]
    assert mrs() > 0
    t.pd.close()
    assert mrs() == 0
    t.ctx.close()


@case
def a_child_that_ends_as_python_does() -> None:
    t = Things()
    count, child = mrs(), os.fork()
    if not child:
        must_fail(lambda: jh.Arena(t.verbs, policy="eager").zeros(5), "before the fork")
        must_fail(t.pd.close, "parent process")
        t.arrays.clear()
        left["t"] = t
        return
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert mrs() == count, "the parent's MRs are its own"
    assert [jh.key(a) for a in t.arrays] == t.keys
    intact(t)
    t.arrays.clear()
    t.arena.close()
    assert mrs() == 0
    t.pd.close()
    t.ctx.close()


@case
def another_binding() -> None:
    device = next(d for d in ibverbs.get_device_list() if d.name == "rxe0")
    ctx = device.open()
    pd = ctx.alloc_pd()
    with jh.Arena(jh.Verbs(pd=pd)) as arena:
        a = arena.zeros(5)
        jh.key(a)
        del a
    assert mrs() == 0
    pd.close()
    ctx.close()
    left["ctx"] = ctx = device.open()
    left["pd"] = pd = ctx.alloc_pd()
    left["arena"] = jh.Arena(jh.Verbs(pd=pd))
    left["a"] = left["arena"].zeros(5)
    jh.key(left["a"])


def main() -> None:
    """Returns in every child, too, which then ends as Python does, with what the case left."""
    for name in sys.argv[1:] or CASES:
        with tempfile.TemporaryFile("w+") as said:
            pid = os.fork()
            if not pid:
                os.dup2(said.fileno(), 2)
                CASES[name]()
                return
            _, status = os.waitpid(pid, 0)
            said.seek(0)
            print(json.dumps([name, os.waitstatus_to_exitcode(status), said.read()]), flush=True)


if __name__ == "__main__":
    main()
