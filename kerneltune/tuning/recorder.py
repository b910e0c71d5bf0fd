"""Brute-forces a space into recordings: every feasible config, those near the optimum timed again in turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from kerneltune.device import slug
from kerneltune.kernels.table_format import class_name
from kerneltune.recordings import Recording, canonical, point_key, write_recording
from kerneltune.records import Trial
from kerneltune.tuning import finalists, ladder
from kerneltune.tuning.backends import FINAL_ROUNDS, Backend
from kerneltune.tuning.log import Log
from kerneltune.tuning.measuring import Watch, recall_or_measure, time_finals
from kerneltune.tuning.options import Options
from kerneltune.tuning.progress import Progress

NEAR = 1.06  # points within 6 % of the best are re-timed: the noise of one timing is below that
MOST_RETIMED = 8
AHEAD = 48  # compiles under way: nothing is learnt between trials, so as many as keep every core busy
STOP_ABOVE = 1.5  # slower than this against the best: a few samples are enough


def record(
    backend: Backend, workloads: Sequence[Mapping[str, Any]], space_text: str, options: Options, progress: Progress
) -> list[Path]:
    """One Parquet file a workload under `options.out/recordings`; resumable, since each trial is a record first."""
    log = Log(backend, options)
    paths = []
    ordered = ladder.in_order(workloads)
    progress.begin(ordered)
    try:
        for position, workload in enumerate(ordered):
            watch = Watch(backend, log, workload)
            recording = _record_workload(backend, workload, position, space_text, log, options, progress)
            for warning in watch.end():
                progress.note(f"warning: {warning}")
            name = f"{backend.kernel}-{_label(workload)}.parquet"
            path = options.out / "recordings" / name
            write_recording(path, recording)
            paths.append(path)
    finally:
        log.close()
    return paths


def _record_workload(
    backend: Backend,
    workload: dict[str, Any],
    position: int,
    space_text: str,
    log: Log,
    options: Options,
    progress: Progress,
) -> Recording:
    default = backend.default_config(workload)
    rows: dict[str, Trial] = {}
    rounds: dict[str, int] = {}
    progress.workload(position, workload, sum(len(backend.points(workload, part)) for part in backend.parts))
    for part in backend.parts:
        points = backend.points(workload, part)
        trials = _every_point(backend, workload, part, points, log, progress)
        rows |= {point_key(t.part, t.config): t for t in trials}
        for trial in _retimed(backend, workload, part, trials, log):
            key = point_key(part, trial.config)
            rows[key] = _with_times(rows[key], trial)
            rounds[key] = FINAL_ROUNDS
    good = [t for t in rows.values() if t.outcome == "ok"]
    launch_us = max((t.launch_us for t in good), default=0.0)
    whole = backend.work(workload, "")
    return Recording(
        kernel=backend.kernel,
        workload=workload,
        parts=backend.parts,
        shared=backend.shared,
        device=backend.device,
        ceilings=backend.ceilings,
        default_config=default,
        whole={"flops": whole.flops, "bytes": whole.bytes, "compute": whole.compute},
        rest_us=_rest(backend, workload, default, list(rows.values()), log),
        launch_us=launch_us,
        space=space_text,
        kernel_hash=backend.kernel_hash,
        versions=backend.versions,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=options.command,
        trials=tuple(rows.values()),
        rounds=rounds,
    )


def _every_point(
    backend: Backend,
    workload: dict[str, Any],
    part: str,
    points: Sequence[Mapping[str, Any]],
    log: Log,
    progress: Progress,
) -> list[Trial]:
    work = backend.work(workload, part)
    trials: list[Trial] = []
    best: Trial | None = None
    waiting: deque[tuple[int, Mapping[str, Any]]] = deque()

    def finish_oldest() -> None:
        nonlocal best
        index, params = waiting.popleft()
        stop = best.time_us * STOP_ABOVE if best is not None and best.time_us is not None else None
        trial, remembered = recall_or_measure(backend, log, work, workload, part, params, "record", index, stop)
        trials.append(trial)
        if trial.outcome == "ok" and (best is None or (trial.time_us or 0) < (best.time_us or 0)):
            best = trial
        progress.trial(trial, best.time_us if best else None, best.roofline if best else None, remembered)

    for index, params in enumerate(points):
        if len(waiting) == AHEAD:
            finish_oldest()
        if not log.need_not_measure(workload, part, params, "record"):
            backend.prepare(workload, part, params)
        waiting.append((index, params))
    while waiting:
        finish_oldest()
    return trials


def _retimed(backend: Backend, workload: dict[str, Any], part: str, trials: Sequence[Trial], log: Log) -> list[Trial]:
    good = sorted((t for t in trials if t.outcome == "ok" and t.time_us), key=lambda t: t.time_us or 0.0)
    near = [t.config for t in good if (t.time_us or 0) <= (good[0].time_us or 0) * NEAR][:MOST_RETIMED]
    return (
        [t for t in time_finals(backend, workload, near, "retimed", log, part=part) if t.outcome == "ok"]
        if near
        else []
    )


def _with_times(trial: Trial, retimed: Trial) -> Trial:
    return msgspec.structs.replace(
        trial,
        time_us=retimed.time_us,
        p20_us=retimed.p20_us,
        p80_us=retimed.p80_us,
        samples=retimed.samples,
        gbps=retimed.gbps,
        tflops=retimed.tflops,
        roofline=retimed.roofline,
    )


def _rest(
    backend: Backend, workload: dict[str, Any], default: Mapping[str, Any], rows: Sequence[Trial], log: Log
) -> dict[str, float]:
    """Whole operation minus its parts, net of launches, for each value of the shared parameters; {} for one part."""
    if len(backend.parts) == 1:
        return {}
    whole: dict[str, dict[str, Any]] = {}
    for values in dict.fromkeys(canonical([t.config[name] for name in backend.shared]) for t in rows):
        group = [t for t in rows if canonical([t.config[name] for name in backend.shared]) == values]
        best = finalists.choose(group, backend.parts, backend.shared, limit=1)
        if best:
            whole[values] = best[0]
    times = {point_key(t.part, t.config): t for t in rows}
    rest: dict[str, float] = {}
    for (values, config), trial in zip(
        whole.items(), time_finals(backend, workload, list(whole.values()), "whole", log), strict=True
    ):
        if trial.outcome == "ok" and trial.time_us is not None:
            parts = [times[point_key(part, config[part])] for part in backend.parts]
            net = sum((t.time_us or 0.0) - t.launch_us for t in parts)
            rest[values] = round(max(trial.time_us - trial.launch_us - net, 0.0), 3)
    return rest


def _label(workload: Mapping[str, Any]) -> str:
    """A file name that tells the workloads of one recording set apart."""
    sizes = [f"{name}{value}" for name, value in workload.items() if name in ("heads", "E", "N", "K", "top_k", "s_q")]
    scaled = [f"{name}{value}" for name, value in workload.items() if name in ("batch", "kv_len", "tokens")]
    inputs = [class_name(str(workload[name])) for name in ("lengths", "routing") if name in workload]
    return slug("-".join([str(workload.get("dtype", "")), *sizes, *scaled, *inputs]))
