"""What the verbs examples share: a reliable connected queue pair of pyverbs, and the TCP connection that sets it up."""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

try:
    import pyverbs  # noqa: F401
except ImportError:
    raise SystemExit("pyverbs is missing; install python3-pyverbs (Debian), and use the system's Python") from None
try:
    import pyverbs.enums as e
except ImportError:
    import pyverbs.libibverbs_enums as e  # its name since rdma-core 58
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context, get_device_list
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

TIMEOUT = 60.0  # seconds that one step may take
ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_ATOMIC
STATUS = {value: name for name, value in vars(e).items() if name.startswith("IBV_WC_") and "ERR" in name}


class TransferFailed(Exception):
    """A work request completed with an error; its queue pair is of no more use."""

    def __init__(self, status: int) -> None:
        self.status = int(status)
        super().__init__(f"completion status {self.status}, {STATUS.get(status, 'unknown')}")


class Device:
    """A device, a protection domain in it, and the address on its port 1 by which peers reach it."""

    def __init__(self, name: str | None = None, gid_index: int | None = None) -> None:
        here = [d.name.decode() for d in get_device_list()]
        if not here or (name or here[0]) not in here:
            raise SystemExit(f"no RDMA device {name or ''}; this host has {', '.join(here) or 'none'}")
        self.name = name or here[0]
        self.ctx = Context(name=self.name)
        self.pd = PD(self.ctx)
        self.port = self.ctx.query_port(1)
        used = [
            i for i in range(min(self.port.gid_tbl_len, 256)) if self._gid(i).strip("0:")
        ]  # address handles: 8 bits
        if not used or (gid_index is not None and gid_index not in used):
            raise SystemExit(f"device {self.name} has no GID {gid_index}; those of its port 1 are {used}")
        over_ipv4 = [i for i in used if self._gid(i).startswith("0000:0000:0000:0000:0000:ffff")]
        self.gid_index = [*over_ipv4, *used][0] if gid_index is None else gid_index
        self.gid = self._gid(self.gid_index)

    def _gid(self, index: int) -> str:
        """All zero where there is none."""
        try:
            return str(self.ctx.query_gid(1, index).gid)
        except PyverbsError:
            return "0"

    def close(self) -> None:
        self.ctx.close()


class QueuePair:
    """One-sided transfers to and from the memory of one peer. One at a time is under way, unless posted by hand."""

    def __init__(self, device: Device, depth: int = 64, pieces: int = 8) -> None:
        self.device = device
        self.cq = CQ(device.ctx, depth)
        self.psn = random.randrange(1 << 24)
        cap = QPCap(max_send_wr=depth, max_recv_wr=1, max_send_sge=pieces, max_recv_sge=1)
        self.qp = QP(device.pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap, sq_sig_all=1))

    def address(self) -> dict[str, Any]:
        """For the peer's connect()."""
        d = self.device
        return {"qpn": self.qp.qp_num, "psn": self.psn, "gid": d.gid, "lid": d.port.lid, "mtu": d.port.active_mtu}

    def connect(self, peer: dict[str, Any], *, timeout: int = 14, retries: int = 7) -> None:
        """:param timeout: how long to wait for an answer, 4.096 us << timeout. :param retries: how often."""
        route = GlobalRoute(dgid=GID(peer["gid"]), sgid_index=self.device.gid_index)
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = ACCESS
        attr.ah_attr = AHAttr(port_num=1, is_global=1, gr=route, dlid=peer["lid"])
        attr.path_mtu = min(peer["mtu"], self.device.port.active_mtu)
        attr.dest_qp_num, attr.rq_psn, attr.sq_psn = peer["qpn"], peer["psn"], self.psn
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 4
        attr.min_rnr_timer, attr.rnr_retry = 12, 7
        attr.timeout, attr.retry_cnt = timeout, retries
        self.qp.to_rts(attr)

    def post(self, opcode: int, pieces: Sequence[tuple[int, int, int]], remote: int, rkey: int, **atomic: int) -> None:
        """:param pieces: address, length and local key of each, as arena.sges() gives them."""
        wr = SendWR(opcode=opcode, num_sge=len(pieces), sg=[SGE(*p) for p in pieces])
        if atomic:
            wr.set_wr_atomic(rkey, remote, atomic["add"], atomic.get("swap", 0))
        else:
            wr.set_wr_rdma(rkey, remote)
        self.qp.post_send(wr)

    def wait(self, seconds: float = TIMEOUT) -> None:
        """For one completion. :raises TransferFailed, TimeoutError:"""
        end = time.monotonic() + seconds
        while True:
            count, done = self.cq.poll()
            if count:
                break
            if time.monotonic() > end:
                raise TimeoutError(f"no completion within {seconds:g} s")
            os.sched_yield()
        if done[0].status != e.IBV_WC_SUCCESS:
            raise TransferFailed(done[0].status)

    def write(self, pieces: Sequence[tuple[int, int, int]], remote: int, rkey: int) -> None:
        self.post(e.IBV_WR_RDMA_WRITE, pieces, remote, rkey)
        self.wait()

    def read(self, pieces: Sequence[tuple[int, int, int]], remote: int, rkey: int) -> None:
        self.post(e.IBV_WR_RDMA_READ, pieces, remote, rkey)
        self.wait()

    def fetch_add(self, piece: tuple[int, int, int], remote: int, rkey: int, add: int) -> None:
        """The 8 bytes at `remote` before the addition come to `piece`."""
        self.post(e.IBV_WR_ATOMIC_FETCH_AND_ADD, [piece], remote, rkey, add=add)
        self.wait()

    def close(self) -> None:
        self.qp.close()
        self.cq.close()


class Channel:
    """Objects as lines of JSON over TCP: what two sides tell each other before and between transfers."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(TIMEOUT)
        self.socket, self._lines = connection, connection.makefile("r")

    def send(self, what: Any) -> None:
        self.socket.sendall(json.dumps(what).encode() + b"\n")

    def receive(self, seconds: float | None = TIMEOUT) -> Any:
        """:param seconds: None: as long as it takes. :raises EOFError: the other side is gone."""
        self.socket.settimeout(seconds)
        line = self._lines.readline()
        if not line:
            raise EOFError("the other side closed the connection")
        return json.loads(line)

    def ask(self, what: Any) -> Any:
        self.send(what)
        return self.receive()

    def close(self) -> None:
        self._lines.close()
        self.socket.close()


def add_options(parser: argparse.ArgumentParser, port: int) -> None:
    """What both sides of every example take."""
    parser.add_argument("--port", type=int, default=port, help=f"the server's TCP port (default {port})")
    parser.add_argument("--device", help="such as mlx5_0 or rxe0 (default: the first)")
    parser.add_argument("--gid-index", type=int, help="of port 1 (default: its first IPv4 GID)")
    parser.add_argument("--inherit", type=int, help=argparse.SUPPRESS)


def loopback(client: Callable[[int, subprocess.Popen[bytes]], int]) -> int:
    """Run client(port, process) with this program once more as the server, which listens on a port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        arguments = [*sys.argv[1:], "--inherit", str(listener.fileno())]
        server = subprocess.Popen([sys.executable, sys.argv[0], *arguments], pass_fds=[listener.fileno()])
        try:
            return client(listener.getsockname()[1], server) or server.wait(TIMEOUT)
        except EOFError:
            server.wait(TIMEOUT)  # it says why
            raise
        finally:
            server.kill()
            server.wait()


def dial(host: str, port: int) -> Channel:
    """Connect to a server that may still be starting."""
    end = time.monotonic() + TIMEOUT
    while True:
        try:
            return Channel(socket.create_connection((host, port), timeout=TIMEOUT))
        except OSError as error:
            if time.monotonic() > end:
                raise SystemExit(f"no server at {host} port {port}: {error}") from None
            time.sleep(0.1)
