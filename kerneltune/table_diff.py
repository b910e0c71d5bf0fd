"""What differs between two tables, and merging several: entry by entry, by workload and input class."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kerneltune.errors import UserError
from kerneltune.kernels import tables as launch_tables
from kerneltune.kernels.table_format import Table
from kerneltune.tables import (
    as_dict,
    encode,
    entry_date,
    load_table,
    locked,
    make_table,
    merge_tables,
    origin,
    replace_file,
    table_file_name,
)

PREFER = ("newest", "first", "fastest")
Key = tuple[Any, ...]  # kernel, device name, SM count, the workload's values


@dataclass(frozen=True)
class Difference:
    """One entry or one field of the header that is not the same on both sides."""

    kind: str  # "only a", "only b", "config", "measured", "loss", "origin" (software or date), "header"
    kernel: str
    workload: dict[str, Any]  # {}: the header
    what: str  # one line
    a: Any = None
    b: Any = None


def keyed(tables: Sequence[Table]) -> dict[Key, tuple[Table, Mapping[str, Any]]]:
    """Every entry by what it is for; of the same workload twice the first."""
    found: dict[Key, tuple[Table, Mapping[str, Any]]] = {}
    for table in tables:
        for entry in table.entries:
            found.setdefault(entry_key(table, entry), (table, entry))
    return found


def entry_key(table: Table, entry: Mapping[str, Any]) -> Key:
    """What an entry is for: kernel, device and the whole workload, the input class included."""
    return table.kernel, table.device["name"], table.device["sm_count"], *sorted(entry["workload"].items())


def diff(a: Sequence[Table], b: Sequence[Table]) -> list[Difference]:
    """Differences in the order of `a`, then what only `b` has."""
    found = _headers(a, b)
    left, right = keyed(a), keyed(b)
    for key, (table, entry) in left.items():
        workload = dict(entry["workload"])
        if key not in right:
            found.append(Difference("only a", table.kernel, workload, _time_text(entry), entry))
            continue
        other = right[key][1]
        if entry["config"] != other["config"]:
            times = f"{_time_text(entry)} -> {_time_text(other)}"
            what = f"{', '.join(_changes(entry['config'], other['config']))} ({times})"
            found.append(Difference("config", table.kernel, workload, what, entry, other))
        elif entry.get("measured") != other.get("measured"):
            what = f"{_time_text(entry)} -> {_time_text(other)}, the same config"
            found.append(Difference("measured", table.kernel, workload, what, entry, other))
        elif changes := _changes(entry.get("loss", {}), other.get("loss", {})):
            found.append(Difference("loss", table.kernel, workload, ", ".join(changes), entry, other))
        elif changes := _changes(_origin(table, entry), _origin(right[key][0], other)):
            found.append(Difference("origin", table.kernel, workload, ", ".join(changes), entry, other))
    for key, (table, entry) in right.items():
        if key not in left:
            found.append(Difference("only b", table.kernel, dict(entry["workload"]), _time_text(entry), None, entry))
    return found


@dataclass(frozen=True)
class Conflict:
    """A workload that several tables have, and whose entry was taken."""

    kernel: str
    workload: dict[str, Any]
    taken: str  # path
    left: str


def same_device(tables: Sequence[Table]) -> None:
    """Raise UserError unless the tables may share a file: one kernel, one device."""
    one = tables[0]
    for table in tables[1:]:
        for what, mine, other in (
            ("kernel", one.kernel, table.kernel),
            *((f"device.{n}", one.device[n], table.device[n]) for n in ("name", "sm_count")),
        ):
            if mine != other:
                raise UserError(f"{table.path}: {what} is {other}, not {mine} as in {one.path}: merge them apart")


def merge_into(to: Path, sources: Sequence[Table], prefer: str) -> tuple[dict[Path, int], list[Conflict]]:
    """Put tables together into the file `to`, or into a file for each kernel, dtype and device in the folder `to`.

    What is there already counts as the first source. Every file is locked from reading it to writing it, so what
    another process writes meanwhile is neither lost nor overruled, and all are checked before any is written.

    Returns:
        the number of entries by file, and the conflicts.

    Raises:
        UserError: tables of different kernels or devices for one file, a file there that is no sound table, or a
            result too large to be read.
    """
    groups = _groups(to, sources)
    for mine in groups.values():
        same_device(mine)
    conflicts: list[Conflict] = []
    whole: dict[Path, dict[str, Any]] = {}
    with contextlib.ExitStack() as held:
        for path in sorted(groups):  # in one order, so that two merges do not wait for each other
            held.enter_context(locked(path))
        for path, mine in groups.items():
            present = [load_table(path)] if path.exists() else []
            entries, found = merged([*present, *mine], prefer)
            whole[path] = _composed(path, present, entries)
            conflicts += found
        encoded = {path: encode(table, path) for path, table in whole.items()}
        for path, data in encoded.items():
            replace_file(path, data)
    launch_tables.forget()
    return {path: len(table["entries"]) for path, table in whole.items()}, conflicts


def _groups(to: Path, sources: Sequence[Table]) -> dict[Path, list[Table]]:
    """What goes into each file: whole tables into `to` itself, in a folder the entries of a file's dtype."""
    groups: dict[Path, list[Table]] = {}
    for table in sources:
        if to.suffix == ".json":
            groups.setdefault(to, []).append(table)
            continue
        for dtype in sorted({entry["workload"]["dtype"] for entry in table.entries}):
            path = to / table_file_name(table.kernel, dtype, table.device["name"])
            mine = [entry for entry in table.entries if entry["workload"]["dtype"] == dtype]
            groups.setdefault(path, []).append(dataclasses.replace(table, entries=mine))
    return groups


def _composed(path: Path, present: Sequence[Table], entries: Sequence[tuple[Table, dict[str, Any]]]) -> dict[str, Any]:
    """One table of the chosen entries over what is there; its header is the last contributor's."""
    whole = as_dict(present[0]) if present else None
    for table in {id(table): table for table, _ in entries}.values():
        mine = [entry for source, entry in entries if source is table]
        whole = merge_tables(whole, make_table(table.kernel, table.device, table.provenance, mine), path)
    assert whole is not None  # there are entries, or a table there
    return whole


def merged(tables: Sequence[Table], prefer: str) -> tuple[list[tuple[Table, dict[str, Any]]], list[Conflict]]:
    """One entry for each workload, with the table it comes from and its provenance filled in, and the conflicts.

    Args:
        prefer: "newest" by each entry's date, "first" in the order given, or "fastest" as measured.

    Raises:
        UserError: tables of different kernels or devices.
    """
    same_device(tables)
    chosen: dict[Key, tuple[Table, dict[str, Any]]] = {}
    conflicts: list[Conflict] = []
    for table in tables:
        for entry in table.entries:
            mine = {**entry, "provenance": entry.get("provenance", table.provenance)}
            key = entry_key(table, entry)
            if key not in chosen:
                chosen[key] = table, mine
                continue
            other, theirs = chosen[key]
            if _same_measurement(mine, theirs):
                loss = _united(theirs.get("loss", {}), mine.get("loss", {}))
                chosen[key] = other, {**theirs, "loss": loss}
                if loss != _united(mine.get("loss", {}), theirs.get("loss", {})):  # one key, two losses
                    conflicts.append(Conflict(table.kernel, dict(entry["workload"]), other.path, table.path))
                continue
            takes_mine = _better(mine, theirs, prefer)
            if takes_mine:
                chosen[key] = table, mine
            taken, left = (table, other) if takes_mine else (other, table)
            conflicts.append(Conflict(table.kernel, dict(entry["workload"]), taken.path, left.path))
    return list(chosen.values()), conflicts


def _better(mine: Mapping[str, Any], theirs: Mapping[str, Any], prefer: str) -> bool:
    if prefer == "newest":
        own, other = (entry_date(entry, entry["provenance"]) for entry in (mine, theirs))
        return own is not None and (other is None or own > other)
    if prefer == "fastest":
        return _time_us(mine) < _time_us(theirs)
    return False


def _headers(a: Sequence[Table], b: Sequence[Table]) -> list[Difference]:
    def of(table: Table) -> tuple[Any, ...]:
        return table.kernel, table.device["name"], table.device["sm_count"], _dtypes(table)

    right = {of(table): table for table in b}
    found = []
    for table in a:
        other = right.get(of(table))
        if other is None:
            continue
        pairs = [
            (f"device.{n}", table.device.get(n), other.device.get(n)) for n in dict(table.device) | dict(other.device)
        ]
        pairs += _shared_changes(table, other)
        found += [
            Difference("header", table.kernel, {}, f"{name}: {mine} -> {theirs}", mine, theirs)
            for name, mine, theirs in pairs
            if mine != theirs
        ]
    return found


def _shared_changes(a: Table, b: Table) -> list[tuple[str, Any, Any]]:
    """The fields of the provenance that changed alike for every entry of both: (name, a's, b's)."""
    left, right = ({entry_key(table, each): each for each in table.entries} for table in (a, b))
    pairs = [(_origin(a, left[key]), _origin(b, right[key])) for key in left if key in right]
    if not pairs:
        pairs = [(dict(a.provenance), dict(b.provenance))] if not left and not right else []
    names = dict.fromkeys(name for pair in pairs for each in pair for name in each)
    changes = {name: [(mine.get(name), other.get(name)) for mine, other in pairs] for name in names}
    return [(f"provenance.{name}", *found[0]) for name, found in changes.items() if found.count(found[0]) == len(found)]


def _origin(table: Table, entry: Mapping[str, Any]) -> dict[str, Any]:
    return origin(entry, entry.get("provenance", table.provenance))


def _same_measurement(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether two entries with their provenance filled in are one measurement, by all that a write keeps of them."""
    same = all(mine.get(name) == theirs.get(name) for name in ("config", "measured"))
    return same and origin(mine, mine["provenance"]) == origin(theirs, theirs["provenance"])


def _united(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Losses measured with one config, put together; of a key in both the first one's."""
    inputs = {**second.get("inputs", {}), **first.get("inputs", {})}
    return {**second, **first} | ({"inputs": inputs} if inputs else {})


def _dtypes(table: Table) -> tuple[str, ...]:
    return tuple(sorted({entry["workload"]["dtype"] for entry in table.entries}))


def _changes(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name in dict(a) | dict(b):
        mine, other = a.get(name), b.get(name)
        if isinstance(mine, Mapping) and isinstance(other, Mapping):
            found += _changes(mine, other, f"{prefix}{name}.")
        elif mine != other:
            found.append(f"{prefix}{name} {mine} -> {other}")
    return found


def _time_us(entry: Mapping[str, Any]) -> float:
    time_us = entry.get("measured", {}).get("time_us")
    return time_us if isinstance(time_us, int | float) and not isinstance(time_us, bool) else float("inf")


def _time_text(entry: Mapping[str, Any]) -> str:
    time_us = _time_us(entry)
    return "not measured" if time_us == float("inf") else f"{time_us:g} us"
