"""Multi-head latent attention decode over a paged cache: `mla_decode`, and FlashMLA's calls of the same meaning."""

from __future__ import annotations

from typing import Any

__all__ = ["flash_mla_with_kvcache", "get_mla_metadata", "mla_decode"]


def __getattr__(name: str) -> Any:
    """Import the calls, and with them torch and triton, at their first use."""
    if name in __all__:
        from kerneltune.kernels.mla_decode import op

        return getattr(op, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
