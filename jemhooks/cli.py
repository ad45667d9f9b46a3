"""The command ``jemhooks``."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from .errors import JemhooksError, LoadError
from .loader import built


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jemhooks", description="RDMA-ready memory from the jemalloc you already have."
    )
    parser.add_argument("--version", action="store_true", help="print the version and what was configured")
    parser.add_argument("--pkgconfigdir", action="store_true", help="print the folder of jemhooks.pc, for C programs")
    commands = parser.add_subparsers(dest="command", metavar="command")
    run = commands.add_parser(
        "run",
        help="run a command in which libjemalloc loads",
        description="Run a command in whose Pythons libjemalloc can be loaded.",
        usage="jemhooks run [--process] -- command …",
    )
    run.add_argument(
        "--process", action="store_true", help="make jemalloc the malloc of the whole process (LD_PRELOAD)"
    )
    run.add_argument("argv", nargs="+", metavar="command")
    commands.add_parser("doctor", help="say what is found, what works, and what to do about the rest")
    bench = commands.add_parser("bench", help="measure allocation and look-up beside the bare things")
    bench.add_argument("--rounds", type=int, default=11, help="rounds, of which the median is taken (1 to 101)")
    bench.add_argument("--iterations", type=int, default=1_000_000, help="operations per row and round")
    bench.add_argument("--sizes", type=int, nargs="+", default=[64, 4096], help="block sizes in bytes")
    bench.add_argument("--regions", type=int, nargs="+", default=[1000, 16000], help="numbers of regions to look up in")
    return parser


def _pkgconfigdir() -> Path:
    spec = find_spec("jemhooks._ffi")
    if spec is None or spec.origin is None:
        raise LoadError("jemhooks is not built; install it with: pip install .")
    return Path(spec.origin).parent / "lib" / "pkgconfig"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        if args.version:
            print(f"jemhooks {built().VERSION} {built().BUILD_CONFIG}")
            return 0
        if args.pkgconfigdir:
            print(_pkgconfigdir())
            return 0
        if args.command == "run":
            from .run import run

            run(args.argv, args.process)
        if args.command == "doctor":
            from .doctor import doctor

            return doctor()
        if args.command == "bench":
            from .run import bootstrap

            bootstrap()
            from .bench import bench

            bench(args.rounds, args.iterations, args.sizes, args.regions)
            return 0
    except JemhooksError as e:
        print(f"jemhooks: {e}", file=sys.stderr)
        return 1
    parser.print_help()
    return 2
