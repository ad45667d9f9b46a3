"""What can go wrong. Every message names the value, the limit and the remedy."""

from __future__ import annotations


class JemhooksError(Exception):
    """The base of all errors of this package. ``errno`` is the C library's error number, 0 where there is none."""

    errno: int = 0


class LoadError(JemhooksError):
    """The native library, or a registrar's library, cannot be loaded."""


class ConfigError(JemhooksError, ValueError):
    """An argument is wrong."""


class ProviderError(JemhooksError):
    """The provider of the memory refused."""


class AllocationError(JemhooksError, MemoryError):
    """An allocation cannot be served."""


class RegistrationError(JemhooksError):
    """A registrar refused to register or to deregister."""


class PinLimitError(RegistrationError):
    """A limit on pinned memory or on the number of registrations stands in the way."""


class NotOursError(JemhooksError, LookupError):
    """The address lies in no region of any arena."""


class ForkError(JemhooksError):
    """An arena made before a fork was used in the child."""


class ClosedError(JemhooksError):
    """Something was used after it was closed."""


class TransferError(JemhooksError):
    """A transfer failed, or a registrar's own function did."""
