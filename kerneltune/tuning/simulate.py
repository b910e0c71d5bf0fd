"""How good is a sampler? Searches replayed on a recording, many seeds, compared with random order.

A search asks, is told what the recording holds, and is scored by the fraction of the optimum that it has after each
measurement, as a user would serve it: the best whole config among the parts measured so far. No config counts twice.
The score follows the autotuning methodology (Willemsen et al., "A methodology for comparing optimization algorithms for
auto-tuning", FGCS 2024): how far the best so far lies from random order's towards the optimum, averaged over the
measurements that random order without replacement needs to reach 95 % of the optimum. 1: at the optimum from the first
measurement on; 0: no better than random order.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kerneltune.errors import UserError
from kerneltune.recordings import Recording, canonical
from kerneltune.tuning import ladder
from kerneltune.tuning.backends import ReplayBackend
from kerneltune.tuning.search_loop import LOOK_AHEAD
from kerneltune.tuning.study import WorkloadStudy
from kerneltune.tuning.surrogate import SMALLEST_US, transferred
from kerneltune.workloads import format_workload

Floats = NDArray[np.float64]
AFTER = (16, 32, 64)
CUTOFF = 0.95
RANDOM_RUNS = 200  # of the baseline
NEIGHBOUR_MEASUREMENTS = 48  # of each part: what a search of the neighbour saw


@dataclass(frozen=True)
class Simulation:
    """One sampler on one recording."""

    recording: str  # "mla-decode batch=8 kv_len=8192 heads=16 bf16"
    points: int  # configs recorded, of all parts
    sampler: str
    prior: str
    seeds: int
    fractions: Floats  # [seeds, measurements]: optimum / best whole so far; 0 while there is no whole
    gpu_s: Floats  # [seeds, measurements]: recorded seconds of gate and timing until then
    sampler_s: float  # the sampler's own time for one measurement, mean
    baseline: Floats  # [measurements]: mean fraction of random order

    @property
    def after(self) -> dict[str, float]:
        """Mean fraction of the optimum after so many distinct measurements."""
        last = self.fractions.shape[1]
        return {str(n): float(self.fractions[:, min(n, last) - 1].mean()) for n in AFTER}

    @property
    def scores(self) -> list[float]:
        """The methodology's score of each seed."""
        return [_score(row, self.baseline) for row in self.fractions]

    def to_dict(self) -> dict[str, Any]:
        """As `kerneltune simulate --json` prints it."""
        scores = self.scores
        half = 1.96 * statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else 0.0
        mean = statistics.fmean(scores)
        return {
            "recording": self.recording,
            "points": self.points,
            "sampler": self.sampler,
            "prior": self.prior,
            "seeds": self.seeds,
            "after": {n: round(value, 4) for n, value in self.after.items()},
            "worst": {
                str(n): round(float(self.fractions[:, min(n, self.fractions.shape[1]) - 1].min()), 4) for n in AFTER
            },
            "score": round(mean, 4),
            "score_band": [round(mean - half, 4), round(mean + half, 4)],
            "sampler_ms": round(1e3 * self.sampler_s, 2),
        }


@dataclass(frozen=True)
class Average:
    """One sampler over several recordings."""

    count: int
    after: dict[str, float]
    worst: float  # the least mean fraction of any recording after 32 measurements
    score: float


def averages(results: Sequence[Simulation]) -> dict[str, Average]:
    """By sampler, each recording counted once."""
    found: dict[str, Average] = {}
    for sampler in dict.fromkeys(result.sampler for result in results):
        own = [result for result in results if result.sampler == sampler]
        found[sampler] = Average(
            len(own),
            {str(n): statistics.fmean(result.after[str(n)] for result in own) for n in AFTER},
            min(result.after["32"] for result in own),
            statistics.fmean(statistics.fmean(result.scores) for result in own),
        )
    return found


def simulate(
    recording: Recording,
    sampler: str,
    seeds: int,
    measurements: int = max(AFTER),
    prior: str = "none",
    others: Sequence[Recording] = (),
) -> Simulation:
    """Replay a sampler.

    Args:
        prior: "none": the search knows nothing but the space and the device's ceilings; "default": it tries the
            kernel's default config first, as real searches do; "neighbour": a default search on the nearest of `others`
            of the same exact keys was seen to its end.

    Raises:
        UserError: no config of the recording ran.
    """
    name = f"{recording.kernel} {format_workload(recording.kernel, recording.workload)}"
    if math.isinf(optimum_us(recording)):
        raise UserError(f"{name}: no whole config of this recording ran, so there is no optimum to find")
    neighbour = _nearest(recording, others) if prior == "neighbour" else None
    warm = recording.default_config if prior == "default" else None
    runs = [_Run(recording, sampler, seed, measurements, warm, neighbour) for seed in range(seeds)]
    return Simulation(
        recording=name,
        points=len(recording.trials),
        sampler=sampler,
        prior="none" if prior == "neighbour" and neighbour is None else prior,
        seeds=seeds,
        fractions=np.array([run.fractions for run in runs]),
        gpu_s=np.array([run.gpu_s for run in runs]),
        sampler_s=statistics.fmean(run.sampler_s / len(run.fractions) for run in runs),
        baseline=_random_order(recording, min(measurements, len(recording.trials))),
    )


class _Run:
    """One search on one recording, to its end."""

    def __init__(
        self,
        recording: Recording,
        sampler: str,
        seed: int,
        measurements: int,
        warm_start: Mapping[str, Any] | None = None,
        neighbour: Recording | None = None,
    ) -> None:
        self.fractions: list[float] = []  # of the optimum, after each measurement
        self.gpu_s: list[float] = []  # recorded seconds of gate and timing until then
        self.seen: dict[str, dict[int, float]] = {part: {} for part in recording.parts}  # net times by point
        self._recording = recording
        self._backend = ReplayBackend([recording])
        self._best = _Best(recording)
        optimum = optimum_us(recording)
        begin = time.perf_counter()
        study = self._study(sampler, seed, warm_start, neighbour)
        self.sampler_s = time.perf_counter() - begin
        pending: deque[tuple[str, int]] = deque()
        count = min(measurements, len(recording.trials))
        while len(self.fractions) < count:
            begin = time.perf_counter()
            asked = None
            if len(pending) < LOOK_AHEAD and len(self.fractions) + len(pending) < count:
                asked = study.ask()
            if asked is not None:
                pending.append(asked)
            self.sampler_s += time.perf_counter() - begin
            if asked is None:
                self._finish(study, *pending.popleft())
                self.fractions.append(optimum / self._best.us)

    def _study(
        self, sampler: str, seed: int, warm_start: Mapping[str, Any] | None, neighbour: Recording | None
    ) -> WorkloadStudy:
        backend, workload = self._backend, self._recording.workload
        points = {part: backend.points(workload, part) for part in backend.parts}
        estimates = {part: backend.estimates(workload, part) for part in backend.parts}
        warm: dict[str, list[Mapping[str, Any]]] = {}
        if warm_start is not None:
            warm = {part: [warm_start if len(backend.parts) == 1 else warm_start[part]] for part in backend.parts}
        if neighbour is not None:
            before = _Run(neighbour, "default", seed, NEIGHBOUR_MEASUREMENTS * len(backend.parts))
            for part in backend.parts:
                there, estimated = before._backend.points(neighbour.workload, part), estimates[part]
                estimated_there = before._backend.estimates(neighbour.workload, part)
                if not before.seen[part]:
                    continue
                if estimated and estimated_there:
                    trust = ladder.trust(workload, neighbour.workload)
                    estimates[part] = transferred(
                        points[part], estimated, there, estimated_there, before.seen[part], trust
                    )
                else:
                    winner = min(before.seen[part], key=lambda point: before.seen[part][point])
                    warm[part] = [there[winner]]
        return WorkloadStudy(points, backend.shared, sampler, seed, warm, estimates)

    def _finish(self, study: WorkloadStudy, part: str, point: int) -> None:
        params = study.params(part, point)
        row = self._backend.measure(self._recording.workload, part, params, None)
        net_us = max(row["time_us"] - self._recording.launch_us, SMALLEST_US) if row["outcome"] == "ok" else None
        if net_us is not None:
            self._best.add(part, params, net_us)
            self.seen[part][point] = net_us
        self.gpu_s.append((self.gpu_s[-1] if self.gpu_s else 0.0) + row["gate_s"] + row["timing_s"])
        begin = time.perf_counter()
        study.tell(part, point, net_us)
        self.sampler_s += time.perf_counter() - begin


def _random_order(recording: Recording, measurements: int) -> Floats:
    """Mean fraction of the optimum after each measurement: parts in turns, in random order without replacement."""
    random = np.random.default_rng(0)
    optimum = optimum_us(recording)
    by_part = [[trial for trial in recording.trials if trial.part == part] for part in recording.parts]
    total = np.zeros(measurements)
    for _ in range(RANDOM_RUNS):
        best = _Best(recording)
        orders = [random.permutation(len(trials)) for trials in by_part]
        turns = [
            trials[order[turn]]
            for turn in range(max(map(len, by_part)))
            for trials, order in zip(by_part, orders, strict=True)
            if turn < len(trials)
        ]
        for number, trial in enumerate(turns[:measurements]):
            if trial.outcome == "ok" and trial.time_us is not None:
                best.add(trial.part, trial.config, max(trial.time_us - recording.launch_us, SMALLEST_US))
            total[number] += optimum / best.us
    return total / RANDOM_RUNS


class _Best:
    """The best whole config among the parts measured so far, as it would be served."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._times: dict[str, dict[str, float]] = {}
        self.us = math.inf

    def add(self, part: str, params: Mapping[str, Any], net_us: float) -> None:
        values = [params[name] for name in self._recording.shared]
        rest_us = self._recording.rest(values) if len(self._recording.parts) > 1 else 0.0
        if rest_us is None:
            return  # no whole config ran with these
        times = self._times.setdefault(canonical(values), {})
        times[part] = min(times.get(part, math.inf), net_us)
        if len(times) == len(self._recording.parts):
            self.us = min(self.us, sum(times.values()) + rest_us)


def optimum_us(recording: Recording) -> float:
    """What the fastest whole config of a recording takes, net of the launch; inf if none ran."""
    best = _Best(recording)
    for trial in recording.trials:
        if trial.outcome == "ok" and trial.time_us is not None:
            best.add(trial.part, trial.config, max(trial.time_us - recording.launch_us, SMALLEST_US))
    return best.us


def _nearest(recording: Recording, others: Sequence[Recording]) -> Recording | None:
    """The nearest recording of another workload of the same exact keys."""
    from kerneltune.kernels.table_format import KEYS

    exact = KEYS[recording.kernel].exact if recording.kernel in KEYS else ()

    def same(other: Recording) -> bool:
        if other.kernel != recording.kernel or canonical(other.workload) == canonical(recording.workload):
            return False
        return all(other.workload[key] == recording.workload[key] for key in exact)

    found = [other for other in others if same(other)]
    return min(found, key=lambda other: ladder.distance(recording.workload, other.workload), default=None)


def _score(fractions: Floats, baseline: Floats) -> float:
    """Mean share of the way from random order to the optimum, over the measurements that random order needs."""
    needed = next((n for n, value in enumerate(baseline, 1) if value >= CUTOFF), len(baseline))
    own, base = fractions[:needed], np.minimum(baseline[:needed], 1 - 1e-9)
    return float(np.mean((own - base) / (1 - base)))
