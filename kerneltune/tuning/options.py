"""What a user may choose of a search."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """What a user may choose of a search."""

    out: Path
    trials: int | None = None  # distinct configs for each workload and part, recorded ones counted in; None: until
    # another is unlikely to pay
    budget_s: float | None = None  # seconds for the whole search; recorded seconds in a replay
    sampler: str = "default"
    seed: int = 0
    command: str = ""
    max_loss: float = 0.02  # what a workload may lose against its best config, so that few configs serve all
