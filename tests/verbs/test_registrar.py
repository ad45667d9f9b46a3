"""The registrar verbs: devices, protection domains, access, limits, rails, and what bad input gets."""

from __future__ import annotations

import contextlib
import errno
import re
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import jemhooks as jh

if TYPE_CHECKING:
    from conftest import Python


def test_a_device_by_name(mrs: Callable[..., int]) -> None:
    with jh.Verbs("rxe1") as verbs, jh.Arena(verbs) as arena:
        info = verbs.info()
        assert (info.device, info.ports, info.atomics) == ("rxe1", 1, True)
        assert info.max_mr_size > 2**30
        assert info.max_mr > 1000
        before = mrs()
        a = arena.zeros(1000)
        assert mrs() == before, "lazy: nothing is registered before a key is asked for"
        key = jh.key(a)
        assert (key.addr, key.length) == (a.__array_interface__["data"][0], a.nbytes), "remote addresses are addresses"
        assert mrs() == before + 1
        assert [jh.key(arena.zeros(10)).rkey for _ in range(10)] == [key.rkey] * 10, "a region has one key"
        assert mrs() == before + 1, "registered once"
        del a
        assert arena.trim() > 0
        assert mrs() == before, "an idle region is deregistered by trim()"


def test_the_first_device_by_default() -> None:
    with jh.Verbs() as verbs:
        assert verbs.info().device == "rxe0"


def test_a_pd_of_pyverbs(device: Any, mrs: Callable[..., int]) -> None:
    before = mrs()
    verbs = jh.Verbs(pd=device.pd)
    with jh.Verbs("rxe0") as other:
        assert (verbs.max_mr_size, verbs.max_mr) == other.info()[1:3], "the device's own limits"
    with jh.Arena(verbs, policy="eager") as arena:
        a = arena.zeros(10)
        assert mrs() == before + 1, "eager: registered before it is handed out"
        assert jh.key(a).lkey
        assert arena.sges([a]).tolist() == [(jh.key(a).addr, 80, jh.key(a).lkey)]
        with pytest.raises(jh.ConfigError, match="ask its context"):
            verbs.info()
        del a
    assert mrs() == before


def test_a_pd_of_another_binding(mrs: Callable[..., int]) -> None:
    """PyPI's ibverbs; anything else with reg_mr(addr, length, access) goes the same way."""
    import ibverbs

    found = {d.name: d for d in ibverbs.get_device_list()}
    context = found["rxe0"].open()
    pd, before = context.alloc_pd(), mrs()
    with jh.Arena(jh.Verbs("rxe0", pd=pd)) as arena:
        a = arena.zeros(10)
        key = jh.key(a)
        assert key.addr == a.__array_interface__["data"][0]
        assert mrs() == before + 1
        with pytest.raises(jh.ConfigError, match="device rxe0, not of rxe1"):
            jh.Verbs("rxe1", pd=pd)
        with pytest.raises(Exception, match=r"(?i)child|open|busy|mr"):
            pd.close()
        assert jh.key(a) == key, "that binding refuses to close a PD in use"
        del a
    assert mrs() == before
    pd.close()
    with pytest.raises(jh.RegistrationError), jh.Arena(jh.Verbs(pd=pd), policy="eager") as arena:
        arena.block(1)
    context.close()


def test_on_demand_paging_is_refused_where_the_device_has_none(device: Any) -> None:
    with jh.Verbs("rxe0") as verbs:
        has = verbs.info().on_demand
    for make in (lambda: jh.Verbs("rxe0"), lambda: jh.Verbs(pd=device.pd)):
        with jh.Arena(make(), access="remote_read|on_demand", policy="lazy") as arena:
            block = arena.block(100)
            if has:
                assert jh.key(block).lkey
            else:
                with pytest.raises(jh.RegistrationError, match="rxe0"):
                    jh.key(block)
            assert bytes(block.memoryview()[:0]) == b"", "the arena lives on"
            del block


def test_rails_are_all_or_none(devices: tuple[Any, Any], mrs: Callable[..., int]) -> None:
    before, null = mrs(), jh.Null(fail_at=1)
    rails = [jh.Verbs(pd=devices[0].pd), jh.Verbs("rxe1"), null]
    with jh.Arena(rails) as arena:
        block = arena.block(1000)
        with pytest.raises(jh.RegistrationError, match="null"):
            jh.key(block)
        assert mrs() == before, "what the first rails had registered is undone"
        keys = [jh.key(block, rail) for rail in range(3)]
        assert mrs() == before + 2
        assert keys[0].addr == keys[1].addr == block.address
        assert arena.sges([block], rail=1)[0]["lkey"] == keys[1].lkey
        del block
    assert mrs() == before
    null.close()


def test_verbs_beside_libfabric(device: Any, mrs: Callable[..., int]) -> None:
    before = mrs()
    with jh.Fabric("tcp") as fabric, jh.Arena([jh.Verbs(pd=device.pd), fabric]) as arena:
        a = arena.full(1000, 7, "u1")
        assert jh.key(a).addr == a.__array_interface__["data"][0]
        assert jh.key(a, 1).rkey != jh.key(a, 0).rkey
        peer = fabric.connect(fabric.address())
        b = arena.zeros(1000, "u1")
        fabric.put(peer, a, jh.key(b, 1)).wait()
        assert (b == 7).all()
        assert mrs() == before + 1
        del a, b


def test_wrong_arguments(devices: tuple[Any, Any]) -> None:
    from pyverbs.device import Context
    from pyverbs.pd import PD

    closed, orphan = PD(devices[0].ctx), PD(other := Context(name="rxe1"))
    closed.close()
    other.close()
    wrong: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: jh.Verbs("mlx5_9"), jh.RegistrationError, "no device is named mlx5_9; this host has rxe0, rxe1"),
        (lambda: jh.Verbs("rxe1", pd=devices[0].pd), jh.ConfigError, "the PD is of device rxe0, not of rxe1"),
        (lambda: jh.Verbs(pd=closed), jh.ClosedError, "is closed"),
        (lambda: jh.Verbs(pd=orphan), jh.ClosedError, "is closed"),
        (lambda: jh.Verbs(pd=7), jh.ConfigError, "neither a pyverbs PD"),
        (lambda: jh.Verbs(pd=devices[0].ctx), jh.ConfigError, "neither a pyverbs PD"),
        (lambda: jh.Verbs(5), jh.ConfigError, "device"),  # type: ignore[arg-type]
        (lambda: jh.Verbs("a\0b"), jh.ConfigError, "device"),
    ]
    for make, error, said in wrong:
        with pytest.raises(error, match=re.escape(said)):
            make()


def test_closed_while_in_use(mrs: Callable[..., int]) -> None:
    from pyverbs.device import Context
    from pyverbs.pd import PD

    ctx = Context(name="rxe0")
    pd, before = PD(ctx), mrs()
    with jh.Arena(jh.Verbs(pd=pd), policy="eager") as arena:
        kept = arena.full(1000, 3, "u1")
        assert jh.key(kept).lkey
        with jh.lease(kept):
            ctx.close()
        assert mrs() == before, "its context took the PD along, and the PD its MRs"
        for ask in (jh.key, jh.lease, lambda _: arena.sges([_]), lambda _: arena.block(5)):
            with pytest.raises(jh.RegistrationError, match="the protection domain, or its device context, is closed"):
                ask(kept)
        assert (kept == 3).all(), "memory is not lost with its registration"
        del kept


def test_memlock_of_an_ordinary_user(python: Python) -> None:
    """CAP_IPC_LOCK exempts root; so as nobody, with a limit of 8 MiB."""
    out = python.check(
        """
        import os, pathlib, resource
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        import jemhooks as jh
        from pyverbs.device import Context
        from pyverbs.pd import PD
        def pinned():
            return int(pathlib.Path("/proc/self/status").read_text().split("VmPin:")[1].split()[0])
        for verbs in (jh.Verbs("rxe0"), jh.Verbs(pd=PD(Context(name="rxe0")))):
            with jh.Arena(verbs, region_max="2MiB", provider=jh.Anonymous(thp=False)) as arena:
                kept = []
                try:
                    while len(kept) < 100:
                        kept.append(arena.full(1 << 20, len(kept), "u1"))
                        jh.key(kept[-1])
                except jh.RegistrationError as e:
                    print(e.errno, str(e))
                print(len(kept), pinned())
                assert all((a == i).all() for i, a in enumerate(kept)), "no byte was lost"
                kept.clear()
                arena.trim()
                print(pinned(), jh.key(arena.zeros(100)).rkey > 0)
        """
    ).splitlines()
    assert len(out) == 6, out
    for refused, full, freed in (out[:3], out[3:]):
        number, text = refused.split(" ", 1)
        assert int(number) == errno.ENOMEM, text
        for said in ("rxe0", "2097152 bytes", "RLIMIT_MEMLOCK is 8388608 bytes", "ulimit -l"):
            assert said in text, f"the error names {said}: {text}"
        count, pinned = map(int, full.split())
        assert 4 <= count <= 8, out
        assert 0 < pinned <= 8192
        assert freed == "0 True", "all of it came back, and can be used again"


def test_ten_thousand_regions(device: Any, mrs: Callable[..., int]) -> None:
    count, nbytes = 10_000, 65536
    memory = np.zeros((count + 1) * nbytes, "u1")
    start = -(-memory.__array_interface__["data"][0] // nbytes) * nbytes
    fixed = jh.Fixed([(start + i * nbytes, nbytes) for i in range(count)], zeroed=True)
    before = mrs()
    with jh.Verbs("rxe0") as verbs, jh.Arena(verbs, provider=fixed) as arena:
        blocks = [arena.block(56 * 1024) for _ in range(count)]
        keys = jh.keys([b.address for b in blocks])
        assert len(np.unique(keys["rkey"])) == count, "each region has a key of its own"
        assert mrs() == before + count
        assert arena.stats().registrations == count
        again = jh.keys([b.address for b in blocks])
        assert (again == keys).all(), "and keeps it"
        blocks.clear()
        assert arena.trim() == count * nbytes
        assert mrs() == before


def test_doctor_shows_the_device() -> None:
    done = subprocess.run([sys.executable, "-m", "jemhooks", "doctor"], capture_output=True, text=True, check=False)
    assert re.search(r"^ok +verbs +rxe0, registered a region", done.stdout, re.M), done.stdout
    assert done.returncode == 0


def test_a_device_that_may_not_be_opened(python: Python) -> None:
    with contextlib.ExitStack() as stack:
        import os
        import stat

        for node in ("uverbs0", "uverbs1"):
            path = f"/dev/infiniband/{node}"
            stack.callback(os.chmod, path, stat.S_IMODE(os.stat(path).st_mode))
            os.chmod(path, 0o600)
        out = python.check(
            """
            import os
            os.setresuid(65534, 65534, 65534)
            import jemhooks as jh
            try:
                jh.Verbs("rxe0")
            except jh.RegistrationError as e:
                print(e)
            """
        )
    assert "ibv_open_device of rxe0" in out
    assert "/dev/infiniband" in out, f"names what to do: {out}"
