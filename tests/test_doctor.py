"""``jemhooks doctor``: what is here, what works, what to do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jemhooks import loader
from jemhooks.doctor import jemalloc_notes

if TYPE_CHECKING:
    from conftest import Python


def test_all_is_well(python: Python) -> None:
    done = python.run(None, "-m", "jemhooks", "doctor")
    assert (done.returncode, done.stderr) == (0, ""), (
        f"everything that was built works here\n{done.stdout}{done.stderr}"
    )
    lines = done.stdout.splitlines()
    assert not [line for line in lines if line.startswith("FAIL")], done.stdout
    for name in ("loading", "jemalloc", "null", "uring", "fabric", "ucx"):
        assert [line for line in lines if line.startswith(f"ok   {name} ")], f"{name} should be reported as working"
    assert "allocator=jemalloc fabric=on uring=on" in lines[0], "what was configured"
    assert "5." in next(line for line in lines if line.startswith("ok   jemalloc")), "the version of jemalloc"
    for kind in ("anonymous: gives pages back, pinnable, private", "memfd: ", "file in /dev/shm: "):
        assert [line for line in lines if line.startswith(f"ok   provider        {kind}")], f"{kind} works anywhere"
    assert "devdax" in done.stdout, "why there is none"
    for word in ("memlock", "huge pages", "reserved, 2 MiB each", "io_uring", "ptrace_scope"):
        assert any(word in line for line in lines), f"{word} matters for registration"


def test_without_room_for_the_library(python: Python) -> None:
    done = python.run(None, "-m", "jemhooks", "doctor", bare=True)
    assert done.returncode == 1, "something that was built does not work"
    assert "Traceback" not in done.stderr, done.stderr
    assert "FAIL loading" in done.stdout, done.stdout
    need = loader.spare_needed(loader.jemalloc_path() or Path())
    assert f"{need} would do" in done.stdout, "the number"
    assert f"export GLIBC_TUNABLES={loader.TUNABLE}={need}" in done.stdout, "the remedy, ready to paste"
    assert "cannot be tried before the library loads" in done.stdout


def test_a_registrar_that_does_not_work(python: Python) -> None:
    """FI_PROVIDER=^… leaves libfabric without any provider."""
    done = python.run(None, "-m", "jemhooks", "doctor", variables={"FI_PROVIDER": "nonsense"})
    assert done.returncode == 1, done.stdout
    assert "FAIL fabric" in done.stdout, done.stdout
    assert "ok   null" in done.stdout, "the others are still tried"
    assert "ok   uring" in done.stdout
    assert "fi_info" in done.stdout, "and the remedy is named"


def test_limits_are_shown(python: Python) -> None:
    done = python.run("""
        import resource, runpy, sys
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 8 << 20))
        sys.argv[:] = ["jemhooks", "doctor"]
        runpy.run_module("jemhooks", run_name="__main__")
    """)
    assert "soft 1 MiB, hard 8 MiB" in done.stdout, done.stdout + done.stderr
    assert "ulimit -l" in done.stdout, "a small limit comes with its remedy"


def test_as_a_command(python: Python) -> None:
    import subprocess
    import sys

    command = Path(sys.executable).with_name("jemhooks")
    done = subprocess.run(
        [str(command), "doctor"], capture_output=True, text=True, timeout=60, env=python.environment(), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("variable", ["MALLOC_CONF", "JE_MALLOC_CONF"])
@pytest.mark.parametrize(("version", "options", "remedy"), [
    ("4.5.0", "", "MALLOC_CONF=purge:decay"),
    ("4.1.1", "purge:ratio", "MALLOC_CONF=purge:decay"),
    ("4.5.0", "junk:false,purge:decay", ""),
])  # fmt: skip
def test_what_jemalloc_4_lacks(
    monkeypatch: pytest.MonkeyPatch, version: str, variable: str, options: str, remedy: str
) -> None:
    monkeypatch.setenv("MALLOC_CONF", "purge:decay")  # which jemalloc with a prefix does not read
    monkeypatch.setenv(variable, options)
    (line,) = jemalloc_notes(version, variable)
    assert "records are in registered memory" in line, "what a peer can reach"
    assert f"-> {variable}=purge:decay" in line if remedy else "purge" not in line, "what can be done"
    assert not list(jemalloc_notes("5.3.0", variable)), "5 has no such limits"
