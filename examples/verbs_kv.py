"""A remote key-value store whose clients read by RDMA alone: the server's CPU has no part in it.

The server keeps an index, an array of fixed slots, and the values, all in one arena. Where the index is, how large, and
the remote key for it, stands in the user metadata of the region that holds it. A client gets the regions' metadata
once, when it connects; from then on it reads a slot, then the value that the slot names, and checks its CRC: two RDMA
reads, while the server may be busy, or stopped. A replaced value stays a while, for clients that are just reading it.

    verbs_kv.py --loopback                        both sides here; the server is stopped (SIGSTOP) during the reads
    verbs_kv.py --server [NAME=VALUE …]           serves clients until it is interrupted
    verbs_kv.py --client HOST NAME …              prints values
"""

from __future__ import annotations

import jemhooks as jh

jh.bootstrap()  # restarts Python once if libjemalloc would not load; so it comes first

import argparse
import collections
import contextlib
import hashlib
import signal
import socket
import struct
import subprocess
import sys
import time
import zlib

import numpy as np
from verbs_rc import Channel, Device, QueuePair, TransferFailed, add_options, dial, loopback

SUPERBLOCK = struct.Struct("<8sQII")  # magic, address of the index, its remote key, its slots
MAGIC = b"jh-kv-01"
SLOT = np.dtype(
    [("name", "S16"), ("address", "<u8"), ("length", "<u4"), ("rkey", "<u4"), ("crc", "<u4"), ("version", "<u4")]
)
KEPT = 64  # replaced values that readers may still be at
TRIES = 100


def digest(name: str) -> bytes:
    """16 bytes without zeros at the end, for numpy's S16."""
    return hashlib.blake2b(name.encode(), digest_size=15).digest() + b"."


class Store:
    """The server's side: names to bytes."""

    def __init__(self, arena: jh.Arena, slots: int) -> None:
        self.arena, self.slots = arena, slots
        self.index = arena.zeros(slots, SLOT)
        self.values: dict[int, np.ndarray] = {}
        self.replaced: collections.deque[np.ndarray] = collections.deque(maxlen=KEPT)
        key = jh.key(self.index)
        jh.region(self.index).user[: SUPERBLOCK.size] = SUPERBLOCK.pack(MAGIC, key.addr, key.rkey, slots)

    def put(self, name: str, value: bytes) -> None:
        mark = digest(name)
        for at in probes(mark, self.slots):
            if self.index[at]["name"] in (b"", mark):
                break
        else:
            raise SystemExit(f"no slot of {self.slots} is left for '{name}'; start the server with more --slots")
        memory = self.arena.array(np.frombuffer(value or b"\0", "u1"))
        key = jh.key(memory)
        slot = self.index[at]
        version = slot["version"] + 1
        self.index[at] = (mark, key.addr, len(value), key.rkey, zlib.crc32(value + mark), version)
        if at in self.values:
            self.replaced.append(self.values[at])
        self.values[at] = memory

    def metadata(self) -> list[str]:
        """Of every region, in hexadecimal."""
        return [bytes(jh.region(int(base)).user).hex() for base in self.arena.regions()["base"]]


def probes(mark: bytes, slots: int) -> list[int]:
    """The slots in which a name may be, the most likely first."""
    first = int.from_bytes(mark[:8], "little") % slots
    return [(first + i) % slots for i in range(min(8, slots))]


class Reader:
    """The client's side."""

    def __init__(self, arena: jh.Arena, queue: QueuePair, metadata: list[str]) -> None:
        self.arena, self.queue, self.reads = arena, queue, 0
        found = [m for m in map(bytes.fromhex, metadata) if m.startswith(MAGIC)]
        if not found:
            raise SystemExit("no region of the server has the metadata of a key-value store")
        _, self.address, self.rkey, self.slots = SUPERBLOCK.unpack_from(found[0])
        self.slot = arena.zeros(1, SLOT)

    def _read(self, into: np.ndarray, address: int, rkey: int) -> None:
        self.queue.read(self.arena.sges([into]).tolist(), address, rkey)
        self.reads += 1

    def get(self, name: str) -> bytes | None:
        """The value, or None. Reads again if the server changed it meanwhile."""
        mark = digest(name)
        for at in probes(mark, self.slots):
            for _ in range(TRIES):
                self._read(self.slot, self.address + at * SLOT.itemsize, self.rkey)
                slot = self.slot[0]
                if slot["name"] != mark:
                    break
                value = self.arena.empty(max(1, int(slot["length"])), "u1")
                self._read(value, int(slot["address"]), int(slot["rkey"]))
                data = value.tobytes()[: int(slot["length"])]
                if zlib.crc32(data + mark) == slot["crc"]:
                    return data
            else:
                raise SystemExit(f"'{name}' changes faster than it can be read")
            if slot["name"] == b"":
                return None
        return None


def serve(channel: Channel, device: Device, store: Store) -> None:
    """One client: all that it ever needs from this CPU. However it ends, the next one is served."""
    queue = QueuePair(device)
    with contextlib.suppress(EOFError, OSError, ValueError):
        queue.connect(channel.ask({"address": queue.address(), "metadata": store.metadata()}))
        channel.send("connected")
        while True:
            request = channel.receive(None)  # meanwhile the client reads, which is not seen here
            for name, value in request.items():  # only --loopback writes from outside
                store.put(name, value.encode())
            channel.send(len(request))
    queue.close()
    channel.close()


def server(listener: socket.socket, options: argparse.Namespace) -> int:
    device = Device(options.device, options.gid_index)
    with jh.Arena(jh.Verbs(pd=device.pd), access="remote_read", name="store") as arena:
        store = Store(arena, options.slots)
        for text in options.names:
            name, _, value = text.partition("=")
            store.put(name, value.encode())
        print(f"serving {len(options.names)} values in {options.slots} slots on device {device.name}", file=sys.stderr)
        while True:
            connection, _ = listener.accept()
            serve(Channel(connection), device, store)
            if options.inherit is not None:
                break
    device.close()
    return 0


def connect(host: str, port: int, device: Device, arena: jh.Arena) -> tuple[Channel, Reader]:
    channel, queue = dial(host, port), QueuePair(device)
    there = channel.receive()
    queue.connect(there["address"])
    channel.ask(queue.address())
    return channel, Reader(arena, queue, there["metadata"])


def client(options: argparse.Namespace) -> int:
    device, missing = Device(options.device, options.gid_index), 0
    with jh.Arena(jh.Verbs(pd=device.pd), access="local_write", name="reader") as arena:
        channel, reader = connect(options.client, options.port, device, arena)
        for name in options.names:
            value = reader.get(name)
            missing += value is None
            print(f"{name}: not found" if value is None else f"{name}={value.decode(errors='replace')}")
        channel.close()
    device.close()
    return int(missing > 0)


def demonstrate(port: int, child: subprocess.Popen[bytes], options: argparse.Namespace) -> int:
    device, bad = Device(options.device, options.gid_index), 0
    rng = np.random.default_rng(1)
    content = {f"key {i}": rng.bytes(int(4 ** rng.uniform(0, 7))).hex() for i in range(options.count)}
    with jh.Arena(jh.Verbs(pd=device.pd), access="local_write", name="reader") as arena:
        channel, reader = connect("127.0.0.1", port, device, arena)
        channel.ask(content)
        child.send_signal(signal.SIGSTOP)
        try:
            begun = time.perf_counter()
            bad += sum(reader.get(name) != value.encode() for name, value in content.items())
            bad += reader.get("no such key") is not None
            seconds = time.perf_counter() - begun
        finally:
            child.send_signal(signal.SIGCONT)
        changed = {name: value[::-1] + "!" for name, value in list(content.items())[::3]}
        channel.ask(changed)
        bad += sum(reader.get(name) != value.encode() for name, value in {**content, **changed}.items())
        print(f"device          {device.name}")
        print(f"values          {len(content)} read from the stopped server, {len(changed)} then replaced: {bad} wrong")
        print(f"RDMA reads      {reader.reads}, registrations here {arena.stats().registrations}")
        mean = np.mean([len(value) for value in content.values()])
        print(f"time            {seconds / len(content) * 1e6:.0f} us for each value, of {mean:.0f} bytes")
        channel.close()
    device.close()
    return int(bad > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    side = parser.add_mutually_exclusive_group(required=True)
    side.add_argument("--loopback", action="store_true", help="both sides on this machine")
    side.add_argument("--server", action="store_true", help="serve clients")
    side.add_argument("--client", metavar="HOST", help="read from the server on HOST")
    parser.add_argument("names", nargs="*", help="what to read; with --server NAME=VALUE")
    add_options(parser, 18516)
    parser.add_argument("--slots", type=int, default=4096, help="of the server's index (default 4096)")
    parser.add_argument("--count", type=int, default=200, help="values in --loopback (default 200)")
    options = parser.parse_args()
    if options.slots < 1 or options.count < 1:
        parser.error("--slots and --count must be at least 1")
    if options.server and not all("=" in name for name in options.names):
        parser.error("with --server, names are NAME=VALUE")
    try:
        if options.inherit is not None:
            return server(socket.socket(fileno=options.inherit), options)
        if options.server:
            with socket.create_server(("", options.port)) as listener:
                return server(listener, options)
        if options.client:
            return client(options)
        return loopback(lambda port, process: demonstrate(port, process, options))
    except (jh.JemhooksError, TransferFailed, EOFError, OSError) as error:
        print(f"verbs_kv: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
