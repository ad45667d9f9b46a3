"""The registrar that registers nothing: for tests, dry runs and measurements."""

from __future__ import annotations

import errno
from typing import Any, Literal, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from .._native import check, ffi, lib
from ..errors import ConfigError
from ..sizes import ranged, size
from .base import NativeRegistrar

_OPS = {"register": 1, "deregister": 2}  # enum jemhooks_null_op
_LOG = 4096  # JEMHOOKS_NULL_LOG
CALL_DTYPE = np.dtype(
    [(n, "u8") for n in ("sequence", "address", "length", "lkey")]
    + [("op", "u4"), ("access", "u4"), ("result", "i4"), ("_", "i4")]
)


class NullStats(NamedTuple):
    """Calls, failed ones included; what is live now; and ``errors``: 0 unless the caller registered or ended twice."""

    registers: int
    deregisters: int
    live: int
    live_bytes: int
    live_peak: int
    errors: int


class Null(NativeRegistrar):
    """Hands out keys that are never reused, counts, logs, and fails on demand.

    :param max_mr: registrations at a time, 0: no limit. :param max_mr_size: bytes of one, 0: no limit.
    :param fail_at: the Nth registration fails, 0: none. :param fail_deregister_at: the same for deregistrations.
    :param remote_offset: remote addresses are offsets from 0, as with many libfabric providers.
    """

    def __init__(
        self,
        *,
        max_mr: int = 0,
        max_mr_size: SupportsIndex | str = 0,
        fail_at: int = 0,
        fail_deregister_at: int = 0,
        fail_errno: int = errno.ENOMEM,
        remote_offset: bool = False,
    ) -> None:
        config = ffi.new("jemhooks_null_config *")
        config.size = ffi.sizeof("jemhooks_null_config")
        config.max_mr = ranged(max_mr, "max_mr", 0, 2**63)
        config.max_mr_size = size(max_mr_size, "max_mr_size")
        config.fail_at = ranged(fail_at, "fail_at", 0, 2**63)
        config.fail_deregister_at = ranged(fail_deregister_at, "fail_deregister_at", 0, 2**63)
        config.fail_errno = ranged(fail_errno, "fail_errno", 1, 4095)
        config.fail_deregister_errno = errno.EIO
        config.remote_offset = remote_offset
        super().__init__("null", config)

    def stats(self) -> NullStats:
        """Counts so far."""
        out = ffi.new("jemhooks_null_stats *")
        out.size = ffi.sizeof("jemhooks_null_stats")
        check(lib.jemhooks_null_get_stats(self._open(), out))
        return NullStats(*(getattr(out, n) for n in NullStats._fields))

    def calls(self) -> npt.NDArray[Any]:
        """Return the latest 4,096 calls, oldest first, as a structured array; op is 1 (register) or 2 (deregister)."""
        table, count = np.zeros(_LOG, CALL_DTYPE), ffi.new("size_t *", _LOG)
        check(
            lib.jemhooks_null_get_calls(self._open(), ffi.cast("jemhooks_null_call *", ffi.from_buffer(table)), count)
        )
        return table[: count[0]]

    def fail(self, op: Literal["register", "deregister"], nth: int = 1, error: int = errno.ENOMEM) -> None:
        """Let the ``nth`` next call of ``op`` fail with ``error``; 0 disarms."""
        if not isinstance(op, str) or op not in _OPS:
            raise ConfigError(f"op {op!r} is not one of {', '.join(_OPS)}")
        check(
            lib.jemhooks_null_fail(
                self._open(), _OPS[op], ranged(nth, "nth", 0, 2**63), ranged(error, "error", 1, 4095)
            )
        )
