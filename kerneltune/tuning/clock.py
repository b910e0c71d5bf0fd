"""The seconds that a search has, and how they are shared out."""

from __future__ import annotations

import time

from kerneltune.records import Trial

FINALS_SHARE = 0.15  # of a workload's time, kept for its finals


class Clock:
    """Seconds spent: the wall's when measuring, the recorded ones in a replay, so that a replay repeats itself."""

    def __init__(self, *, live: bool, budget_s: float | None) -> None:
        self._start = time.monotonic() if live else None
        self._recorded = 0.0
        self._budget = budget_s

    def now(self) -> float:
        return time.monotonic() - self._start if self._start is not None else self._recorded

    def spend(self, trial: Trial) -> None:
        self._recorded += trial.compile_s + trial.gate_s + trial.timing_s

    def deadline(self, workloads_left: int) -> float | None:
        """When the next of so many workloads must stop asking: an equal share, less what its finals take."""
        if self._budget is None:
            return None
        left_s = max(self._budget - self.now(), 0.0)
        return self.now() + left_s / workloads_left * (1 - FINALS_SHARE)
