"""A Gaussian process over the points of an enumerated space: what each would take, by what was measured and estimated.

The logarithm of the time is modelled as a + b * log(estimate) + a Gaussian process with a Matern-5/2 kernel and one
length scale a parameter (Rasmussen, Williams: "Gaussian Processes for Machine Learning", 2006, 2.7, 4.2.1, 5.4.1).
Estimates may be wrong by a factor: a is free, and b has a normal prior around 1. Length scales and noise are a small
population that is mutated and selected by its posterior, warm from call to call; predictions average over its best.
Spaces have up to a few thousand points and a search asks some dozens, so everything is exact and takes milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

POPULATION = 12
AVERAGED = 3  # members that predictions are averaged over
GENERATIONS = 2  # a fit
REFIT_ALWAYS = 16  # measurements up to which each is followed by a fit, later every
REFIT_EVERY = 4
LENGTH_SCALE, LENGTH_SPREAD = math.log(0.7), 0.7  # prior of a log length scale; each parameter's range is 1 long
LENGTH_UNMOVED = 1.0  # added for a parameter that does not move the estimates
NOISE, NOISE_SPREAD = math.log(1e-3), 1.5  # prior of the log noise, as a share of the signal's variance
SIGNAL = 0.3  # the process strays by this much in log time, a priori; counts as four measurements
SIGNAL_WEIGHT = 4
SLOPE, SLOPE_SPREAD = 1.0, 0.3  # prior of b
FAR = 1.0  # log times beyond this much above the best are compressed: how bad the bad ones are matters little
FAR_SLOPE = 0.3
SPREAD_OUT, SPREAD_WIDTH = 0.3, 0.4  # before anything is measured: points near one under way look this much worse
RANKED = 12
SMALLEST_US = 1e-3  # stands for a time that cannot be reached
START_POINTS = 5  # without estimates: points far from each other before the model is asked
START_CANDIDATES = 24


class Surrogate:
    """Proposes points by expected improvement; points are numbers into `coordinates`."""

    def __init__(self, coordinates: Floats, estimates_us: Sequence[float] | None, seed: int) -> None:
        """`coordinates` [points, parameters], each column in 0 ... 1; `estimates_us`: of every point, or None."""
        self._x = coordinates
        self._random = np.random.default_rng(seed)
        count, width = coordinates.shape
        self._estimated = estimates_us is not None
        prior = np.log(np.asarray(estimates_us, float)) if estimates_us is not None else np.zeros(count)
        self._level = float(prior.min()) if count else 0.0
        self._prior = prior - self._level
        self._weights = _influence(coordinates, self._prior) if self._estimated else np.ones(width)
        self._usual = LENGTH_SCALE + LENGTH_UNMOVED * (1 - self._weights)
        scales = self._usual + LENGTH_SPREAD / 2 * self._random.standard_normal((POPULATION, width))
        scales[0] = self._usual
        self._population = np.column_stack([scales, np.full(POPULATION, NOISE)])
        self._best_members: list[_Fit] = []
        self.ranking: Ints = np.zeros(0, np.intp)  # what the last proposal came from, the most promising first
        self._fitted_on = self._conditioned_on = 0  # measurements that the population, the best members have seen

    def propose(
        self,
        told: Mapping[int, float],
        pending: Sequence[int],
        is_open: NDArray[np.bool_],
        rest_us: Floats | None = None,
    ) -> int:
        """The open point to measure next.

        Args:
            told: log time of each measured point.
            pending: points under way; they are taken to turn out as predicted.
            is_open: [points], which may be proposed; at least one.
            rest_us: [points], what the rest of the operation takes beside each point; None: nothing, or all the same.
        """
        candidates = np.flatnonzero(is_open)
        if not told or (not self._estimated and len(told) + len(pending) < START_POINTS):
            return self._start(candidates, np.array([*told, *pending], np.intp), rest_us)
        gain, _ = self._gain(told, pending, candidates, rest_us)
        self.ranking = candidates[np.argsort(-gain, kind="stable")[:RANKED]]
        return int(candidates[np.argmax(gain + 1e-12 * self._random.random(len(gain)))])

    def chance(
        self, told: Mapping[int, float], is_open: NDArray[np.bool_], at_least: float, rest_us: Floats | None = None
    ) -> float:
        """The chance that the most promising open point makes the whole faster by at least this much (0.01: 1 %)."""
        candidates = np.flatnonzero(is_open)
        if not len(candidates):
            return 0.0
        if not told:
            return 1.0
        _, chance = self._gain(told, (), candidates, rest_us, at_least)
        return float(chance.max())

    def predict(self, told: Mapping[int, float]) -> Floats:
        """Expected log time of every point; by the estimates alone before anything is told (without: all the same)."""
        if not told:
            return self._level + self._prior
        where, y = self._measured(told)
        self._refit(where, y)
        return self._predict(where, np.arange(len(self._x)), self._best_members[0])[0]

    def _start(self, candidates: Ints, taken: Ints, rest_us: Floats | None) -> int:
        if not self._estimated:
            candidates = self._random.choice(candidates, min(START_CANDIDATES, len(candidates)), replace=False)
        cost = self._level + self._prior[candidates]
        if rest_us is not None and self._estimated:
            cost = np.log(np.exp(cost) + rest_us[candidates])
        cost = cost + 1e-9 * self._random.random(len(candidates))
        if len(taken):
            apart = self._weights * (self._x[candidates][:, None] - self._x[taken][None]) ** 2
            near = np.sqrt(apart.sum(-1)).min(1)
            cost = cost + SPREAD_OUT * np.exp(-near / SPREAD_WIDTH) if self._estimated else -near
        return int(candidates[np.argmin(cost)])

    def _gain(
        self,
        told: Mapping[int, float],
        pending: Sequence[int],
        candidates: Ints,
        rest_us: Floats | None,
        at_least: float = 0.0,
    ) -> tuple[Floats, Floats]:
        """Expected improvement in log time, and the chance of improving the whole by `at_least`, of each candidate."""
        rest = rest_us if rest_us is not None else np.zeros(len(self._x))
        whole_us = min(math.exp(value) + rest[point] for point, value in told.items())
        goal = np.log(np.maximum(whole_us - rest[candidates], SMALLEST_US))
        enough = np.log(np.maximum(whole_us / (1 + at_least) - rest[candidates], SMALLEST_US))
        where, y = self._measured(told)
        self._refit(where, y)
        if len(pending):
            ahead = np.array(pending, np.intp)
            y = np.concatenate([y, self._predict(where, ahead, self._best_members[0])[0]])
            where = np.concatenate([where, ahead])
        members = [self._member(fit.member, where, y) for fit in self._best_members] if len(pending) else None
        gain, chance = np.zeros(len(candidates)), np.zeros(len(candidates))
        fits = members or self._best_members
        for weight, fit in zip(_weights([fit.score for fit in fits]), fits, strict=True):
            mean, deviation = self._predict(where, candidates, fit)
            u = (goal - mean) / deviation
            gain += weight * deviation * (u * _normal_cdf(u) + np.exp(-u * u / 2) / math.sqrt(2 * math.pi))
            chance += weight * _normal_cdf((enough - mean) / deviation)
        return gain, chance

    def _measured(self, told: Mapping[int, float]) -> tuple[Ints, Floats]:
        y = np.array(list(told.values()))
        far = y.min() + FAR
        return np.array(list(told), np.intp), np.where(y > far, far + FAR_SLOPE * (y - far), y)

    def _refit(self, where: Ints, y: Floats) -> None:
        """Condition the best members on all of `where`; select anew where that can still change much."""
        if self._conditioned_on == len(y):
            return
        if len(y) <= REFIT_ALWAYS or len(y) - self._fitted_on >= REFIT_EVERY:
            self._fit(where, y)
            self._fitted_on = len(y)
        else:
            self._best_members = [self._member(fit.member, where, y) for fit in self._best_members]
        self._conditioned_on = len(y)

    def _fit(self, where: Ints, y: Floats) -> None:
        fits = [self._member(row, where, y) for row in self._population]
        for _ in range(GENERATIONS):
            fits = sorted(fits, key=lambda fit: -fit.score)[: POPULATION // 2]
            parents = np.array([fit.member for fit in fits])
            step = np.full(parents.shape, 0.35)
            step[:, -1] = 0.5
            changed = self._random.random(parents.shape) < 0.5
            children = parents + step * changed * self._random.standard_normal(parents.shape)
            fits += [self._member(row, where, y) for row in children]
        fits.sort(key=lambda fit: -fit.score)
        self._population = np.array([fit.member for fit in fits])
        self._best_members = fits[:AVERAGED]

    def _member(self, member: Floats, where: Ints, y: Floats) -> _Fit:
        """Condition on measurements; the score is the log posterior of the member, up to a constant."""
        scales, noise = member[:-1], member[-1]
        count = len(y)
        covariance = _matern(self._x[where], self._x[where], scales)
        covariance[np.diag_indices(count)] += math.exp(noise) + 1e-8
        root = np.asarray(np.linalg.cholesky(covariance), np.float64)
        trend = np.column_stack([np.ones(count), self._prior[where]])
        whitened = np.linalg.solve(root, np.column_stack([trend, y]))
        basis, target = whitened[:, :2], whitened[:, 2]
        variance = SIGNAL**2
        for _ in range(2):  # the slope's prior is in units of the variance, which depends on the slope
            ratio = variance / SLOPE_SPREAD**2
            normal = basis.T @ basis + np.diag([1e-6, ratio])
            slope = np.linalg.solve(normal, basis.T @ target + np.array([0.0, ratio * SLOPE]))
            residual = target - basis @ slope
            squares = residual @ residual + SIGNAL_WEIGHT * SIGNAL**2
            variance = squares / (count + SIGNAL_WEIGHT)
        score = -0.5 * count * math.log(variance) - 0.5 * squares / variance - 2 * math.log(variance)
        score -= float(np.log(np.diag(root)).sum()) + 0.5 * ((slope[1] - SLOPE) / SLOPE_SPREAD) ** 2
        score -= 0.5 * float((((scales - self._usual) / LENGTH_SPREAD) ** 2).sum())
        score -= 0.5 * ((noise - NOISE) / NOISE_SPREAD) ** 2
        return _Fit(member, float(score), root, residual, slope, float(variance))

    def _predict(self, where: Ints, at: Ints, fit: _Fit) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the log time of the points `at`."""
        cross = np.linalg.solve(fit.root, _matern(self._x[where], self._x[at], fit.member[:-1]))
        mean = fit.slope[0] + fit.slope[1] * self._prior[at] + cross.T @ fit.residual
        deviation = np.sqrt(fit.variance * np.maximum(1 - (cross * cross).sum(0), 1e-9))
        return mean, deviation


@dataclass(frozen=True)
class _Fit:
    """One member of the population, conditioned on measurements."""

    member: Floats  # log length scales, then log noise
    score: float
    root: Floats  # Cholesky factor of the covariance
    residual: Floats  # whitened
    slope: Floats  # a, b
    variance: float


def coordinates_of(points: Sequence[Mapping[str, Any]]) -> Floats:
    """Points as rows of numbers in 0 ... 1: logarithms of sizes, one column for each value of anything else.

    A parameter that never changes has no column.
    """
    columns = []
    for name in dict.fromkeys(name for point in points for name in point):
        values: list[Any] = [point.get(name) for point in points]
        distinct = sorted(set(values), key=lambda value: (str(type(value)), value))
        if len(distinct) == 1:
            continue
        if all(isinstance(value, int | float) and not isinstance(value, bool) and value > 0 for value in distinct):
            logs = np.log([float(value) for value in values])
            columns.append((logs - logs.min()) / (logs.max() - logs.min()))
        elif len(distinct) == 2:
            columns.append(np.array([float(value == distinct[1]) for value in values]))
        else:
            columns += [np.array([float(value == each) for value in values]) for each in distinct]
    return np.column_stack(columns) if columns else np.zeros((len(points), 1))


def _influence(coordinates: Floats, log_estimates: Floats) -> Floats:
    """How much each coordinate moves the estimates, all others equal: 1 for the one that does most, 0: not at all."""
    moves = []
    for column in range(coordinates.shape[1]):
        others = np.delete(coordinates, column, axis=1)
        _, group = np.unique(others, axis=0, return_inverse=True)
        counts = np.bincount(group)
        means = np.bincount(group, log_estimates) / counts
        moves.append(math.sqrt(float(np.mean((log_estimates - means[group]) ** 2))))
    largest = max(moves, default=0.0)
    return np.array(moves) / largest if largest > 0 else np.ones(len(moves))


def _matern(a: Floats, b: Floats, log_scales: Floats) -> Floats:
    scaled_a, scaled_b = a / np.exp(log_scales), b / np.exp(log_scales)
    squared = (scaled_a**2).sum(1)[:, None] + (scaled_b**2).sum(1)[None] - 2 * scaled_a @ scaled_b.T
    r = np.sqrt(5 * np.maximum(squared, 0.0))
    result: Floats = (1 + r + r * r / 3) * np.exp(-r)
    return result


def _weights(scores: Sequence[float]) -> Floats:
    weights = np.exp(np.array(scores) - max(scores))
    result: Floats = weights / weights.sum()
    return result


_erf = np.frompyfunc(math.erf, 1, 1)


def _normal_cdf(u: Floats) -> Floats:
    result: Floats = 0.5 * (1 + np.asarray(_erf(u / math.sqrt(2)), float))
    return result


def transferred(
    points: Sequence[Mapping[str, Any]],
    estimates_us: Sequence[float],
    neighbour_points: Sequence[Mapping[str, Any]],
    neighbour_estimates_us: Sequence[float],
    neighbour_us: Mapping[int, float],
    trust: float,
) -> list[float]:
    """Estimates corrected by how far a neighbouring workload's were from what was measured there.

    Args:
        neighbour_us: time of each of `neighbour_points` that was measured, by its number; at least one.
        trust: the share of the correction that is made, 0 to 1.
    """
    together = coordinates_of([*neighbour_points, *points])
    surrogate = Surrogate(together, [*neighbour_estimates_us, *estimates_us], seed=0)
    predicted = surrogate.predict({point: math.log(time_us) for point, time_us in neighbour_us.items()})
    own, corrected = np.log(np.asarray(estimates_us, float)), predicted[len(neighbour_points) :]
    correction = corrected - corrected.mean() - (own - own.mean())
    return [float(value) for value in np.exp(own + trust * correction)]
