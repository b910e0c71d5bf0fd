"""What was measured, one JSON line a trial, appended at once: the source of truth of every search.

A record file holds `session` lines (who measured: device, versions, ceilings), `trial` lines (one config on one
workload), `conditions` lines (the GPU around the trials of a workload) and `summary` lines (the end of a search). It is
only ever appended to. A line cut off by a crash is dropped by the reader and removed by the next writer; fields and
kinds of line that this version does not know are skipped.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kerneltune.errors import UserError

SCHEMA = 1
MOST = 1e12  # no figure of a trial is larger, whatever its unit
OUTCOMES = ("ok", "infeasible", "compile_error", "wrong", "nondeterministic", "crashed", "timed_out", "suspect")


class RecordsInUse(UserError):
    """Another process is writing these records."""


class Session(msgspec.Struct, tag="session", tag_field="kind", frozen=True, kw_only=True):
    """Who measured the trials that name this session, with what, and when."""

    id: str
    kernel: str
    device: dict[str, Any]  # kernels.device.Device.to_dict()
    source: str  # "live", or "replay:<id of the recording set>"
    kernel_hash: dict[str, str]  # of the source, by variant
    versions: dict[str, str]  # triton, torch, driver, cuda, python, kerneltune
    ceilings: dict[str, Any]  # roofline.model.Ceilings as a dict
    seed: int
    sampler: str
    command: str
    date: str  # ISO 8601, UTC
    schema: int = SCHEMA


class Trial(msgspec.Struct, tag="trial", tag_field="kind", frozen=True, kw_only=True, omit_defaults=True):
    """One config tried on one workload. Times are medians in microseconds as read, launch_us included."""

    session: str
    workload: dict[str, Any]
    part: str  # "" : the whole operation with a whole config
    config: dict[str, Any]  # parameters of the part, or the whole config
    stage: str  # "search", "polish", "final", "matrix", "record"
    index: int  # position in its study, counted from 0
    outcome: str  # one of OUTCOMES
    reason: str = ""
    time_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    samples: int = 0
    freaks: int = 0  # samples far from the rest (measure.conditions.freaks)
    launch_us: float = 0.0  # what an empty graph costs; net time is time_us - launch_us
    flops: int = 0
    bytes: int = 0
    gbps: float | None = None
    tflops: float | None = None
    intensity: float | None = None  # FLOP per byte
    bound: str = ""  # "memory" or "compute"
    roofline: float | None = None  # fraction of the binding ceiling reached, net of launch_us
    error: float | None = None  # worst relative error against the reference
    registers: int | None = None
    spills: int | None = None  # bytes of local memory
    shared_bytes: int | None = None
    compile_s: float = 0.0
    gate_s: float = 0.0
    timing_s: float = 0.0
    composed: bool = False  # replay only: the sum of the parts' recorded times, not one measurement
    date: str = ""


class Conditions(msgspec.Struct, tag="conditions", tag_field="kind", frozen=True, kw_only=True):
    """The GPU before and after the trials of one workload (`measure.conditions.Snapshot`), and what is doubtful."""

    session: str
    workload: dict[str, Any]
    before: dict[str, Any]
    after: dict[str, Any]
    freaks: int  # readings far from the rest, of so many samples
    samples: int
    warnings: list[str]
    date: str


class Summary(msgspec.Struct, tag="summary", tag_field="kind", frozen=True, kw_only=True):
    """The end of a search that measured."""

    session: str
    seconds: dict[str, float]  # by tuning.seconds.KINDS; together the wall clock's
    measured: int
    date: str


Line = Session | Trial
Note = Conditions | Summary
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Line)
_note_decoder = msgspec.json.Decoder(Note)


def read_lines(path: Path) -> Iterator[Line]:
    """Yield every whole line that this version understands; a cut-off, damaged, unknown or senseless one is skipped."""
    with path.open("rb") as file:
        for text in file:
            try:
                line = _decoder.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            if isinstance(line, Session) or is_sound(line):
                yield line


def read_notes(folder: Path) -> list[Note]:
    """The lines of `folder/records/*.jsonl` that are about trials rather than one: conditions and summaries."""
    notes: list[Note] = []
    for path in sorted((folder / "records").glob("*.jsonl")):
        with path.open("rb") as file:
            for text in file:
                with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    notes.append(_note_decoder.decode(text))
    return notes


def is_sound(trial: Trial) -> bool:
    """Whether a trial's values can be what a measurement gives: scalars, and finite figures above zero."""
    if not all(isinstance(value, bool | int | float | str) for value in trial.workload.values()):
        return False
    figures = (trial.time_us, trial.p20_us, trial.p80_us, trial.gbps, trial.tflops, trial.intensity, trial.roofline)
    known = [figure for figure in figures if figure is not None]
    if trial.outcome == "ok" and trial.time_us is None:
        return False
    return all(0 < figure < MOST for figure in known) and 0 <= trial.launch_us < MOST


def read_folder(folder: Path) -> tuple[dict[str, Session], list[Trial]]:
    """All sessions (by id) and trials of `folder/records/*.jsonl`, in file order."""
    sessions: dict[str, Session] = {}
    trials: list[Trial] = []
    for path in sorted((folder / "records").glob("*.jsonl")):
        for line in read_lines(path):
            if isinstance(line, Session):
                sessions[line.id] = line
            else:
                trials.append(line)
    return sessions, trials


class RecordWriter:
    """Appends lines to one record file, each flushed to the disk before `append` returns; one writer at a time."""

    def __init__(self, path: Path) -> None:
        """Open for appending; removes a cut-off last line first.

        Raises:
            RecordsInUse: another process holds the file's lock.
            OSError: the folder cannot be written.
        """
        from filelock import FileLock, Timeout

        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: not a regular file, so records cannot be kept there; choose another --out")
        self.path = path
        self._lock = FileLock(f"{path}.lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise RecordsInUse(
                f"{path} is being written by another kerneltune; wait for it or choose another --out"
            ) from None
        _remove_cut_tail(path)
        self._file = path.open("ab", buffering=0)  # a buffer would keep a line that failed and write it later

    def append(self, line: Line | Note) -> None:
        """Write one line whole, or leave the file as it was and raise OSError (a full disk, say)."""
        data = _encoder.encode(line) + b"\n"
        start = self.path.stat().st_size
        try:
            written = self._file.write(data)
            if written != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())
        except OSError as error:
            os.truncate(self.path, start)
            raise OSError(error.errno, f"{error.strerror}; what was recorded before is kept", str(self.path)) from error

    def close(self) -> None:
        """Close the file and give the lock back."""
        self._file.close()
        self._lock.release()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _remove_cut_tail(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            file.truncate(whole)
