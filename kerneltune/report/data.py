"""What a report says, as plain values: rows, failures, ceilings, provenance, curves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

SCALED_KEYS = ("batch", "kv_len", "tokens")  # sizes along one curve; a group of rows shares all other sizes


@dataclass(frozen=True)
class Row:
    """The outcome of one workload. Times are medians in microseconds; a figure that nobody measured is None."""

    kernel: str
    device: str
    workload: dict[str, Any]
    shape: str  # the workload as short text
    config: dict[str, Any]
    default_us: float | None
    tuned_us: float
    p20_us: float | None
    p80_us: float | None
    gain: float | None  # default / tuned, both net of launch_us
    no_gain: bool  # the default config is the best one known
    gbps: float | None
    tflops: float | None
    roofline: float | None  # fraction of the binding ceiling reached
    bound: str
    inputs: str
    launch_us: float  # what an empty graph takes, in every time
    composed: bool  # replay only: the sum of the parts' recorded times
    origin: str  # "table" or "records"
    loss: float | None = None  # measured, against the best config known for this workload
    losses: dict[str, float] = field(default_factory=dict)  # of this config on the ladder's workloads, by scaled keys

    @property
    def intensity(self) -> float | None:
        """FLOP per byte of compulsory traffic."""
        return 1e3 * self.tflops / self.gbps if self.gbps and self.tflops else None

    @property
    def default_tflops(self) -> float | None:
        """The rate of the default config: the same work in its net time."""
        if not self.tflops or self.default_us is None:
            return None
        return self.tflops * (self.tuned_us - self.launch_us) / max(self.default_us - self.launch_us, 1e-3)


@dataclass(frozen=True)
class Unfinished:
    """A workload that was searched but has no final timing yet: best times of its parts, as the search read them."""

    kernel: str
    device: str
    shape: str
    tried: int
    best_us: dict[str, float]  # by part, of trials that passed


@dataclass(frozen=True)
class Failure:
    """Trials that failed in the same way."""

    kernel: str
    outcome: str
    rule: str  # the reason with its numbers taken out
    count: int
    example: str
    shape: str = ""  # of the example


@dataclass(frozen=True)
class Provenance:
    """Who measured, with what, when, and the command that does it again."""

    kernel: str
    device: str
    source: str  # "live" or "replay:<recording>"
    date: str
    command: str
    seed: int | None
    sampler: str
    versions: tuple[tuple[str, str], ...]  # of what: "triton", "torch", "driver"

    @property
    def recording(self) -> str:
        """The recording that was replayed, "" if the times are this search's own."""
        return self.source.partition(":")[2] if self.source.startswith("replay") else ""


@dataclass(frozen=True)
class Doubt:
    """What the GPU did around the trials of one workload that makes their times doubtful."""

    kernel: str
    device: str
    shape: str
    warnings: tuple[str, ...]
    date: str


@dataclass(frozen=True)
class Search:
    """One search that measured: where its seconds went, by tuning.seconds.KINDS."""

    kernel: str
    device: str
    measured: int
    seconds: dict[str, float]
    date: str


@dataclass(frozen=True)
class Report:
    """Everything that is known about some folders."""

    folders: tuple[Path, ...]
    rows: tuple[Row, ...]
    unfinished: tuple[Unfinished, ...]
    failures: tuple[Failure, ...]
    ceilings: tuple[dict[str, Any], ...]  # roofline.model.Ceilings as dicts
    provenance: tuple[Provenance, ...]
    trials: int
    warnings: tuple[str, ...]
    doubts: tuple[Doubt, ...] = ()
    searches: tuple[Search, ...] = ()


@dataclass(frozen=True)
class Curve:
    """The times of one part of one workload, a value for each distinct config in the order tried; inf: it failed."""

    kernel: str
    shape: str
    part: str
    times_us: tuple[float, ...]


def count_configs(rows: Iterable[Row]) -> int:
    """Distinct configs, those of each group counted on their own: each is a compile at serving time."""
    return len({(*group_key(row), canonical(row.config)) for row in rows})


def group_labels(rows: Iterable[Row]) -> dict[tuple[str, str], str]:
    """Short names for groups of rows that differ in scaled sizes only: "mla-decode heads=16", by `group_key`."""
    rows = list(rows)
    labels: dict[tuple[str, str], str] = {}
    for name in dict.fromkeys(row.kernel for row in rows):
        groups = {group_key(row): exact_sizes(row.workload) for row in rows if row.kernel == name}
        exact = list(groups.values())
        differing: list[str] = []
        for key in exact[0]:
            values = [str(sizes.get(key)) for sizes in exact]
            said = any(values == [str(sizes.get(other)) for sizes in exact] for other in differing)
            if len(set(values)) > 1 and not said:  # kv_dtype with dtype, global_E with E
                differing.append(key)
        for group, sizes in groups.items():
            labels[group] = " ".join([name, *(f"{key}={sizes[key]}" for key in differing if key in sizes)])
    return labels


def group_key(row: Row) -> tuple[str, str]:
    """Equal for rows that differ in scaled sizes only."""
    return row.kernel, canonical(exact_sizes(row.workload))


def geomean(values: Iterable[float]) -> float | None:
    """The geometric mean, None of nothing."""
    logs = [math.log(value) for value in values if value > 0]
    return math.exp(math.fsum(logs) / len(logs)) if logs else None


def exact_sizes(workload: Mapping[str, Any]) -> dict[str, Any]:
    """What a group of rows has in common: all but the scaled sizes."""
    return {key: value for key, value in workload.items() if key not in SCALED_KEYS}


def canonical(value: Mapping[str, Any]) -> str:
    """Equal text for equal workloads, or configs, whatever the order of their keys."""
    return msgspec.json.encode(value, order="sorted").decode()
