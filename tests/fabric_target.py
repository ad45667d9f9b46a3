"""The other process of test_fabric.py: arrays that peers reach; takes orders from standard input, as JSON lines."""

from __future__ import annotations

import json
import select
import sys
from typing import Any

import numpy as np

import jemhooks as jh


def main() -> None:
    provider, count, nbytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    fabric = jh.Fabric(provider)
    arena = jh.Arena(fabric, name="target", region_max="4MiB", dirty_decay_ms=0)
    arrays: list[Any] = [arena.full(nbytes, i, "u1") for i in range(count)]

    def obey(order: str, *args: int) -> Any:
        if order == "hello":
            return [fabric.address().hex(), [list(jh.key(a)) for a in arrays]]
        if order == "read":
            return arrays[args[0]].tobytes().hex()
        if order == "write":
            arrays[args[0]][:] = np.random.default_rng(args[1]).integers(0, 256, nbytes, "u1")
            return None
        if order == "free":  # and deregister
            arrays.clear()
            return arena.trim()
        if order == "allocate":
            arrays[:] = [arena.full(nbytes, 0x77, "u1") for _ in range(count)]
            return [list(jh.key(a)) for a in arrays]
        raise SystemExit(f"no such order: {order}")

    while True:
        fabric.progress(0.002)
        if select.select([sys.stdin], [], [], 0)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            print(json.dumps(obey(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
