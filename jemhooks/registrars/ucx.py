"""UCX: memory handles and packed remote keys of a UCP context."""

from __future__ import annotations

import os
import weakref
from typing import Any, NamedTuple

from .._native import check, ffi, lib
from ..errors import ClosedError, ConfigError, ForkError
from ..sizes import ranged
from .base import NativeRegistrar


class UcxInfo(NamedTuple):
    """What the context is; the fields of jemhooks_ucx_info."""

    context: int
    version: str
    own: bool
    shared: bool


def _handle(context: Any) -> int:
    """The ucp_context_h of an int, or of an object with a ``handle``, such as UCXX's and ucx-py's UCXContext."""
    try:
        value = context if isinstance(context, int) else context.handle
    except AttributeError:
        raise ConfigError(f"context {context!r} is neither a ucp_context_h as an int nor has it a handle") from None
    except Exception as e:
        raise ClosedError(f"the UCX context {context!r} gives no handle, so it is closed: {e}") from e
    if not value:
        raise ClosedError(f"the UCX context {context!r} is closed; pass an open one")
    return ranged(value, "context", 1, 2**64 - 1)


class Ucx(NativeRegistrar):
    """Registers memory with a UCP context; transfers are its owner's.

    A region's remote key is :func:`jemhooks.packed_key`, for ``ucp_ep_rkey_unpack``; ``Key.lkey`` is its ``ucp_mem_h``
    and ``Key.rkey`` is 0. UCX's tcp and shared-memory transports enforce no keys.

    :param context: a ``ucp_context_h`` as an int, or an object whose ``handle`` that is (UCXX's ``UCXContext``), which
        is kept; None: a context of jemhooks' own, with UCX's settings from the environment (``UCX_TLS``, …).
    :raises ConfigError: not a context. :raises ClosedError: a closed one. :raises LoadError: UCX is missing.
    :raises RegistrationError: UCX offers no transport.

    Thread-safe; but UCX locks registrations only in a context with ``mt_workers_shared`` (see :attr:`UcxInfo.shared`):
    leave another one alone while memory is registered. Before you end a context of yours, call :meth:`detach`.
    """

    def __init__(self, context: Any = None) -> None:
        config = ffi.new("jemhooks_ucx_config *")
        config.size = ffi.sizeof("jemhooks_ucx_config")
        config.context = ffi.NULL if context is None else ffi.cast("struct ucp_context *", _handle(context))
        self._context = context
        self._arenas: weakref.WeakSet[Any] = weakref.WeakSet()
        self._own = context is None
        super().__init__("ucx", config)
        self._kept = None if self._own else self._pointer  # for detach(), which is good after close(), too

    def info(self) -> UcxInfo:
        """The context, UCX's version, whether the context is jemhooks' own, whether it is shared by threads."""
        out = ffi.new("jemhooks_ucx_info *")
        out.size = ffi.sizeof("jemhooks_ucx_info")
        check(lib.jemhooks_ucx_get_info(self._open(), out))
        context = int(ffi.cast("uintptr_t", out.context))
        return UcxInfo(context, ffi.string(out.version).decode(), bool(out.own), bool(out.shared))

    def _joined(self, arena: Any) -> None:
        super()._joined(arena)
        self._arenas.add(arena)

    def detach(self) -> None:
        """End every registration with your context, leased or not: it is about to go. Later keys raise. Idempotent.

        :raises ConfigError: the context is jemhooks' own. :raises RegistrationError: a registration could not be ended.
        :raises TransferError: another thread has just registered a region; detach again. :raises ForkError:
        """
        if self._pid != os.getpid():
            raise ForkError("registrar ucx was opened before the fork; leave its context alone in this process")
        if self._own:
            raise ConfigError("the context is jemhooks' own; close the registrar instead")
        if self._kept is None:
            return
        for arena in list(self._arenas):
            arena._revoke()
        check(lib.jemhooks_ucx_detach(self._kept))
        self._context = self._kept = None
