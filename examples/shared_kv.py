"""A key-value store in shared memory: one process fills arrays, the others read them without a copy.

The store's arena is over a memfd. For each array the store hands out a handle of 64 bytes, here in a JSON catalogue on
each reader's standard input; any other way will do. A reader opens handles, and numpy reads the store's own memory. One
reader is killed in the middle; nothing of what it had open is left behind, which the store checks at the end.

    shared_kv.py [--readers N] [--arrays N] [--size BYTES]
"""

from __future__ import annotations

import jemhooks as jh

jh.bootstrap()  # restarts Python once if libjemalloc would not load; so it comes first

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import zlib

import numpy as np


def read(line: str) -> None:
    """A reader: checks every array of the catalogue, says so, and holds on to them until it is told to go."""
    held = []
    for name, entry in json.loads(line).items():
        block = jh.ipc.open(bytes.fromhex(entry["handle"]), read_only=True)
        array = block.array(entry["dtype"], entry["shape"])  # the store's own bytes
        if zlib.crc32(array.data) != entry["crc"]:
            raise SystemExit(f"'{name}' has other contents here than in the store")
        held.append(array)
    print(len(held), sum(a.nbytes for a in held), jh.ipc.stats().opened, flush=True)
    sys.stdin.read()


def catalogue(arrays: dict[str, np.ndarray]) -> str:
    """What readers need, in a line: handles, and what numpy must know."""
    return json.dumps(
        {
            name: {
                "handle": jh.ipc.export(a, writable=False).hex(),
                "dtype": a.dtype.str,
                "shape": a.shape,
                "crc": zlib.crc32(a.data),
            }
            for name, a in arrays.items()
        }
    )


def left_behind() -> tuple[int, int]:
    """Open descriptors of this process, and bytes of memory in its memfds but for jemhooks' own table."""
    names = list(pathlib.Path("/proc/self/fd").iterdir())
    memory = 0
    for name in names:
        try:
            if os.readlink(name).startswith("/memfd:jemhooks:store"):
                memory += os.stat(name).st_blocks * 512
        except FileNotFoundError:  # the listing's own
            pass
    return len(names), memory


def store(readers: int, count: int, size: int) -> None:
    rng = np.random.default_rng(1)
    children: list[subprocess.Popen[str]] = []
    with jh.Arena(provider=jh.Memfd(), name="store") as arena:
        arrays = {f"array {i}": arena.array(rng.standard_normal(max(1, size // 8))) for i in range(count)}
        line = catalogue(arrays)
        before = left_behind()[0]
        try:
            for _ in range(readers):
                children.append(
                    subprocess.Popen(
                        [sys.executable, __file__, "--read"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                    )
                )
                assert children[-1].stdin
                children[-1].stdin.write(line + "\n")
                children[-1].stdin.flush()
            for child in children:
                assert child.stdout
                if not (said := child.stdout.readline()):
                    raise SystemExit(f"a reader failed (exit status {child.wait()})")
                print(
                    "reader {}: {} arrays, {} bytes, in {} mapped regions; all checked".format(child.pid, *said.split())
                )
            children[0].send_signal(signal.SIGKILL)
            print(f"reader {children[0].pid}: killed ({children[0].wait()})")
            for child in children[1:]:
                child.communicate()
        finally:
            for child in children:
                child.kill()
                child.communicate()
        arrays.clear()
        arena.trim()
        descriptors, memory = left_behind()
        print(f"left behind: {descriptors - before} descriptors, {memory} bytes of shared memory")
        if descriptors != before or memory:
            raise SystemExit("something was left behind")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readers", type=int, default=3)
    parser.add_argument("--arrays", type=int, default=50)
    parser.add_argument("--size", type=int, default=200_000, metavar="BYTES", help="of an array")
    parser.add_argument("--read", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.readers, options.arrays, options.size) < 1:
        parser.error("--readers, --arrays and --size are at least 1")
    try:
        if options.read:
            read(sys.stdin.readline())
        else:
            store(options.readers, options.arrays, options.size)
    except jh.JemhooksError as e:
        raise SystemExit(f"shared_kv: {e}") from None
