"""After a fork: the child's copies of the parent's arenas are frozen, and the parent notices nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from forked import FORK

if TYPE_CHECKING:
    from conftest import Python

# Forks and runs child(); everything else of the scripts is the parent's.
PRELUDE = (
    """
    import gc, os, sys
    import numpy as np
    import jemhooks as jh
"""
    + FORK
)


@pytest.mark.null
def test_frozen_in_the_child(python: Python) -> None:
    python.check(
        PRELUDE
        + """
    null = jh.Null()
    arena = jh.Arena(null, name="parent's")
    a, b = arena.full(1000, 1.0), arena.full(1000, 2.0)
    fresh = arena.block("4MiB")
    key = jh.key(a)
    lease = jh.lease(b)
    before = null.stats()

    def child():
        assert a.sum() == 1000 and (b == 2).all(), "reading works"
        calls = (
            lambda: arena.block(8), lambda: arena.zeros(3), arena.trim, lambda: jh.key(a), lambda: jh.key(a, 0),
            lambda: jh.lkey(a), lambda: jh.rkey(a), lambda: jh.keys([a.__array_interface__["data"][0]]),
            lambda: jh.lease(a), lambda: jh.key(fresh),
        )
        for call in calls:
            text = refused(jh.ForkError, call)
            assert "parent's" in text and "fork" in text and "make an arena here" in text, text
        for call in (arena.stats, arena.regions):
            refused(jh.ForkError, call)
        refused(jh.JemhooksError, lambda: jh.region(a))
        a[:] = 99
        arena.close()
        refused(jh.ClosedError, lambda: arena.block(8))

    wait(fork(child))
    assert (a == 1).all(), "the child's write is its own"
    assert jh.key(a) == key and jh.region(a).leases == 1
    assert null.stats() == before, "the child called no registrar"
    lease.release()
    assert arena.zeros(10).sum() == 0
    del a, b, fresh, lease
    arena.close()
    assert null.stats().live == 0
    """
    )


@pytest.mark.null
def test_leases_across_a_fork(python: Python) -> None:
    """The child leaves the with statement as the parent does, and ends nothing of the parent's."""
    python.check(
        PRELUDE
        + """
    null = jh.Null()
    with jh.Arena(null) as arena:
        a = arena.full(1000, 1.0)
        explicit = jh.lease(a)
        pid = 0
        with jh.lease(a) as key:
            pid = os.fork()
        if not pid:
            refused(jh.ForkError, explicit.release)
            refused(jh.ForkError, lambda: jh.lease(a))
            with jh.Null() as own, jh.Arena(own) as fresh, jh.lease(fresh.full(3, 1.0)):
                pass
            os._exit(0)
        wait(pid)
        assert jh.region(a).leases == 1
        assert jh.key(a) == key
        explicit.release()
        del a
        arena.trim()
        assert null.stats().live == 0
    """
    )


@pytest.mark.null
def test_freeing_in_the_child_changes_nothing(python: Python) -> None:
    """Also where pages are shared with the child: a memfd must not lose them."""
    python.check(
        PRELUDE
        + """
    import mmap
    null = jh.Null()
    for provider in (None, jh.Fixed(mmap.mmap(-1, 64 << 20))):          # private; shared with the child
        arena = jh.Arena(null, provider=provider, dirty_decay_ms=0, muzzy_decay_ms=0)
        arrays = [arena.full(30_000, i, "u1") for i in range(200)] + [arena.full(2 << 20, 7, "u1") for _ in range(5)]
        for x in arrays[::2]:
            jh.key(x)
        leases = [jh.lease(x) for x in arrays[:3]]
        regions = [jh.region(x) for x in arrays[:3]]

        def child():
            import warnings
            warnings.simplefilter("ignore")
            arrays.clear()
            leases.clear()
            regions.clear()
            gc.collect()
            arena.close()
            gc.collect()

        wait(fork(child))
        assert all((x == (i if i < 200 else 7)).all() for i, x in enumerate(arrays)), "the child's frees reached us"
        stats = arena.stats()
        assert stats.current_count == 205 and stats.committed == stats.active + stats.dirty + stats.muzzy
        del arrays[1::2]
        more = [arena.full(30_000, 5, "u1") for _ in range(100)]
        assert all((m == 5).all() for m in more)
        for lease in leases:
            lease.release()
        arrays.clear(); more.clear(); leases.clear(); regions.clear()
        del x, lease
        arena.close()
        assert null.stats().live == 0 and null.stats().errors == 0
    """
    )


@pytest.mark.null
@pytest.mark.parametrize("leave", ["sys.exit(0)", "os._exit(0)", "pass"])
def test_exit_of_the_child(python: Python, leave: str) -> None:
    """An ordinary end, with atexit and all destructors, is quiet and calls no registrar."""
    out = python.check(
        f"""
        import os, sys
        import jemhooks as jh
        class Loud(jh.Registrar):
            def register(self, addr, length, access):
                print("register", os.getpid() == parent, flush=True)
                return 1, 2, None
            def deregister(self, handle):
                print("deregister", os.getpid() == parent, flush=True)
        parent = os.getpid()
        loud, null = Loud(), jh.Null()
        arena, other = jh.Arena(loud), jh.Arena(null)
        a, b = arena.zeros(100), other.zeros(100)
        jh.key(a), jh.key(b)
        user, region = jh.region(a).user, jh.region(b)
        closed = jh.Arena(loud)
        c = closed.zeros(3)
        jh.key(c)
        closed.close()
        pid = os.fork()
        if pid == 0:
            del c
            {leave}
        else:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert status == 0, status
            assert null.stats().live == 1
            del a, b, c, user, region
            arena.close(), other.close()
            print(null.stats().live)
        """,
        options=("-X", "faulthandler"),
    )
    assert out.split("\n")[:-1] == ["register True"] * 2 + ["deregister True"] * 2 + ["0"], "only the parent registers"


@pytest.mark.null
def test_new_arenas_in_the_child(python: Python) -> None:
    python.check(
        PRELUDE
        + """
    null = jh.Null()
    arena = jh.Arena(null)
    a = arena.full(1000, 1.0)
    jh.key(a)

    def child(depth=0):
        mine = jh.Null()
        with jh.Arena(mine, name=f"child {depth}", shards=2) as own:
            x = own.full(5000, 3.0)
            assert jh.key(x).length == 40_000 and jh.region(x).arena is own
            with jh.lease(x):
                assert own.trim() == 0
            refused(jh.ForkError, lambda: jh.key(a))
            assert (x == 3).all() and (a == 1).all()
            if depth < 2:
                wait(fork(lambda: child(depth + 1)))
            assert jh.key(x).length == 40_000, "the grandchild changed nothing here"
            del x
        assert mine.stats().live == 0
        with jh.Uring(slots=2) as uring, jh.Arena(uring) as own:
            jh.key(own.zeros(3))

    pids = [fork(child) for _ in range(3)]
    for pid in pids:
        wait(pid)
    assert jh.key(a).rkey == 2 and null.stats().registers == 1
    del a
    arena.close()
    """,
        timeout=90,
    )


@pytest.mark.null
def test_fork_while_threads_allocate(python: Python, soak: int) -> None:
    """No lock may be left held in the child, whatever the other threads were doing."""
    python.check(
        PRELUDE
        + f"""
    import threading, warnings
    warnings.simplefilter("ignore", DeprecationWarning)
    null = jh.Null()
    arena = jh.Arena(null, shards=2, dirty_decay_ms=0)
    stop = threading.Event()
    jh.key(arena.zeros(1))     # all is imported: Python's own import locks do not survive a fork

    def busy(i):
        while not stop.is_set():
            x = arena.full(1 << (8 + i * 3), i)
            jh.key(x)
            arena.stats()
            if i == 0:
                arena.trim()

    threads = [threading.Thread(target=busy, args=(i,), daemon=True) for i in range(4)]
    for t in threads:
        t.start()
    kept = arena.full(100, 4.0)

    def child():
        import signal
        signal.alarm(30)                       # a deadlock ends here
        refused(jh.ForkError, lambda: arena.block(8))
        with jh.Null() as mine, jh.Arena(mine) as own:
            x = own.full(1000, 2.0)
            jh.key(x)
            own.trim()
            assert (x == 2).all() and (kept == 4).all()
            del x

    for _ in range({15 * soak}):
        wait(fork(child))
    stop.set()
    for t in threads:
        t.join(30)
    assert (kept == 4).all()
    del kept
    arena.close()
    gc.collect()
    assert null.stats().live == 0 and null.stats().errors == 0
    """,
        options=("-X", "faulthandler"),
        timeout=120 * soak,
    )


@pytest.mark.uring
def test_the_parents_pinned_pages_stay_right(python: Python) -> None:
    """A fork makes pages copy-on-write; the device must go on seeing the parent's, not the child's."""
    python.check(
        PRELUDE
        + """
    import tempfile
    def pinned():
        with open("/proc/self/status") as f:
            return int(f.read().split("VmPin:")[1].split()[0])
    uring = jh.Uring(slots=8)
    arena = jh.Arena(uring)
    f = tempfile.TemporaryFile(buffering=0)
    a = arena.full(500_000, 1, "u1")
    jh.key(a)
    was = pinned()
    go, gone = os.pipe(), os.pipe()

    def child():
        os.read(go[0], 1)
        a[:] = 99                                       # our own copy
        refused(jh.ForkError, lambda: uring.write_from(f.fileno(), a))
        arena.close()
        uring.close()
        with jh.Uring(slots=2) as mine, jh.Arena(mine) as own:
            x = own.full(1000, 5, "u1")
            assert mine.write_from(f.fileno(), x, 1_000_000) == 1000
            del x

    pid = fork(child)
    a[:] = 2                                            # after the fork: copied by whoever writes first
    assert uring.write_from(f.fileno(), a) == a.nbytes
    assert os.pread(f.fileno(), a.nbytes, 0) == bytes([2]) * a.nbytes, "the device sees another page than we do"
    os.write(go[1], b"x")
    wait(pid)
    assert pinned() == was, "the child unpinned the parent's memory"
    a[:] = 3
    assert uring.write_from(f.fileno(), a) == a.nbytes
    assert os.pread(f.fileno(), a.nbytes, 0) == bytes([3]) * a.nbytes
    os.pwrite(f.fileno(), b"\\4" * a.nbytes, 0)
    assert uring.read_into(f.fileno(), a) == a.nbytes
    assert (a == 4).all(), "what the device writes is what we read"
    assert os.pread(f.fileno(), 1000, 1_000_000) == b"\\5" * 1000, "the child's own ring worked"
    b = arena.full(3 << 20, 6, "u1")
    assert jh.key(b).length == 3 << 20 and pinned() > was
    del a, b
    f.close()
    arena.close()
    uring.close()
    """
    )


@pytest.mark.uring
@pytest.mark.fabric
@pytest.mark.parametrize("make", ["jh.Uring(slots=4)", "jh.Fabric('tcp')"])
def test_the_parents_registrar_is_refused_in_the_child(python: Python, make: str) -> None:
    """The ring and the connections are shared with the parent: a registration here would be made in its name."""
    python.check(
        PRELUDE
        + f"""
    registrar = {make}
    arena = jh.Arena(registrar)
    a = arena.zeros(10)
    key = jh.key(a)

    def child():
        def use():
            own = jh.Arena(registrar)
            try:
                block = own.block(8)
                jh.key(block)
            finally:
                own.close()
        refused(jh.ForkError, use)

    wait(fork(child))
    assert jh.key(a) == key
    del a
    assert arena.trim() > 0
    b = arena.full(100, 2.0)
    jh.key(b)
    del b
    arena.close()
    registrar.close()
    """
    )


@pytest.mark.fabric
def test_the_childs_exit_does_not_hurt_fabric(python: Python) -> None:
    python.check(
        PRELUDE
        + """
    fabric, arena = jh.Fabric("tcp"), None
    arena = jh.Arena(fabric)
    a, b = arena.full(100_000, 1, "u1"), arena.zeros(100_000, "u1")
    peer = fabric.connect(fabric.address())
    fabric.put(peer, a, jh.key(b)).wait(20)

    def child():
        refused(jh.ForkError, lambda: jh.key(b))
        for call in (
            lambda: fabric.put(peer, a, (0, 0)), lambda: fabric.connect(b"x" * 16), fabric.progress, fabric.address,
        ):
            refused(jh.JemhooksError, call)
        arena.close()
        fabric.close()

    wait(fork(child))
    a[:] = 5
    fabric.put(peer, a, jh.key(b)).wait(20)
    assert (b == 5).all()
    del a, b
    arena.close()
    fabric.close()
    """
    )


@pytest.mark.null
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(python: Python, tmp_path_factory: pytest.TempPathFactory, method: str) -> None:
    script = tmp_path_factory.mktemp(method) / "pool.py"
    script.write_text(
        f"""
import multiprocessing as mp
import os
import jemhooks as jh

arena = None

def work(n):
    with jh.Null() as null, jh.Arena(null) as own:
        x = own.full(1000, n)
        key = jh.key(x)
        total = float(x.sum())
        del x
    if {method!r} == "fork":
        try:
            arena.block(8)
        except jh.ForkError:
            pass
        else:
            raise AssertionError("the parent's arena worked in the child")
    return total, key

if __name__ == "__main__":
    null = jh.Null()
    arena = jh.Arena(null)
    a = arena.full(10, 1.0)
    jh.key(a)
    with mp.get_context({method!r}).Pool(2) as pool:
        results = pool.map(work, range(20))
        pool.close()
        pool.join()
    assert [total for total, _ in results] == [1000.0 * n for n in range(20)]
    assert all(type(key) is jh.Key and key.length == 8000 for _, key in results), "keys come back by pickling"
    assert null.stats().live == 1 and (a == 1).all()
    del a
    arena.close()
    assert null.stats().live == 0
"""
    )
    done = python.run(None, str(script), options=("-X", "faulthandler"), timeout=90)
    assert (done.returncode, done.stderr) == (0, ""), f"{method}: {done.stderr}"
