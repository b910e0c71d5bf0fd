"""The smallest set of configs that serves every workload within a bounded loss: pure arithmetic on a loss matrix.

Each further config of a table costs a compile at serving time, so a table holds as few as it can. Names of workloads
and configs are any texts. Finding the smallest set is set cover: exact while the search tree is small (it is, for
ladders), greedy beyond. Among the smallest sets the one with the least total loss is taken; the names decide what is
left, so equal figures give equal answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

MAX_NODES = 100_000  # of the search tree, about a second
SLACK = 1e-9  # a loss of exactly the bound is inside, whatever the division left over

Times = Mapping[str, Mapping[str, float]]  # workload -> config -> microseconds net of the launch; what is not there
# cannot serve


@dataclass(frozen=True)
class Cover:
    """The configs of a table and which of them serves each workload."""

    configs: tuple[str, ...]  # those that serve, sorted
    serves: dict[str, str]  # workload -> the best config of the set
    loss: dict[str, float]  # workload -> time / best time - 1

    @property
    def worst(self) -> float:
        """The largest loss."""
        return max(self.loss.values(), default=0.0)


def smallest(times: Times, max_loss: float, max_nodes: int = MAX_NODES) -> Cover:
    """The fewest configs such that each workload has one within `max_loss` of its best.

    Args:
        times: at least one time for each workload.
        max_loss: fraction of time that a workload may lose against its best config, 0.02 for 2 %.
        max_nodes: of the exact search; beyond, the greedy set is taken.
    """
    losses = {
        workload: {config: time / min(row.values()) - 1 for config, time in row.items()}
        for workload, row in times.items()
    }
    near = {
        workload: {config: loss for config, loss in row.items() if loss <= max_loss + SLACK}
        for workload, row in losses.items()
    }
    chosen = _greedy(near)
    for size in range(1, len(chosen) + 1):
        search = _OfSize(near, size, max_nodes)
        if search.exhausted:
            break  # too large a tree: the greedy set stays
        if search.best is not None:
            chosen = search.best[1]
            break
    serves = {workload: _best(row, chosen) for workload, row in near.items()}
    used = tuple(sorted(set(serves.values())))
    return Cover(used, serves, {workload: losses[workload][config] for workload, config in serves.items()})


class _OfSize:
    """All covers of one size, when there is none smaller: whichever config serves an unserved workload comes next."""

    def __init__(self, near: Times, size: int, max_nodes: int) -> None:
        self._near, self._nodes = near, max_nodes
        self._by_config: dict[str, frozenset[str]] = {}
        for config in sorted({config for row in near.values() for config in row}):
            self._by_config[config] = frozenset(workload for workload, row in near.items() if config in row)
        self._most = max((len(served) for served in self._by_config.values()), default=0)
        self._seen: set[frozenset[str]] = set()
        self.best: tuple[tuple[float, tuple[str, ...]], tuple[str, ...]] | None = None
        self.exhausted = False
        self._extend(frozenset(), frozenset(near), size)

    def _extend(self, chosen: frozenset[str], unserved: frozenset[str], left: int) -> None:
        if not unserved:
            names = tuple(sorted(chosen))
            rank = _total_loss(self._near, names), names
            if self.best is None or rank < self.best[0]:
                self.best = rank, names
            return
        if left * self._most < len(unserved) or chosen in self._seen:
            return
        self._seen.add(chosen)
        self._nodes -= 1
        if self._nodes < 0:
            self.exhausted = True
            return
        hardest = min(unserved, key=lambda workload: (len(self._near[workload]), workload))
        for config in sorted(self._near[hardest]):
            self._extend(chosen | {config}, unserved - self._by_config[config], left - 1)
            if self.exhausted:
                return


def _greedy(near: Times) -> tuple[str, ...]:
    """Whichever serves most of what is left, the least loss on those first; then what turned out needless goes."""
    chosen: list[str] = []
    unserved = set(near)
    configs = sorted({config for row in near.values() for config in row})
    while unserved:
        mine = {c: [near[workload][c] for workload in sorted(unserved) if c in near[workload]] for c in configs}
        chosen.append(min(configs, key=lambda c: (-len(mine[c]), math.fsum(mine[c]), c)))
        unserved -= {workload for workload in unserved if chosen[-1] in near[workload]}
    for config in list(chosen):
        others = [other for other in chosen if other != config]
        if all(any(other in row for other in others) for row in near.values()):
            chosen = others
    return tuple(sorted(chosen))


def _best(row: Mapping[str, float], chosen: tuple[str, ...]) -> str:
    return min((config for config in chosen if config in row), key=lambda config: (row[config], config))


def _total_loss(near: Times, chosen: tuple[str, ...]) -> float:
    return round(math.fsum(row[_best(row, chosen)] for row in near.values()), 12)
