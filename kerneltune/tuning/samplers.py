"""The order in which points of a space are tried: an Optuna study over an enumerated list, without repeats.

Optuna's samplers propose; a proposal that is infeasible or already asked is moved to the nearest point that is still
open, so every ask is a distinct, feasible point (left alone, they repeat a quarter or more of their trials in spaces
of this kind). Parameters are presented to Optuna as the index of their value, so neighbours in the list are close.
Samplers of our own know the list and propose open points only.
"""

from __future__ import annotations

import abc
import math
import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, IntDistribution

from kerneltune.errors import UserError
from kerneltune.tuning.surrogate import Surrogate, coordinates_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from optuna.samplers import BaseSampler

SAMPLERS = ("default", "tpe", "gp", "cmaes", "random", "exhaustive", "descent")
STARTUP_TRIALS = 8  # before a model of Optuna's is trusted; warm starts count


@dataclass
class State:
    """What has been asked of a list of points, and what it took."""

    points: list[dict[str, Any]]
    coordinates: list[tuple[int, ...]]  # of each point: the index of each parameter's value
    is_open: NDArray[np.bool_]  # not asked yet
    running: dict[int, optuna.trial.Trial] = field(default_factory=dict)
    told: dict[int, float] = field(default_factory=dict)  # log time; a failure counts as twice the worst time seen


class PointStudy:
    """Ask for points of a list one by one, tell what they took; no point is asked twice."""

    def __init__(
        self,
        points: Sequence[Mapping[str, Any]],
        sampler: str = "default",
        seed: int = 0,
        warm_starts: Sequence[Mapping[str, Any]] = (),
        estimates_us: Sequence[float] | None = None,
    ) -> None:
        """`warm_starts` that are in `points` are asked first, in their order; `estimates_us`: one for each point.

        Raises:
            UserError: no sampler has that name.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.points = [dict(point) for point in points]
        names = dict.fromkeys(name for point in self.points for name in point)
        self._values = {name: _ordered({point.get(name) for point in self.points}) for name in names}
        coordinates = [self._encode(point) for point in self.points]
        self._index = {each: i for i, each in enumerate(coordinates)}
        self.state = State(self.points, coordinates, np.ones(len(self.points), bool))
        distributions: dict[str, BaseDistribution] = {
            name: IntDistribution(0, len(values) - 1) for name, values in self._values.items() if len(values) > 1
        }
        self._distributions = distributions
        self.sampler = make_sampler(sampler, seed, self.state, list(self._values), estimates_us)
        self._study = optuna.create_study(sampler=self.sampler, direction="minimize")
        self._warm = [i for i in (self._find(point) for point in warm_starts) if i is not None]

    def ask(self) -> int | None:
        """The index of the next point, or None when every point has been asked."""
        if not self.state.is_open.any():
            return None
        while self._warm:
            index = self._warm.pop(0)
            if self.state.is_open[index]:
                return self._start(index)
        trial = self._ask_sampler()
        proposed = tuple(trial.params.get(name, 0) for name in self._values)
        index = self._index.get(proposed, -1)
        if index >= 0 and self.state.is_open[index]:
            self.state.is_open[index] = False
            self.state.running[index] = trial
            return index
        self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        return self._start(self._nearest_open(proposed))

    def tell(self, index: int, time_us: float | None) -> None:
        """Report a time, or None for a point that failed."""
        told = self.state.told
        value = math.log(time_us) if time_us is not None else max(told.values(), default=0.0) + math.log(2)
        told[index] = value
        self._study.tell(self.state.running.pop(index), value)

    def _start(self, index: int) -> int:
        self.state.is_open[index] = False
        fixed = dict(zip(self._values, self.state.coordinates[index], strict=True))
        self._study.enqueue_trial({name: fixed[name] for name in self._distributions})
        self.state.running[index] = self._ask_sampler()
        return index

    def _ask_sampler(self) -> optuna.trial.Trial:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ExperimentalWarning of GP and multivariate TPE
            return self._study.ask(self._distributions)

    def _encode(self, point: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(values.index(point.get(name)) for name, values in self._values.items())

    def _find(self, point: Mapping[str, Any]) -> int | None:
        try:
            return self._index.get(self._encode(point))
        except (KeyError, ValueError):
            return None

    def _nearest_open(self, coordinates: tuple[int, ...]) -> int:
        spans = [max(len(values) - 1, 1) for values in self._values.values()]

        def distance(index: int) -> tuple[float, int]:
            other = self.state.coordinates[index]
            return sum(abs(a - b) / span for a, b, span in zip(coordinates, other, spans, strict=True)), index

        return min((int(i) for i in np.flatnonzero(self.state.is_open)), key=distance)


def make_sampler(
    name: str, seed: int, state: State, names: Sequence[str], estimates_us: Sequence[float] | None = None
) -> BaseSampler:
    """An Optuna sampler by name; "default" is the best on the shipped recordings (docs/search.md).

    Raises:
        UserError: no sampler has that name.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        match name:
            case "default":
                return SurrogateSampler(state, names, Surrogate(coordinates_of(state.points), estimates_us, seed))
            case "gp":
                import torch

                torch.set_num_threads(1)  # small matrices: threads cost time, and compiles need the cores
                return optuna.samplers.GPSampler(
                    seed=seed, n_startup_trials=STARTUP_TRIALS, deterministic_objective=True
                )
            case "tpe":
                return optuna.samplers.TPESampler(
                    seed=seed, n_startup_trials=STARTUP_TRIALS, multivariate=True, constant_liar=True
                )
            case "cmaes":
                return optuna.samplers.CmaEsSampler(seed=seed, n_startup_trials=STARTUP_TRIALS)
            case "random" | "exhaustive":
                return ListedSampler(state, names, seed if name == "random" else None)
            case "descent":
                return DescentSampler(state, names, seed)
    raise UserError(f"--sampler {name}: expected one of {', '.join(SAMPLERS)}")


class PointSampler(optuna.samplers.BaseSampler):
    """A sampler that chooses among the open points of a list."""

    def __init__(self, state: State, names: Sequence[str]) -> None:
        self._state = state
        self._names = list(names)
        self._chosen: dict[str, int] = {}
        self._index = {each: i for i, each in enumerate(state.coordinates)}

    def open_neighbours(self, index: int) -> list[int]:
        """Open points that differ from a point in one parameter by one step."""
        found = []
        for column, value in enumerate(self._state.coordinates[index]):
            for step in (-1, 1):
                moved = list(self._state.coordinates[index])
                moved[column] = value + step
                other = self._index.get(tuple(moved))
                if other is not None and self._state.is_open[other]:
                    found.append(other)
        return found

    @abc.abstractmethod
    def choose(self) -> int:
        """The point to try next; there is an open one."""

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
        return {}

    def before_trial(self, study: Any, trial: Any) -> None:
        if "fixed_params" not in trial.system_attrs:  # an enqueued trial is chosen already
            self._chosen = dict(zip(self._names, self._state.coordinates[self.choose()], strict=True))

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        return self._chosen[name]


class ListedSampler(PointSampler):
    """Points in their order (`seed` None), or in one random order without replacement."""

    def __init__(self, state: State, names: Sequence[str], seed: int | None) -> None:
        super().__init__(state, names)
        self._order = list(range(len(state.points)))
        if seed is not None:
            random.Random(seed).shuffle(self._order)

    def choose(self) -> int:
        return next(index for index in self._order if self._state.is_open[index])


class DescentSampler(PointSampler):
    """Coordinate descent: the neighbours of the best point, one parameter one step up or down; then a new start.

    A start is a random open point. Asked ahead of results, it goes on with the neighbours of the best known so far.
    """

    def __init__(self, state: State, names: Sequence[str], seed: int) -> None:
        super().__init__(state, names)
        self._random = random.Random(seed)
        self._run: set[int] | None = None  # points asked since the last start; None: warm starts, if any, are the start

    def choose(self) -> int:
        if self._run is None:
            self._run = {*self._state.told, *self._state.running}
        told = {index: self._state.told[index] for index in self._run if index in self._state.told}
        best = min(told, key=lambda index: told[index]) if told else None
        neighbours = self.open_neighbours(best) if best is not None else []
        if best is None and self._run:  # the start is still under way
            neighbours = self.open_neighbours(next(iter(self._run)))
        if neighbours:
            chosen = self._random.choice(neighbours)
        else:
            self._run.clear()
            chosen = self._random.choice([int(i) for i in np.flatnonzero(self._state.is_open)])
        self._run.add(chosen)
        return chosen


class SurrogateSampler(PointSampler):
    """Our default: expected improvement by `surrogate.Surrogate`, started from the estimates."""

    def __init__(self, state: State, names: Sequence[str], surrogate: Surrogate) -> None:
        super().__init__(state, names)
        self.surrogate = surrogate
        self.rest_us: NDArray[np.float64] | None = None  # [points], what the other parts take beside each

    def choose(self) -> int:
        state = self._state
        return self.surrogate.propose(state.told, list(state.running), state.is_open, self.rest_us)

    def chance(self, at_least: float) -> float:
        """The chance that one more trial makes the whole faster by at least this much (0.01: 1 %)."""
        return self.surrogate.chance(self._state.told, self._state.is_open, at_least, self.rest_us)


def _ordered(values: set[Any]) -> list[Any]:
    return sorted(values, key=lambda value: (value is not None, isinstance(value, str), 0 if value is None else value))
