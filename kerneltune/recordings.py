"""A brute-forced space: every feasible config of one workload as it was measured, in one Parquet file.

docs/recordings.md describes the format. Columns: `part`, one column a parameter (null where the part does not have it),
then outcome, reason, time_us, p20_us, p80_us, samples, flops, bytes, error, registers, spills, shared_bytes, compile_s,
gate_s, timing_s, rounds (3: a point near the optimum, re-timed interleaved), estimate_us. What holds for the whole file
(workload, device, ceilings, the space's TOML, the kernel's hash, versions, date, command) is JSON under the key
`kerneltune` of the file's metadata.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kerneltune.errors import UserError
from kerneltune.records import Trial

SCHEMA = 1
MOST_POINTS = 1_000_000  # as many combinations as a space may have; a small file can claim billions
MEASURED = ("outcome", "reason", "time_us", "p20_us", "p80_us", "samples", "error")
RESOURCES = ("registers", "spills", "shared_bytes", "compile_s", "gate_s", "timing_s")
_FIGURES = (*MEASURED, "flops", "bytes", *RESOURCES)
BY_POINT = ("trials", "rounds", "estimates_us")  # columns; what else a recording has is metadata
_OPTIONAL: dict[str, Any] = {
    "reason": "",
    "samples": 1,
    "compile_s": 0.0,
    "gate_s": 0.0,
    "timing_s": 0.0,
}  # columns that may be
_DIGITS = {"time_us": 3, "p20_us": 3, "p80_us": 3, "compile_s": 3, "gate_s": 4, "timing_s": 4}


@dataclass(frozen=True)
class Recording:
    """One workload's whole space, measured."""

    kernel: str
    workload: dict[str, Any]
    parts: tuple[str, ...]
    shared: tuple[str, ...]  # parameters equal in all parts of a config
    device: dict[str, Any]
    ceilings: dict[str, Any]
    default_config: dict[str, Any]
    whole: dict[str, int | str]  # flops, bytes, compute of the whole operation
    rest_us: dict[str, float]  # what the operation takes beside its parts, by the values of the shared parameters
    launch_us: float
    space: str  # the TOML it was enumerated from
    kernel_hash: dict[str, str]  # of the source, by variant
    versions: dict[str, str]
    date: str
    command: str
    trials: tuple[Trial, ...]
    rounds: dict[str, int] = field(default_factory=dict)  # times each point near the optimum was timed, by point key
    estimates_us: dict[str, float] = field(default_factory=dict)  # by point key; {}: the kernel's own estimate
    schema: int = SCHEMA

    @property
    def id(self) -> str:
        """Eight hex digits that change with any figure of the recording."""
        text = json.dumps([self.kernel, self.workload, self.date, [t.time_us for t in self.trials]], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def rest(self, shared_values: Sequence[Any]) -> float | None:
        """Microseconds beside the parts under these values of the shared parameters; None: no whole config ran there.

        An empty `rest_us` says nothing of several parts: then the parts are all there is.
        """
        return self.rest_us.get(canonical(list(shared_values))) if self.rest_us else 0.0


def canonical(mapping: Any) -> str:
    """One text for equal mappings, whatever their order: the key of workloads, configs and points."""
    return json.dumps(mapping, sort_keys=True, separators=(",", ":"))


def point_key(part: str, params: Any) -> str:
    """The key of one point of a recording."""
    return f"{part} {canonical(params)}"


def write_recording(path: Path, recording: Recording) -> None:
    """Write whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    header = {name: getattr(recording, name) for name in Recording.__dataclass_fields__ if name not in BY_POINT}
    names = list(dict.fromkeys(name for trial in recording.trials for name in trial.config))
    columns: dict[str, list[Any]] = {"part": [t.part for t in recording.trials]}
    for name in names:
        columns[name] = [t.config.get(name) for t in recording.trials]
    for name in _FIGURES:
        digits = _DIGITS.get(name)
        values = [getattr(t, name) for t in recording.trials]
        columns[name] = [round(v, digits) if digits and v is not None else v for v in values]
    if recording.estimates_us:
        columns["estimate_us"] = [recording.estimates_us[point_key(t.part, t.config)] for t in recording.trials]
    columns["rounds"] = [recording.rounds.get(point_key(t.part, t.config), 1) for t in recording.trials]
    table = pa.table(columns).replace_schema_metadata(
        {"kerneltune": json.dumps(header), "parameters": json.dumps(names)}
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    pq.write_table(table, temporary, compression="zstd")
    temporary.replace(path)


def read_recording(path: Path) -> Recording:
    """Read one file.

    Raises:
        UserError: it cannot be read, or is no recording.
    """
    import pyarrow.parquet as pq

    from kerneltune.recording_checks import check

    try:
        if not path.is_file():
            raise ValueError("not a regular file")
        with pq.ParquetFile(path) as file:
            if file.metadata.num_rows > MOST_POINTS:
                raise ValueError(f"{file.metadata.num_rows} rows, expected at most {MOST_POINTS}")
            table = file.read()
        metadata = table.schema.metadata or {}
        header = json.loads(metadata[b"kerneltune"])
        names = json.loads(metadata[b"parameters"])
        rows = table.to_pylist()
        if header["schema"] != SCHEMA:
            raise UserError(f"{path}: recording of schema {header['schema']}, this version reads {SCHEMA}")
        header["parts"], header["shared"] = (tuple(_texts(header, name)) for name in ("parts", "shared"))
        trials = tuple(
            Trial(
                session=path.stem,
                workload=header["workload"],
                part=row["part"],
                config={name: row[name] for name in names if row[name] is not None},
                stage="record",
                index=index,
                launch_us=header["launch_us"],
                **_figures(row),
            )
            for index, row in enumerate(rows)
        )
        rounds = {
            point_key(t.part, t.config): row["rounds"]
            for t, row in zip(trials, rows, strict=True)
            if (row.get("rounds") or 1) > 1
        }
        estimates = {
            point_key(t.part, t.config): row["estimate_us"]
            for t, row in zip(trials, rows, strict=True)
            if row.get("estimate_us") is not None
        }
        recording = Recording(**header, trials=trials, rounds=rounds, estimates_us=estimates)
        check(recording, names)
        return recording
    except UserError:
        raise
    except Exception as error:  # a file from outside: whatever reading it can raise
        raise UserError(f"{path}: not a kerneltune recording ({type(error).__name__}: {error})") from error


def _texts(header: dict[str, Any], name: str) -> list[str]:
    if not isinstance(header[name], list) or not all(isinstance(text, str) for text in header[name]):
        raise ValueError(f"{name}: expected a list of names")
    return header[name]


def _figures(row: dict[str, Any]) -> dict[str, Any]:
    """Columns that may be missing, and cells of them that are null, get what `_OPTIONAL` says."""
    return {name: row.get(name) if row.get(name) is not None else _OPTIONAL.get(name) for name in _FIGURES}


def find_recordings(paths: Iterable[Path], kernel: str | None = None) -> list[Recording]:
    """Recordings (of one kernel) among files and folders (searched below), in the order of their names.

    Raises:
        UserError: one of them does not exist or is no recording.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(path.rglob("*.parquet"))
        elif path.exists():
            files.append(path)
        else:
            raise UserError(f"{path}: no such recording file or folder")
    return [recording for recording in map(read_recording, files) if kernel in (None, recording.kernel)]
