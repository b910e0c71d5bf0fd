"""Entries of tables measured again: to renew those that are out of date, or to see whether they still hold.

Each entry's config is vetted as a finalist is and timed in turns with the default, a few seconds an entry: minutes for
a table, where a search would take an hour. Nothing new is looked for. The renewed table is written after every entry,
so an interruption keeps what is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kerneltune import tables
from kerneltune.errors import NO_GPU, UserError
from kerneltune.kernels.staleness import staleness
from kerneltune.kernels.table_format import KEYS, Table, split_recorded
from kerneltune.records import Session, Trial
from kerneltune.registry import load_tunable
from kerneltune.table_check import Finding
from kerneltune.tuning import finalists
from kerneltune.tuning.backends import Backend
from kerneltune.tuning.entries import winner_entry
from kerneltune.tuning.log import new_session, provenance
from kerneltune.tuning.measuring import make_trial
from kerneltune.tuning.options import Options
from kerneltune.workloads import format_workload

BAD_ENTRY = (KeyError, TypeError, ValueError)  # what an entry that nobody can pose or run raises on its way
MakeBackend = Callable[[str, dict[str, Any]], Backend]  # kernel, first workload


def on_gpu(index: int) -> MakeBackend:
    """What makes the backend of a kernel on this GPU; making one where it is not there is a UserError (exit 3)."""

    def make(kernel: str, first: dict[str, Any]) -> Backend:
        from kerneltune.device import detect
        from kerneltune.space import load_space
        from kerneltune.tuning.backends import LiveBackend

        if detect(index) is None:  # asked when one is needed: with nothing to measure none is
            raise UserError(f"entries are measured on a GPU, and GPU {index} is not here", NO_GPU)
        return LiveBackend(kernel, load_space(kernel), index, 0, first)

    return make


@dataclass(frozen=True)
class Renewed:
    """One entry and what became of it, or a whole file that is no sound table."""

    path: str
    kernel: str  # "": of no sound table
    number: int | None  # of the entry in its file as it was read; None: the whole file
    workload: dict[str, Any]
    why: tuple[str, ...]  # it was stale; (): asked for
    outcome: str  # "kept", "default" (no longer worth it), "broken" (replaced by the default), "left" (see reason)
    reason: str = ""
    before_us: float | None = None
    time_us: float | None = None
    default_us: float | None = None
    gain: float | None = None
    fault: bool = False  # left because it is wrong, not because it is of another GPU or of recorded inputs


@dataclass(frozen=True)
class Chosen:
    """An entry to measure again, where it lies, and why it is out of date; (): it was asked for."""

    table: Table
    number: int
    entry: Mapping[str, Any]
    why: tuple[str, ...]


def stale_entries(table: Table, everything: bool) -> list[Chosen]:
    """The entries to measure again."""
    found = []
    for number, entry in enumerate(table.entries):
        stale = staleness(table.kernel, entry["config"], entry.get("provenance", table.provenance))
        if stale or everything:
            found.append(Chosen(table, number, entry, tuple(each.reason for each in stale)))
    return found


def revalidate(
    files: Sequence[Path], make_backend: MakeBackend, *, everything: bool = False, command: str = ""
) -> Iterator[Renewed]:
    """Measure again what is stale in these tables, and renew it there; one result for each, as it is done.

    An entry whose config no longer beats the default by more than the noise states the default, and so does one whose
    config has become wrong or cannot run. Losses on other workloads are kept only by an entry that was not stale and
    keeps its config: against another compiler or source they compare nothing.

    What cannot be measured is left as it is, with the reason: a file that is no sound table, an entry that no call
    poses, recorded inputs, another GPU's.

    Raises:
        UserError: there is something to measure and no GPU (exit 3).
    """
    by_kernel: dict[str, list[Chosen]] = {}
    for path in files:
        try:
            table = tables.load_table(path)
        except UserError as error:
            reason = str(error).removeprefix(f"{path}: ")
            yield Renewed(str(path), "", None, {}, (), "left", reason, fault=True)
            continue
        if chosen := stale_entries(table, everything):
            by_kernel.setdefault(table.kernel, []).extend(chosen)
    for kernel, work in by_kernel.items():
        yield from _renew(kernel, work, make_backend, command)


def _renew(kernel: str, work: Sequence[Chosen], make_backend: MakeBackend, command: str) -> Iterator[Renewed]:
    """What became of the chosen entries of one kernel, as each is done."""
    posed = []
    for each in work:
        if reason := _cannot_make(kernel, each.entry):
            yield _left(each, reason, fault=not _is_recorded(kernel, each.entry))
        else:
            posed.append(each)
    if not posed:
        return
    backend = make_backend(kernel, dict(posed[0].entry["workload"]))
    try:
        session = new_session(backend, Options(Path(), command=command))
        ready = []
        for each in posed:
            if not _is_here(each.table, backend):
                yield _left(each, _elsewhere(each.table, backend))
                continue
            try:
                backend.prepare_finals(each.entry["workload"], _configs(backend, each.entry))
            except BAD_ENTRY as error:
                yield _left(each, f"cannot be measured: {_said(error)}", fault=True)
            else:
                ready.append(each)
        for each in ready:
            yield _renew_one(backend, session, each)
    finally:
        backend.close()


def _renew_one(backend: Backend, session: Session, each: Chosen) -> Renewed:
    """Measure one entry and write it renewed; one that trips the measurement is left, and the others go on."""
    table, entry = each.table, each.entry
    try:
        default, own = time_entry(backend, session.id, entry)
    except BAD_ENTRY as error:
        return _left(each, f"cannot be measured: {_said(error)}", fault=True)
    decision = finalists.decide(default, [own] if own is not default else [])
    if decision is None:
        return _left(each, f"neither it nor the default runs: {own.reason}", fault=True)
    renewed = winner_entry(table.kernel, entry["workload"], decision)
    same = finalists.same_config(renewed["config"], entry["config"])
    if same and not each.why:
        renewed["loss"] = dict(entry.get("loss", {}))
    tables.write_table(Path(table.path), tables.make_table(table.kernel, table.device, provenance(session), [renewed]))
    outcome = "kept" if same else "default" if own.outcome == "ok" else "broken"
    return _renewed(each, outcome, own.reason if outcome == "broken" else "", decision)


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
                with contextlib.suppress(*BAD_ENTRY):  # timing it says what is wrong
                    backend.prepare_finals(entry["workload"], _configs(backend, entry))
            for table, number, entry in sound:
                try:
                    fault, what = _judge(*time_entry(backend, session.id, entry))
                except BAD_ENTRY as error:
                    fault, what = True, f"cannot be measured: {_said(error)}"
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
    except BAD_ENTRY as error:
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
    if _is_recorded(kernel, entry):
        return f"the inputs {entry['workload'][KEYS[kernel].input]} are not here"
    try:
        complete = load_tunable(kernel).complete_workload(entry["workload"])
    except ValueError as error:
        return f"workload: no call ever asks for it ({error})"
    return None if complete == dict(entry["workload"]) else "workload: not as the kernel writes it"


def _is_recorded(kernel: str, entry: Mapping[str, Any]) -> bool:
    return split_recorded(str(entry["workload"][KEYS[kernel].input])) is not None


def _said(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)


def _left(each: Chosen, reason: str, *, fault: bool = False) -> Renewed:
    table, entry = each.table, each.entry
    workload, before = dict(entry["workload"]), _time(entry)
    return Renewed(table.path, table.kernel, each.number, workload, each.why, "left", reason, before, fault=fault)


def _renewed(each: Chosen, outcome: str, reason: str, decision: finalists.Decision) -> Renewed:
    default = None if decision.default is None else decision.default.time_us
    times = _time(each.entry), decision.winner.time_us, default, decision.gain
    workload = dict(each.entry["workload"])
    return Renewed(each.table.path, each.table.kernel, each.number, workload, each.why, outcome, reason, *times)


def _time(entry: Mapping[str, Any]) -> float | None:
    value = entry.get("measured", {}).get("time_us")
    return value if isinstance(value, int | float) else None
