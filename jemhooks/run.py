"""Starting programs so that libjemalloc loads: ``bootstrap()`` in a script, ``jemhooks run`` on the command line."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from .errors import LoadError
from .loader import allocator, environment, jemalloc_path

_MARK = "JEMHOOKS_BOOTSTRAPPED"


def _loads() -> bool:
    try:
        from . import _native  # noqa: F401
    except LoadError as e:
        if "static thread-local storage" not in str(e):
            raise
        return False
    return True


def _mpi_is_up() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    return bool(mpi and mpi.Is_initialized())


def bootstrap() -> None:
    """Restart this Python once, with room for libjemalloc, if that is needed; do nothing otherwise.

    Call it first thing in a script: everything before it runs twice. The program is restarted from ``sys.orig_argv``.

    :raises LoadError: where a restart would lose something (threads run, MPI is initialised, the interpreter is
        interactive or reads its program from standard input), or did not help.
    """
    if _loads():
        return
    hint = "; start the program with `jemhooks run -- python …` instead"
    if os.environ.get(_MARK) == str(os.getpid()):
        from . import _native  # noqa: F401  # raises, with the remedies
    if len(os.listdir("/proc/self/task")) > 1:
        raise LoadError(f"bootstrap() would restart Python, but {len(os.listdir('/proc/self/task'))} threads run{hint}")
    if _mpi_is_up():
        raise LoadError("bootstrap() would restart Python, but MPI is initialised" + hint)
    argv = sys.orig_argv
    if sys.flags.interactive or hasattr(sys, "ps1") or not argv or not sys.argv or sys.argv[0] in ("", "-"):
        raise LoadError("bootstrap() would restart Python, but it is interactive or reads standard input" + hint)
    if not sys.executable:
        raise LoadError("bootstrap() would restart Python, but sys.executable is not known" + hint)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, argv, {**os.environ, **environment(), _MARK: str(os.getpid())})


def run(command: list[str], process: bool = False) -> NoReturn:
    """Replace this process by ``command``, in whose Pythons libjemalloc loads.

    :param process: also make jemalloc the malloc of the whole process.
    :raises LoadError: no libjemalloc, or no such command.
    """
    variables = environment(process)
    if process and allocator() != "jemalloc":
        raise LoadError(f"run --process is for jemalloc, and jemhooks was configured with allocator {allocator()}")
    if not variables and allocator() == "jemalloc":
        raise LoadError(f"libjemalloc.so.2 is not to be found ({jemalloc_path()}); install libjemalloc2")
    os.environ.update(variables)
    try:
        os.execvp(command[0], command)
    except OSError as e:
        raise LoadError(f"cannot run {command[0]}: {e.strerror}") from e
