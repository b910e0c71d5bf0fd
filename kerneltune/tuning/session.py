"""One search: workloads in order, their trials, finals and table entries, every measurement on the disk at once.

Resuming replays the ask/tell loop from trial 0 and takes what the records already hold instead of measuring it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kerneltune.records import Summary, Trial
from kerneltune.tuning import finalists, ladder, matrix
from kerneltune.tuning.backends import Backend
from kerneltune.tuning.clock import Clock
from kerneltune.tuning.entries import served_entry, winner_entry
from kerneltune.tuning.imports import imported_configs
from kerneltune.tuning.log import Log, now, provenance
from kerneltune.tuning.measuring import Watch, time_finals
from kerneltune.tuning.options import Options
from kerneltune.tuning.progress import Progress
from kerneltune.tuning.search_loop import SearchLoop
from kerneltune.tuning.seconds import seconds_text
from kerneltune.workloads import format_workload

PREFETCH = 14  # configs of the next workload that are compiled while this one's finalists are timed


@dataclass(frozen=True)
class Result:
    """What a search found."""

    kernel: str
    out: Path
    table: Path | None  # the last written; None: no workload ended with a config
    tables: tuple[Path, ...]  # one for each dtype
    decisions: list[tuple[dict[str, Any], finalists.Decision | None]]
    measured: int  # trials and finalists measured (or replayed) by this run
    remembered: int  # taken from the records
    live: bool  # measured on a GPU; otherwise replayed
    served: list[matrix.Served]  # what the table states for each workload that has a config

    @property
    def configs(self) -> int:
        """Distinct configs of the table, each set of exact keys counted on its own: each is a compile at serving."""
        return matrix.count_configs(self.served, self.kernel)

    @property
    def worst_loss(self) -> float:
        """The largest loss of any workload against its own best config."""
        return max((served.own_loss for served in self.served), default=0.0)


def run(backend: Backend, workloads: Sequence[Mapping[str, Any]], options: Options, progress: Progress) -> Result:
    """Search every workload; the table is written anew after each, so an interruption loses none that is done.

    With a budget, each workload has an equal share of what is left; those that its end cut short go on with what the
    others did not need, the most promising first. At the end the loss matrix is measured and the table rewritten with
    the few configs that serve all.

    Raises:
        records.RecordsInUse: another search writes to `options.out`.
        OSError: the records cannot be written; what is there stays.
    """
    log = Log(backend, options)
    try:
        return _Run(backend, ladder.in_order(workloads), log, options, progress).run()
    finally:
        log.close()


@dataclass
class _Tuned:
    """A workload and how far it is."""

    loop: SearchLoop
    default: dict[str, Any]
    watch: Watch
    decision: finalists.Decision | None = None

    @property
    def workload(self) -> dict[str, Any]:
        return self.loop.workload


class _Run:
    """The steps of one search and what they hand on."""

    def __init__(
        self, backend: Backend, workloads: list[dict[str, Any]], log: Log, options: Options, progress: Progress
    ) -> None:
        self._backend, self._workloads, self._log = backend, workloads, log
        self._options, self._progress = options, progress
        kept = matrix.BUDGET_SHARE if len(workloads) > 1 else 0.0
        budget_s = None if options.budget_s is None else options.budget_s * (1 - kept)
        self._clock = Clock(live=backend.source == "live", budget_s=budget_s)
        self._tuned: list[_Tuned] = []
        self._table: Path | None = None
        self._tables: dict[Path, None] = {}  # in the order in which they were begun

    def run(self) -> Result:
        self._progress.begin(self._workloads)
        for position in range(len(self._workloads)):
            tuned = self._begin(position)
            self._tuned.append(tuned)
            tuned.loop.run(self._clock, self._clock.deadline(len(self._workloads) - position))
            if tuned.loop.ended:
                self._decide(tuned, position + 1)
        cut = [tuned for tuned in self._tuned if not tuned.loop.ended]
        for left, tuned in zip(range(len(cut), 0, -1), sorted(cut, key=lambda each: -each.loop.chance), strict=True):
            tuned.loop.run(self._clock, self._clock.deadline(left))
            self._decide(tuned, len(self._workloads))
        served = self._serve()
        if self._backend.source == "live" and self._log.measured:
            split = {kind: round(seconds, 3) for kind, seconds in self._backend.seconds.split().items()}
            self._log.note(
                Summary(session=self._log.session.id, seconds=split, measured=self._log.measured, date=now())
            )
            self._progress.note(f"seconds: {seconds_text(split)}")
        return Result(
            self._backend.kernel,
            self._options.out,
            self._table,
            tuple(self._tables),
            [(tuned.workload, tuned.decision) for tuned in self._tuned],
            self._log.measured,
            self._log.remembered,
            self._backend.source == "live",
            served,
        )

    def _begin(self, position: int) -> _Tuned:
        """The search of a workload, started from its default, its incumbents and its neighbours."""
        workload = self._workloads[position]
        default = self._backend.default_config(workload)
        done = [(each.workload, each) for each in self._tuned if each.decision is not None]
        near = ladder.nearest(workload, done)
        winners = [each.decision.winner.config for each in near if each.decision is not None]
        alike = [each.loop for each in near if ladder.same_keys(workload, each.workload, self._backend.varying_keys)]
        kernel, device = self._backend.kernel, self._backend.device
        starts, more = imported_configs(self._options.out, kernel, workload, device)
        if more:
            shape = format_workload(kernel, workload)
            self._progress.note(f"{shape}: starts from {len(starts)} imported configs, {more} more are left out")
        starts += self._backend.incumbents(workload)
        self._backend.admit(workload, starts)
        loop = SearchLoop(
            self._backend,
            workload,
            [default, *starts, *winners],
            alike[0] if alike else None,
            self._log,
            self._options,
            self._progress,
        )
        self._backend.prefetch(workload, loop.first_points(PREFETCH))
        self._progress.workload(position, workload, loop.expected_trials)
        return _Tuned(loop, default, Watch(self._backend, self._log, workload))

    def _decide(self, tuned: _Tuned, following: int) -> None:
        """Time the finalists against the default, and write the table entry; the next workload compiles meanwhile."""
        from kerneltune import tables

        chosen = finalists.choose(tuned.loop.trials, self._backend.parts, self._backend.shared)
        earlier = finalists.best(self._log.recorded(tuned.workload, "final"))  # of a longer search into this folder
        if earlier is not None:
            chosen.append(dict(earlier.config))
        configs = finalists.distinct([tuned.default, *chosen])
        if any(self._log.known(tuned.workload, "", config, "final") is None for config in configs):
            self._backend.prepare_finals(tuned.workload, configs)
            self._prefetch(following, tuned)
        finals = time_finals(self._backend, tuned.workload, configs, "final", self._log, self._clock)
        tuned.decision = finalists.decide(finals[0], finals[1:])
        for warning in tuned.watch.end():
            self._progress.note(f"warning: {warning}")
        self._progress.decided(tuned.workload, tuned.decision)
        if tuned.decision is not None:
            entry = winner_entry(self._backend.kernel, tuned.workload, tuned.decision)
            self._table = tables.add_entry(*self._table_place(), entry)
            self._tables.setdefault(self._table)

    def _prefetch(self, following: int, tuned: _Tuned) -> None:
        if following >= len(self._workloads):
            return
        workload = self._workloads[following]
        default = self._backend.default_config(workload)
        several = len(self._backend.parts) > 1
        likely = [(part, default[part] if several else default) for part in self._backend.parts]
        likely += SearchLoop(
            self._backend, workload, [], tuned.loop, self._log, self._options, self._progress
        ).first_points(PREFETCH)
        for part, params in likely:
            if not self._log.need_not_measure(workload, part, params, "search"):
                self._backend.prepare(workload, part, params)

    def _table_place(self) -> tuple[Path, str, dict[str, Any], dict[str, Any]]:
        folder = self._options.out / "tables"
        return folder, self._backend.kernel, self._backend.device, provenance(self._log.session)

    def _serve(self) -> list[matrix.Served]:
        """Time the winners on each other's workloads, and choose what the table states for each."""
        backend, log, clock, options = self._backend, self._log, self._clock, self._options
        decided = [(each.workload, each.decision) for each in self._tuned if each.decision is not None]
        groups = matrix.groups(decided, backend.kernel)
        served: list[matrix.Served] = []
        for position, group in enumerate(groups):
            pairs = matrix.PAIRS
            if options.budget_s is not None:
                seconds = max(options.budget_s - clock.now(), 0.0) / (len(groups) - position)
                pairs = min(pairs, int(seconds / matrix.PAIR_S))
            planned = matrix.plan(group, options.max_loss, backend.why_not, pairs)
            count = sum(map(len, planned))
            if count:
                timings = f"{count} timing" + ("s" if count > 1 else "")
                self._progress.note(f"loss matrix of {len(group)} workloads: {timings} of configs that others want")
            for column, configs in zip(group, planned, strict=True):
                for config in configs:
                    if log.known(column.workload, "", config, "matrix") is None:
                        for part in backend.parts:
                            backend.prepare(column.workload, part, config if len(backend.parts) == 1 else config[part])

            def timed(workload: dict[str, Any], configs: list[dict[str, Any]]) -> list[Trial]:
                return time_finals(backend, workload, configs, "matrix", log, clock, rounds=matrix.ROUNDS)

            served += matrix.serve(matrix.measure(group, planned, timed), options.max_loss, backend.kernel)
        if served:
            from kerneltune import tables

            entries = [served_entry(backend.kernel, each) for each in served]
            self._table = tables.add_entries(*self._table_place(), entries)
        return served
