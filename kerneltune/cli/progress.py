"""Live progress of a search on stderr: a bar on a terminal, a plain line for each workload elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kerneltune.workloads import format_workload

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from kerneltune.records import Trial
    from kerneltune.tuning.finalists import Decision


class ConsoleProgress:
    """Says which workload is under way, how many trials, the best so far, its roofline share and the rest."""

    def __init__(self, kernel: str, budget_s: float | None = None) -> None:
        self._kernel = kernel
        self._budget_s = math.inf if budget_s is None else budget_s
        self._start = time.monotonic()
        self._last: tuple[int, float, float | None] = (0, 0.0, None)
        self._label = self._under_way = ""
        self._labels: dict[str, str] = {}  # by workload as formatted
        self._parts: dict[str, None] = {}  # those tried, in order
        self._roofline: float | None = None
        self._bar: Bar | None = None

    def begin(self, workloads: Sequence[Mapping[str, Any]]) -> None:
        """Announce the whole."""
        self._count = len(workloads)
        self._done = self._total = 0
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[best]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=None, best="")

    def workload(self, position: int, workload: Mapping[str, Any], trials: int) -> None:
        """A workload begins, of at most so many trials."""
        self._finish_line()
        self._total = self._done + trials * (self._count - position)
        text = format_workload(self._kernel, workload)
        self._labels[text] = f"[{position + 1}/{self._count}] {text}"
        self._turn_to(text)
        if self._bar is not None:
            self._bar.update(self._task, total=self._total)

    def trial(self, trial: Trial, best_us: float | None, roofline: float | None, remembered: bool) -> None:
        """A trial has ended, maybe of a workload that was cut short by its share of the budget and now goes on."""
        text = format_workload(self._kernel, trial.workload)
        if text != self._under_way:
            self._finish_line()
            self._turn_to(text, ", going on")
        self._done += 1
        self._parts.setdefault(trial.part)
        self._last = (self._last[0] + 1, self._last[1], best_us)
        self._roofline = roofline
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, best=self._best(best_us, roofline))

    def decided(self, workload: Mapping[str, Any], decision: Decision | None) -> None:
        """A workload has its winner."""
        self._finish_line()
        if decision is None:
            text = "no config ran"
        elif decision.kept_default:
            text = f"{decision.winner.time_us:.1f} us, no gain over the default"
        else:
            gain = f", {decision.gain:.2f}x the default" if decision.gain else ""
            text = f"{decision.winner.time_us:.1f} us, {decision.winner.roofline or 0:.0%} of roof{gain}"
        self._say(f"{format_workload(self._kernel, workload)}: {text}")

    def note(self, text: str) -> None:
        """Something to know that is no result."""
        self._finish_line()
        self._say(text)

    def close(self) -> None:
        """Give the terminal back."""
        self._finish_line()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _turn_to(self, text: str, how: str = "") -> None:
        self._under_way, self._label = text, self._labels.get(text, text) + how
        if self._bar is not None:
            self._bar.update(self._task, description=self._label)

    def _best(self, best_us: float | None, roofline: float | None) -> str:
        if best_us is None:
            return "nothing ran yet"
        # Of several parts it is the sum, without what the rest of the operation takes.
        parts = f" {' + '.join(self._parts)}" if len(self._parts) > 1 else ""
        return f"best{parts} {best_us:.1f} us" + (f" ({roofline:.0%} of roof)" if roofline is not None else "")

    def _finish_line(self) -> None:
        count, started, best = self._last
        if count and self._bar is None:
            elapsed = time.monotonic() - self._start
            left = min(elapsed / self._done * (self._total - self._done), max(self._budget_s - elapsed, 0.0))
            self._say(
                f"{self._label}: {count} trial{'s' if count > 1 else ''} in {time.monotonic() - started:.1f} s,"
                f" {self._best(best, self._roofline)}, at most about {left:.0f} s left"
            )
        self._last = (0, time.monotonic(), None)

    def _say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)
