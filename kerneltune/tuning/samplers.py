"""The order in which points of a space are tried: an Optuna study over an enumerated list, without repeats.

Optuna's samplers propose; a proposal that is infeasible or already asked is moved to the nearest point that is still
open, so every ask is a distinct, feasible point (left alone, they repeat a quarter or more of their trials in spaces
of this kind). Parameters are presented to Optuna as the index of their value, so neighbours in the list are close.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kerneltune.errors import UserError

if TYPE_CHECKING:
    import optuna

SAMPLERS = ("default", "tpe", "gp", "cmaes", "random", "exhaustive")
STARTUP_TRIALS = 8  # before the model is trusted; warm starts count


class PointStudy:
    """Ask for points of a list one by one, tell what they took; no point is asked twice."""

    def __init__(
        self,
        points: Sequence[Mapping[str, Any]],
        sampler: str = "default",
        seed: int = 0,
        warm_starts: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """`warm_starts` that are in `points` are asked first, in their order.

        Raises:
            UserError: no sampler has that name.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.points = [dict(point) for point in points]
        names = list(self.points[0]) if self.points else []
        self._values = {name: _ordered({point[name] for point in self.points}) for name in names}
        self._coordinates = [self._encode(point) for point in self.points]
        self._index = {tuple(c.values()): i for i, c in enumerate(self._coordinates)}
        self._open = set(range(len(self.points)))
        self._distributions: dict[str, optuna.distributions.BaseDistribution] = {
            name: optuna.distributions.IntDistribution(0, len(values) - 1)
            for name, values in self._values.items()
            if len(values) > 1
        }
        self._study = optuna.create_study(sampler=make_sampler(sampler, seed, self._coordinates), direction="minimize")
        self._running: dict[int, optuna.trial.Trial] = {}
        self._warm = [i for i in (self._find(point) for point in warm_starts) if i is not None]
        self._worst = 0.0

    def ask(self) -> int | None:
        """The index of the next point, or None when every point has been asked."""
        if not self._open:
            return None
        while self._warm:
            index = self._warm.pop(0)
            if index in self._open:
                return self._start(index)
        trial = self._ask_sampler()
        proposed = tuple(trial.params.get(name, 0) for name in self._values)
        index = self._index.get(proposed, -1)
        if index in self._open:
            self._open.discard(index)
            self._running[index] = trial
            return index
        import optuna

        self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        return self._start(self._nearest_open(proposed))

    def tell(self, index: int, time_us: float | None) -> None:
        """Report a time, or None for a point that failed: it counts as twice the worst time seen."""
        import math

        if time_us is not None:
            value = math.log(time_us)
            self._worst = max(self._worst, value)
        else:
            value = self._worst + math.log(2)
        self._study.tell(self._running.pop(index), value)

    def _start(self, index: int) -> int:
        self._open.discard(index)
        self._study.enqueue_trial({name: self._coordinates[index][name] for name in self._distributions})
        self._running[index] = self._ask_sampler()
        return index

    def _ask_sampler(self) -> optuna.trial.Trial:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ExperimentalWarning of GP and multivariate TPE
            return self._study.ask(self._distributions)

    def _encode(self, point: Mapping[str, Any]) -> dict[str, int]:
        return {name: values.index(point[name]) for name, values in self._values.items()}

    def _find(self, point: Mapping[str, Any]) -> int | None:
        try:
            return self._index.get(tuple(self._encode(point).values()))
        except (KeyError, ValueError):
            return None

    def _nearest_open(self, coordinates: tuple[int, ...]) -> int:
        spans = [max(len(values) - 1, 1) for values in self._values.values()]

        def distance(index: int) -> tuple[float, int]:
            other = self._coordinates[index].values()
            return sum(abs(a - b) / span for a, b, span in zip(coordinates, other, spans, strict=True)), index

        return min(self._open, key=distance)


def make_sampler(name: str, seed: int, coordinates: Sequence[Mapping[str, int]]) -> optuna.samplers.BaseSampler:
    """An Optuna sampler by name; "default" is the best on the shipped recordings."""
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        match name:
            case "default" | "gp":
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
                return listed_sampler(coordinates, seed if name == "random" else None)
    raise UserError(f"--sampler {name}: expected one of {', '.join(SAMPLERS)}")


def listed_sampler(coordinates: Sequence[Mapping[str, int]], seed: int | None) -> optuna.samplers.BaseSampler:
    """Points in their order (`seed` None), or in one random order without replacement."""
    import random

    import optuna

    order = [dict(c) for c in coordinates]
    if seed is not None:
        random.Random(seed).shuffle(order)

    class ListedSampler(optuna.samplers.BaseSampler):
        """Hands out a list from its front."""

        def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
            return {}

        def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
            return {}

        def before_trial(self, study: Any, trial: Any) -> None:
            self._next = order.pop(0) if order else {}

        def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
            return self._next.get(name, distribution.low)

    return ListedSampler()


def _ordered(values: set[Any]) -> list[Any]:
    return sorted(values, key=lambda value: (isinstance(value, str), value))
