"""Which kernels can be tuned, by the names that the command line and the tables use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from kerneltune.kernels.tunable import Tunable

KERNELS = {
    "mla-decode": "kerneltune.kernels.mla_decode.tunable",
    "moe": "kerneltune.kernels.moe.tunable",
}


def load_tunable(kernel: str) -> Tunable:
    """Import a kernel's tunable (this imports torch and triton).

    Raises:
        ValueError: no kernel has that name.
    """
    if kernel not in KERNELS:
        raise ValueError(f"unknown kernel {kernel!r}: expected one of {', '.join(KERNELS)}")
    return cast("Tunable", importlib.import_module(KERNELS[kernel]).TUNABLE)
