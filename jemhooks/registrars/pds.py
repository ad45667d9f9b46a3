"""Protection domains of other bindings: pyverbs, and those that are like it."""

from __future__ import annotations

import gc
import sys
from typing import Any


def is_pyverbs(pd: Any) -> bool:
    """Without importing it: whoever has a PD has. (The import would set up logging.)"""
    module = sys.modules.get("pyverbs.pd")
    return module is not None and isinstance(pd, module.PD)


def context_of(pd: Any) -> Any:
    """The device context of a protection domain; None once it is closed."""
    if not is_pyverbs(pd):
        return getattr(pd, "context", None)
    # PD has no attribute that is safe to read in all versions; but an open one keeps its Context.
    from pyverbs.device import Context

    return next((c for c in gc.get_referents(pd) if isinstance(c, Context)), None)
