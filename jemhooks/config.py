"""The arguments of an arena, checked and put where C finds them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, SupportsFloat, SupportsIndex

from ._native import ffi
from .budget import max_regions_of, pin_limit_of
from .errors import ConfigError
from .providers import Provider
from .registrars.base import Registrar
from .sizes import LIMIT, ranged, size

_POLICIES = {"lazy": 0, "eager": 1, "none": 2}  # enum jemhooks_policy
_EVICT = {"idle": 0, "unleased": 1}  # enum jemhooks_evict
_ZERO_ON_FREE = {"lazy": 0, "eager": 1}
_PREPARE = {"nothing": 0, "ahead": 1}  # enum jemhooks_prepare
_DECAY_DEFAULT = -2  # JEMHOOKS_DECAY_DEFAULT
_FOREVER = -1  # JEMHOOKS_FOREVER


def registrars_of(name: str, given: Registrar | Iterable[Registrar]) -> tuple[Registrar, ...]:
    """One, or several. :raises ConfigError: something else."""
    try:
        found = (given,) if isinstance(given, Registrar) else tuple(given)
    except TypeError:
        raise ConfigError(f"arena '{name}': {given!r} is neither a Registrar nor several of them") from None
    for item in found:
        if not isinstance(item, Registrar):
            raise ConfigError(f"arena '{name}': {item!r} is not a Registrar")
    return found


def _one_of(name: str, what: str, value: object, known: dict[str, int]) -> int:
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"arena '{name}': {what} {value!r} is not one of {', '.join(known)}")
    return known[value]


def _decay(milliseconds: int | None, what: str) -> int:
    return _DECAY_DEFAULT if milliseconds is None else ranged(milliseconds, what, -1, LIMIT)


def _ttl(seconds: SupportsFloat | None) -> int:
    if seconds is None:
        return _FOREVER
    try:
        value = float(seconds)
    except (TypeError, ValueError):
        raise ConfigError(f"idle_ttl: {seconds!r} is not a number of seconds, nor None") from None
    if not 0 <= value <= 1e9:
        raise ConfigError(f"idle_ttl: {seconds!r} seconds is not between 0 and 1e9; None means for ever")
    return round(value * 1000)


def arena_config(
    name: str,
    encoded: Any,
    provider: Provider | None,
    *,
    rails: int,
    access: int,
    policy: str,
    region_min: SupportsIndex | str,
    region_max: SupportsIndex | str,
    shards: int,
    dirty_decay_ms: int | None,
    muzzy_decay_ms: int | None,
    pin_limit: SupportsIndex | str | None,
    max_regions: SupportsIndex | None,
    idle_ttl: SupportsFloat | None,
    evict: str,
    prepare: str,
    zero_on_free: str,
    rotate_keys: bool,
) -> Any:
    """A jemhooks_config without its registrars. :raises ConfigError:

    :param encoded: the name as a C string, which must live as long as what is returned.
    """
    if provider is not None and not isinstance(provider, Provider):
        raise ConfigError(f"arena '{name}': {provider!r} is not a Provider")
    config = ffi.new("jemhooks_config *")
    config.size = ffi.sizeof("jemhooks_config")
    config.name = encoded
    config.provider = ffi.NULL if provider is None else provider._pointer
    config.registrar_count = rails
    config.access, config.policy = access, _one_of(name, "policy", policy, _POLICIES)
    config.region_min = size(region_min, "region_min", 1)
    config.region_max = size(region_max, "region_max", 1)
    config.shards = ranged(shards, "shards", 1, 64)
    config.dirty_decay_ms = _decay(dirty_decay_ms, "dirty_decay_ms")
    config.muzzy_decay_ms = _decay(muzzy_decay_ms, "muzzy_decay_ms")
    config.pin_limit, config.max_regions = pin_limit_of(pin_limit), max_regions_of(max_regions)
    config.idle_ttl_ms, config.evict = _ttl(idle_ttl), _one_of(name, "evict", evict, _EVICT)
    config.prepare = _one_of(name, "prepare", prepare, _PREPARE)
    config.zero_on_free = _one_of(name, "zero_on_free", zero_on_free, _ZERO_ON_FREE)
    if not isinstance(rotate_keys, bool):
        raise ConfigError(f"arena '{name}': rotate_keys {rotate_keys!r} is not True or False")
    config.rotate_keys = rotate_keys
    return config
