"""jemhooks: RDMA-ready memory from the jemalloc you already have.

Importing this package always succeeds. The native library loads when something that needs it is first used; where it
cannot, LoadError names the remedies. See :func:`bootstrap`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .access import Access
from .errors import (
    AllocationError,
    ClosedError,
    ConfigError,
    ForkError,
    JemhooksError,
    LoadError,
    NotOursError,
    PinLimitError,
    ProviderError,
    RegistrationError,
    TransferError,
)
from .loader import built
from .run import bootstrap

if TYPE_CHECKING:
    from . import ipc
    from .arena import Arena
    from .block import Block
    from .budget import Budget
    from .events import Event, EventKind, Events, notify_cache
    from .leases import Lease, lease
    from .lookup import Key, Region, State, key, keys, lkey, packed_key, region, rkey
    from .providers import Anonymous, DevDax, File, Fixed, Memfd, Provider, ProviderInfo
    from .registrars.base import Registrar
    from .registrars.fabric import Fabric, Transfer
    from .registrars.null import Null
    from .registrars.ucx import Ucx
    from .registrars.uring import Uring
    from .registrars.verbs import Verbs
    from .stats import Stats

    __version__: str

_LAZY = {
    "Arena": "arena",
    "ipc": "ipc",
    "Stats": "stats",
    "Block": "block",
    "Budget": "budget",
    **dict.fromkeys(("Event", "EventKind", "Events", "notify_cache"), "events"),
    **dict.fromkeys(("Anonymous", "DevDax", "File", "Fixed", "Memfd", "Provider", "ProviderInfo"), "providers"),
    **dict.fromkeys(("Lease", "lease"), "leases"),
    **dict.fromkeys(("Key", "Region", "State", "key", "keys", "lkey", "packed_key", "region", "rkey"), "lookup"),
    "Registrar": "registrars.base",
    **dict.fromkeys(("Fabric", "Transfer"), "registrars.fabric"),
    "Null": "registrars.null",
    "Ucx": "registrars.ucx",
    "Uring": "registrars.uring",
    "Verbs": "registrars.verbs",
}

__all__ = [
    "Access",
    "AllocationError",
    "Anonymous",
    "Arena",
    "Block",
    "Budget",
    "ClosedError",
    "ConfigError",
    "DevDax",
    "Event",
    "EventKind",
    "Events",
    "Fabric",
    "File",
    "Fixed",
    "ForkError",
    "JemhooksError",
    "Key",
    "Lease",
    "LoadError",
    "Memfd",
    "NotOursError",
    "Null",
    "PinLimitError",
    "Provider",
    "ProviderError",
    "ProviderInfo",
    "Region",
    "Registrar",
    "RegistrationError",
    "State",
    "Stats",
    "Transfer",
    "TransferError",
    "Ucx",
    "Uring",
    "Verbs",
    "__version__",
    "bootstrap",
    "build_config",
    "ipc",
    "key",
    "keys",
    "lease",
    "lkey",
    "notify_cache",
    "packed_key",
    "region",
    "rkey",
]


def build_config() -> dict[str, str]:
    """Say what was chosen when jemhooks was configured: {"allocator": "jemalloc", "fabric": "on", …}.

    :raises LoadError: jemhooks is not built.
    """
    return dict(item.split("=", 1) for item in built().BUILD_CONFIG.split())


if not TYPE_CHECKING:  # a type checker knows the names from the imports above

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return built().VERSION
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # All at once: a module half imported by another thread would hang a forked child that wants it.
        modules = {m: import_module(f".{m}", __name__) for m in dict.fromkeys(_LAZY.values())}
        globals().update({n: getattr(modules[m], n, modules[m]) for n, m in _LAZY.items()})
        return globals()[name]


def __dir__() -> list[str]:
    return __all__
