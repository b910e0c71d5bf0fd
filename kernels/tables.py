"""Which tuned config serves a workload on this GPU: a lookup in JSON files, with the standard library alone.

`resolve` is what an op calls before the first launch of a shape. It uses only numbers that the host knows, never raises
because of a file, and answers None (the op's default config) when no table fits. The first source (table_files.py)
with an entry inside the bound wins. Tables of this very device come first, in all sources; then those of its relatives
(device.relation).

An entry fits when every exact key is equal, each scaled key is within a factor of BOUND, and it is not stale under a
strict policy (staleness.py). What is used although it is not made for this very device, compiler and source is said
once, and so is what is left out for it.

Limits: an op asks once for each shape, so a file that changes later serves the shapes that come later; `forget` makes
this process ask anew.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kerneltune.kernels.device import Device, relation
from kerneltune.kernels.staleness import Stale, policies, staleness
from kerneltune.kernels.table_files import Source, read_table, sources
from kerneltune.kernels.table_format import KEYS, Keys, Table, TableError, table_workload

BOUND = 2.0  # the largest ratio of a scaled key to an entry's


@dataclass(frozen=True)
class Match:
    """The entry that serves a workload."""

    config: dict[str, Any]
    entry: Mapping[str, Any]
    path: str
    source: str
    distance: float  # summed |log2| over the scaled keys
    exact: bool  # the very workload, and the input class if one was asked for
    relation: str = ""  # why a table of another device serves; "": it is of this device
    stale: tuple[Stale, ...] = ()  # in what it is out of date, yet used


@dataclass(frozen=True)
class LeftOut:
    """An entry that fits but is stale under a strict policy."""

    entry: Mapping[str, Any]
    path: str
    stale: tuple[Stale, ...]


@dataclass(frozen=True)
class Answer:
    """What a lookup found."""

    match: Match | None
    left_out: tuple[LeftOut, ...]


def resolve(
    kernel: str, workload: Mapping[str, Any], device: Device, explicit: str | os.PathLike[str] | None = None
) -> dict[str, Any] | None:
    """The tuned config for a launch, or None: use the default. What is special about the answer is warned of once.

    The caller checks that the config is valid for its very workload.

    Args:
        workload: the workload keys that the host knows; the input class (`lengths`, `routing`) may be left out.
        explicit: a file or folder searched before all others.
    """
    answer = search(kernel, workload, device, tables=None if explicit is None else [explicit])
    match = answer.match
    if match is None:
        _say_untuned(kernel, workload, device, answer.left_out)
        return None
    _say_special(kernel, workload, device, match)
    return {name: dict(value) if isinstance(value, dict) else value for name, value in match.config.items()}


def find(
    kernel: str,
    workload: Mapping[str, Any],
    device: Device,
    *,
    tables: Sequence[str | os.PathLike[str]] | None = None,
    only: bool = False,
) -> Match | None:
    """The best entry of the first source that has one inside the bound; arguments as of `search`."""
    return search(kernel, workload, device, tables=tables, only=only).match


def search(
    kernel: str,
    workload: Mapping[str, Any],
    device: Device,
    *,
    tables: Sequence[str | os.PathLike[str]] | None = None,
    only: bool = False,
) -> Answer:
    """The best entry of the first source that has one inside the bound, and what was left out before it as stale.

    Args:
        tables: files or folders searched first; with `only`, nothing else is searched.
    """
    if kernel not in KEYS:
        return Answer(None, ())
    workload = table_workload(kernel, workload)
    ruling, fault = policies()
    if fault:
        _warn_once(("policy", fault), f"{fault}; the usual one holds")
    places = list(sources(tables, only=only))
    left_out: list[LeftOut] = []
    for of_relatives in (False, True):
        for source in places:
            match = _best(kernel, workload, device, source, of_relatives, ruling, left_out)
            if match is not None:
                return Answer(match, tuple(left_out))
    return Answer(None, tuple(left_out))


def shape_text(kernel: str, workload: Mapping[str, Any]) -> str:
    """The workload as `--workload` takes it, scaled keys first, without the input class."""
    keys = KEYS.get(kernel)
    names = [name for name in (*keys.scaled, *keys.exact) if name in workload] if keys else list(workload)
    words = {
        name: str(workload[name]).lower() if isinstance(workload[name], bool) else workload[name] for name in names
    }
    return ",".join(f"{name}={word}" for name, word in words.items())


def forget() -> None:
    """Make every op of this process choose anew at its next call, so that it sees files written a moment ago."""
    for clear in _chosen:
        clear()


def say_anew() -> None:
    """Let warnings that were given once be given once more."""
    _said.clear()


def on_forget(clear: Callable[[], None]) -> None:
    """Register what drops the choices that an op remembers."""
    _chosen.append(clear)


def scaled_distance(keys: Keys, entry: Mapping[str, Any], workload: Mapping[str, Any]) -> float | None:
    """Summed |log2| of the ratios of the scaled keys; None when one of them is beyond BOUND."""
    total = 0.0
    for name in keys.scaled:
        ratio = entry[name] / max(workload.get(name, 0), 1)
        if not 1 / BOUND <= ratio <= BOUND:
            return None
        total += abs(math.log2(ratio))
    return total


_chosen: list[Callable[[], None]] = []
_said: set[Any] = set()


def _best(
    kernel: str,
    workload: Mapping[str, Any],
    device: Device,
    source: Source,
    of_relatives: bool,
    ruling: Mapping[str, str],
    left_out: list[LeftOut],
) -> Match | None:
    """The best entry of one source, among tables of this device or of its relatives; stale ones join `left_out`."""
    keys = KEYS[kernel]
    exact = tuple(workload.get(name) for name in keys.exact)
    fitting: list[tuple[float, Mapping[str, Any], str, str, tuple[Stale, ...]]] = []
    classes: dict[float, set[str]] = {}  # input classes that have an entry, by distance
    for path in source.files:
        table = _readable(path, source)
        why = None if table is None else _relation(table, kernel, device, path, source)
        if table is None or why is None or bool(why) != of_relatives:
            continue
        for entry in table.by_exact.get(exact, ()):
            distance = scaled_distance(keys, entry["workload"], workload)
            if distance is None:
                continue
            stale = staleness(kernel, entry["config"], entry.get("provenance", table.provenance))
            if any(ruling[each.kind] == "strict" for each in stale):
                left_out.append(LeftOut(entry, path, stale))
                continue
            fitting.append((distance, entry, path, why, stale))
            classes.setdefault(distance, set()).add(entry["workload"][keys.input])
    if not fitting:
        return None
    distance, entry, path, why, stale = min(fitting, key=lambda each: _rank(keys, each[1], workload, each[0], classes))
    same = workload.get(keys.input) in (None, entry["workload"][keys.input])
    return Match(entry["config"], entry, path, source.name, distance, distance == 0 and same, why, stale)


def _rank(
    keys: Keys,
    entry: Mapping[str, Any],
    workload: Mapping[str, Any],
    distance: float,
    classes: Mapping[float, set[str]],
) -> tuple[Any, ...]:
    """Smaller is better; equal ranks fall to the entry that comes first.

    Asked for an input class, entries tuned on it come before nearer ones of another. Not asked, the nearest shape
    wins, then the smallest worst loss over all classes that have an entry there (unknown for one: the worst there
    is), then the usual class.
    """
    entry_class = entry["workload"][keys.input]
    asked = workload.get(keys.input)
    if asked is not None:
        return entry_class != asked, distance, entry_class != keys.usual_input
    losses = entry.get("loss", {}).get("inputs", {})
    worst = max([losses.get(name, math.inf) for name in classes[distance]] + list(losses.values()))
    return distance, worst, entry_class != keys.usual_input


def _readable(path: str, source: Source) -> Table | None:
    """The table in this file if it is sound; otherwise None, said once."""
    try:
        return read_table(path)
    except FileNotFoundError:
        if path in source.named:
            _warn_once(("file", path), f"no table there: {path} ({source.name})")
    except (TableError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        _warn_once(("file", path, str(reason)), f"table left out: {path}: {reason}")
    return None


def _relation(table: Table, kernel: str, device: Device, path: str, source: Source) -> str | None:
    """`device.relation` for a table of this kernel, else None; of a file that the user named it is said why."""
    if table.kernel != kernel:
        if source.name == "argument" and path in source.named:
            message = f"table left out: {path}: kernel is {table.kernel}, not {kernel}"
            _warn_once(("differs", path, kernel), message)
        return None
    why = relation(table.device, device)
    if why is None and path in source.named:
        there, count = table.device["name"], table.device["sm_count"]
        differs = f"device is {there} with {count} SMs, not {device.name} with {device.sm_count}"
        _warn_once(("differs", path, differs), f"table left out: {path}: {differs}")
    return why


def _say_untuned(kernel: str, workload: Mapping[str, Any], device: Device, left_out: Sequence[LeftOut]) -> None:
    exact = tuple(workload.get(name) for name in (KEYS[kernel].exact if kernel in KEYS else ()))
    shape = shape_text(kernel, workload)
    if left_out:
        first = left_out[0]
        why = "; ".join(each.reason for each in first.stale)
        message = (
            f"{kernel}: the tuned config for {shape.replace(',', ' ')} is stale ({why}); the default is used "
            f"(to renew it: kerneltune revalidate {first.path})"
        )
        _warn_once(("stale", kernel, exact, first.path, why), message)
        return
    message = (
        f"{kernel}: no tuned config for {shape.replace(',', ' ')} on {device.name}; the default is used "
        f"(to tune it: kerneltune search {kernel} --workload {shape})"
    )
    _warn_once(("untuned", kernel, exact, device.name, device.sm_count), message)


def _say_special(kernel: str, workload: Mapping[str, Any], device: Device, match: Match) -> None:
    """Warn, once for each file and reason, that a relative's or a stale entry is used."""
    if match.relation:
        there = read_table(match.path).device["name"]
        message = (
            f"{kernel}: on {device.name} the table of {there} is used ({match.relation}): {match.path} "
            f"(to tune this GPU: kerneltune search {kernel} --workload {shape_text(kernel, workload)})"
        )
        _warn_once(("relative", match.path), message)
    told = [each for each in match.stale if policies()[0][each.kind] == "warn"]
    if told:
        why = "; ".join(each.reason for each in told)
        message = (
            f"{kernel}: a stale table is used ({why}): {match.path} (to renew it: kerneltune revalidate {match.path})"
        )
        _warn_once(("stale", match.path, why), message)


def say_unusable(kernel: str, workload: Mapping[str, Any], reason: str) -> None:
    """Warn once that a table's entry for this workload cannot run here, so that the default is used."""
    shape = shape_text(kernel, workload)
    message = (
        f"{kernel}: the tuned config for {shape.replace(',', ' ')} cannot run here ({reason}); the default is used "
        f"(kerneltune lookup {kernel} {shape} names its table)"
    )
    _warn_once(("unusable", kernel, shape), message)


def _warn_once(key: Any, message: str) -> None:
    if key not in _said:
        _said.add(key)
        warnings.warn(message, UserWarning, stacklevel=4)
