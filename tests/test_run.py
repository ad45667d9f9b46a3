"""Starting programs so that libjemalloc loads: ``jemhooks run`` and ``bootstrap()``."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jemhooks import cli, loader

if TYPE_CHECKING:
    from conftest import Python

SCRIPT = """\
import os, sys
with open(sys.argv[1], "a") as log:
    log.write("run ")
sys.stdout.write("flushed ")
import jemhooks
jemhooks.bootstrap()
jemhooks.bootstrap()
a = jemhooks.Arena()
a.close()
print(sys.argv[2:], sys.flags.utf8_mode, os.getpid())
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "a script.py"
    path.write_text(SCRIPT)
    return path


def jemhooks(python: Python, *args: str, timeout: float = 60, **variables: str) -> subprocess.CompletedProcess[str]:
    return python.run(None, "-m", "jemhooks", *args, bare=True, timeout=timeout, variables=variables)


# ---- jemhooks run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [[], ["--process"]])
def test_run_makes_the_library_loadable(python: Python, mode: list[str]) -> None:
    code = "import os, jemhooks as j; j.Arena().close(); print(os.environ.get('LD_PRELOAD', ''), 'end')"
    done = jemhooks(python, "run", *mode, "--", sys.executable, "-c", code)
    preload = str(loader.jemalloc_path()) if mode else ""
    assert (done.returncode, done.stderr) == (0, ""), "run should just work"
    assert done.stdout.strip() == f"{preload} end".strip(), "LD_PRELOAD is for --process alone"


def test_run_passes_on_status_arguments_and_variables(python: Python) -> None:
    code = "import json, os, sys; print(json.dumps([sys.argv, os.environ['GLIBC_TUNABLES']])); sys.exit(7)"
    args = ["-x", "--", "--process", "a b", ""]
    done = jemhooks(python, "run", "--", sys.executable, "-c", code, *args, GLIBC_TUNABLES="glibc.malloc.check=0")
    assert done.returncode == 7, f"the command's own exit status comes back: {done.stderr}"
    argv, tunables = json.loads(done.stdout)
    assert argv == ["-c", *args], "every argument after the first -- is the command's, another -- included"
    assert tunables.startswith("glibc.malloc.check=0:"), "tunables of the user's are kept"


@pytest.mark.parametrize(
    ("args", "status", "said"),
    [
        (["run", "--", "no-such-command"], 1, "jemhooks: cannot run no-such-command: No such file or directory"),
        (["run", "--", "/etc/passwd"], 1, "Permission denied"),
        (["run"], 2, "the following arguments are required"),
        (["nonsense"], 2, "invalid choice: 'nonsense'"),
        ([], 2, ""),
    ],
)
def test_wrong_command_lines(python: Python, args: list[str], status: int, said: str) -> None:
    done = jemhooks(python, *args)
    assert done.returncode == status, f"{args}: {done.stderr}"
    assert said in done.stderr, f"{args}: the message should say what is wrong"
    assert "Traceback" not in done.stderr, "a user's mistake is no reason for a traceback"


def test_version_and_help(python: Python, capsys: pytest.CaptureFixture[str]) -> None:
    done = jemhooks(python, "--version")
    assert (done.returncode, done.stdout) == (
        0,
        "jemhooks 0.1.0 allocator=jemalloc fabric=on uring=on ucx=on verbs=on\n",
    )
    with pytest.raises(SystemExit) as e:
        cli.main(["run", "--help"])
    assert e.value.code == 0, "help is not an error"
    assert "jemhooks run [--process] -- command" in capsys.readouterr().out


def test_bench_runs(python: Python) -> None:
    done = jemhooks(python, "bench", "--rounds", "1", "--iterations", "1000", "--sizes", "64", "--regions", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" ns ") == 15, (
        f"four rows of blocks, five of look-ups, three with two figures of slow ones:\n{done.stdout}"
    )
    for wrong in (["--rounds", "0"], ["--rounds", "102"], ["--iterations", "0"], ["--sizes", "0"], ["--regions", "0"]):
        usual = ["--rounds", "1", "--iterations", "64", "--sizes", "8", "--regions", "1"]
        done = jemhooks(python, "bench", *usual, *wrong)
        assert done.returncode in (1, 2), f"bench {wrong} must be refused"
        assert len(done.stderr) > 20, f"bench {wrong} must say why: {done.stderr!r}"
        assert "Traceback" not in done.stderr, f"bench {wrong}: {done.stderr}"


# ---- bootstrap() ----------------------------------------------------------------------------------------------------


def test_bootstrap_restarts_once(python: Python, script: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    done = python.run(None, str(script), str(log), "-a", "b c", options=("-X", "utf8"), bare=True)
    assert done.returncode == 0, done.stderr
    assert log.read_text() == "run run ", "restarted exactly once"
    out = done.stdout.split(" ", 2)
    assert out[:2] == ["flushed", "flushed"], "what was printed before the restart must not be lost"
    assert out[2].startswith("['-a', 'b c'] 1 "), "arguments and interpreter options survive"


def test_bootstrap_does_nothing_where_the_library_loads(python: Python, script: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    done = python.run(None, str(script), str(log))
    assert (done.returncode, log.read_text()) == (0, "run "), f"no restart where none is needed: {done.stderr}"


def test_bootstrap_of_c_and_m(python: Python, tmp_path: Path) -> None:
    source = "import jemhooks as j, sys; j.bootstrap(); j.Arena().close(); print(sys.argv[1:])"
    assert python.check(source, "x", bare=True) == "['x']\n", "python -c restarts too"
    (tmp_path / "amodule.py").write_text(source)
    done = python.run(None, "-m", "amodule", "x", bare=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "['x']\n"), f"python -m restarts too: {done.stderr}"


def test_bootstrap_is_inherited_by_children_that_need_it(python: Python) -> None:
    """The mark is of one process: a child that lost the tunable must be able to restart itself."""
    out = python.check(
        """
        import jemhooks, os, subprocess, sys
        jemhooks.bootstrap()
        env = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
        code = "import jemhooks as j; j.bootstrap(); j.Arena().close(); print('child')"
        print(subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout)
        """,
        bare=True,
    )
    assert out.strip() == "child", "JEMHOOKS_BOOTSTRAPPED of the parent must not stop the child"


def test_bootstrap_that_does_not_help_raises(python: Python) -> None:
    done = python.run(
        """
        import jemhooks.run
        jemhooks.run.environment = lambda process=False: {}   # a restart that changes nothing
        print("run", flush=True)
        jemhooks.bootstrap()
        """,
        bare=True,
    )
    assert done.stdout == "run\nrun\n", "it must not restart for ever"
    assert done.returncode == 1, "it must not go on as if all were well"
    assert "LoadError" in done.stderr, done.stderr
    assert "GLIBC_TUNABLES=" in done.stderr, "the other remedies are named"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import threading as t; t.Thread(target=t.Event().wait, daemon=True).start()", "2 threads run"),
        (
            "import sys, types; sys.modules['mpi4py.MPI'] = m = types.ModuleType('m'); m.Is_initialized = lambda: True",
            "MPI is initialised",
        ),
        ("import sys; sys.executable = ''", "sys.executable is not known"),
    ],
)
def test_bootstrap_refuses(python: Python, source: str, reason: str) -> None:
    out = python.check(
        f"""
        {source}
        import jemhooks as jh
        try:
            jh.bootstrap()
        except jh.LoadError as e:
            print(e)
        """,
        bare=True,
    )
    assert reason in out, "a restart here would lose something"
    assert "jemhooks run -- python" in out, "and the message says what to do instead"


def test_bootstrap_refuses_a_program_on_standard_input(python: Python) -> None:
    done = python.run(None, bare=True, input="import jemhooks as j\nj.bootstrap()\nprint('on')\n")
    assert done.returncode == 1, "the restarted Python would find an empty standard input"
    assert "standard input" in done.stderr, done.stderr
    assert "on" not in done.stdout, "nothing after bootstrap() may run"


def test_bootstrap_refuses_interactively(python: Python) -> None:
    done = python.run("import jemhooks as j; j.bootstrap()", options=("-i",), bare=True, input="")
    assert "LoadError" in done.stderr, done.stderr
    assert "interactive" in done.stderr, "python -i -c must not be restarted"
    master, slave = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-q"],
            stdin=slave, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=python.environment(bare=True),
        )  # fmt: skip
        os.write(master, b"import jemhooks as j\nj.bootstrap()\nraise SystemExit(5)\n")
        out, _ = process.communicate(timeout=30)
    finally:
        os.close(master)
        os.close(slave)
    assert process.returncode == 5, f"the session must go on after the error: {out}"
    assert "interactive" in out, out
