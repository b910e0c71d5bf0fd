"""Measurements of a search: recalled from the records, or made, judged against the roofline and recorded at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kerneltune.recordings import canonical
from kerneltune.records import Conditions, Trial
from kerneltune.tuning import finalists
from kerneltune.tuning.backends import FINAL_ROUNDS, Backend, Work
from kerneltune.tuning.clock import Clock
from kerneltune.tuning.log import Log, now


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
    trial = make_trial(log.session.id, backend, work, workload, part, params, stage, index, figures)
    log.add(trial)
    log.measured += 1
    return trial, False


def time_finals(
    backend: Backend,
    workload: dict[str, Any],
    configs: Sequence[Mapping[str, Any]],
    stage: str,
    log: Log,
    clock: Clock | None = None,
    part: str = "",
    rounds: int = FINAL_ROUNDS,
) -> list[Trial]:
    """Time configs in turns, those already recorded left out; the first is the incumbent. One trial each, in order."""
    missing = [config for config in configs if log.known(workload, part, config, stage) is None]
    failed = {canonical(c): _failed_before(backend, log, workload, part, c) for c in missing}
    sound = [config for config in missing if failed[canonical(config)] is None]
    measured = dict(
        zip(map(canonical, sound), backend.finals(workload, sound, part, rounds) if sound else [], strict=True)
    )
    if missing:
        work = backend.work(workload, part)
        for config in missing:
            figures = failed[canonical(config)] or measured[canonical(config)]
            if stage == "final" and finalists.same_config(config, configs[0]):
                figures = {"reason": "default"} | {k: v for k, v in figures.items() if k != "reason" or v}
            index = next(i for i, other in enumerate(configs) if finalists.same_config(config, other))
            log.add(make_trial(log.session.id, backend, work, workload, part, config, stage, index, figures))
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
    session: str,
    backend: Backend,
    work: Work,
    workload: Mapping[str, Any],
    part: str,
    config: Mapping[str, Any],
    stage: str,
    index: int,
    figures: Mapping[str, Any],
) -> Trial:
    """A record from what a backend measured: rates and roofline added, `suspect` where a ceiling is exceeded.

    `session`: the id of the session it belongs to.
    """
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
        session=session,
        workload=dict(workload),
        part=part,
        config=dict(config),
        stage=stage,
        index=index,
        flops=work.flops,
        bytes=work.bytes,
        date=now(),
        **fields,
    )


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
                date=now(),
            )
        )
        return found
