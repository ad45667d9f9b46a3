"""Several processes: forked children that must not reach the parent's MRs, peers that are killed."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jemhooks as jh

HERE = Path(__file__).parent


@pytest.mark.parametrize("kind", ["pd", "device"])
def test_a_forked_child_leaves_the_parents_registrations_alone(
    devices: tuple[Any, Any], loop: Callable[..., Any], mrs: Callable[..., int], kind: str
) -> None:
    """It frees everything, trims, closes, and ends as Python does."""
    queue = loop(devices[0]).here
    rail = {"pd": lambda: jh.Verbs(pd=devices[0].pd), "device": lambda: jh.Verbs("rxe1")}[kind]()
    rails = [jh.Verbs(pd=devices[0].pd), rail]
    with jh.Arena(rails, region_max="2MiB", dirty_decay_ms=0) as arena:
        arrays = [arena.full(200_000, i, "u1") for i in range(30)]
        keys, before = [jh.key(a) for a in arrays], mrs()
        ready, child = os.pipe(), os.fork()
        if not child:
            status = 1
            try:
                for ask in (lambda: arena.empty(5), lambda: jh.key(arrays[0]), arena.trim):
                    with pytest.raises((jh.ForkError, jh.ClosedError)):
                        ask()
                assert all((a == i).all() for i, a in enumerate(arrays)), "its bytes can be read"
                for a in arrays:
                    a[:] = 0xDD  # its own copies
                del a
                arrays.clear()
                arena.close()
                with jh.Arena(jh.Verbs("rxe0")) as own:
                    assert jh.key(own.zeros(5)).lkey, "an arena of the child's own works"
                os.write(ready[1], b"x")
                status = 0
            finally:
                os._exit(status)
        os.close(ready[1])
        assert os.read(ready[0], 1) == b"x", "the child failed"
        os.close(ready[0])
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert mrs() == before, "the parent's MRs are as they were"
        assert [jh.key(a) for a in arrays] == keys
        assert all((a == i).all() for i, a in enumerate(arrays)), "and its bytes"
        with jh.Arena(jh.Verbs(pd=devices[0].pd)) as mine:
            source = mine.array(np.arange(200_000) % 251, "u1")
            for a, key in zip(arrays, keys, strict=True):
                queue.write(mine.sges([source]).tolist(), key.addr, key.rkey)
                assert (a == source).all(), "the device and the CPU see the same pages after the fork"
            del source
        del a
        arrays.clear()
    assert mrs() < before


class Peer:
    """peer.py in a process of its own, talked to in lines of JSON."""

    def __init__(self, role: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "peer.py"), role], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def say(self, what: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, f"the peer ended with {self.process.wait(30)}"
        return json.loads(line)

    def end(self) -> int:
        self.process.communicate(timeout=60)
        return self.process.returncode


def connected(device: Any, peer: Peer, **how: int) -> tuple[Any, dict[str, Any]]:
    from verbs_rc import QueuePair

    there, queue = peer.hear(), QueuePair(device)
    queue.connect(there["address"], **how)
    peer.say(queue.address())
    return queue, there


def test_a_killed_target_leaves_the_initiator_able_to_go_on(device: Any, mrs: Callable[..., int]) -> None:
    """kill -9 of the process whose memory is being written; then a new one in its place."""
    from verbs_rc import TransferFailed, e

    before = mrs()
    with jh.Arena(jh.Verbs(pd=device.pd), region_max="4MiB") as arena:
        source = arena.full(1 << 20, 5, "u1")
        pieces = arena.sges([source]).tolist()
        peer = Peer("target")
        queue, there = connected(device, peer, timeout=10, retries=2)
        assert peer.hear() == "ready"
        queue.write(pieces, there["addr"], there["rkey"])
        for _ in range(8):
            queue.post(e.IBV_WR_RDMA_WRITE, pieces, there["addr"], there["rkey"])  # under way while it dies
        peer.process.kill()
        assert peer.end() == -signal.SIGKILL
        ended = []
        for _ in range(8):
            try:
                queue.wait()
                ended.append(0)
            except TransferFailed as failed:
                ended.append(failed.status)
        assert len(ended) == 8, "every work request ends"
        if not ended[-1]:
            with pytest.raises(TransferFailed):
                queue.write(pieces, there["addr"], there["rkey"])
        queue.close()
        assert (source == 5).all()
        peer = Peer("target")
        queue, there = connected(device, peer)
        assert peer.hear() == "ready"
        queue.write(pieces, there["addr"], there["rkey"])
        peer.say("sum")
        assert peer.hear() == 5 << 20, "the next peer is served as the first was"
        assert peer.end() == 0
        queue.close()
        del source
        assert arena.trim() > 0, "its registrations are not stuck"
    assert mrs() == before


def test_a_killed_initiator_leaves_the_target_able_to_go_on(
    device: Any, loop: Callable[..., Any], mrs: Callable[..., int], wait_until: Callable[..., bool]
) -> None:
    before = mrs()
    with jh.Arena(jh.Verbs(pd=device.pd), region_max="4MiB") as arena:
        memory = arena.zeros(1 << 20, "u1")
        key = jh.key(memory)
        peer = Peer("initiator")
        queue, _ = connected(device, peer)
        peer.say([key.addr, key.rkey, key.length])
        assert wait_until(functools.partial(memory.item, -1), 60), "it writes again and again"
        peer.process.kill()
        assert peer.end() == -signal.SIGKILL
        queue.close()
        source = arena.full(1 << 20, 99, "u1")
        loop(device).here.write(arena.sges([source]).tolist(), key.addr, key.rkey)
        assert (memory == 99).all(), "nobody else writes any more, and the key is as good as before"
        del memory, source
        assert arena.trim() > 0
    assert mrs() == before
