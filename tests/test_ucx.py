"""UCX on loopback: memory handles, packed keys, contexts of our own and of others. Its caches: tests/c/ucx_cache.c."""

from __future__ import annotations

import ctypes
import gc
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

import jemhooks as jh

if TYPE_CHECKING:
    from conftest import Python

pytestmark = pytest.mark.ucx

# A UCP context as an application makes it: ucp_init() of ucp/api/ucp.h, whose ucp_params_t begins with field_mask and
# features, and has mt_workers_shared at byte 48.
CONTEXTS = """
    import ctypes

    def library(name):
        return ctypes.CDLL(name, ctypes.RTLD_GLOBAL)

    def ucp_init(ucp, shared):
        params = (ctypes.c_uint64 * 64)()
        params[0] = 1 << 0 | (1 << 5 if shared else 0)  # UCP_PARAM_FIELD_FEATURES, _MT_WORKERS_SHARED
        params[1] = 1 << 1  # UCP_FEATURE_RMA
        params[6] = int(shared)
        context, major, minor, release = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
        ucp.ucp_get_version(ctypes.byref(major), ctypes.byref(minor), ctypes.byref(release))
        status = ucp.ucp_init_version(major, minor, params, None, ctypes.byref(context))
        assert status == 0, f"ucp_init gave {status}"
        return context.value
"""
NAMES: dict[str, Any] = {}
exec(textwrap.dedent(CONTEXTS), NAMES)


@pytest.fixture(scope="module")
def ucp() -> Any:
    return NAMES["library"]("libucp.so.0")


@pytest.fixture(params=[True, False], ids=["shared", "single"])
def context(request: pytest.FixtureRequest, ucp: Any) -> Iterator[int]:
    """A context of somebody else's, with or without a lock of its own."""
    handle = NAMES["ucp_init"](ucp, request.param)
    yield handle
    ucp.ucp_cleanup(ctypes.c_void_p(handle))


class Handle:
    """Like UCXX's UCXContext."""

    def __init__(self, handle: int) -> None:
        self.handle = handle


def test_own_context() -> None:
    with jh.Ucx() as ucx, jh.Arena(ucx) as arena:
        info = ucx.info()
        assert (info.own, info.shared) == (True, True)
        assert info.version.count(".") == 2
        a, b = arena.full(1000, 1.0), arena.empty(10)
        key = jh.key(a)
        assert key.addr == a.__array_interface__["data"][0], "UCX's remote addresses are plain ones"
        assert key.lkey, "the memory handle"
        assert key.rkey == 0
        packed = jh.packed_key(a)
        assert 9 <= len(packed) < 1000, "a packed rkey has a map of domains and a memory type at least"
        assert jh.packed_key(b) == packed, "one region, one key"
        assert arena.stats().registrations == 1


def test_a_region_without_packed_keys(null: jh.Null) -> None:
    with jh.Arena(null) as arena:
        assert jh.packed_key(arena.empty(10)) == b""
    with pytest.raises(jh.NotOursError):
        jh.packed_key(12345)


@pytest.mark.parametrize("wrap", [int, Handle])
def test_the_callers_context(context: int, wrap: Callable[[int], Any]) -> None:
    with jh.Ucx(wrap(context)) as ucx:
        assert ucx.info().context == context
        assert not ucx.info().own
        with jh.Arena(ucx, region_min="4MiB", region_max="4MiB") as arena:
            blocks = [arena.block("3MiB") for _ in range(5)]
            assert len({jh.key(block).lkey for block in blocks}) == 5, "regions share a memory handle"
            assert all(len(jh.packed_key(block)) >= 9 for block in blocks)


def test_a_context_that_ends(ucp: Any) -> None:
    """Registrations go first, leased or not; later keys are refused, and the arena can still be used."""
    handle = NAMES["ucp_init"](ucp, True)
    ucx = jh.Ucx(handle)
    with jh.Arena(ucx, name="left") as arena:
        array = arena.full(1000, 2.0)
        with jh.lease(array):
            ucx.detach()
            ucp.ucp_cleanup(ctypes.c_void_p(handle))
        with pytest.raises(jh.RegistrationError, match="detached"):
            jh.key(array)
        assert array.sum() == 2000.0
        assert arena.full(10, 1.0).sum() == 10.0
    assert ucx.info().context == 0
    ucx.detach()
    ucx.close()
    ucx.detach()


def test_detach_after_close(ucp: Any) -> None:
    """The registrar is closed, its arenas go on; the context can still be ended safely."""
    handle = NAMES["ucp_init"](ucp, True)
    ucx = jh.Ucx(handle)
    with jh.Arena(ucx) as arena:
        array = arena.full(10, 1.0)
        assert jh.packed_key(array)
        ucx.close()
        ucx.detach()
        ucp.ucp_cleanup(ctypes.c_void_p(handle))
        with pytest.raises(jh.RegistrationError, match="detached"):
            jh.packed_key(array)


def test_detach_is_for_the_callers_context() -> None:
    with jh.Ucx() as ucx, jh.Arena(ucx) as arena:
        array = arena.full(10, 1.0)
        generation = jh.key(array).generation
        with pytest.raises(jh.ConfigError, match="own"):
            ucx.detach()
        assert jh.key(array).generation == generation, "refused, but something was done"


def test_packed_keys_while_registrations_end(soak: int) -> None:
    """Never bytes of a registration that has ended."""
    with jh.Ucx() as ucx, jh.Arena(ucx) as arena:
        block = arena.block(100)
        expected, done, wrong = jh.packed_key(block), threading.Event(), 0

        def revoke() -> None:
            while not done.is_set():
                arena._revoke()

        threads = [threading.Thread(target=revoke) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(5000 * soak):
            wrong += jh.packed_key(block) != expected
        done.set()
        for thread in threads:
            thread.join()
        assert wrong == 0, f"{wrong} packed keys were other bytes"


class Closed:
    """As ucx-py's context does after its close."""

    @property
    def handle(self) -> int:
        raise AssertionError("not initialized")


@pytest.mark.parametrize(
    ("context", "error", "words"),
    [
        ("context", jh.ConfigError, "neither a ucp_context_h"),
        (object(), jh.ConfigError, "neither a ucp_context_h"),
        (-1, jh.ConfigError, "context"),
        (2**64, jh.ConfigError, "context"),
        (4096, jh.ConfigError, "there is no memory"),
        (0x7FFF_FFFF_F001, jh.ConfigError, "there is no memory"),
        (0, jh.ClosedError, "closed"),
        (Handle(0), jh.ClosedError, "closed"),
        (Closed(), jh.ClosedError, "not initialized"),
    ],
)
def test_no_context(context: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        jh.Ucx(context)


def test_no_transport(python: Python) -> None:
    python.check(
        """
        import jemhooks as jh
        try:
            jh.Ucx()
        except jh.RegistrationError as e:
            assert "ucx_info -d" in str(e), e
        else:
            raise AssertionError("a context without transports was made")
        """,
        variables={"UCX_TLS": "nonsense", "UCX_LOG_LEVEL": "fatal", "UCX_WARN_INVALID_CONFIG": "n"},
    )


def test_deregistered_means_unmapped() -> None:
    """A budget that evicts: handles come and go, and none is used after its end."""
    with jh.Ucx() as ucx, jh.Arena(ucx, pin_limit="8MiB", dirty_decay_ms=0, muzzy_decay_ms=0) as arena:
        for _ in range(50):
            blocks = [arena.block("1500KiB") for _ in range(4)]
            assert all(jh.key(block).lkey for block in blocks)
            del blocks
            gc.collect()
            arena.trim()
        stats = arena.stats()
        assert stats.registered_peak <= 8 << 20
        assert stats.deregistrations >= 50


def test_pythons_signal_handlers_stay(python: Python) -> None:
    """UCX takes SIGSEGV and others when it is loaded; a crash must still be reported by whoever reported it before."""
    done = python.run(
        """
        import os, signal
        import jemhooks as jh
        ucx = jh.Ucx()
        os.kill(os.getpid(), signal.SIGSEGV)
        """
    )
    assert done.returncode == -11
    assert "Fatal Python error: Segmentation fault" in done.stderr, done.stderr


def test_fork(python: Python) -> None:
    python.check(
        """
        import os, sys
        import jemhooks as jh
        ucx = jh.Ucx()
        arena = jh.Arena(ucx)
        array = arena.full(1000, 3.0)
        packed = jh.packed_key(array)
        for leave in ("exit", "_exit"):
            pid = os.fork()
            if not pid:
                for call in (lambda: jh.key(array), lambda: jh.packed_key(array), ucx.info, lambda: jh.Arena(ucx)):
                    try:
                        call()
                    except jh.ForkError:
                        pass
                    else:
                        os._exit(1)
                with jh.Ucx() as own, jh.Arena(own) as fresh:
                    assert jh.packed_key(fresh.full(10, 1.0))
                del array
                sys.exit(0) if leave == "exit" else os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert jh.packed_key(array) == packed
        assert array.sum() == 3000.0
        arena.trim()
        del array
        arena.close()
        ucx.close()
        """,
        variables={"UCX_TLS": "tcp,self"},
    )


def test_notify_without_ucx(python: Python) -> None:
    python.check(
        """
        import jemhooks as jh
        try:
            jh.notify_cache("ucx")
        except jh.LoadError as e:
            assert "load UCX first" in str(e), e
        else:
            raise AssertionError("there is no UCX in this process")
        for wrong in ("knem", "", "ucx/.."):
            try:
                jh.notify_cache(wrong)
            except jh.ConfigError as e:
                assert "fabric and ucx" in str(e), e
            else:
                raise AssertionError(f"{wrong!r} was taken")
        with jh.Arena() as arena:
            assert arena.full(10, 1.0).sum() == 10.0
        """
    )
