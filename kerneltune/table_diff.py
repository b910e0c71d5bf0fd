"""What differs between two tables, and merging several: entry by entry, by workload and input class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kerneltune.errors import UserError
from kerneltune.kernels.table_format import Table
from kerneltune.tables import entry_date

PREFER = ("newest", "first", "fastest")
HEADER = ("triton", "torch", "driver", "cuda", "kernel_hash", "date")  # of the provenance, the fields worth comparing

Key = tuple[Any, ...]  # kernel, device name, SM count, the workload's values


@dataclass(frozen=True)
class Difference:
    """One entry or one field of the header that is not the same on both sides."""

    kind: str  # "only a", "only b", "config", "measured", "header"
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
    for key, (table, entry) in right.items():
        if key not in left:
            found.append(Difference("only b", table.kernel, dict(entry["workload"]), _time_text(entry), None, entry))
    return found


@dataclass(frozen=True)
class Conflict:
    """A workload that several tables have, and whose entry was taken."""

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
            if {n: v for n, v in mine.items() if n != "loss"} == {n: v for n, v in theirs.items() if n != "loss"}:
                continue
            takes_mine = _better(mine, theirs, prefer)
            if takes_mine:
                chosen[key] = table, mine
            taken, left = (table, other) if takes_mine else (other, table)
            conflicts.append(Conflict(dict(entry["workload"]), taken.path, left.path))
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
        pairs += [(f"provenance.{n}", table.provenance.get(n), other.provenance.get(n)) for n in HEADER]
        found += [
            Difference("header", table.kernel, {}, f"{name}: {mine} -> {theirs}", mine, theirs)
            for name, mine, theirs in pairs
            if mine != theirs
        ]
    return found


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
