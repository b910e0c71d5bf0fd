"""From the folders of searches to a report: finds them, reads records and tables, decides which figure is a row's."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from kerneltune.errors import UserError
from kerneltune.kernels import table_files
from kerneltune.kernels.table_format import KEYS, Table, TableError, scaled_text, table_workload
from kerneltune.records import Conditions, Session, Trial, read_folder, read_notes
from kerneltune.report.data import (
    SCALED_KEYS,
    Curve,
    Doubt,
    Failure,
    Provenance,
    Report,
    Row,
    Search,
    Unfinished,
    canonical,
    exact_sizes,
)
from kerneltune.tuning.finalists import decide
from kerneltune.workloads import format_workload

INPUT_KEYS = ("lengths", "routing")
TRIED_STAGES = ("search", "polish")
SEARCH_DEPTH = 3  # kerneltune-results/<device>/<kernel> below the folder that was named


def find_folders(folder: Path | None, kernel: str | None = None) -> tuple[Path, ...]:
    """The result folders meant: `folder` or those in it; without it the last search here (of `kernel`), else what is
    shipped.

    Raises:
        UserError: there is no such folder, or nothing of a search in it.
    """
    if folder is None:
        runs = [found for found in Path("kerneltune-results").glob("*/*") if _is_result(found, kernel)]
        if runs:
            return (max(runs, key=_last_written),)
        folder = Path(str(files("kerneltune"))) / "results"
    elif not folder.is_dir():
        raise UserError(f"no such folder: {folder} (name the --out folder of a search, or a folder of several)")
    level = [folder]
    for _ in range(SEARCH_DEPTH):
        if found := [path for path in level if _is_result(path)]:
            return tuple(found)
        level = [child for path in level for child in sorted(path.iterdir()) if child.is_dir()]
    raise UserError(
        f"no results in {folder}: expected records/*.jsonl or tables/*.json there (run `kerneltune search mla-decode`, "
        "or name the --out folder of a search)"
    )


def read_report(folders: Sequence[Path], kernel: str | None = None) -> Report:
    """Read and judge everything in the folders; with `kernel`, of that kernel only."""
    rows: dict[tuple[str, str, str], Row] = {}
    unfinished: list[Unfinished] = []
    failed: list[tuple[str, Trial]] = []
    ceilings: dict[tuple[str, str], dict[str, Any]] = {}
    provenance: dict[Provenance, Provenance] = {}
    warnings: list[str] = []
    doubts: dict[tuple[str, str, str], Doubt] = {}
    searches: list[Search] = []
    count = 0
    for folder in folders:
        sessions, trials = _read_records(folder, kernel)
        tables = [table for table in _read_tables(folder, warnings) if kernel in (None, table.kernel)]
        count += len(trials)
        failed += [(sessions[trial.session].kernel, trial) for trial in trials if trial.outcome != "ok"]
        by_key = _by_workload(sessions, trials)
        from_records = {key: row for key, found in by_key.items() if (row := _record_row(key, found)) is not None}
        from_tables = {
            (table.kernel, str(table.device["name"]), canonical(entry["workload"])): _table_row(table, entry)
            for table in tables
            for entry in table.entries
            if entry.get("measured", {}).get("time_us")  # an imported entry has none
        }
        for note in _read_notes(folder, sessions):
            if isinstance(note, Search):
                searches.append(note)
            else:  # the last time that a workload was measured counts
                doubts[note.kernel, note.device, note.shape] = note
        rows |= from_records
        rows |= {key: _with_records(row, from_records.get(key)) for key, row in from_tables.items()}
        unfinished += [_unfinished(key, found) for key, found in by_key.items() if key not in rows]
        for session in sessions.values():
            source = _session_provenance(session)
            provenance[replace(source, date="")] = (
                source  # a search that was resumed is listed once, with its last date
            )
        searched = {(session.kernel, session.device.get("name")) for session in sessions.values()}
        for table in tables:
            if (table.kernel, table.device.get("name")) not in searched:
                source = _table_provenance(table)
                provenance[replace(source, date="")] = source
        for found in [*(s.ceilings for s in sessions.values()), *(t.provenance.get("ceilings") for t in tables)]:
            if found:
                ceilings.setdefault((str(found.get("device")), str(found.get("date"))), dict(found))
    return Report(
        folders=tuple(folders),
        rows=tuple(sorted(rows.values(), key=_order)),
        unfinished=tuple(unfinished),
        failures=_failures(failed),
        ceilings=tuple(ceilings.values()),
        provenance=tuple(provenance.values()),
        trials=count,
        warnings=tuple(warnings),
        doubts=tuple(doubt for doubt in doubts.values() if doubt.warnings),
        searches=tuple(searches),
    )


def read_curves(folders: Sequence[Path], kernel: str | None = None) -> list[Curve]:
    """How each search went: one curve for each workload and part that had a config pass."""
    times: dict[tuple[str, str, str], dict[str, float]] = {}
    for folder in folders:
        sessions, trials = _read_records(folder, kernel)
        for trial in trials:
            if trial.stage in TRIED_STAGES and trial.outcome != "infeasible":
                name = sessions[trial.session].kernel
                tried = times.setdefault((name, canonical(trial.workload), trial.part), {})
                passed = trial.outcome == "ok" and trial.time_us is not None
                tried.setdefault(canonical(trial.config), trial.time_us if passed and trial.time_us else math.inf)
    return [
        Curve(name, format_workload(name, msgspec.json.decode(workload)), part, tuple(tried.values()))
        for (name, workload, part), tried in times.items()
        if min(tried.values()) < math.inf
    ]


def _is_result(folder: Path, kernel: str | None = None) -> bool:
    return any(kernel is None or path.name.startswith(f"{kernel}.") for path in _result_files(folder))


def _last_written(folder: Path) -> float:
    return max(os.stat(path).st_mtime for path in _result_files(folder))


def _result_files(folder: Path) -> list[Path]:
    return [*(folder / "records").glob("*.jsonl"), *(folder / "tables").glob("*.json")]


def _read_records(folder: Path, kernel: str | None) -> tuple[dict[str, Session], list[Trial]]:
    sessions, trials = read_folder(folder)
    sessions = {name: session for name, session in sessions.items() if kernel in (None, session.kernel)}
    return sessions, [_as_in_tables(sessions[t.session].kernel, t) for t in trials if t.session in sessions]


def _as_in_tables(kernel: str, trial: Trial) -> Trial:
    """With its workload as tables write it, so that a record and its table's entry are one row."""
    if kernel not in KEYS:
        return trial
    return msgspec.structs.replace(trial, workload=table_workload(kernel, trial.workload))


def _read_notes(folder: Path, sessions: Mapping[str, Session]) -> list[Doubt | Search]:
    """What the records of a folder tell of these sessions besides trials, in file order."""
    found: list[Doubt | Search] = []
    for note in read_notes(folder):
        if (session := sessions.get(note.session)) is None:
            continue
        device = str(session.device.get("name", ""))
        if isinstance(note, Conditions):
            shape = format_workload(session.kernel, note.workload)
            found.append(Doubt(session.kernel, device, shape, tuple(note.warnings), note.date))
        else:
            found.append(Search(session.kernel, device, note.measured, note.seconds, note.date))
    return found


def _read_tables(folder: Path, warnings: list[str]) -> list[Table]:
    """The tables that a launch would take too."""
    tables = []
    for path in sorted((folder / "tables").glob("*.json")):
        try:
            tables.append(table_files.read_table(path))
        except (TableError, OSError) as error:
            warnings.append(f"{path} is left out: {error.strerror if isinstance(error, OSError) else error}")
    return tables


def _by_workload(sessions: dict[str, Session], trials: list[Trial]) -> dict[tuple[str, str, str], list[Trial]]:
    by_key: dict[tuple[str, str, str], list[Trial]] = {}
    for trial in trials:
        session = sessions[trial.session]
        key = (session.kernel, str(session.device.get("name", "")), canonical(trial.workload))
        by_key.setdefault(key, []).append(trial)
    return by_key


def _record_row(key: tuple[str, str, str], trials: list[Trial]) -> Row | None:
    """The row that the final trials of one workload give, decided as the search decides."""
    finals = {canonical(trial.config): trial for trial in trials if trial.stage == "final"}  # the last of each config
    default = next((trial for trial in finals.values() if trial.reason == "default"), None)
    decision = decide(default, [trial for trial in finals.values() if trial is not default])
    if decision is None or decision.winner.time_us is None:
        return None
    best = decision.winner
    return Row(
        kernel=key[0],
        device=key[1],
        workload=best.workload,
        shape=format_workload(key[0], best.workload),
        config=best.config,
        default_us=decision.default.time_us if decision.default else None,
        tuned_us=decision.winner.time_us,
        p20_us=best.p20_us,
        p80_us=best.p80_us,
        gain=decision.gain,
        no_gain=decision.kept_default,
        gbps=best.gbps,
        tflops=best.tflops,
        roofline=best.roofline,
        bound=best.bound,
        inputs=_inputs(best.workload),
        launch_us=best.launch_us,
        composed=best.composed,
        origin="records",
    )


def _table_row(table: Table, entry: Mapping[str, Any]) -> Row:
    measured = entry["measured"]
    time_us, launch_us, default_us = (measured.get(name) or 0.0 for name in ("time_us", "launch_us", "default_us"))
    losses = {name: float(loss) for name, loss in entry.get("loss", {}).items() if "=" in name}
    gain = measured.get("gain")
    if gain is None and default_us:
        gain = (default_us - launch_us) / max(time_us - launch_us, 1e-3)
    return Row(
        kernel=table.kernel,
        device=str(table.device["name"]),
        workload=entry["workload"],
        shape=format_workload(table.kernel, entry["workload"]),
        config=entry["config"],
        default_us=measured.get("default_us"),
        tuned_us=time_us,
        p20_us=measured.get("p20_us"),
        p80_us=measured.get("p80_us"),
        gain=gain,
        no_gain=gain is not None and gain <= 1.0,
        gbps=measured.get("gbps"),
        tflops=measured.get("tflops"),
        roofline=measured.get("roofline"),
        bound=measured.get("bound") or "",
        inputs=measured.get("inputs") or _inputs(entry["workload"]),
        launch_us=launch_us,
        composed=measured.get("composed") or False,
        origin="table",
        loss=losses.get(scaled_text(KEYS[table.kernel], entry["workload"])),
        losses=losses,
    )


def _with_records(row: Row, recorded: Row | None) -> Row:
    """The table's row, with what only the records of the same measurement tell."""
    if recorded is None or recorded.config != row.config:
        return row
    return replace(row, composed=row.composed or recorded.composed, no_gain=row.no_gain or recorded.no_gain)


def _unfinished(key: tuple[str, str, str], trials: list[Trial]) -> Unfinished:
    best: dict[str, float] = {}
    for trial in trials:
        if trial.stage in TRIED_STAGES and trial.outcome == "ok" and trial.time_us:
            best[trial.part] = min(trial.time_us, best.get(trial.part, math.inf))
    tried = {(trial.part, canonical(trial.config)) for trial in trials}
    return Unfinished(key[0], key[1], format_workload(key[0], trials[0].workload), len(tried), best)


def _failures(failed: list[tuple[str, Trial]]) -> tuple[Failure, ...]:
    counts: Counter[tuple[str, str, str]] = Counter()
    examples: dict[tuple[str, str, str], tuple[str, str]] = {}
    for kernel, trial in failed:
        reason = trial.reason.strip().splitlines()[0] if trial.reason.strip() else "no reason given"
        key = (kernel, trial.outcome, re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", reason.split(":")[0]))
        counts[key] += 1
        examples.setdefault(key, (reason, format_workload(kernel, trial.workload)))
    return tuple(Failure(*key, count, *examples[key]) for key, count in counts.most_common())


def _session_provenance(session: Session) -> Provenance:
    return Provenance(
        kernel=session.kernel,
        device=str(session.device.get("name", "")),
        source=session.source,
        date=session.date,
        command=session.command,
        seed=session.seed,
        sampler=session.sampler,
        versions=_pairs(session.versions),
    )


def _table_provenance(table: Table) -> Provenance:
    given = table.provenance
    return Provenance(
        kernel=table.kernel,
        device=str(table.device.get("name", "")),
        source=str(given.get("source", "live")),
        date=str(given.get("date", "")),
        command=str(given.get("command", "")),
        seed=given.get("seed"),
        sampler=str(given.get("sampler", "")),
        versions=_pairs({name: given[name] for name in ("triton", "torch", "driver", "cuda") if name in given}),
    )


def _order(row: Row) -> tuple[Any, ...]:
    sizes = tuple(float(row.workload.get(key, 0)) for key in SCALED_KEYS)
    return (row.kernel, row.device, [f"{value:>12}" for value in exact_sizes(row.workload).values()], sizes, row.shape)


def _inputs(workload: Mapping[str, Any]) -> str:
    return " ".join(str(workload[key]) for key in INPUT_KEYS if key in workload)


def _pairs(versions: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(version)) for name, version in versions.items())
