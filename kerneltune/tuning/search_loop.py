"""The trials of one workload: asked, compiled ahead, measured, told, until they are unlikely to pay.

What an ask may see is fixed by the trial's index (LOOK_AHEAD), never by which result came first, so the same records
lead to the same asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from kerneltune.records import Trial
from kerneltune.tuning import finalists, ladder
from kerneltune.tuning.backends import Backend
from kerneltune.tuning.clock import Clock
from kerneltune.tuning.log import Log
from kerneltune.tuning.measuring import recall_or_measure
from kerneltune.tuning.options import Options
from kerneltune.tuning.progress import Progress
from kerneltune.tuning.study import WorkloadStudy
from kerneltune.tuning.surrogate import SMALLEST_US, transferred

LOOK_AHEAD = 8  # compiles under way while one trial is measured; constant, so that a resumed search asks the same
STOP_ABOVE = 1.25  # a config this much slower than the best so far is dropped after a few samples
MOST_TRIALS = 64  # of a part, where the user names no number
LEAST_TRIALS = 24  # of a part, before a search may end by itself
CHECK_EVERY = 4  # trials
WORTH = 0.01  # a gain below this does not pay
UNLIKELY = 0.05  # chance of such a gain, CHECKS times in a row, that ends a search
CHECKS = 4


class SearchLoop:
    """One workload's search; `run` may be called again, to go on where a deadline stopped it."""

    def __init__(
        self,
        backend: Backend,
        workload: dict[str, Any],
        warm_starts: Sequence[Mapping[str, Any]],
        neighbour: SearchLoop | None,
        log: Log,
        options: Options,
        progress: Progress,
    ) -> None:
        """`warm_starts`: whole configs, tried first; `neighbour`: a finished search, whose times correct estimates."""
        self.workload = workload
        self.trials: list[Trial] = []
        self.ended = ""  # why no more trials are made; "": a deadline came first
        self._backend, self._log, self._options, self._progress = backend, log, options, progress
        self._limit = options.trials or MOST_TRIALS
        self._points = {part: backend.points(workload, part) for part in backend.parts}
        with backend.seconds.of("sampler"):
            self.estimates_us = self._estimates(neighbour) if options.sampler == "default" else {}
            several = len(backend.parts) > 1
            self._study = WorkloadStudy(
                self._points,
                backend.shared,
                options.sampler,
                options.seed,
                {part: [config[part] if several else config for config in warm_starts] for part in backend.parts},
                self.estimates_us,
            )
        self._work = {part: backend.work(workload, part) for part in backend.parts}
        self._measured: dict[str, dict[int, Trial]] = {part: {} for part in backend.parts}
        self._best: dict[str, Trial] = {}
        self._pending: deque[tuple[str, int, int]] = deque()  # part, point, index in its part
        self._checks_failed = 0
        self.chance = 1.0  # that another trial gains WORTH, when last asked

    @property
    def expected_trials(self) -> int:
        """How many trials there will be at most."""
        return sum(min(len(points), self._limit) for points in self._points.values())

    def first_points(self, count: int) -> list[tuple[str, dict[str, Any]]]:
        """(part, parameters) that this search is likely to begin with: the best by the estimates, if there are any."""
        found = []
        for part, points in self._points.items():
            if estimates := self.estimates_us.get(part):
                ranked = sorted(range(len(points)), key=estimates.__getitem__)
                found += [(part, points[point]) for point in ranked[: count // len(self._points)]]
        return found

    def run(self, clock: Clock, deadline: float | None) -> None:
        """Make trials until they end by themselves, or until `clock` passes `deadline`."""
        while not self.ended:
            if len(self._pending) == LOOK_AHEAD:
                self._finish_oldest(clock)
            if self.ended or (deadline is not None and clock.now() > deadline and self.trials):
                break
            with self._backend.seconds.of("sampler"):
                asked = self._study.ask(self._limit)
            if asked is None:
                self._end_exhausted()
                break
            part, point = asked
            params = self._study.params(part, point)
            if not self._log.need_not_measure(self.workload, part, params, "search"):
                self._backend.prepare(self.workload, part, params)
            self._pending.append((part, point, self._study.asked(part) - 1))
            self._backend.prefetch(self.workload, self._unknown(self._study.likely()))
        while self._pending:
            self._finish_oldest(clock)
        if self.ended:
            self._say_ended()

    def told_us(self, part: str) -> dict[int, float]:
        """Net time of each point of a part that ran, by its number."""
        return {
            point: max((trial.time_us or 0.0) - trial.launch_us, SMALLEST_US)
            for point, trial in self._measured[part].items()
            if trial.outcome == "ok"
        }

    def _estimates(self, neighbour: SearchLoop | None) -> dict[str, list[float] | None]:
        estimates = {part: self._backend.estimates(self.workload, part) for part in self._backend.parts}
        for part, own in estimates.items():
            there = neighbour.estimates_us.get(part) if neighbour is not None else None
            if neighbour is None or own is None or there is None or not neighbour.told_us(part):
                continue
            estimates[part] = transferred(
                self._points[part],
                own,
                neighbour._points[part],
                there,
                neighbour.told_us(part),
                ladder.trust(self.workload, neighbour.workload),
            )
        return estimates

    def _finish_oldest(self, clock: Clock) -> None:
        part, point, index = self._pending.popleft()
        params = self._study.params(part, point)
        best = self._best.get(part)
        stop = best.time_us * STOP_ABOVE if best is not None and best.time_us is not None else None
        trial, remembered = recall_or_measure(
            self._backend, self._log, self._work[part], self.workload, part, params, "search", index, stop
        )
        clock.spend(trial)
        self.trials.append(trial)
        self._measured[part][point] = trial
        good = trial.outcome == "ok" and trial.time_us is not None
        with self._backend.seconds.of("sampler"):
            self._study.tell(part, point, self.told_us(part)[point] if good else None)
        if good and (best is None or (trial.time_us or 0.0) < (best.time_us or 0.0)):
            self._best[part] = trial
        self._tell_progress(trial, remembered)
        if self._options.trials is None and not self.ended:
            self._check_worth()

    def _check_worth(self) -> None:
        """End the search once more trials are unlikely to pay."""
        count = len(self.trials)
        if count % CHECK_EVERY or count < LEAST_TRIALS * len(self._points):
            return
        with self._backend.seconds.of("sampler"):
            self.chance = self._study.chance(WORTH)
        self._checks_failed = self._checks_failed + 1 if self.chance < UNLIKELY else 0
        if self._checks_failed == 1:
            self._prepare_finals()
        if self._checks_failed == CHECKS:
            self.ended = f"less than {UNLIKELY:.0%} chance that another gains {WORTH:.0%}"

    def _prepare_finals(self) -> None:
        """The end is near: what its finalists need compiles while the last trials are measured."""
        chosen = finalists.choose(self.trials, self._backend.parts, self._backend.shared)
        missing = [config for config in chosen if self._log.known(self.workload, "", config, "final") is None]
        self._backend.prepare_finals(self.workload, missing)

    def _say_ended(self) -> None:
        if self._options.trials is None:
            self._progress.note(f"stopped after {len(self.trials)} trials: {self.ended}")
            return
        for part, points in self._points.items():
            if len(points) < self._limit:
                self._progress.note(
                    f"{part}: all {len(points)} feasible configs are tried, fewer than the {self._limit} asked"
                )

    def _unknown(self, likely: Sequence[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, Mapping[str, Any]]]:
        """Without what the records answer."""
        return [each for each in likely if not self._log.need_not_measure(self.workload, *each, "search")]

    def _end_exhausted(self) -> None:
        """No part has an open point, or each has had its number of trials."""
        self.chance = 0.0
        short = {part: len(points) for part, points in self._points.items() if len(points) < self._limit}
        self.ended = f"{self._limit} configs of each part are tried"
        if len(short) == len(self._points):
            self.ended = "every feasible config is tried"

    def _tell_progress(self, trial: Trial, remembered: bool) -> None:
        """The best so far: of the whole, or the sum of its parts."""
        best = list(self._best.values())
        if len(best) < len(self._points):
            self._progress.trial(trial, None, None, remembered)
        elif len(best) == 1:
            self._progress.trial(trial, best[0].time_us, best[0].roofline, remembered)
        else:
            launch_us = best[0].launch_us
            total = launch_us + sum((each.time_us or 0.0) - each.launch_us for each in best)
            self._progress.trial(trial, total, None, remembered)
