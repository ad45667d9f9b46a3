"""What all tests share: child processes, and a look for what a test left behind."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

import jemhooks as jh

if TYPE_CHECKING:
    from differences import Difference

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
PASSED = pytest.StashKey[bool]()
DIFFERENCE: pytest.StashKey[Difference] = pytest.StashKey()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Without the native library every test would fail for the same reason; say it once."""
    try:
        jh.Arena().close()
    except jh.LoadError as e:
        pytest.exit(f"start the tests with `python -m jemhooks run -- python -m pytest`: {e}", returncode=4)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is different with this allocator must be so: a test that passes nevertheless fails."""
    from allocator import VERSION
    from differences import expected

    found = expected(jh.build_config()["allocator"], VERSION)
    for item in items:
        name = f"{item.path.name}::{item.name}"
        difference = found.get(name, found.get(name.partition("[")[0]))
        if difference:
            item.stash[DIFFERENCE] = difference
            item.add_marker(pytest.mark.xfail(reason=difference.reason, strict=difference.always))


def forget_the_failure() -> None:
    """What a test that had to fail left open goes in silence, lest the next one fail by its warnings."""
    for name in ("last_exc", "last_value", "last_traceback"):
        if hasattr(sys, name):
            delattr(sys, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    difference = item.stash.get(DIFFERENCE, None)
    if difference and call.excinfo and hasattr(report, "wasxfail"):
        lines = re.findall("(?m)^E .*", report.longreprtext) or [report.longreprtext]
        said = "\n".join((str(call.excinfo.value), *lines))
        if not re.search(difference.says, said):
            del report.wasxfail
            report.outcome = "failed"
            report.longrepr = f"{report.longreprtext}\nexpected to fail, but to say {difference.says!r}"
    if difference:
        forget_the_failure()
    if report.when == "call":
        item.stash[PASSED] = report.passed
    return report


def eventually(condition: Callable[[], bool], timeout: float = 10.0) -> bool:
    """Whether the condition comes true in time; for what the kernel does later. Never a fixed wait."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


class Resources(NamedTuple):
    """What this process holds that a leak would show in."""

    arenas: int
    shared: int  # mappings of arenas' shared memory; of huge pages, one kept keeps other tests from having any
    pinned_kb: int
    descriptors: int
    resident_kb: int

    @classmethod
    def now(cls, collect: bool = True) -> Resources:
        from jemhooks.lifetime import by_address, drain

        if collect:
            gc.collect()
        drain()
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        kb = [int(status[name].split()[0]) for name in ("VmPin", "VmRSS")]
        still_open = sum(not arena._closed for arena in list(by_address.values()))  # type: ignore[attr-defined]
        maps = Path("/proc/self/maps").read_text()
        shared = maps.count("/memfd:jemhooks:") - maps.count("/memfd:jemhooks:ledger")
        return cls(still_open, shared, kb[0], len(os.listdir("/proc/self/fd")), kb[1])


@pytest.fixture
def resources() -> Callable[[], Resources]:
    """A function: what is held now, after garbage collection."""
    return Resources.now


@pytest.fixture
def wait_until() -> Callable[..., bool]:
    return eventually


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test may leave an arena open or a page pinned. (One that failed may: its traceback holds its arenas.)"""
    before = Resources.now(collect=False)
    yield
    if not request.node.stash.get(PASSED, False):
        return
    after = Resources.now(collect=False)
    if after.arenas > before.arenas or after.shared > before.shared or after.pinned_kb > before.pinned_kb:
        after = Resources.now()
    assert after.arenas <= before.arenas, "the test left an arena open"
    assert after.shared <= before.shared, "the test left shared memory mapped"
    assert eventually(lambda: Resources.now(collect=False).pinned_kb <= before.pinned_kb), "pages stayed pinned (VmPin)"


@pytest.fixture
def passed(request: pytest.FixtureRequest) -> Callable[[], bool]:
    """Whether the test itself passed; for checks after it, which would only repeat its failure."""
    return lambda: request.node.stash.get(PASSED, False)


@pytest.fixture
def null(passed: Callable[[], bool]) -> Iterator[jh.Null]:
    """A registrar that, at the end, must have been left without registrations and called correctly."""
    with jh.Null() as registrar:
        yield registrar
        if passed():
            gc.collect()
            stats = registrar.stats()
            assert stats.live == 0, "a region stayed registered after its arena was closed and its last array was gone"
            assert stats.errors == 0, "a region was registered twice, or something deregistered that was not registered"


class Python:
    """Runs scripts in child processes, where crashes, forks, limits and exits cannot hurt the tests."""

    def environment(self, *, bare: bool = False, **variables: str) -> dict[str, str]:
        """Ours with room for libjemalloc, or (bare) without anything that helps it to load."""
        from jemhooks.loader import environment

        helpers = ("GLIBC_TUNABLES", "LD_PRELOAD", "JEMHOOKS_BOOTSTRAPPED")
        out = {k: v for k, v in os.environ.items() if k not in helpers}
        out |= {"HFI_NO_BACKTRACE": "1", "IPATH_NO_BACKTRACE": "1"}  # libpsm2, beneath libfabric, would write files
        if not bare:
            out |= environment()
        return out | variables

    def run(
        self,
        script: str | None,
        *args: str,
        options: tuple[str, ...] = ("-W", "error", "-X", "faulthandler"),
        bare: bool = False,
        timeout: float = 60.0,
        variables: dict[str, str] | None = None,
        **popen: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python -c script args`` and give back what came of it."""
        source = [] if script is None else ["-c", textwrap.dedent(script)]
        return subprocess.run(
            [sys.executable, *options, *source, *args],
            env=self.environment(bare=bare, **(variables or {})),
            **{"capture_output": True, "text": True, "timeout": timeout, **popen},
        )

    def check(self, script: str, *args: str, **more: Any) -> str:
        """The standard output of a script that must end well: status 0 and nothing on standard error."""
        done = self.run(script, *args, **more)
        said = done.stdout[-2000:] + done.stderr[-4000:]
        assert done.returncode == 0, f"the script ended with {done.returncode}\n{said}"
        assert not done.stderr.strip(), f"the script ended with 0, but complained\n{said}"
        return done.stdout


@pytest.fixture(scope="session")
def python() -> Python:
    return Python()


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def soak() -> int:
    """By what to multiply loop counts: 1, or many if JEMHOOKS_SOAK=1."""
    return 20 if os.environ.get("JEMHOOKS_SOAK") == "1" else 1


class Tensor:
    """Like a torch tensor, as far as jemhooks looks: data_ptr(), nbytes, device; no buffer, no __array_interface__."""

    def __init__(self, array: Any, device: str = "cpu") -> None:
        self._array = array
        self.nbytes = array.nbytes
        self.device = type("device", (), {"type": device, "__repr__": lambda _: device})()

    def data_ptr(self) -> int:
        return int(self._array.__array_interface__["data"][0])


@pytest.fixture(scope="session")
def tensor() -> type[Tensor]:
    return Tensor
