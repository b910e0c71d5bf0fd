"""From counted work and a time to rates, the binding ceiling and the fraction of it: pure arithmetic.

Williams, Waterman, Patterson: "Roofline: an insightful visual performance model", CACM 52(4), 2009. Traffic is the
compulsory traffic (each input once, each output once), so a fraction below one includes every byte moved twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kerneltune.kernels.tunable import Cost

SUSPECT_ABOVE = 1.02  # ceilings themselves repeat within 2 %: 4.4 to 4.55 TB/s over kernels and days on an H200


@dataclass(frozen=True)
class Ceilings:
    """Rates measured on one device, with date; nothing from a datasheet."""

    device: str
    date: str
    dram_read_gbps: float
    dram_copy_gbps: float
    tflops: Mapping[str, float]  # by dtype: "bf16", "fp16"
    launch_us: float  # cold replay of a graph that holds one tiny node
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Ceilings:
        """The inverse of `to_dict`; unknown fields are ignored."""
        return cls(**{name: data[name] for name in cls.__dataclass_fields__ if name in data})


@dataclass(frozen=True)
class Placement:
    """Where a measurement lies under the roof."""

    gbps: float
    tflops: float
    intensity: float  # FLOP per byte
    bound: str  # "memory" or "compute"
    floor_us: float  # the least time the binding ceiling allows
    roofline: float  # floor_us / net time

    @property
    def suspect(self) -> bool:
        """Faster than a measured ceiling allows: wrong, or not cold."""
        return self.roofline > SUSPECT_ABOVE


def place(cost: Cost, time_us: float, ceilings: Ceilings, launch_us: float | None = None) -> Placement:
    """Rates and fraction of one measured time.

    Args:
        time_us: the median as read; `launch_us` (default: the ceilings') is taken off for the fraction and the rates.

    Raises:
        KeyError: no ceiling was measured for `cost.compute`.
    """
    launch = ceilings.launch_us if launch_us is None else launch_us
    net_us = max(time_us - launch, 1e-3)
    memory_us = cost.bytes / ceilings.dram_read_gbps / 1e3
    compute_us = cost.flops / ceilings.tflops[cost.compute] / 1e6
    floor_us = max(memory_us, compute_us)
    return Placement(
        gbps=cost.bytes / net_us / 1e3,
        tflops=cost.flops / net_us / 1e6,
        intensity=cost.flops / cost.bytes if cost.bytes else 0.0,  # an expert-parallel rank may have nothing to do
        bound="memory" if memory_us >= compute_us else "compute",
        floor_us=floor_us,
        roofline=floor_us / net_us,
    )
