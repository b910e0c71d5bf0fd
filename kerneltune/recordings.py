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
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kerneltune.errors import UserError
from kerneltune.records import MOST, Trial, is_sound

SCHEMA = 1
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
    kernel_hash: str
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

    try:
        table = pq.read_table(path)
        metadata = table.schema.metadata or {}
        header = json.loads(metadata[b"kerneltune"])
        names = json.loads(metadata[b"parameters"])
        rows = table.to_pylist()
        if header["schema"] != SCHEMA:
            raise UserError(f"{path}: recording of schema {header['schema']}, this version reads {SCHEMA}")
        header["parts"], header["shared"] = tuple(header["parts"]), tuple(header["shared"])
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
            if row.get("rounds", 1) > 1
        }
        estimates = {
            point_key(t.part, t.config): row["estimate_us"]
            for t, row in zip(trials, rows, strict=True)
            if row.get("estimate_us") is not None
        }
        recording = Recording(**header, trials=trials, rounds=rounds, estimates_us=estimates)
        _check(recording)
        return recording
    except UserError:
        raise
    except Exception as error:  # a file from outside: whatever reading it can raise
        raise UserError(f"{path}: not a kerneltune recording ({type(error).__name__}: {error})") from error


def _figures(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] if name in row else _OPTIONAL.get(name) for name in _FIGURES}


def _check(recording: Recording) -> None:
    """Raise ValueError where a recording could not be replayed."""
    from kerneltune.device import slug
    from kerneltune.kernels.device import Device
    from kerneltune.kernels.table_format import KEYS
    from kerneltune.roofline.model import Ceilings

    device, ceilings = Device(**recording.device), Ceilings.from_dict(recording.ceilings)
    costs = [int(recording.whole["flops"]), int(recording.whole["bytes"])]
    costs += [cost for trial in recording.trials for cost in (trial.flops, trial.bytes)]
    rates = [ceilings.dram_read_gbps, ceilings.tflops[str(recording.whole["compute"])], *costs]
    texts = (device.name, recording.kernel, *recording.parts, *recording.shared, recording.kernel_hash)
    if not all(isinstance(text, str) and text for text in texts) or not recording.parts:
        raise ValueError("a name is missing")
    keys = KEYS.get(recording.kernel)
    if keys is not None and set(recording.workload) != set(keys.all):
        raise ValueError(f"the workload's keys are not those of {recording.kernel}")
    scaled = keys.scaled if keys is not None else ()
    for name, value in recording.workload.items():
        whole = isinstance(value, int) and value >= 0
        if (name in scaled and not (whole and value)) or not (whole or (isinstance(value, str) and slug(value))):
            raise ValueError(f"workload.{name}: {value!r}")
    if not slug(device.name):
        raise ValueError("the device has no name")
    if not all(0 < rate < MOST**2 for rate in rates) or not 0 <= recording.launch_us < MOST:
        raise ValueError("a ceiling or a cost is not above zero")
    if not all(is_sound(trial) for trial in recording.trials):
        raise ValueError("a time is not above zero")
    points = {point_key(t.part, t.config) for t in recording.trials}
    for part in recording.parts:
        default = recording.default_config if len(recording.parts) == 1 else recording.default_config[part]
        if point_key(part, default) not in points:
            raise ValueError(f"the default config of {part} was not recorded")
    if recording.estimates_us and not (
        len(recording.estimates_us) == len(points) and all(0 < each < MOST for each in recording.estimates_us.values())
    ):
        raise ValueError("estimate_us is not above zero for each point")
    if not isinstance(recording.versions, dict) or not isinstance(recording.rest_us, dict):
        raise ValueError("versions and rest_us must be mappings")


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
