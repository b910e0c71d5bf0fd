"""One workload's search: a study for each part of the operation, asked in turns, judged by the whole.

Parts are timed on their own, but some parameters must be equal in all of them (the fused MoE has one BLOCK_M for both
GEMMs). A part's point is therefore judged by what it takes together with the best that the other parts have, or are
expected to have, under the same shared parameters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kerneltune.recordings import canonical
from kerneltune.tuning.samplers import PointStudy, SurrogateSampler

SMALLEST_US = 1e-3  # a goal that cannot be reached any more


class WorkloadStudy:
    """Ask (part, point) one by one, tell what they took; no point is asked twice."""

    def __init__(
        self,
        points: Mapping[str, Sequence[Mapping[str, Any]]],
        shared: Sequence[str],
        sampler: str = "default",
        seed: int = 0,
        warm_starts: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
        estimates_us: Mapping[str, Sequence[float] | None] | None = None,
    ) -> None:
        """Args:
            points, warm_starts, estimates_us: by part; `estimates_us` one for each point, or None.
            shared: parameters that must be equal in all parts of a config.
        """
        self.parts = list(points)
        self._studies = {
            part: PointStudy(
                points[part],
                sampler,
                seed,
                (warm_starts or {}).get(part, ()),
                (estimates_us or {}).get(part),
            )
            for part in self.parts
        }
        self._groups = {part: [canonical([point[n] for n in shared]) for point in points[part]] for part in self.parts}
        self._turns = itertools.cycle(self.parts)
        self._asked = dict.fromkeys(self.parts, 0)

    def ask(self, limit: int | None = None) -> tuple[str, int] | None:
        """The next part and the number of its point; None when no part has an open point, or fewer than `limit` asked."""
        for _ in self.parts:
            part = next(self._turns)
            if limit is not None and self._asked[part] >= limit:
                continue
            study = self._studies[part]
            self._set_goals(part)
            point = study.ask()
            if point is not None:
                self._asked[part] += 1
                return part, point
        return None

    def tell(self, part: str, point: int, net_us: float | None) -> None:
        """Report a time net of the launch, or None for a point that failed."""
        self._studies[part].tell(point, net_us)

    def params(self, part: str, point: int) -> dict[str, Any]:
        """A point's parameters."""
        return self._studies[part].points[point]

    def asked(self, part: str) -> int:
        """How many points of a part have been asked."""
        return self._asked[part]

    def chance(self, at_least: float) -> float:
        """The chance that the next trial makes the whole faster by this much (0.01: 1 %); 1 if the sampler can't tell."""
        chances = []
        for part, study in self._studies.items():
            if not isinstance(study.sampler, SurrogateSampler):
                return 1.0
            share = self._set_goals(part)
            chances.append(study.sampler.chance(at_least / share))
        return max(chances)

    def _set_goals(self, part: str) -> float:
        """Set what each point of a part has to beat; returns the part's share of the best whole."""
        sampler = self._studies[part].sampler
        if len(self.parts) == 1 or not isinstance(sampler, SurrogateSampler) or not self._studies[part].state.told:
            return 1.0
        others = [self._expected_best(each) for each in self.parts if each != part]
        rest = {group: sum(best[group] for best in others) for group in set.intersection(*map(set, others))}
        own = self._measured_best(part)
        wholes = {group: rest[group] + own[group] for group in own if group in rest}
        if not wholes:
            sampler.goals = None
            return 1.0
        best_group = min(wholes, key=lambda group: wholes[group])
        goals = [max(wholes[best_group] - rest.get(group, math.inf), SMALLEST_US) for group in self._groups[part]]
        sampler.goals = np.log(goals)
        return own[best_group] / wholes[best_group]

    def _measured_best(self, part: str) -> dict[str, float]:
        """The least measured time of a part under each value of the shared parameters."""
        best: dict[str, float] = {}
        for point, value in self._studies[part].state.told.items():
            group = self._groups[part][point]
            best[group] = min(best.get(group, math.inf), math.exp(value))
        return best

    def _expected_best(self, part: str) -> dict[str, float]:
        """As `_measured_best`, and what is expected of the values that were not measured."""
        study = self._studies[part]
        assert isinstance(study.sampler, SurrogateSampler)
        expected: dict[str, float] = {}
        for group, value in zip(self._groups[part], study.sampler.surrogate.predict(study.state.told), strict=True):
            expected[group] = min(expected.get(group, math.inf), math.exp(value))
        return expected | self._measured_best(part)
