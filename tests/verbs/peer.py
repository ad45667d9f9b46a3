"""The other process of test_processes.py. Says how it is reached on stdout, is told on stdin, in lines of JSON.

target: has memory, and says what its bytes sum up to. initiator: is told of memory, and writes it until it is killed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from verbs_rc import Device, QueuePair

import jemhooks as jh


def say(what: Any) -> None:
    print(json.dumps(what), flush=True)


device = Device("rxe0")
queue = QueuePair(device)
with jh.Arena(jh.Verbs(pd=device.pd)) as arena:
    memory = arena.zeros(1 << 20, "u1")
    key = jh.key(memory)
    say({"address": queue.address(), "addr": key.addr, "rkey": key.rkey})
    queue.connect(json.loads(sys.stdin.readline()))
    if sys.argv[1] == "initiator":
        addr, rkey, length = json.loads(sys.stdin.readline())
        memory[:] = 1
        pieces = [(key.addr, length, key.lkey)]
        while True:
            queue.write(pieces, addr, rkey)
    say("ready")
    for _ in sys.stdin:
        say(int(memory.sum()))
    del memory
queue.close()
device.close()
