"""What a kernel's constraints may know of a GPU, as plain numbers, with or without that GPU present.

Limits: one record describes one device; a machine with different GPUs has one record for each.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Device:
    """One GPU, as the driver (or, for a GPU that is not here, kerneltune's target list) describes it."""

    name: str  # as the driver reports it: "NVIDIA H200"
    arch: str  # "sm_90", "gfx942"
    sm_count: int  # streaming multiprocessors (AMD: compute units)
    shared_memory_per_block: int  # bytes one block may opt in to (AMD: LDS)
    l2_bytes: int  # last-level cache
    memory_bytes: int
    warp_size: int = 32

    @property
    def backend(self) -> str:
        """Triton's backend name: "cuda" or "hip"."""
        return "hip" if self.arch.startswith("gfx") else "cuda"

    def to_dict(self) -> dict[str, str | int]:
        """The fields as plain JSON values."""
        return asdict(self)


@functools.cache
def current_device(index: int = 0) -> Device:
    """Describe GPU `index` of this process through torch.

    Raises:
        RuntimeError: no GPU is visible to torch.
    """
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("no GPU is visible to torch on this machine")
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        arch = properties.gcnArchName.split(":")[0]
        shared = properties.shared_memory_per_block
    else:
        arch = f"sm_{properties.major}{properties.minor}"
        shared = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Device(
        name=properties.name,
        arch=arch,
        sm_count=properties.multi_processor_count,
        shared_memory_per_block=shared,
        l2_bytes=properties.L2_cache_size,
        memory_bytes=properties.total_memory,
        warp_size=properties.warp_size,
    )
