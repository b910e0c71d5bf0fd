"""Which tuned config serves a workload on this GPU: a lookup in JSON files, with the standard library alone.

`resolve` is what an op calls before it launches. It uses only numbers that the host knows, never raises because of a
file, and answers None (the op's default config) when no table fits. Tables are looked for in this order, and the first
source with an entry inside the bound wins: the path that the caller gives; KERNELTUNE_TABLES, a path list of files or
folders; the user's folder, ~/.config/kerneltune/tables; what is shipped in kerneltune/results/*/tables.

An entry fits when the device's name and SM count and every exact key are equal and each scaled key is within a factor
of BOUND. Limits: a changed file is noticed after RECHECK_S seconds at the latest.
"""

from __future__ import annotations

import functools
import math
import os
import stat
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kerneltune.kernels.table_format import KEYS, MAX_BYTES, Keys, Table, TableError, parse_table, table_workload

BOUND = 2.0  # the largest ratio of a scaled key to an entry's
RECHECK_S = 1.0  # looking at every file before every launch would cost as much as the launch

MAX_REMEMBERED = 4096  # answers, and files


@dataclass(frozen=True)
class Source:
    """One place in the lookup order."""

    name: str  # "argument", "KERNELTUNE_TABLES", "user", "shipped"
    files: tuple[str, ...]
    named: frozenset[str] = frozenset()  # files that the user named one by one: what is wrong with them is said


@dataclass(frozen=True)
class Match:
    """The entry that serves a workload."""

    config: dict[str, Any]
    entry: Mapping[str, Any]
    path: str
    source: str
    distance: float  # summed |log2| over the scaled keys
    exact: bool  # the very workload, and the input class if one was asked for


def resolve(
    kernel: str, workload: Mapping[str, Any], device: Any, explicit: str | os.PathLike[str] | None = None
) -> dict[str, Any] | None:
    """The tuned config for a launch, or None: use the default. Said once for each combination of exact keys.

    The caller checks that the config is valid for its very workload.

    Args:
        workload: the workload keys that the host knows; the input class (`lengths`, `routing`) may be left out.
        device: a `Device`, or a mapping with its fields.
        explicit: a file or folder searched before all others.
    """
    key = (kernel, tuple(workload.items()), _device_key(device), _places(explicit))
    now = time.monotonic()
    remembered = _answers.get(key)
    if remembered is not None and now - remembered[0] < RECHECK_S:
        config = remembered[1]
    else:
        match = find(kernel, workload, device, tables=None if explicit is None else [explicit])
        config = None if match is None else match.config
        if len(_answers) >= MAX_REMEMBERED:
            _answers.clear()
        _answers[key] = (now, config)
    if config is None:
        _say_untuned(kernel, workload, device)
        return None
    return {name: dict(value) if isinstance(value, dict) else value for name, value in config.items()}


def find(
    kernel: str,
    workload: Mapping[str, Any],
    device: Any,
    *,
    tables: Sequence[str | os.PathLike[str]] | None = None,
    only: bool = False,
) -> Match | None:
    """The best entry of the first source that has one inside the bound.

    Args:
        tables: files or folders searched first; with `only`, nothing else is searched.
    """
    keys = KEYS.get(kernel)
    if keys is None:
        return None
    workload = table_workload(kernel, workload)
    exact = tuple(workload.get(name) for name in keys.exact)
    for source in sources(tables, only=only):
        fitting: list[tuple[float, Mapping[str, Any], str]] = []
        classes: dict[float, set[str]] = {}  # input classes that have an entry, by distance
        for path in source.files:
            table = _usable(path, kernel, device, source)
            for entry in () if table is None else table.by_exact.get(exact, ()):
                distance = scaled_distance(keys, entry["workload"], workload)
                if distance is not None:
                    fitting.append((distance, entry, path))
                    classes.setdefault(distance, set()).add(entry["workload"][keys.input])
        if fitting:
            distance, entry, path = min(fitting, key=lambda each: _rank(keys, each[1], workload, each[0], classes))
            same = workload.get(keys.input) in (None, entry["workload"][keys.input])
            return Match(entry["config"], entry, path, source.name, distance, distance == 0 and same)
    return None


def sources(tables: Sequence[str | os.PathLike[str]] | None = None, *, only: bool = False) -> Iterator[Source]:
    """The places where tables are looked for, in order, with the files that lie there now."""
    if tables is not None:
        yield _listed("argument", [os.fspath(path) for path in tables])
    if only:
        return
    named = os.environ.get("KERNELTUNE_TABLES")
    if named:
        yield _listed("KERNELTUNE_TABLES", [path for path in named.split(os.pathsep) if path])
    yield Source("user", tuple(_json_files(user_folder())))
    yield Source("shipped", _shipped())


def user_folder() -> str:
    """Where a search installs its tables: the folder that platformdirs gives for user configuration on Linux."""
    root = os.environ.get("XDG_CONFIG_HOME", "").strip() or os.path.join(os.path.expanduser("~"), ".config")
    return os.path.join(root, "kerneltune", "tables")


def shape_text(kernel: str, workload: Mapping[str, Any]) -> str:
    """The workload as `--workload` takes it, scaled keys first, without the input class."""
    keys = KEYS.get(kernel)
    names = [name for name in (*keys.scaled, *keys.exact) if name in workload] if keys else list(workload)
    words = {
        name: str(workload[name]).lower() if isinstance(workload[name], bool) else workload[name] for name in names
    }
    return ",".join(f"{name}={word}" for name, word in words.items())


def forget() -> None:
    """Drop remembered answers, so that the next lookup sees files written a moment ago."""
    _answers.clear()


def scaled_distance(keys: Keys, entry: Mapping[str, Any], workload: Mapping[str, Any]) -> float | None:
    """Summed |log2| of the ratios of the scaled keys; None when one of them is beyond BOUND."""
    total = 0.0
    for name in keys.scaled:
        ratio = entry[name] / max(workload.get(name, 0), 1)
        if not 1 / BOUND <= ratio <= BOUND:
            return None
        total += abs(math.log2(ratio))
    return total


def read_table(path: str | os.PathLike[str]) -> Table:
    """Read and check one file; the result is kept until the file changes.

    Raises:
        TableError: it is not a sound table.
        OSError: it cannot be read.
    """
    name = os.fspath(path)
    try:
        found = os.stat(name)
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for ever
            raise TableError("not a regular file")
        signature = (found.st_ino, found.st_mtime_ns, found.st_size)
        known = _files.get(name)
        if known is None or known[0] != signature:
            result: Table | TableError
            try:
                result = parse_table(_read_bytes(name), name)
            except TableError as error:
                result = error
            if len(_files) >= MAX_REMEMBERED:
                _files.clear()
            known = _files[name] = (signature, result)
    except ValueError as error:  # a TableError, or a path that holds a NUL
        raise TableError(str(error)) from None
    if isinstance(known[1], TableError):
        raise TableError(str(known[1]))
    return known[1]


_answers: dict[Any, tuple[float, dict[str, Any] | None]] = {}  # (asked at, config)
_files: dict[str, tuple[Any, Table | TableError]] = {}
_said: set[Any] = set()


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


def _usable(path: str, kernel: str, device: Any, source: Source) -> Table | None:
    """The table in this file if it is sound and for this kernel and device; otherwise None, said once."""
    try:
        table = read_table(path)
    except FileNotFoundError:
        if path in source.named:
            _warn_once(("file", path), f"no table there: {path} ({source.name})")
        return None
    except (TableError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        _warn_once(("file", path, str(reason)), f"table left out: {path}: {reason}")
        return None
    differs = ""
    if table.kernel != kernel:
        differs = f"kernel is {table.kernel}, not {kernel}" if source.name == "argument" else ""
    elif _device_key(table.device) != _device_key(device):
        differs = "device is {} with {} SMs, not {} with {}".format(*_device_key(table.device), *_device_key(device))
    else:
        return table
    if differs and path in source.named:
        _warn_once(("differs", path, differs), f"table left out: {path}: {differs}")
    return None


def _listed(name: str, paths: list[str]) -> Source:
    """Files as named; of a folder the tables in it, and in its `tables` (the --out folder of a search)."""
    files: list[str] = []
    for path in paths:
        if os.path.isdir(path):
            files += [*_json_files(path), *_json_files(os.path.join(path, "tables"))]
        else:
            files.append(path)
    return Source(name, tuple(files), frozenset(paths))


def _json_files(folder: str) -> list[str]:
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    return [os.path.join(folder, name) for name in names if name.endswith(".json") and not name.startswith(".")]


@functools.cache
def _shipped() -> tuple[str, ...]:
    """The tables of the installed package: kerneltune/results, beside kerneltune/kernels (a folder or a link)."""
    results = Path(__file__).parent.parent / "results"
    return tuple(str(path) for path in sorted(results.glob("*/tables/*.json")))


def _places(explicit: object) -> tuple[Any, ...]:
    get = os.environ.get
    return explicit, get("KERNELTUNE_TABLES"), get("XDG_CONFIG_HOME"), get("HOME")


def _device_key(device: Any) -> tuple[Any, Any]:
    if isinstance(device, Mapping):
        return device.get("name"), device.get("sm_count")
    return device.name, device.sm_count


def _say_untuned(kernel: str, workload: Mapping[str, Any], device: Any) -> None:
    exact = tuple(workload.get(name) for name in (KEYS[kernel].exact if kernel in KEYS else ()))
    key = ("untuned", kernel, exact, _device_key(device))
    if key not in _said:  # before any text is made: this runs at every launch
        shape = shape_text(kernel, workload)
        message = (
            f"{kernel}: no tuned config for {shape.replace(',', ' ')} on {_device_key(device)[0]}; the default is used "
            f"(to tune it: kerneltune search {kernel} --workload {shape})"
        )
        _warn_once(key, message)


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


def _read_bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(MAX_BYTES + 1)
