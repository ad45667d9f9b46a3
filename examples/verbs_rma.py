"""Memory from a jemhooks arena, moved by ibverbs: RDMA write, read and atomic fetch-and-add on numpy arrays.

The server allocates arrays and tells the client their keys. The client writes them, the server checks each byte and
writes others, the client reads and checks those, and counts in a counter of the server's by atomic operations.
Nothing is registered per transfer: keys come from the arena's regions, which pyverbs' own protection domain registers.

    verbs_rma.py --loopback                       both sides on this machine
    verbs_rma.py --server                         on one machine
    verbs_rma.py --client HOST                    on another
    verbs_rma.py --loopback --compare             also: fresh buffers, by jemhooks and registered for each transfer
"""

from __future__ import annotations

import jemhooks as jh

jh.bootstrap()  # restarts Python once if libjemalloc would not load; so it comes first

import argparse
import socket
import sys
import time

import numpy as np
from verbs_rc import ACCESS, TIMEOUT, Channel, Device, QueuePair, TransferFailed, add_options, dial, loopback

ADDITIONS = 100
FRESH = 65536  # bytes of a buffer in --compare


def sizes(count: int, largest: int) -> list[int]:
    rng = np.random.default_rng(count)
    return [largest, *(max(1, int(largest ** rng.random())) for _ in range(count - 1))]


def pattern(nbytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, "u1")


def wrong(arrays: list[np.ndarray], seed: int) -> int:
    """How many bytes are not those of the pattern."""
    return sum(int(np.count_nonzero(a != pattern(a.nbytes, seed + i))) for i, a in enumerate(arrays))


def open_arena(device: Device, name: str) -> jh.Arena:
    return jh.Arena(jh.Verbs(pd=device.pd), access="remote_read|remote_write|remote_atomic", name=name)


def serve(channel: Channel, device: Device, options: argparse.Namespace) -> None:
    with open_arena(device, "server") as arena:
        queue = QueuePair(device)
        arrays = [arena.zeros(n, "u1") for n in sizes(options.count, options.size)]
        counter = arena.zeros(1, "u8")
        keys = [(k.addr, k.rkey) for k in map(jh.key, [*arrays, counter])]
        queue.connect(channel.ask({"address": queue.address(), "keys": keys, "sizes": [a.nbytes for a in arrays]}))
        channel.send("connected")
        while True:
            request = channel.receive(None)  # meanwhile the client reads and writes, which is not seen here
            if request == "check":
                channel.send(wrong(arrays, 0))
            elif request == "refill":
                for i, a in enumerate(arrays):
                    a[:] = pattern(a.nbytes, 1_000_000 + i)
                channel.send(True)
            else:
                channel.send({"counter": int(counter[0]), "registrations": arena.stats().registrations})
                queue.close()
                return


def compare(queue: QueuePair, device: Device, arena: jh.Arena, target: tuple[int, int], count: int) -> None:
    """Two loops of `count` writes, each from a buffer of its own."""
    from pyverbs.mr import MR

    target_address, rkey = target
    before, begun = arena.stats().registrations, time.perf_counter()
    for _ in range(count):
        fresh = arena.block(FRESH)
        queue.write(arena.sges([fresh]).tolist(), target_address, rkey)
        del fresh
    ours, registrations = time.perf_counter() - begun, arena.stats().registrations - before
    begun = time.perf_counter()
    for _ in range(count):
        buffer = np.empty(FRESH, "u1")
        mr = MR(device.pd, FRESH, ACCESS, address=buffer.__array_interface__["data"][0])
        queue.write([(buffer.__array_interface__["data"][0], FRESH, mr.lkey)], target_address, rkey)
        mr.close()
    theirs = time.perf_counter() - begun
    print(f"compare         {count} writes of {FRESH} bytes, each from a fresh buffer")
    print(f"  jemhooks      {registrations} registrations, {ours / count * 1e6:.0f} us each")
    print(
        f"  ibv_reg_mr    {count} registrations, {theirs / count * 1e6:.0f} us each: {theirs / ours:.2f} times as long"
    )


def run(channel: Channel, device: Device, options: argparse.Namespace) -> int:
    with open_arena(device, "client") as arena:
        queue = QueuePair(device)
        there = channel.receive()
        queue.connect(there["address"])
        channel.ask(queue.address())
        *targets, counter = there["keys"]
        arrays = [arena.empty(n, "u1") for n in there["sizes"]]
        pieces = arena.sges(arrays).tolist()
        for i, a in enumerate(arrays):
            a[:] = pattern(a.nbytes, i)
        begun = time.perf_counter()
        for piece, (address, rkey) in zip(pieces, targets, strict=True):
            queue.write([piece], address, rkey)
        written = time.perf_counter() - begun
        bad = channel.ask("check")
        channel.ask("refill")
        begun = time.perf_counter()
        for piece, (address, rkey) in zip(pieces, targets, strict=True):
            queue.read([piece], address, rkey)
        read = time.perf_counter() - begun
        bad += wrong(arrays, 1_000_000)
        old = arena.zeros(1, "u8")
        [result] = arena.sges([old]).tolist()
        for n in range(ADDITIONS):
            queue.fetch_add(result, *counter, add=3)
            bad += int(old[0]) != 3 * n
        here = arena.stats().registrations
        if options.compare:
            if options.size < FRESH:
                raise SystemExit(f"--compare writes {FRESH} bytes at a time: --size must be as large")
            compare(queue, device, arena, targets[0], options.compare)
        end = channel.ask("end")
        bad += end["counter"] != 3 * ADDITIONS
        nbytes, n = sum(a.nbytes for a in arrays), len(arrays)
        print(f"device          {device.name}, GID {device.gid_index}: {device.gid}")
        print(f"transfers       {2 * n + ADDITIONS} ({2 * nbytes} bytes), every byte checked: {bad} wrong")
        print(f"registrations   {end['registrations']} at the server, {here} here; per transfer: {4 * n}")
        print(f"throughput      write {nbytes / written / 1e6:.1f} MB/s, read {nbytes / read / 1e6:.1f} MB/s")
        queue.close()
        return int(bad > 0)


def server(listener: socket.socket, options: argparse.Namespace) -> int:
    listener.settimeout(None if options.server else TIMEOUT)
    connection, _ = listener.accept()
    device = Device(options.device, options.gid_index)
    serve(Channel(connection), device, options)
    device.close()
    return 0


def client(host: str, port: int, options: argparse.Namespace) -> int:
    device = Device(options.device, options.gid_index)
    try:
        return run(dial(host, port), device, options)
    finally:
        device.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    side = parser.add_mutually_exclusive_group(required=True)
    side.add_argument("--loopback", action="store_true", help="both sides on this machine")
    side.add_argument("--server", action="store_true", help="wait for a client, and serve it")
    side.add_argument("--client", metavar="HOST", help="connect to the server on HOST")
    add_options(parser, 18515)
    parser.add_argument(
        "--size", type=int, default=1 << 18, help="bytes of the server's largest array (default 256 KiB)"
    )
    parser.add_argument("--count", type=int, default=50, help="how many arrays the server has (default 50)")
    parser.add_argument(
        "--compare", type=int, nargs="?", const=1000, metavar="N", help="N writes of fresh buffers (1000)"
    )
    options = parser.parse_args()
    if options.size < 1 or options.count < 1:
        parser.error("--size and --count must be at least 1")
    try:
        if options.inherit is not None:
            return server(socket.socket(fileno=options.inherit), options)
        if options.server:
            with socket.create_server(("", options.port)) as listener:
                return server(listener, options)
        if options.client:
            return client(options.client, options.port, options)
        return loopback(lambda port, _: client("127.0.0.1", port, options))
    except (jh.JemhooksError, TransferFailed, EOFError, OSError) as error:
        print(f"verbs_rma: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
