"""What is wrong with tables, found without a GPU: `kerneltune check`.

A fault is what makes an entry wrong, unusable or unreachable for a launch; a note is worth knowing and no more. A table
is judged by the device in its own header, so the answer is the same on every machine; only the kernel's source and the
compiler are those that lie here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kerneltune.errors import UserError
from kerneltune.kernels import table_files
from kerneltune.kernels.device import Device
from kerneltune.kernels.staleness import staleness
from kerneltune.kernels.table_format import KEYS, Table, TableError
from kerneltune.tables import entry_date, whole_device, why_not
from kerneltune.workloads import format_workload

COMPARED = ("torch", "driver")  # software whose change is worth a note


@dataclass(frozen=True)
class Finding:
    """One thing about a file or one of its entries."""

    path: str
    fault: bool  # otherwise a note
    entry: int | None  # its number in the file
    what: str  # one line, with what to do about it
    workload: str = ""

    def __str__(self) -> str:
        place = self.path if self.entry is None else f"{self.path}: entries[{self.entry}] {self.workload}"
        return f"{'fault' if self.fault else 'note '}  {place}: {self.what}"


def table_paths(paths: Sequence[Path]) -> tuple[list[Path], list[Finding]]:
    """The table files that are meant by files and folders, and what in the folders no lookup will ever read.

    Raises:
        UserError: a path is not there, or a folder has no tables.
    """
    found: dict[Path, Path] = {}  # by what it really is: a file named twice is read once
    findings: list[Finding] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: no such file or folder")
        if not path.is_dir():
            found.setdefault(path.resolve(), path)
            continue
        (source,) = table_files.sources([path], only=True)
        read = [Path(file) for file in source.files]
        if not read:
            raise UserError(f"{path}: no tables (*.json) there or in its folder `tables`")
        for file in read:
            found.setdefault(file.resolve(), file)
        for other in sorted(path.rglob("*.json")):
            if other not in read and _says_kernel(other):
                findings.append(
                    Finding(str(other), True, None, f"no lookup in {path} reaches it: move it into {path}/tables")
                )
    return list(found.values()), list(dict.fromkeys(findings))


def _read_together(path: Path) -> Path:
    """The folder whose lookup reads this file: the one it lies in, or the one whose `tables` that is."""
    folder = path.resolve().parent
    return folder.parent if folder.name == "tables" else folder


def check_tables(paths: Sequence[Path]) -> list[Finding]:
    """Every fault and note of these files and folders.

    Raises:
        UserError: a path is not there.
    """
    files, findings = table_paths(paths)
    first: dict[tuple[Any, ...], str] = {}  # folder, device, workload -> the place that has it
    for path in files:
        if path.suffix != ".json" or path.name.startswith("."):
            findings.append(Finding(str(path), True, None, "no lookup in its folder reaches it: name it *.json"))
        try:
            table = table_files.read_table(path)
        except (TableError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            findings.append(Finding(str(path), True, None, f"{reason}; a launch leaves it out"))
            continue
        findings += _check_table(path, table, first)
    return findings


def _check_table(path: Path, table: Table, first: dict[tuple[Any, ...], str]) -> Iterator[Finding]:
    from kerneltune.device import versions

    device = whole_device(table.device)
    if device is None:
        yield Finding(str(path), True, None, "device: fields are missing, so no config can be judged: search again")
    here = versions()
    own = table.provenance
    for name in COMPARED:
        there = own.get(name)
        if isinstance(there, str) and name in here and there != here[name]:
            yield Finding(str(path), False, None, f"measured with {name} {there:.40}, here is {here[name]}")
    dates = [entry_date(entry, entry.get("provenance", own)) for entry in table.entries] or [entry_date({}, own)]
    known = [date for date in dates if date is not None]
    if len(known) < len(dates):
        yield Finding(str(path), False, None, "provenance has no date that can be read, so its age is unknown")
    if known:
        days = max((datetime.now(UTC) - min(known)).days, 0)
        yield Finding(str(path), False, None, f"measured {days} day{'' if days == 1 else 's'} ago")
    said: set[str] = set()
    for number, entry in enumerate(table.entries):
        for fault, what in _check_entry(path, table, entry, device, number, first):
            if not fault and what in said:  # of the whole file, then
                continue
            said.add(what)
            yield Finding(str(path), fault, number, what, format_workload(table.kernel, entry["workload"]))


def _check_entry(
    path: Path,
    table: Table,
    entry: Mapping[str, Any],
    device: Device | None,
    number: int,
    first: dict[tuple[Any, ...], str],
) -> Iterator[tuple[bool, str]]:
    from kerneltune.registry import load_tunable

    tunable, workload, config = load_tunable(table.kernel), entry["workload"], entry["config"]
    key = KEYS[table.kernel]
    asked = {name: value for name, value in workload.items() if name != key.input}
    try:
        complete = tunable.complete_workload(asked)
    except ValueError as error:
        yield True, f"workload: no call ever asks for it ({error})"
        return
    if {name: complete[name] for name in asked} != asked:
        yield True, "workload: not as the kernel writes it, so no call ever asks for it"
    place = (
        _read_together(path),
        table.device["name"],
        table.device["sm_count"],
        table.kernel,
        *(workload[n] for n in key.all),
    )
    if place in first:
        yield True, f"the same workload as {first[place]}, of which a launch takes one: leave one"
    first.setdefault(place, f"{path} entries[{number}]")
    if device is not None and (reason := why_not(table.kernel, config, complete, device)):
        yield True, f"config cannot run on {device.name}: {reason}; tune it again"
    for stale in staleness(table.kernel, config, entry.get("provenance", table.provenance)):
        renew = f"kerneltune revalidate {path}"
        yield stale.kind == "source", f"{stale.kind} changed: {stale.reason}; to renew it: {renew}"
    if "kernel_hash" not in entry.get("provenance", table.provenance):
        yield False, "no kernel_hash: nothing says on which source it was measured"
    time_us, default_us = (entry.get("measured", {}).get(name) for name in ("time_us", "default_us"))
    if all(isinstance(x, int | float) for x in (time_us, default_us)) and time_us > default_us:
        yield False, f"measured slower than the default: {time_us} us, {default_us} us"


def _says_kernel(path: Path) -> bool:
    """Whether a file looks like a table of ours: other JSON in a folder is nobody's business."""
    try:
        table_files.read_table(path)
    except (TableError, OSError):
        return False
    return True
