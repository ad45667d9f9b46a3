"""The hook contract in C: every invariant under load, and each rule broken on purpose, which must be noticed.

The programs of tests/c run on a build of their own with the switches of csrc/fault.h. Without a switch every one must
pass, whatever jemalloc is told by its options; with one, the program meant for it must fail and say why.
JEMHOOKS_SOAK=1 makes everything ten times longer.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from allocator import OPTIONS

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "contract"
SOAK = 10 if os.environ.get("JEMHOOKS_SOAK") == "1" else 1
TIMEOUT = 180 * SOAK
PAUSES = "give_back,registering,idle,deregistering,moving,preparing"

pytestmark = pytest.mark.contract
uring = pytest.mark.uring

Run = Callable[..., "Outcome"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a program ended and what it printed."""

    command: str
    status: int
    output: str

    def __str__(self) -> str:
        """All that a failing test needs to show."""
        return f"{self.command}\n{self.output}\nexit status {self.status}"

    @property
    def reasons(self) -> set[str]:
        """Which invariants it says were violated."""
        return set(re.findall(r"^VIOLATED (\w+):", self.output, re.MULTILINE))


def build(*command: str | Path) -> None:
    """Run one step of the build."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"


@pytest.fixture(scope="session")
def run() -> Run:
    """Build the programs; give a function that runs one."""
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    options = [
        "-DJEMHOOKS_TESTS=ON",
        "-DJEMHOOKS_FAULTS=ON",
        "-DJEMHOOKS_FABRIC=off",
        "-DJEMHOOKS_UCX=on",
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
    ]
    build("cmake", "-S", ROOT / "csrc", "-B", BUILD, *generator, *options)
    build("cmake", "--build", BUILD, "--parallel", "2")

    def run_one(program: str, *arguments: str, conf: str = "", fault: str = "", pause: str = "") -> Outcome:
        conf = ",".join(filter(None, (os.environ.get(OPTIONS), conf)))
        settings = {OPTIONS: conf, "JEMHOOKS_FAULT": fault, "JEMHOOKS_PAUSE": pause}
        environment = {name: value for name, value in os.environ.items() if name not in settings}
        environment.update({name: value for name, value in settings.items() if value})
        command = [str(BUILD / f"test_{program}"), *arguments]
        shown = " ".join([*(f"{name}={value}" for name, value in settings.items() if value), *command])
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired as expired:
            pytest.fail(f"{shown}\nhangs; so far:\n{expired.output!r}")
        return Outcome(shown, done.returncode, done.stdout)

    return run_one


def passes(outcome: Outcome) -> None:
    """Nothing was violated, and nothing crashed."""
    assert outcome.status == 0, str(outcome)
    assert " ok " in outcome.output.splitlines()[-1], str(outcome)


def count(name: str, value: int) -> str:
    """A program's argument, longer in a soak run."""
    return f"{name}={value * SOAK}"


# ---- unbroken --------------------------------------------------------------------------------------------------------

retain = pytest.mark.parametrize("conf", ["retain:true", "retain:false"])


@retain
@pytest.mark.parametrize("decay", [-2, 0, -1])
def test_random_load(run: Run, conf: str, decay: int) -> None:
    passes(run("contract", count("ops", 400_000), f"decay={decay}", conf=conf))


@retain
def test_random_load_eager(run: Run, conf: str) -> None:
    passes(run("contract", count("ops", 100_000), "decay=0", "policy=eager", "seed=2", conf=conf))


@retain
def test_random_load_small_regions(run: Run, conf: str) -> None:
    passes(run("contract", count("ops", 100_000), "decay=0", "region_max=2", "seed=3", "case=random", conf=conf))


@retain
@pytest.mark.parametrize("decay", [-2, 0])
def test_random_load_locked_in_memory(run: Run, conf: str, decay: int) -> None:
    passes(run("contract", count("ops", 60_000), f"decay={decay}", "mlockall=1", "cycle_ops=2000", conf=conf))


@uring
@retain
@pytest.mark.parametrize("huge", [0, 1])
def test_storm(run: Run, conf: str, huge: int) -> None:
    passes(run("storm", count("ops", 100_000), f"huge={huge}", conf=conf))


@uring
@retain
@pytest.mark.parametrize("pause", ["", PAUSES])
def test_storm_under_a_small_budget(run: Run, conf: str, pause: str) -> None:
    ops = count("ops", 30_000 if pause else 100_000)
    passes(run("storm", ops, "limit=32", "seed=3", conf=conf, pause=pause))


@uring
@retain
def test_storm_with_pauses(run: Run, conf: str) -> None:
    passes(run("storm", count("ops", 30_000), "seed=2", conf=conf, pause=PAUSES))


@uring
@retain
@pytest.mark.parametrize("pause", ["", PAUSES])
def test_windows(run: Run, conf: str, pause: str) -> None:
    passes(run("windows", conf=conf, pause=pause))


@retain
def test_fixed_ranges(run: Run, conf: str) -> None:
    passes(run("fixed", count("ops", 20_000), conf=conf))


@retain
def test_full_memory(run: Run, conf: str) -> None:
    passes(run("full", conf=conf))


def test_jemalloc_4(run: Run) -> None:
    passes(run("chunks", count("ops", 30_000)))


def test_each_jemalloc_5(run: Run) -> None:
    passes(run("extents"))


@retain
def test_own_providers(run: Run, conf: str) -> None:
    passes(run("provider", count("arenas", 500), count("ops", 20_000), conf=conf))


@retain
def test_lookup(run: Run, conf: str) -> None:
    passes(run("lookup", count("rounds", 600), count("ranges", 10_000 if conf == "retain:true" else 1_000), conf=conf))


@retain
@pytest.mark.parametrize("pause", ["", PAUSES])
def test_registration(run: Run, conf: str, pause: str) -> None:
    passes(run("registration", count("rounds", 200), conf=conf, pause=pause))


@retain
@pytest.mark.parametrize("pause", ["", PAUSES])
def test_budgets(run: Run, conf: str, pause: str) -> None:
    passes(run("budget", count("rounds", 3000), conf=conf, pause=pause))


@retain
@pytest.mark.parametrize("pause", ["", PAUSES])
def test_events(run: Run, conf: str, pause: str) -> None:
    passes(run("events", count("steps", 3000), count("rounds", 100), conf=conf, pause=pause))


@retain
@pytest.mark.parametrize("pause", ["", PAUSES])
def test_ahead(run: Run, conf: str, pause: str) -> None:
    passes(run("ahead", count("rounds", 100), conf=conf, pause=pause))


@retain
@pytest.mark.parametrize("told", [1, 0])
def test_ucx_keeps_nothing_stale(run: Run, conf: str, told: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Untold it does, which shows that the test can see it."""
    monkeypatch.setenv("UCX_MEM_MMAP_HOOK_MODE", "none")
    outcome = run("ucx_cache", f"told={told}", count("rounds", 300), conf=conf)
    if told:
        passes(outcome)
    else:
        assert outcome.reasons == {"stale"}, str(outcome)


@retain
def test_failures(run: Run, conf: str) -> None:
    passes(run("failing", conf=conf))


@retain
def test_lifetimes(run: Run, conf: str) -> None:
    passes(run("lifetime", count("arenas", 10_000), count("threads", 2_000), conf=conf))


@retain
@pytest.mark.parametrize("case", ["frozen", "shared_range", "busy"])
def test_forking(run: Run, conf: str, case: str) -> None:
    passes(run("forking", f"case={case}", f"forks={300 if SOAK == 1 else 10_000}", conf=conf))


@retain
def test_forking_while_growing(run: Run, conf: str) -> None:
    passes(run("forking", "case=growing", conf=conf))  # never more forks: each makes the next ones slower


@uring
def test_forking_pinned(run: Run) -> None:
    passes(run("forking", "case=pinned"))


# ---- broken on purpose -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Fault:
    """A broken rule: how the program meant for it is run, and what it must say, or by which signal it may die."""

    name: str
    program: str
    arguments: tuple[str, ...]
    reasons: frozenset[str]
    conf: str = "retain:true"
    pause: str = ""
    dies_of: tuple[int, ...] = ()


def fault(name: str, command: str, reasons: str, **more: object) -> object:
    """One parameter of test_fault, from a command line and reasons separated by spaces."""
    program, *arguments = command.split()
    broken = Fault(name, program, tuple(arguments), frozenset(reasons.split()), **more)  # type: ignore[arg-type]
    marks = [uring] if program in {"storm", "windows"} else []
    return pytest.param(broken, marks=marks, id=f"{name}-{program}-{broken.conf.partition(':')[2]}")


SMALL = "ops=60000 cycle_ops=2000"
CRASH = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)

FAULTS = [
    # 1: dalloc opts out
    fault("dalloc_accepts", "contract case=flat decay=0 cycle_ops=2000", "flat account idle", dies_of=CRASH),
    fault(
        "dalloc_accepts", f"contract case=random decay=0 {SMALL}", "account idle", conf="retain:false", dies_of=CRASH
    ),
    # 2: commit and decommit are exact
    fault("commit_answered", f"contract case=random decay=0 {SMALL}", "account idle"),
    fault("decommit_refused", f"contract case=random decay=0 {SMALL}", "account idle"),
    fault("decommit_refused", f"contract case=random decay=0 {SMALL}", "account idle", conf="retain:false"),
    # 3: commit does not fail
    fault("commit_fails", "contract case=growth", "regions waste"),
    # 4: a decommitted page reads as zero
    fault("commit_keeps_stale", f"contract case=random decay=0 {SMALL}", "zero"),
    fault("commit_keeps_stale", "fixed case=stale", "zero", conf="retain:false"),
    fault("commit_stays_stale", "registration case=kept", "bytes"),
    fault("give_back_trusted", f"contract case=random decay=0 mlockall=1 {SMALL}", "zero"),
    fault("mark_skipped", "windows case=beyond", "zero"),
    fault("mark_skipped", "storm ops=30000", "zero"),
    fault("decommit_drops", "storm ops=20000", "stale"),
    # 5: registered pages are never purged
    fault("purge_allowed", "windows case=purged", "stale"),
    # 6: no block in two regions, no extent that cannot be split
    fault("merge_across", "contract case=neighbours decay=0", "span", conf="retain:false", dies_of=CRASH),
    fault("split_refused", f"contract case=random decay=0 {SMALL}", "abandoned account idle", conf="retain:false"),
    # 7 to 9: large frees stay, regions start on 2 MiB and do not grow without limit
    fault("oversize_default", "contract case=oversize", "oversize"),
    fault("alignment_small", f"contract case=random {SMALL}", "alignment"),
    fault("growth_unlimited", "contract case=growth", "growth"),
    # 10: metadata stays out
    fault("metadata_inside", f"contract case=random {SMALL}", "metadata"),
    fault("metadata_inside", "extents", "metadata"),
    # 11: only unregistered memory drops pages; idle is decided under the lock
    fault("decommit_drops_registering", "windows case=registering", "stale"),
    fault("idle_unlocked", "registration case=lasting", "key", pause="idle"),
    fault("deregister_lost", f"contract case=random decay=0 {SMALL}", "errors"),
    fault("deregister_lost", "windows case=registering", "pinned"),
    # 12: what the host cannot touch is not touched
    fault("touch", "fixed case=zero_touch", "", dies_of=(signal.SIGSEGV,)),
    # memory of fixed size is given whole
    fault("unseeded", "full case=share", "share"),
    # no page is used before there is room for it
    fault("reserve_skipped", "full case=at_growth", "full", dies_of=CRASH),
    fault("reserve_skipped", "full case=eager", "eager", conf="retain:false", dies_of=CRASH),
    # and what is refused takes no room
    fault("unreserve_skipped", "full case=refused_whole", "room"),
    fault("unreserve_registered", "full case=refused_registered", "kept"),
    # jemalloc 4: what it takes for uncommitted is, and the records in a chunk and its other runs do not keep it
    fault("decommit_refused", "chunks case=spare", "idle"),
    fault("dalloc_stays_committed", "chunks ops=10000", "idle"),
    fault("commit_whole", "chunks case=taken_up", "account"),
    fault("records_busy", "chunks case=reused", "idle"),
    fault("runs_mixed", "chunks ops=10000", "kept"),
    fault("merge_across", "chunks ops=10000", "span", dies_of=CRASH),
    fault("split_refused", "chunks ops=10000", "split"),
    fault("commit_keeps_stale", "chunks ops=10000", "zero"),
    fault("mark_skipped", "chunks ops=10000", "zero"),
    # registration caches are told before pages go
    fault("decommit_untold", "events case=complete", "untold"),
    # and no fork in the midst of growth
    fault("fork_in_growth", "forking case=growing forks=2000 alarm=5", "child", conf="retain:false"),
]


@pytest.mark.parametrize("broken", FAULTS)
def test_fault_is_noticed(run: Run, broken: Fault) -> None:
    outcome = run(broken.program, *broken.arguments, conf=broken.conf, fault=broken.name, pause=broken.pause)
    assert outcome.status != 0, f"not noticed:\n{outcome}"
    if -outcome.status not in broken.dies_of:
        assert outcome.reasons & broken.reasons, f"noticed for another reason than {set(broken.reasons)}:\n{outcome}"


def test_every_fault_has_a_test() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "csrc").rglob("*.c"))
    switches = set(re.findall(r"JH_FAULT\((\w+)\)", sources))
    tested = {parameter.values[0].name for parameter in FAULTS}  # type: ignore[attr-defined]
    assert switches == tested
    assert set(re.findall(r"JH_PAUSE\((\w+)\)", sources)) == set(PAUSES.split(","))
