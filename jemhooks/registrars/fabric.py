"""libfabric: registered memory that peers read and write by remote direct memory access."""

from __future__ import annotations

import errno
import math
from typing import Any, NamedTuple

from .._native import check, error, ffi, lib
from ..errors import ConfigError
from ..lookup import rail_key
from ..memory import hold, solid
from ..sizes import LIMIT, ranged, size, text
from .base import NativeRegistrar

_U64 = 2**64 - 1
_ADDRESS_ROOM = 256  # always enough: jemhooks_fabric_address()
_FI_MR_LOCAL = 1 << 2  # rdma/fabric.h
_for_good: list[Any] = []  # memory that a registrar closed too early may still be moving


class FabricInfo(NamedTuple):
    """What libfabric chose; the fields of jemhooks_fabric_info."""

    provider: str
    domain: str
    mr_mode: int
    max_msg_size: int
    mr_key_size: int
    max_mr: int
    version: int
    manual_progress: bool
    virtual_addresses: bool
    packed_keys: bool
    max_outstanding: int
    outstanding: int


def _milliseconds(seconds: float) -> int:
    if not (isinstance(seconds, (int, float)) and 0 <= seconds <= 1e6):
        raise ConfigError(f"timeout {seconds!r} is not a number of seconds from 0 to 1000000")
    return math.ceil(seconds * 1000)


class Transfer:
    """A put or get under way. It keeps its local memory until it has ended, whether it is waited for or not."""

    def __init__(self, fabric: Fabric, ticket: int, local: Any) -> None:
        self._fabric, self._ticket, self.done = fabric, ticket, False
        fabric._under_way[ticket] = hold(local)

    def _ended(self) -> None:
        self.done = True
        self._fabric._under_way.pop(self._ticket, None)

    def wait(self, timeout: float = 30.0) -> None:
        """Return when it is done: the bytes of a put are in the target's memory then, those of a get in ours.

        :param timeout: seconds.
        :raises TransferError: it failed, or (``errno`` is ETIMEDOUT) it is still under way and can be waited for again.
        """
        if self.done:
            return
        rc = lib.jemhooks_fabric_wait(self._fabric._open(), self._ticket, _milliseconds(timeout))
        if rc != -errno.ETIMEDOUT:
            self._ended()
        check(rc)

    def __del__(self) -> None:
        pointer = self._fabric._pointer
        if not self.done and pointer is not None:
            lib.jemhooks_fabric_forget(pointer, self._ticket)
            self._fabric._forgotten = True


class Fabric(NativeRegistrar):
    """Registers memory with a libfabric domain, and moves bytes to and from peers.

    :param provider: "tcp", "sockets", "verbs;ofi_rxm", … as ``fi_info`` names them; None: libfabric's choice.
    :param node: this host's own address, on which peers reach it; None for providers without (shm).
    :param service: own port; None: any. :param domain: an interface such as "mlx5_0"; None: any.
    :param max_outstanding: transfers at a time, 1 to 65536.
    :raises LoadError: libfabric is missing. :raises RegistrationError: it has no such provider here.

    Thread-safe. With manual progress (tcp), a target serves its peers only inside :meth:`progress` or ``wait``.
    """

    def __init__(
        self,
        provider: str | None = None,
        *,
        node: str | None = "127.0.0.1",
        service: str | None = None,
        domain: str | None = None,
        max_outstanding: int = 256,
    ) -> None:
        self._under_way: dict[int, Any] = {}  # ticket -> local memory
        self._forgotten = False
        config = ffi.new("jemhooks_fabric_config *")
        config.size = ffi.sizeof("jemhooks_fabric_config")
        given = {"provider": provider, "node": node, "service": service, "domain": domain}
        texts = {n: ffi.new("char[]", text(v, n)) for n, v in given.items() if v is not None}
        for n, encoded in texts.items():
            setattr(config, n, encoded)
        config.max_outstanding = ranged(max_outstanding, "max_outstanding", 1, 65536)
        super().__init__("fabric", config)
        self._needs_lkey = bool(self.info().mr_mode & _FI_MR_LOCAL)

    def info(self) -> FabricInfo:
        """What libfabric chose."""
        out = ffi.new("jemhooks_fabric_info *")
        out.size = ffi.sizeof("jemhooks_fabric_info")
        check(lib.jemhooks_fabric_get_info(self._open(), out))
        values = {n: getattr(out, n) for n in FabricInfo._fields}
        for n in ("provider", "domain"):
            values[n] = ffi.string(values[n]).decode()
        for n in ("manual_progress", "virtual_addresses", "packed_keys"):
            values[n] = bool(values[n])
        return FabricInfo(**values)

    def address(self) -> bytes:
        """This endpoint's address, for a peer's :meth:`connect`."""
        room, length = ffi.new("char[]", _ADDRESS_ROOM), ffi.new("size_t *", _ADDRESS_ROOM)
        check(lib.jemhooks_fabric_address(self._open(), room, length))
        return bytes(ffi.buffer(room, length[0]))

    def connect(self, address: bytes) -> int:
        """Make the endpoint with this address a peer; its number. Nothing is sent yet."""
        if not isinstance(address, (bytes, bytearray, memoryview)):
            raise ConfigError(f"address {address!r} is not the bytes that a peer's address() gave")
        peer = ffi.new("uint64_t *")
        check(lib.jemhooks_fabric_connect(self._open(), ffi.from_buffer(address), len(address), peer))
        return int(peer[0])

    def _start(
        self, function: Any, peer: int, local: Any, remote: Any, offset: int, nbytes: int | None, writable: bool
    ) -> Transfer:
        address, have = solid(local, writable)
        if have is None:
            if nbytes is None:
                raise ConfigError("a transfer from or to an integer address needs nbytes")
            have = LIMIT
        n = have if nbytes is None else size(nbytes, "nbytes", 1)
        if n > have:
            raise ConfigError(f"nbytes {n} is more than the {have} bytes of the local memory")
        addr, key_ = self._remote(remote, offset, n)
        self._sweep()
        ticket = ffi.new("uint64_t *")
        mine = rail_key(local, self)[1].lkey if self._needs_lkey else 0
        rc = function(
            self._open(), ranged(peer, "peer", 0, _U64), ffi.cast("void *", address), mine, n, addr, key_, ticket
        )
        if rc:
            raise error(rc)
        return Transfer(self, ticket[0], local)

    @staticmethod
    def _remote(remote: Any, offset: int, n: int) -> tuple[int, int]:
        """Address and rkey of a Key or an (addr, rkey) pair; a Key's length is a bound."""
        length = getattr(remote, "length", None)
        ranged(offset, "offset", 0, LIMIT)
        try:
            addr, key_ = remote if length is None else (remote.addr, remote.rkey)
        except (AttributeError, TypeError, ValueError):
            raise ConfigError(f"remote memory {remote!r} is neither a Key nor a pair of address and rkey") from None
        if length is not None and offset + n > length:
            raise ConfigError(f"{n} bytes at offset {offset} reach beyond the {length} bytes of the remote key")
        start = ranged(addr, "remote address", 0, _U64)
        return ranged(start + offset, "remote address", 0, _U64), ranged(key_, "rkey", 0, _U64)

    def put(self, peer: int, local: Any, remote: Any, *, offset: int = 0, nbytes: int | None = None) -> Transfer:
        """Start copying local memory to a peer's.

        :param remote: the :class:`Key` of the peer's memory, or a pair of address and rkey.
        :param offset: bytes into the remote memory. :param nbytes: default: all of ``local``.
        :raises ConfigError, TransferError: it could not be started; later failures come from :meth:`Transfer.wait`.
        """
        return self._start(lib.jemhooks_fabric_put, peer, local, remote, offset, nbytes, False)

    def get(self, peer: int, local: Any, remote: Any, *, offset: int = 0, nbytes: int | None = None) -> Transfer:
        """Start copying a peer's memory to ours; otherwise as :meth:`put`."""
        return self._start(lib.jemhooks_fabric_get, peer, local, remote, offset, nbytes, True)

    def progress(self, timeout: float = 0.0) -> None:
        """Serve peers, and move our own transfers on, for ``timeout`` seconds (0: once)."""
        check(lib.jemhooks_fabric_progress(self._open(), _milliseconds(timeout)))

    def _sweep(self) -> None:
        """Let go of the memory of forgotten transfers once nothing is outstanding."""
        if self._forgotten and self.info().outstanding == 0:
            self._under_way.clear()
            self._forgotten = False

    def close(self) -> None:
        """Refuse new arenas and transfers; it ends with the last arena that uses it. Wait for transfers first."""
        _for_good.extend(self._under_way.values())
        self._under_way.clear()
        super().close()
