"""What a kernel's constraints may know of a GPU, as plain numbers, with or without that GPU present.

Limits: one record describes one device; a machine with different GPUs has one record for each.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

VARIABLE = "KERNELTUNE_DEVICE"


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


def relation(table: Mapping[str, Any], device: Device) -> str | None:
    """How the device of a table is related to `device`: "" if it is the same, None if its entries say nothing here.

    The same: name and SM count are equal, memory to 10 % (where both are known). A relative: architecture and SM count
    are equal, and neither is a slice of a GPU (MIG): what fits and how the work divides are then equal, only memory and
    clocks differ (H100 SXM, H800, GH200, H200, H200 NVL with 132 SMs; MI300X and MI325X). KERNELTUNE_DEVICE=NAME makes
    this GPU count as NAME.

    Returns:
        for a relative, a few words that say why.
    """
    name, sm_count, arch, memory = (table.get(field) for field in ("name", "sm_count", "arch", "memory_bytes"))
    known = memory if isinstance(memory, int) and device.memory_bytes else 0
    alike = not known or 0.9 <= known / device.memory_bytes <= 1.1
    if (name, sm_count) == (device.name, device.sm_count) and alike:
        return ""
    if name == os.environ.get(VARIABLE):
        return f"{VARIABLE} names it"
    if "MIG" in f"{name} {device.name}".split() or not arch or (arch, sm_count) != (device.arch, device.sm_count):
        return None
    sizes = f"; memory {known / 2**30:.0f} GiB there, {device.memory_bytes / 2**30:.0f} here" if known else ""
    return f"also {arch} with {sm_count} SMs{sizes}"
