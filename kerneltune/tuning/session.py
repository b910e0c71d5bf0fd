"""One search: workloads in order, their trials, finals and table entries, every measurement on the disk at once.

Resuming replays the ask/tell loop from trial 0 and takes what the records already hold instead of measuring it. What
an ask may see is fixed by the trial's index (LOOK_AHEAD), never by which result came first, so the same records lead
to the same asks.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from kerneltune.recordings import canonical
from kerneltune.records import Conditions, RecordWriter, Session, Summary, Trial, read_lines
from kerneltune.tuning import finalists, ladder
from kerneltune.tuning.backends import Backend, Work
from kerneltune.tuning.failures import Failures
from kerneltune.tuning.samplers import PointStudy
from kerneltune.tuning.seconds import seconds_text

LOOK_AHEAD = 8  # compiles under way while one trial is measured; constant, so that a resumed search asks the same
STOP_ABOVE = 1.25  # a config this much slower than the best so far is dropped after a few samples
FINALS_SHARE = 0.15  # of a workload's time, kept for its finals


@dataclass(frozen=True)
class Options:
    """What a user may choose of a search."""

    out: Path
    trials: int = 48  # distinct configs for each workload and part, those already recorded counted in
    budget_s: float | None = None  # seconds for the whole search; recorded seconds in a replay
    sampler: str = "default"
    seed: int = 0
    command: str = ""


class Progress(Protocol):
    """Is told what happens, in order."""

    def begin(self, workloads: Sequence[Mapping[str, Any]], trials: int) -> None: ...

    def workload(self, position: int, workload: Mapping[str, Any], part: str, points: int) -> None: ...

    def trial(self, trial: Trial, best_us: float | None, roofline: float | None, remembered: bool) -> None: ...

    def decided(self, workload: Mapping[str, Any], decision: finalists.Decision | None) -> None: ...

    def note(self, text: str) -> None: ...


class Silent:
    """Progress that says nothing."""

    def begin(self, workloads: Sequence[Mapping[str, Any]], trials: int) -> None: ...

    def workload(self, position: int, workload: Mapping[str, Any], part: str, points: int) -> None: ...

    def trial(self, trial: Trial, best_us: float | None, roofline: float | None, remembered: bool) -> None: ...

    def decided(self, workload: Mapping[str, Any], decision: finalists.Decision | None) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass(frozen=True)
class Result:
    """What a search found."""

    out: Path
    table: Path | None  # None: no workload ended with a config
    decisions: list[tuple[dict[str, Any], finalists.Decision | None]]
    measured: int  # trials and finalists measured (or replayed) by this run
    remembered: int  # taken from the records
    live: bool  # measured on a GPU; otherwise replayed


class Log:
    """The record file of one search, and what it already holds for this kernel, device, compiler and source."""

    def __init__(self, backend: Backend, options: Options) -> None:
        self.session = _session(backend, options)
        path = options.out / "records" / f"{backend.kernel}.jsonl"
        self._writer = RecordWriter(path)
        self._known: dict[str, Trial] = {}
        self.failures = Failures(backend.varying_keys)
        self.measured = self.remembered = self.samples = self.freaks = 0
        sound: set[str] = set()
        for line in read_lines(path):
            if isinstance(line, Session):
                if _same_measurement(line, self.session):
                    sound.add(line.id)
            elif line.session in sound:
                self._known.setdefault(_key(line.workload, line.part, line.config, line.stage), line)
                self.failures.add(line)
        self._announced = False

    def known(self, workload: Mapping[str, Any], part: str, config: Mapping[str, Any], stage: str) -> Trial | None:
        """The record of this very measurement, if there is one."""
        return self._known.get(_key(workload, part, config, stage))

    def add(self, trial: Trial) -> None:
        """Onto the disk, before anything else happens."""
        if not self._announced:
            self._writer.append(self.session)
            self._announced = True
        self._writer.append(trial)
        self._known[_key(trial.workload, trial.part, trial.config, trial.stage)] = trial
        self.failures.add(trial)
        self.samples += trial.samples
        self.freaks += trial.freaks

    def note(self, line: Conditions | Summary) -> None:
        """Something about trials that are on the disk."""
        self._writer.append(line)

    def need_not_measure(self, workload: Mapping[str, Any], part: str, config: Mapping[str, Any], stage: str) -> bool:
        """Whether this very measurement is recorded, or the config is known to fail: nothing to compile then."""
        recorded = self.known(workload, part, config, stage) is not None
        return recorded or self.failures.recall(workload, part, config) is not None

    def close(self) -> None:
        self._writer.close()


def run(backend: Backend, workloads: Sequence[Mapping[str, Any]], options: Options, progress: Progress) -> Result:
    """Search every workload; the table is written anew after each, so an interruption loses none that is done.

    Raises:
        records.RecordsInUse: another search writes to `options.out`.
        OSError: the records cannot be written; what is there stays.
    """
    from kerneltune import tables

    ordered = ladder.in_order(workloads)
    log = Log(backend, options)
    clock = _Clock(live=backend.source == "live", budget_s=options.budget_s)
    decisions: list[tuple[dict[str, Any], finalists.Decision | None]] = []
    done: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
    table: Path | None = None
    progress.begin(ordered, options.trials)
    try:
        for position, workload in enumerate(ordered):
            watch = Watch(backend, log, workload)
            decision = _tune(backend, workload, position, len(ordered), done, log, clock, options, progress)
            for warning in watch.end():
                progress.note(f"warning: {warning}")
            decisions.append((workload, decision))
            progress.decided(workload, decision)
            if decision is not None:
                done.append((workload, decision.winner.config))
                table = tables.add_entry(
                    options.out / "tables",
                    backend.kernel,
                    backend.device,
                    _provenance(log.session),
                    entry(workload, decision),
                )
        if backend.source == "live" and log.measured:
            split = backend.seconds.split()
            log.note(Summary(session=log.session.id, seconds=_rounded(split), measured=log.measured, date=_now()))
            progress.note(f"seconds: {seconds_text(split)}")
    finally:
        log.close()
    return Result(options.out, table, decisions, log.measured, log.remembered, backend.source == "live")


def _tune(
    backend: Backend,
    workload: dict[str, Any],
    position: int,
    count: int,
    done: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
    log: Log,
    clock: _Clock,
    options: Options,
    progress: Progress,
) -> finalists.Decision | None:
    default = backend.default_config(workload)
    seeds = [default, *backend.incumbents(workload), *ladder.nearest(workload, done)]
    share = clock.share(count - position)
    trials: list[Trial] = []
    for left, part in zip(range(len(backend.parts), 0, -1), backend.parts, strict=True):
        warm = [config if len(backend.parts) == 1 else config[part] for config in seeds]
        progress.workload(position, workload, part, len(backend.points(workload, part)))
        deadline = clock.deadline(share, left)
        trials += _search_part(backend, workload, part, warm, deadline, log, clock, options, progress)
    chosen = finalists.choose(trials, backend.parts, backend.shared)
    others = [config for config in chosen if not finalists.same_config(config, default)]
    finals = time_finals(backend, workload, [default, *others], "final", log, clock)
    return finalists.decide(finals[0], finals[1:])


def _search_part(
    backend: Backend,
    workload: dict[str, Any],
    part: str,
    warm: Sequence[Mapping[str, Any]],
    deadline: float | None,
    log: Log,
    clock: _Clock,
    options: Options,
    progress: Progress,
) -> list[Trial]:
    study = PointStudy(backend.points(workload, part), options.sampler, options.seed, warm)
    work = backend.work(workload, part)
    trials: list[Trial] = []
    best: Trial | None = None
    pending: deque[tuple[int, int]] = deque()

    def finish_oldest() -> None:
        nonlocal best
        index, point = pending.popleft()
        params = study.points[point]
        stop = best.time_us * STOP_ABOVE if best is not None and best.time_us is not None else None
        trial, remembered = recall_or_measure(backend, log, work, workload, part, params, "search", index, stop)
        clock.spend(trial)
        trials.append(trial)
        with backend.seconds.of("sampler"):
            study.tell(point, trial.time_us if trial.outcome == "ok" else None)
        if trial.outcome == "ok" and (best is None or (trial.time_us or 0) < (best.time_us or 0)):
            best = trial
        progress.trial(trial, best.time_us if best else None, best.roofline if best else None, remembered)

    for index in range(options.trials):
        if len(pending) == LOOK_AHEAD:
            finish_oldest()
        if deadline is not None and clock.now() > deadline and index > 0:
            break
        with backend.seconds.of("sampler"):
            point = study.ask()
        if point is None:
            progress.note(
                f"{part}: all {len(study.points)} feasible configs are tried, fewer than the {options.trials} asked"
            )
            break
        if not log.need_not_measure(workload, part, study.points[point], "search"):
            backend.prepare(workload, part, study.points[point])
        pending.append((index, point))
    while pending:
        finish_oldest()
    return trials


def recall_or_measure(
    backend: Backend,
    log: Log,
    work: Work,
    workload: Mapping[str, Any],
    part: str,
    params: Mapping[str, Any],
    stage: str,
    index: int,
    stop_above_us: float | None,
) -> tuple[Trial, bool]:
    """The record of this trial and True, or measured now, on the disk, and False."""
    known = log.known(workload, part, params, stage)
    if known is not None:
        log.remembered += 1
        return known, True
    figures = log.failures.recall(workload, part, params) or backend.measure(workload, part, params, stop_above_us)
    trial = make_trial(log.session, backend, work, workload, part, params, stage, index, figures)
    log.add(trial)
    log.measured += 1
    return trial, False


def time_finals(
    backend: Backend,
    workload: dict[str, Any],
    configs: Sequence[Mapping[str, Any]],
    stage: str,
    log: Log,
    clock: _Clock | None = None,
    part: str = "",
) -> list[Trial]:
    """Time configs in turns, those already recorded left out; the first is the incumbent. One trial each, in order."""
    missing = [config for config in configs if log.known(workload, part, config, stage) is None]
    failed = {canonical(c): _failed_before(backend, log, workload, part, c) for c in missing}
    sound = [config for config in missing if failed[canonical(config)] is None]
    measured = dict(zip(map(canonical, sound), backend.finals(workload, sound, part) if sound else [], strict=True))
    if missing:
        work = backend.work(workload, part)
        for config in missing:
            figures = failed[canonical(config)] or measured[canonical(config)]
            if not part and finalists.same_config(config, configs[0]):
                figures = {"reason": "default"} | {k: v for k, v in figures.items() if k != "reason" or v}
            index = next(i for i, other in enumerate(configs) if finalists.same_config(config, other))
            log.add(make_trial(log.session, backend, work, workload, part, config, stage, index, figures))
            log.measured += 1
    log.remembered += len(configs) - len(missing)
    found = [log.known(workload, part, config, stage) for config in configs]
    trials = [trial for trial in found if trial is not None]
    for trial in trials:
        if clock is not None:
            clock.spend(trial)
    return trials


def _failed_before(
    backend: Backend, log: Log, workload: Mapping[str, Any], part: str, config: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The figures of a config of which some part is known to fail; None: it has to be measured."""
    if part or len(backend.parts) == 1:
        return log.failures.recall(workload, part or backend.parts[0], config)
    found = (log.failures.recall(workload, name, config[name]) for name in backend.parts)
    return next((figures for figures in found if figures is not None), None)


def make_trial(
    session: Session,
    backend: Backend,
    work: Work,
    workload: Mapping[str, Any],
    part: str,
    config: Mapping[str, Any],
    stage: str,
    index: int,
    figures: Mapping[str, Any],
) -> Trial:
    """A record from what a backend measured: rates and roofline added, `suspect` where a ceiling is exceeded."""
    from kerneltune.kernels.tunable import Cost
    from kerneltune.roofline.model import Ceilings, place

    fields = {name: value for name, value in figures.items() if name in Trial.__struct_fields__}
    if fields["outcome"] == "ok":
        cost = Cost(flops=work.flops, bytes_read=work.bytes, bytes_written=0, compute=work.compute)
        placement = place(cost, fields["time_us"], Ceilings.from_dict(backend.ceilings), fields.get("launch_us"))
        fields |= {
            "gbps": placement.gbps,
            "tflops": placement.tflops,
            "intensity": placement.intensity,
            "bound": placement.bound,
            "roofline": placement.roofline,
        }
        if placement.suspect:
            fields["outcome"] = "suspect"
            fields["reason"] = f"{placement.roofline:.0%} of the measured {placement.bound} ceiling"
    return Trial(
        session=session.id,
        workload=dict(workload),
        part=part,
        config=dict(config),
        stage=stage,
        index=index,
        flops=work.flops,
        bytes=work.bytes,
        date=_now(),
        **fields,
    )


def entry(workload: Mapping[str, Any], decision: finalists.Decision) -> dict[str, Any]:
    """The table entry of a decided workload (DESIGN.md §6)."""
    winner, default = decision.winner, decision.default
    inputs = next((workload[name] for name in ("lengths", "routing") if name in workload), "")
    measured = {
        "time_us": _round(winner.time_us, 3),
        "p20_us": _round(winner.p20_us, 3),
        "p80_us": _round(winner.p80_us, 3),
        "launch_us": _round(winner.launch_us, 3),
        "samples": winner.samples,
        "gbps": _round(winner.gbps, 1),
        "tflops": _round(winner.tflops, 2),
        "intensity": _round(winner.intensity, 2),
        "roofline": _round(winner.roofline, 4),
        "bound": winner.bound,
        "default_us": _round(default.time_us, 3) if default else None,
        "gain": _round(decision.gain, 4),
        "inputs": inputs,
        "date": winner.date,
    }
    if winner.composed:
        measured["composed"] = True
    return {"workload": dict(workload), "config": dict(winner.config), "measured": measured, "loss": {}}


class Watch:
    """The GPU around the trials of one workload."""

    def __init__(self, backend: Backend, log: Log, workload: Mapping[str, Any]) -> None:
        self._backend, self._log, self._workload = backend, log, workload
        self._before = backend.conditions()
        self._count = log.measured, log.samples, log.freaks

    def end(self) -> list[str]:
        """Onto the disk, with what is doubtful; [] if the workload's trials were all in the records."""
        from kerneltune.measure.conditions import Snapshot, warnings

        measured, samples, freaks = self._count
        if not self._before or self._log.measured == measured:
            return []
        after, samples, freaks = self._backend.conditions(), self._log.samples - samples, self._log.freaks - freaks
        found = warnings(Snapshot.from_dict(self._before), Snapshot.from_dict(after), freaks, samples)
        self._log.note(
            Conditions(
                session=self._log.session.id,
                workload=dict(self._workload),
                before=self._before,
                after=after,
                freaks=freaks,
                samples=samples,
                warnings=found,
                date=_now(),
            )
        )
        return found


class _Clock:
    """Seconds spent: the wall's when measuring, the recorded ones in a replay, so that a replay repeats itself."""

    def __init__(self, *, live: bool, budget_s: float | None) -> None:
        self._start = time.monotonic() if live else None
        self._recorded = 0.0
        self._budget = budget_s

    def now(self) -> float:
        return time.monotonic() - self._start if self._start is not None else self._recorded

    def spend(self, trial: Trial) -> None:
        self._recorded += trial.compile_s + trial.gate_s + trial.timing_s

    def share(self, workloads_left: int) -> float | None:
        """Seconds the next workload may take."""
        return None if self._budget is None else max(self._budget - self.now(), 0.0) / workloads_left

    def deadline(self, share: float | None, parts_left: int) -> float | None:
        """When the next part of a workload must stop asking."""
        return None if share is None else self.now() + share * (1 - FINALS_SHARE) / parts_left


def _session(backend: Backend, options: Options) -> Session:
    return Session(
        id=uuid.uuid4().hex[:12],
        kernel=backend.kernel,
        device=backend.device,
        source=backend.source,
        kernel_hash=backend.kernel_hash,
        versions=backend.versions,
        ceilings=backend.ceilings,
        seed=options.seed,
        sampler=options.sampler,
        command=options.command,
        date=_now(),
    )


def _same_measurement(old: Session, new: Session) -> bool:
    """Whether a figure of `old` still holds: same device, source of figures, kernel code, compiler and input seed."""
    return (
        old.device.get("name") == new.device.get("name")
        and old.source == new.source
        and old.kernel_hash == new.kernel_hash
        and old.versions.get("triton") == new.versions.get("triton")
        and (old.source != "live" or old.seed == new.seed)
    )


def _provenance(session: Session) -> dict[str, Any]:
    return {
        **session.versions,
        "kernel_hash": session.kernel_hash,
        "ceilings": session.ceilings,
        "date": session.date,
        "command": session.command,
        "source": session.source,
        "seed": session.seed,
    }


def _key(workload: Mapping[str, Any], part: str, config: Mapping[str, Any], stage: str) -> str:
    return canonical([workload, part, config, stage])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _rounded(split: Mapping[str, float]) -> dict[str, float]:
    return {kind: round(seconds, 3) for kind, seconds in split.items()}


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
