"""Entries of tables measured again: to renew those that are out of date, or to see whether they still hold.

Each entry's config is vetted as a finalist is and timed in turns with the default, a few seconds an entry: minutes for
a table, where a search would take an hour. Nothing new is looked for. The renewed table is written after every entry,
so an interruption keeps what is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kerneltune import tables
from kerneltune.errors import NO_GPU, UserError
from kerneltune.kernels.staleness import staleness
from kerneltune.kernels.table_format import KEYS, Table, split_recorded
from kerneltune.records import Trial
from kerneltune.registry import load_tunable
from kerneltune.table_check import Finding
from kerneltune.tuning import finalists
from kerneltune.tuning.backends import Backend
from kerneltune.tuning.entries import winner_entry
from kerneltune.tuning.log import new_session, provenance
from kerneltune.tuning.measuring import make_trial
from kerneltune.tuning.options import Options
from kerneltune.workloads import format_workload

MakeBackend = Callable[[str, dict[str, Any]], Backend]  # kernel, first workload


def on_gpu(index: int) -> MakeBackend:
    """What makes the backend of a kernel on this GPU.

    Raises:
        UserError: it is not there (exit 3).
    """
    from kerneltune.device import detect
    from kerneltune.space import load_space
    from kerneltune.tuning.backends import LiveBackend

    if detect(index) is None:
        raise UserError(f"entries are measured on a GPU, and GPU {index} is not here", NO_GPU)
    return lambda kernel, first: LiveBackend(kernel, load_space(kernel), index, 0, first)


@dataclass(frozen=True)
class Renewed:
    """One entry and what became of it."""

    path: str
    workload: dict[str, Any]
    why: tuple[str, ...]  # it was stale; (): asked for
    outcome: str  # "kept", "default" (no longer worth it), "broken" (replaced by the default), "left" (see reason)
    reason: str = ""
    before_us: float | None = None
    time_us: float | None = None
    default_us: float | None = None
    gain: float | None = None


def stale_entries(table: Table, everything: bool) -> list[tuple[Mapping[str, Any], tuple[str, ...]]]:
    """The entries to measure again, each with the reasons why it is out of date."""
    found = []
    for entry in table.entries:
        stale = staleness(table.kernel, entry["config"], entry.get("provenance", table.provenance))
        if stale or everything:
            found.append((entry, tuple(each.reason for each in stale)))
    return found


def revalidate(
    files: Sequence[Path], make_backend: MakeBackend, *, everything: bool = False, command: str = ""
) -> Iterator[Renewed]:
    """Measure again what is stale in these tables, and renew it there; one result for each, as it is done.

    An entry whose config no longer beats the default by more than the noise states the default, and so does one whose
    config has become wrong or cannot run. Losses on other workloads are kept only by an entry that was not stale and
    keeps its config: against another compiler or source they compare nothing.

    Raises:
        UserError: a file is no sound table.
    """
    by_kernel: dict[str, list[tuple[Table, list[tuple[Mapping[str, Any], tuple[str, ...]]]]]] = {}
    for path in files:
        table = tables.load_table(path)
        if chosen := stale_entries(table, everything):
            by_kernel.setdefault(table.kernel, []).append((table, chosen))
    for kernel, work in by_kernel.items():
        first = next((entry for _, chosen in work for entry, _ in chosen if _cannot_make(kernel, entry) is None), None)
        if first is None:
            for table, chosen in work:
                yield from (_left(table, entry, why, _cannot_make(kernel, entry) or "") for entry, why in chosen)
            continue
        backend = make_backend(kernel, dict(first["workload"]))
        try:
            session = new_session(backend, Options(Path(), command=command))
            mine = [(table, chosen) for table, chosen in work if _is_here(table, backend)]
            for table, chosen in work:
                if not _is_here(table, backend):
                    yield from (_left(table, entry, why, _elsewhere(table, backend)) for entry, why in chosen)
            for _, chosen in mine:
                for entry, _ in chosen:
                    if _cannot_make(kernel, entry) is None:
                        backend.prepare_finals(entry["workload"], _configs(backend, entry))
            for table, chosen in mine:
                for entry, why in chosen:
                    reason = _cannot_make(kernel, entry)
                    if reason is not None:
                        yield _left(table, entry, why, reason)
                        continue
                    default, own = time_entry(backend, session.id, entry)
                    decision = finalists.decide(default, [own] if own is not default else [])
                    if decision is None:
                        yield _left(table, entry, why, f"neither it nor the default runs: {own.reason}")
                        continue
                    renewed = winner_entry(kernel, entry["workload"], decision)
                    same = finalists.same_config(renewed["config"], entry["config"])
                    if same and not why:
                        renewed["loss"] = dict(entry.get("loss", {}))
                    tables.write_table(
                        Path(table.path), tables.make_table(kernel, table.device, provenance(session), [renewed])
                    )
                    outcome = "kept" if same else "default" if own.outcome == "ok" else "broken"
                    yield _renewed(table, entry, why, outcome, own.reason if outcome == "broken" else "", decision)
        finally:
            backend.close()


def measure_entries(files: Sequence[Path], make_backend: MakeBackend) -> Iterator[Finding]:
    """A fault for each entry whose config is wrong, cannot run, or is slower than the default by more than the noise.

    Raises:
        UserError: a table is of another device than the one here (exit 3), or unsound.
    """
    loaded: dict[str, list[Table]] = {}
    for path in files:
        table = tables.load_table(path)
        if table.entries:
            loaded.setdefault(table.kernel, []).append(table)
    for kernel, mine in loaded.items():
        entries = [entry for table in mine for entry in table.entries]
        first = next((entry for entry in entries if _cannot_make(kernel, entry) is None), None)
        if first is None:
            for table in mine:
                for number, entry in enumerate(table.entries):
                    what = f"not measured: {_cannot_make(kernel, entry)}"
                    yield Finding(table.path, False, number, what, format_workload(kernel, entry["workload"]))
            continue
        backend = make_backend(kernel, dict(first["workload"]))
        try:
            session = new_session(backend, Options(Path()))
            for table in mine:
                if not _is_here(table, backend):
                    raise UserError(f"{table.path}: {_elsewhere(table, backend)}", NO_GPU)
            sound = []
            for table in mine:
                for number, entry in enumerate(table.entries):
                    reason = _cannot_make(kernel, entry)
                    if reason is None:
                        sound.append((table, number, entry))
                    else:
                        text = format_workload(kernel, entry["workload"])
                        yield Finding(table.path, False, number, f"not measured: {reason}", text)
            for _, _, entry in sound:
                backend.prepare_finals(entry["workload"], _configs(backend, entry))
            for table, number, entry in sound:
                default, own = time_entry(backend, session.id, entry)
                fault, what = _judge(default, own)
                yield Finding(table.path, fault, number, what, format_workload(kernel, entry["workload"]))
        finally:
            backend.close()


def time_entry(backend: Backend, session: str, entry: Mapping[str, Any]) -> tuple[Trial, Trial]:
    """The default and the entry's config, vetted and timed in turns; one trial twice where they are the same."""
    workload = dict(entry["workload"])
    configs = _configs(backend, entry)
    figures = backend.finals(workload, configs)
    work = backend.work(workload, "")
    trials = [
        make_trial(session, backend, work, workload, "", config, "final", index, each)
        for index, (config, each) in enumerate(zip(configs, figures, strict=True))
    ]
    if len(trials) == 1 and not finalists.same_config(configs[0], entry["config"]):
        reason = backend.why_not(workload, entry["config"]) or ""
        broken = {"outcome": "infeasible", "reason": reason}
        return trials[0], make_trial(session, backend, work, workload, "", entry["config"], "final", 1, broken)
    return trials[0], trials[-1]


def _configs(backend: Backend, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The default first, then the entry's where it is another and can run."""
    default, own = backend.default_config(entry["workload"]), dict(entry["config"])
    if finalists.same_config(default, own):
        return [default]
    try:
        reason = backend.why_not(entry["workload"], own)
    except (KeyError, TypeError, ValueError) as error:
        reason = str(error)
    return [default] if reason else [default, own]


def _judge(default: Trial, own: Trial) -> tuple[bool, str]:
    if own.outcome != "ok" or own.time_us is None:
        return True, f"{own.outcome}: {own.reason or 'no time'}; tune it again, or `kerneltune revalidate` the file"
    if own is default or default.outcome != "ok" or default.time_us is None:
        return False, f"{own.time_us:.1f} us, correct; it states the default"
    ratio = finalists.net_us(own) / finalists.net_us(default)
    slack = max(finalists.MIN_GAIN, finalists.noise(own), finalists.noise(default))
    times = f"{own.time_us:.1f} us, default {default.time_us:.1f} us"
    if ratio > 1 + slack:
        return (
            True,
            f"slower than the default: {times}, beyond the noise of {slack:.1%}; `kerneltune revalidate` renews it",
        )
    return False, f"{times}, {1 / ratio:.2f}x, correct"


def _is_here(table: Table, backend: Backend) -> bool:
    return all(table.device[name] == backend.device[name] for name in ("name", "sm_count"))


def _elsewhere(table: Table, backend: Backend) -> str:
    return f"is of {table.device['name']}, and here is {backend.device['name']}"


def _cannot_make(kernel: str, entry: Mapping[str, Any]) -> str | None:
    """Why an entry's inputs cannot be made here: recorded in service, or such as no call ever has."""
    name = KEYS[kernel].input
    value = entry["workload"][name]
    if split_recorded(str(value)) is not None:
        return f"the inputs {value} are not here"
    try:
        complete = load_tunable(kernel).complete_workload(entry["workload"])
    except ValueError as error:
        return f"workload: no call ever asks for it ({error})"
    return None if complete == dict(entry["workload"]) else "workload: not as the kernel writes it"


def _left(table: Table, entry: Mapping[str, Any], why: tuple[str, ...], reason: str) -> Renewed:
    return Renewed(table.path, dict(entry["workload"]), why, "left", reason, _time(entry))


def _renewed(
    table: Table,
    entry: Mapping[str, Any],
    why: tuple[str, ...],
    outcome: str,
    reason: str,
    decision: finalists.Decision,
) -> Renewed:
    default = None if decision.default is None else decision.default.time_us
    times = _time(entry), decision.winner.time_us, default, decision.gain
    return Renewed(table.path, dict(entry["workload"]), why, outcome, reason, *times)


def _time(entry: Mapping[str, Any]) -> float | None:
    value = entry.get("measured", {}).get("time_us")
    return value if isinstance(value, int | float) else None
