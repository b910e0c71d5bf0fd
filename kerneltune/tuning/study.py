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

NEVER_US = 1e12  # stands for a part that has no point under these shared parameters


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
        """The next part and its point; None when each part has no open point left, or has been asked `limit` times."""
        for _ in self.parts:
            part = next(self._turns)
            if limit is not None and self._asked[part] >= limit:
                continue
            study = self._studies[part]
            self._consider_others(part)
            point = study.ask()
            if point is not None:
                self._asked[part] += 1
                return part, point
        return None

    def likely(self) -> list[tuple[str, dict[str, Any]]]:
        """(part, parameters) of open points that may soon be asked for, if the sampler can tell."""
        found = []
        for part, study in self._studies.items():
            if isinstance(study.sampler, SurrogateSampler):
                ranking = study.sampler.surrogate.ranking
                found += [(part, study.points[point]) for point in ranking if study.state.is_open[point]]
        return found

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
        """The chance that the next trial makes the whole faster by this much (0.01: 1 %); 1 where none can tell."""
        chances = []
        for part, study in self._studies.items():
            if not isinstance(study.sampler, SurrogateSampler):
                return 1.0
            self._consider_others(part)
            chances.append(study.sampler.chance(at_least))
        return max(chances)

    def _consider_others(self, part: str) -> None:
        """Tell a part's sampler what the other parts take beside each of its points."""
        sampler = self._studies[part].sampler
        if len(self.parts) == 1 or not isinstance(sampler, SurrogateSampler):
            return
        others = [self._expected_best(each) for each in self.parts if each != part]
        rest = [sum(best.get(group, math.inf) for best in others) for group in self._groups[part]]
        sampler.rest_us = np.minimum(rest, NEVER_US)

    def _expected_best(self, part: str) -> dict[str, float]:
        """The least time of a part under each value of the shared parameters, measured or else expected."""
        study = self._studies[part]
        assert isinstance(study.sampler, SurrogateSampler)
        expected: dict[str, float] = {}
        for group, value in zip(self._groups[part], study.sampler.surrogate.predict(study.state.told), strict=True):
            expected[group] = min(expected.get(group, math.inf), math.exp(min(value, math.log(NEVER_US))))
        measured: dict[str, float] = {}
        for point, value in study.state.told.items():
            group = self._groups[part][point]
            measured[group] = min(measured.get(group, math.inf), math.exp(value))
        return expected | measured
