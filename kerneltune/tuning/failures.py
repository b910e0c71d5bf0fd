"""Remembers what failed, so that it is neither compiled nor run again for the next workload of the same kernel sizes.

A config that the compiler rejects or hangs on, or that crashes or hangs the GPU, does so for every workload with the
same exact keys: only sizes that need no other compile differ. `wrong` is not remembered: another size may well be right
(and what is right on one may be wrong on the next). Nor is what was not the config's own doing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kerneltune.recordings import canonical
from kerneltune.records import Trial

LASTING = ("infeasible", "compile_error", "crashed", "timed_out")
# Reasons that tell of the size (a smaller workload may run) or of the machine, in the words of measure/worker.py.
PASSING = ("out of GPU memory", "preparing the workload", "SIGKILL", "SIGTERM", "cannot start")
ONE_PART_STAGES = ("search", "polish", "record")  # in others several configs shared a fate, or a whole one is meant


class Failures:
    """The lasting failures of one search, by part, config and those workload keys that need another compile."""

    def __init__(self, varying: Collection[str]) -> None:
        """`varying`: the workload keys that need no other compile: scaled sizes and input classes."""
        self._varying = tuple(varying)
        self._first: dict[str, Trial] = {}

    def add(self, trial: Trial) -> None:
        """Note a trial, if it is a lasting failure; the first of a kind is kept."""
        told = any(text in trial.reason for text in PASSING)
        if trial.outcome in LASTING and trial.stage in ONE_PART_STAGES and not told:
            self._first.setdefault(self._key(trial.workload, trial.part, trial.config), trial)

    def recall(self, workload: Mapping[str, Any], part: str, config: Mapping[str, Any]) -> dict[str, Any] | None:
        """The figures of a trial that need not be made, or None. The reason says on which workload it failed."""
        if not self._varying:
            return None
        failed = self._first.get(self._key(workload, part, config))
        if failed is None:
            return None
        return {"outcome": failed.outcome, "reason": f"{failed.reason} (as on {self._where(failed)})"}

    def _where(self, trial: Trial) -> str:
        return " ".join(f"{name}={trial.workload[name]}" for name in self._varying if name in trial.workload)

    def _key(self, workload: Mapping[str, Any], part: str, config: Mapping[str, Any]) -> str:
        return canonical([{k: v for k, v in workload.items() if k not in self._varying}, part, config])
