"""What a measurement is valid for: the hash of the code of each variant of a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kerneltune.kernels.source_hash import source_hash

if TYPE_CHECKING:
    from kerneltune.kernels.tunable import Tunable


def kernel_hash(tunable: Tunable) -> dict[str, str]:
    """12 hex digits for each variant of a tunable."""
    return {variant: source_hash(roots) for variant, roots in tunable.variants.items()}
