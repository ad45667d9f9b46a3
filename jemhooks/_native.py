"""The loaded native library: ``ffi``, ``lib``, and the one place that turns C results into exceptions.

Importing this module loads it; where that is impossible it raises LoadError with the remedies.
"""

from __future__ import annotations

import threading
from typing import Any

from . import errors
from .loader import explain, settle_cxx

settle_cxx()
try:
    from ._ffi import ffi, lib
except ImportError as e:
    raise errors.LoadError(explain(e)) from e

__all__ = ["callbacks", "check", "error", "ffi", "lib"]

# enum jemhooks_error_kind of jemhooks.h, in its order
_KINDS: tuple[type[errors.JemhooksError], ...] = (
    errors.JemhooksError,
    errors.ConfigError,
    errors.LoadError,
    errors.ProviderError,
    errors.AllocationError,
    errors.RegistrationError,
    errors.PinLimitError,
    errors.NotOursError,
    errors.ForkError,
    errors.ClosedError,
    errors.ProviderError,
    errors.TransferError,
)


class _Callbacks(threading.local):
    """What happened in calls from C into Python on this thread."""

    depth: int = 0  # how many registrar calls this thread is inside of
    raised: BaseException | None = None


callbacks = _Callbacks()


def error(rc: int) -> errors.JemhooksError:
    """The exception for the failure that the native library recorded last on this thread."""
    text: str = ffi.string(lib.jemhooks_last_error()).decode(errors="replace")
    kind = _KINDS[lib.jemhooks_last_error_kind()]
    cause, callbacks.raised = callbacks.raised, None
    if cause is not None and not isinstance(cause, Exception):
        raise cause  # KeyboardInterrupt and the like are not the registrar's failure
    exception = kind(text)
    exception.errno = -rc
    if kind is errors.RegistrationError:
        exception.__cause__ = cause
    return exception


def check(rc: int) -> Any:
    """Pass a result of the native library through; raise if it is negative."""
    if rc < 0:
        raise error(rc)
    return rc
