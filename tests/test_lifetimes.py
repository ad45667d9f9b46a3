"""Who keeps whom: views, blocks, arenas, registrars; forgotten things, cycles, and the interpreter's end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import jemhooks as jh

if TYPE_CHECKING:
    from conftest import Python, Resources

pytestmark = pytest.mark.null


def test_close_finishes_with_the_last_array(null: jh.Null) -> None:
    arena = jh.Arena(null)
    a = arena.full(1000, 3.0)
    view = a[10:20:2]
    block = arena.block(10)
    jh.key(a)
    arena.close()
    assert null.stats().live == 1, "closed with live arrays: not yet destroyed"
    del a
    assert null.stats().live == 1
    assert view.tolist() == [3.0] * 5, "a view keeps its memory through close()"
    del block
    assert null.stats().live == 1, "the view is still there"
    del view
    assert null.stats().live == 0, "destroyed with the last of them, at once"


def test_each_kind_of_user_keeps_a_closed_arena(null: jh.Null) -> None:
    users: dict[str, Callable[[jh.Arena], Any]] = {
        "block": lambda a: a.block(8),
        "array": lambda a: a.zeros(3),
        "view": lambda a: a.zeros(30)[::7],
        "memoryview": lambda a: a.block(8).memoryview(),
        "asarray": lambda a: np.asarray(a.block(8)),
        "lease": lambda a: jh.lease(a.zeros(3)),
        "user bytes": lambda a: jh.region(a.zeros(3)).user,
        "array on user bytes": lambda a: np.frombuffer(jh.region(a.zeros(3)).user, "u1"),
    }
    for name, make in users.items():
        arena = jh.Arena(null)
        user = make(arena)
        jh.key(arena.zeros(1))
        arena.close()
        assert null.stats().live == 1, f"{name}: the arena must wait for it"
        if isinstance(user, jh.Lease):
            user.release()
        del user
        assert null.stats().live == 0, f"{name}: the arena must end with it"


def test_arena_keeps_registrars_and_provider() -> None:
    null, memory = jh.Null(), np.zeros(4 << 20, "u1")
    registrar, owner = weakref.ref(null), weakref.ref(memory)
    arena = jh.Arena(null, provider=jh.Fixed(memory))
    del null, memory
    gc.collect()
    a = arena.zeros(10)
    assert owner() is not None, "the memory beneath is kept"
    assert jh.key(a).lkey == 1, "and the registrar"
    arena.close()
    del arena
    assert owner() is not None, "an array keeps all of it"
    del a
    gc.collect()
    assert registrar() is None, "and nothing more than that is kept"
    assert owner() is None, "and nothing more than that is kept"


def test_forgotten_arena(null: jh.Null) -> None:
    arena = jh.Arena(null, name="forgotten")
    jh.key(arena.zeros(3))
    with pytest.warns(ResourceWarning, match="arena 'forgotten' was not closed; use it in a with statement"):
        del arena
    assert null.stats().live == 0, "it is closed all the same"


@pytest.mark.filterwarnings("error::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_forgotten_arena_where_warnings_are_errors(null: jh.Null) -> None:
    arena = jh.Arena(null)
    jh.key(arena.zeros(3))
    del arena
    gc.collect()
    assert null.stats().live == 0, "a warning that raises must not keep the registration for good"


def test_array_outlives_a_forgotten_arena(null: jh.Null) -> None:
    a = jh.Arena(null).full(10, 4.0)
    gc.collect()
    assert a.tolist() == [4.0] * 10, "no reference to the arena is needed"
    assert jh.region(a).arena.zeros(2).tolist() == [0.0, 0.0], "it is not even closed"
    with pytest.warns(ResourceWarning, match="was not closed"):
        del a


def test_cycles(null: jh.Null) -> None:
    class Node:
        pass

    def through_a_dictionary() -> None:
        arena, node = jh.Arena(null), Node()
        node.all = (node, arena, arena.zeros(3), arena.block(8))  # type: ignore[attr-defined]
        jh.key(node.all[2])  # type: ignore[attr-defined]
        arena.close()

    def arena_and_block() -> None:
        arena = jh.Arena(null)
        arena.mine = arena.block(8)  # type: ignore[attr-defined]
        jh.key(arena.mine)  # type: ignore[attr-defined]
        arena.close()

    def region_and_lease() -> None:
        arena, node = jh.Arena(null), Node()
        block = arena.block(8)
        node.all = (node, jh.region(block), block)  # type: ignore[attr-defined]
        jh.key(block)
        arena.close()

    gc.disable()
    try:
        for make in (through_a_dictionary, arena_and_block, region_and_lease):
            make()
            assert null.stats().live == 1, "a cycle is not freed by counting"
            gc.collect()
            assert null.stats().live == 0, f"{make.__name__}: the garbage collector must free it"
    finally:
        gc.enable()


def test_nothing_is_left_over_many_rounds(resources: Callable[[], Resources], soak: int) -> None:
    def round_(n: int) -> None:
        null = jh.Null()
        arena = jh.Arena([null], policy=("lazy", "eager")[n % 2])  # type: ignore[arg-type]
        kept = [arena.full(1000, i) for i in range(20)]
        with jh.lease(kept[0]), jh.lease(kept[1][::3]):
            jh.keys([k.__array_interface__["data"][0] for k in kept])
            jh.region(kept[0]).user[0] = 1
            arena.trim()
        arena.close()
        null.close()

    for n in range(50):
        round_(n)
    before = resources()
    rounds = 300 * soak
    for n in range(rounds):
        round_(n)
    after = resources()
    assert (after.arenas, after.descriptors) == (before.arenas, before.descriptors)
    assert after.resident_kb < before.resident_kb + 4096, f"{after.resident_kb - before.resident_kb} kB leaked"


# ---- close() at every possible moment of another call ----

AT_EVERY_MOMENT = """
    import gc, importlib, pkgutil, sys
    import jemhooks as jh
    from types import CodeType, FunctionType

    # All Python code of the package that a call may run through.
    codes = set()
    def gather(code):
        codes.add(code)
        for c in code.co_consts:
            if isinstance(c, CodeType):
                gather(c)
    for found in pkgutil.walk_packages(jh.__path__, "jemhooks."):
        if found.name.rpartition(".")[2].startswith("_"):
            continue
        module = importlib.import_module(found.name)
        for value in list(vars(module).values()):
            if isinstance(value, FunctionType) and value.__module__ == module.__name__:
                gather(value.__code__)
            elif isinstance(value, type) and value.__module__ == module.__name__:
                for member in vars(value).values():
                    member = getattr(member, "fget", None) or member
                    if isinstance(member, FunctionType):
                        gather(member.__code__)

    where = ""
    if sys.argv[1].startswith("registrar"):   # the rest is the other scenarios' to see
        codes = {c for c in codes if "/registrars/" in c.co_filename or c.co_name == "__init__"}

    def with_intruder(at, call, intrude):
        "Run call(); before its bytecode number `at` (as a thread switch could), run intrude(). Was it so long?"
        seen = [0]
        def trace(frame, event, arg):
            if frame.f_code not in codes:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            if event == "opcode":
                seen[0] += 1
                if seen[0] == at:
                    sys.settrace(None)
                    globals()["where"] = f"{frame.f_code.co_name}:{frame.f_lineno}"
                    intrude()
            return trace
        sys.settrace(trace)
        try:
            call()
        except (jh.ClosedError, jh.NotOursError):
            pass
        finally:
            sys.settrace(None)
        return seen[0] >= at

    if sys.version_info >= (3, 12):          # settrace() does not tell of every bytecode there
        watch = sys.monitoring
        watch.use_tool_id(watch.PROFILER_ID, "intruder")
        def watch_all(events):
            for code in codes:
                watch.set_local_events(watch.PROFILER_ID, code, events)
        def with_intruder(at, call, intrude):
            seen = [0]
            def instruction(code, offset):
                seen[0] += 1
                if seen[0] == at:
                    watch_all(0)
                    globals()["where"] = f"{code.co_name}+{offset}"
                    intrude()
            watch.register_callback(watch.PROFILER_ID, watch.events.INSTRUCTION, instruction)
            watch_all(watch.events.INSTRUCTION)
            try:
                call()
            except (jh.ClosedError, jh.NotOursError):
                pass
            finally:
                watch_all(0)
                watch.register_callback(watch.PROFILER_ID, watch.events.INSTRUCTION, None)  # it holds intrude
            return seen[0] >= at

    null = jh.Null()
    def scenario(name):
        if name.startswith("registrar"):
            registrar = jh.Null() if name.endswith("null") else jh.Uring(slots=2)
            def use():
                with jh.Arena(registrar) as other:
                    jh.key(other.block(8))
                if name.endswith("null"):
                    registrar.stats()
            return registrar, use, registrar.close
        arena = jh.Arena(null)
        if name in ("block", "empty", "trim", "regions", "stats", "close"):
            jh.key(arena.block(8))
            call = {
                "block": lambda: arena.block(100),
                "empty": lambda: arena.empty(3).fill(1),
                "trim": arena.trim,
                "regions": arena.regions,
                "stats": arena.stats,
                "close": arena.close,
            }[name]
            return arena, call, arena.close
        block = arena.block(8)
        jh.key(block)
        address, box = block.address, [block]
        del block
        def forget():
            arena.close()
            box.clear()
        if name == "free":
            return arena, box.clear, arena.close
        if name == "region":
            return arena, lambda: jh.region(address), forget
        if name == "lease":
            return arena, lambda: jh.lease(address).release(), forget
        if name == "release":
            lease = jh.lease(address)
            return arena, lease.release, forget
        if name == "release twice":
            lease, other = jh.lease(box[0]), jh.lease(box[0])
            def release():
                try:
                    lease.release()
                except jh.ClosedError:
                    pass
            def finish():
                release()
                assert jh.region(address).leases == 1, "the other lease was ended"
            def call():
                try:
                    finish()
                finally:
                    other.release()
                    box.clear()
            return arena, call, release
        raise AssertionError(name)

    name, at, longer, left = sys.argv[1], 1, True, []
    while longer:
        arena, call, intrude = scenario(name)
        try:
            longer = with_intruder(at, call, intrude)
        except Exception as e:
            left.append(f"at {where}: {type(e).__name__}: {e}")
        arena.close()
        del arena, call, intrude
        gc.collect()
        jh.Arena().close()
        if null.stats().live > len(left):
            left.append(f"at {where}: the arena was never destroyed")
        at += 1
    print(at > 10 or name == "free", null.stats().errors)      # frees may be C's alone
    print("\\n".join(left))
"""


@pytest.mark.parametrize(
    "name",
    [
        "block",
        "empty",
        "trim",
        "regions",
        "stats",
        "close",
        "free",
        "region",
        "lease",
        "release",
        "release twice",
        "registrar null",
        "registrar uring",
    ],
)
def test_close_at_every_moment(python: Python, name: str) -> None:
    """As if another thread closed the arena between any two bytecodes; freed memory of C's is overwritten at once."""
    out = python.check(AT_EVERY_MOMENT, name, variables={"MALLOC_PERTURB_": "170"}, timeout=120)
    first, _, left = out.partition("\n")
    assert not left.strip(), f"closed between two bytecodes of {name}: {left}"
    assert first == "True 0", "each arena must be destroyed exactly once, and the tracing must have seen something"


# ---- the interpreter's end ----

AT_EXIT = """
    import builtins, os, sys, tempfile, threading
    import numpy as np
    import jemhooks as jh

    which, close, how = sys.argv[1:]
    class InPython(jh.Registrar):
        def register(self, addr, length, access):
            return 1, 2, addr
        def deregister(self, handle):
            pass
    registrar = {"null": jh.Null, "python": InPython, "uring": lambda: jh.Uring(slots=4), "fabric": jh.Fabric}[which]()
    arena = jh.Arena(registrar, name="at exit")
    array = arena.full(1000, 1.5)
    key = jh.key(array)
    block = arena.block(100)
    view, memory, region, lease = array[::2], block.memoryview(), jh.region(array), jh.lease(array)
    user = region.user
    cycle = [array, arena]; cycle.append(cycle)
    if close == "closed":
        arena.close()
    if how == "modules":      # torn down after everything else
        builtins.keep = [view, user, arena]
        sys.keep = [lease, memory]
        np.keep = array
    elif how == "cycles":
        class Holder:
            pass
        holder = Holder()
        holder.all = [holder, array, block, lease, region, registrar, arena, memory, view]
    elif how == "thread":
        local = threading.local()
        mine = arena.zeros(10) if close == "open" else view
        thread = threading.Thread(target=lambda: setattr(local, "a", (mine, lease)))
        thread.start()
        thread.join()
    lease.release()
    print("end")
"""


@pytest.mark.parametrize("how", ["plain", "modules", "cycles", "thread"])
@pytest.mark.parametrize("close", ["open", "closed"])
@pytest.mark.parametrize("which", ["null", "python", "uring", "fabric"])
def test_exit_with_everything_alive(python: Python, which: str, close: str, how: str) -> None:
    done = python.run(AT_EXIT, which, close, how, options=("-X", "faulthandler"))
    assert done.returncode == 0, f"{which}, {close}, {how}: {done.returncode}\n{done.stderr}"
    assert (done.stdout, done.stderr) == ("end\n", ""), "the end of Python must be quiet, whatever is alive"


def test_exit_with_a_lease_held_and_a_thread_running(python: Python) -> None:
    done = python.run(
        """
        import threading, jemhooks as jh
        null = jh.Null()
        arena = jh.Arena(null)
        lease = jh.lease(arena.zeros(3))
        ready = threading.Event()
        def work():
            while True:
                a = arena.zeros(1000)
                jh.key(a)
                ready.set()
        threading.Thread(target=work, daemon=True).start()
        ready.wait(20)
        print("end")
        """,
        options=("-X", "faulthandler"),
    )
    assert (done.returncode, done.stdout) == (0, "end\n"), f"daemon threads may run to the end: {done.stderr}"
    assert "Fatal" not in done.stderr, done.stderr


def test_os_exit_and_sys_exit_inside_with(python: Python) -> None:
    for leave, status in (("sys.exit(3)", 3), ("os._exit(4)", 4), ("raise SystemExit", 0)):
        done = python.run(
            f"""
            import os, sys, jemhooks as jh
            with jh.Uring(slots=4) as uring, jh.Arena(uring) as arena:
                a = arena.zeros(3)
                with jh.lease(a):
                    {leave}
            """
        )
        assert (done.returncode, done.stderr) == (status, ""), f"{leave}: {done.stderr}"
