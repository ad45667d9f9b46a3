"""Two processes, memory from jemhooks arenas, bytes moved by libfabric RMA on loopback; no network card needed.

The target allocates arrays of several dtypes and sizes and hands their keys to the initiator over a pipe. The initiator
puts bytes into all of them, the target checks each byte, writes others, and the initiator gets and checks those.
Nothing is registered per transfer: the keys come from the arena's regions.
"""

from __future__ import annotations

import jemhooks as jh

jh.bootstrap()  # restarts Python once if libjemalloc would not load; so it comes first

import argparse
import multiprocessing as mp
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

DTYPES = ("u1", "i2", "f4", "f8", "c16")
TIMEOUT = 60.0  # seconds that one step may take


def plan(count: int, largest: int) -> list[tuple[str, int]]:
    """dtype and number of elements of each buffer: lengths from 1 element to `largest` bytes."""
    rng = np.random.default_rng(count)
    out = []
    for i in range(count):
        kind = np.dtype(DTYPES[i % len(DTYPES)])
        nbytes = largest if i == 0 else int(largest ** rng.random())
        out.append((kind.str, max(1, nbytes // kind.itemsize)))
    return out


def fill(array: np.ndarray, seed: int) -> None:
    view = array.view("u1")
    view[:] = np.random.default_rng(seed).integers(0, 256, view.size, "u1")


def wrong(array: np.ndarray, seed: int) -> int:
    """How many bytes are not what fill() writes."""
    view = array.view("u1")
    return int(np.count_nonzero(view != np.random.default_rng(seed).integers(0, 256, view.size, "u1")))


def bar(what: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        width = 40 * done // total
        sys.stderr.write(
            f"\r{what:<12}[{'#' * width}{'.' * (40 - width)}] {done}/{total}" + ("\n" if done == total else "")
        )
        sys.stderr.flush()
    elif done == total:
        print(f"{what:<12}{done}/{total}", file=sys.stderr)


def target(pipe: Connection, options: argparse.Namespace) -> None:
    with jh.Fabric(options.provider) as fabric, jh.Arena(fabric, policy=options.policy, name="target") as arena:
        arrays = [arena.zeros(n, kind) for kind, n in plan(options.count, options.size)]
        pipe.send((fabric.address(), [jh.key(a) for a in arrays]))
        while True:
            while not pipe.poll():
                fabric.progress(0.001)  # with tcp, peers are served here
            request = pipe.recv()
            if request == "check":
                pipe.send(sum(wrong(a, i) for i, a in enumerate(arrays)))
            elif request == "refill":
                for i, a in enumerate(arrays):
                    fill(a, i + 1_000_000)
                pipe.send(True)
            else:
                pipe.send(arena.stats().registrations)
                return


def ask(pipe: Connection, request: str) -> object:
    pipe.send(request)
    if not pipe.poll(TIMEOUT):
        raise SystemExit(f"the target did not answer '{request}' within {TIMEOUT:g} s")
    return pipe.recv()


def run(what: str, start: Callable[..., jh.Transfer], pairs: list) -> float:
    """Start all transfers, a window of them at a time, and wait; the seconds it took."""
    begun = time.perf_counter()
    window: list[jh.Transfer] = []
    for i, (array, key) in enumerate(pairs, 1):
        window.append(start(array, key))
        if len(window) == 64 or i == len(pairs):
            for transfer in window:
                transfer.wait(TIMEOUT)
            window.clear()
            bar(what, i, len(pairs))
    return time.perf_counter() - begun


def initiator(pipe: Connection, options: argparse.Namespace) -> int:
    with jh.Fabric(options.provider) as fabric, jh.Arena(fabric, policy=options.policy, name="initiator") as arena:
        if not pipe.poll(TIMEOUT):
            raise SystemExit(f"the target did not come up within {TIMEOUT:g} s")
        address, keys = pipe.recv()
        peer = fabric.connect(address)
        arrays = [arena.empty(n, kind) for kind, n in plan(options.count, options.size)]
        for i, a in enumerate(arrays):
            fill(a, i)
        pairs = list(zip(arrays, keys, strict=True))
        nbytes = sum(a.nbytes for a in arrays)
        put = run("put", lambda a, k: fabric.put(peer, a, k), pairs)
        bad = int(ask(pipe, "check"))  # type: ignore[call-overload]
        ask(pipe, "refill")
        got = run("get", lambda a, k: fabric.get(peer, a, k), pairs)
        bad += sum(wrong(a, i + 1_000_000) for i, a in enumerate(arrays))
        there = int(ask(pipe, "end"))  # type: ignore[call-overload]
        here = arena.stats().registrations
        transfers = 2 * len(pairs)
        print(f"provider        {fabric.info().provider}")
        print(f"transfers       {transfers} ({2 * nbytes} bytes), every byte checked: {bad} wrong")
        needs = "" if here else " (this provider needs no local keys)"
        print(f"registrations   {there} at the target, {here} here{needs}; per transfer: {2 * transfers}")
        print(f"throughput      put {nbytes / put / 1e6:.0f} MB/s, get {nbytes / got / 1e6:.0f} MB/s")
        return int(bad > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", default="tcp", help="libfabric provider: tcp, sockets, net, … (default tcp)")
    parser.add_argument("--size", type=int, default=1 << 20, help="bytes of the largest buffer (default 1 MiB)")
    parser.add_argument("--count", type=int, default=500, help="how many buffers (default 500)")
    parser.add_argument("--policy", choices=("lazy", "eager"), default="lazy", help="when regions are registered")
    options = parser.parse_args()
    if options.size < 16 or options.count < 1:
        parser.error("--size must be at least 16 bytes and --count at least 1")
    ours, theirs = mp.Pipe()
    child = mp.get_context("spawn").Process(target=target, args=(theirs, options), daemon=True)
    child.start()
    theirs.close()
    try:
        status = initiator(ours, options)
        child.join(TIMEOUT)
        return status or int(child.exitcode != 0)
    except jh.JemhooksError as e:
        print(f"fabric_rma: {type(e).__name__}: {e}", file=sys.stderr)
        return 1
    except EOFError:
        print("fabric_rma: the target ended early; its error is above", file=sys.stderr)
        return 1
    finally:
        if child.is_alive():
            child.terminate()


if __name__ == "__main__":
    raise SystemExit(main())
