"""In which order the workloads of a ladder are tuned, and which finished ones are near a new one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

NEIGHBOURS = 2

T = TypeVar("T")


def in_order(workloads: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Sorted so that each workload has a neighbour before it: by its exact fields, then by its sizes ascending."""

    def key(workload: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple((isinstance(value, str), value) for value in workload.values())

    unique = {key(workload): dict(workload) for workload in workloads}
    return [unique[k] for k in sorted(unique)]


def distance(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """Summed |log2| of the ratios of numeric fields; a differing text or flag counts as 4 (a factor of 16)."""
    total = 0.0
    for name in a:
        x, y = a[name], b.get(name)
        if x == y:
            continue
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) and v > 0 for v in (x, y))
        total += abs(math.log2(x / y)) if numbers else 4.0
    return total


def trust(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """How much of what was seen on one workload may be expected of another: 1 / (1 + distance)."""
    return 1 / (1 + distance(a, b))


def nearest(workload: Mapping[str, Any], done: Sequence[tuple[Mapping[str, Any], T]]) -> list[T]:
    """What belongs to the nearest finished workloads, nearest first: (workload, anything) pairs in."""
    ranked = sorted(done, key=lambda pair: distance(workload, pair[0]))
    return [found for _, found in ranked[:NEIGHBOURS]]


def same_keys(a: Mapping[str, Any], b: Mapping[str, Any], varying: Sequence[str]) -> bool:
    """Whether two workloads differ in nothing but the keys `varying`."""
    return all(a[name] == b.get(name) for name in a if name not in varying)
