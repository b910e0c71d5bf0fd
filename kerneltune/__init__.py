"""Tune MLA decode and fused MoE kernels on your GPU, judge them by its roofline, ship the table."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Resolved when first used: an engine that imports kerneltune.kernels must not load the tuner.
_LAZY = {
    "search": "kerneltune.tuning.api",
    "load_table": "kerneltune.tables",
    "lookup": "kerneltune.tables",
}
__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'kerneltune' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
