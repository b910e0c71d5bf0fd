"""Tables as the tool writes them: entries merged into files, installed for the kernels to find, and explained.

Reading and matching are `kerneltune.kernels.tables`, the very code that serves a launch. A table is written whole,
under a lock and by a rename, so a reader sees the old file or the new one. Writing merges: an entry replaces the one
for the same workload and input class, all others stay. An entry that was measured with other software than the rest of
its file keeps its own `provenance`.

`loss` of an entry holds fractions of time lost against the best, measured with its config: by scaled keys
("batch=8,kv_len=2048", its own among them) on the other workloads of its search and class, and in `inputs` by input
class, which a lookup without a class goes by.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kerneltune.errors import UserError
from kerneltune.kernels import table_files
from kerneltune.kernels import tables as launch_tables
from kerneltune.kernels.device import relation
from kerneltune.kernels.staleness import policies, staleness
from kerneltune.kernels.table_format import (
    KEYS,
    SCHEMA,
    Table,
    TableError,
    parse_scaled,
    parse_table,
    scaled_text,
    table_workload,
)
from kerneltune.kernels.tables import Match

if TYPE_CHECKING:
    from kerneltune.kernels.device import Device

LOCK_SECONDS = 60.0  # a merge takes milliseconds: whoever holds the lock for longer is stuck
# What makes measurements comparable.
SAME_SOFTWARE = ("kernel_hash", "triton", "torch", "driver", "cuda", "versions", "source")


def make_entry(
    workload: Mapping[str, Any],
    config: Mapping[str, Any],
    measured: Mapping[str, Any],
    loss: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One entry of a table: DESIGN's four fields, in their order."""
    return {"workload": dict(workload), "config": dict(config), "measured": dict(measured), "loss": dict(loss or {})}


def make_table(
    kernel: str, device: Mapping[str, Any], provenance: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """A whole table, ready for `write_table`."""
    return {
        "schema": SCHEMA,
        "kernel": kernel,
        "device": dict(device),
        "provenance": dict(provenance),
        "entries": [dict(entry) for entry in entries],
    }


def table_file_name(kernel: str, dtype: str, device_name: str) -> str:
    """One file per kernel, dtype and device: "mla-decode.bf16.nvidia-h200.json"."""
    from kerneltune.device import slug

    return f"{kernel}.{slug(dtype)}.{slug(device_name)}.json"


def add_entry(
    folder: Path,
    kernel: str,
    device: Mapping[str, Any],
    provenance: Mapping[str, Any],
    entry: Mapping[str, Any],
) -> Path:
    """Merge one finished workload into its table in `folder`; the path of the file."""
    return add_entries(folder, kernel, device, provenance, [entry])


def add_entries(
    folder: Path,
    kernel: str,
    device: Mapping[str, Any],
    provenance: Mapping[str, Any],
    entries: Sequence[Mapping[str, Any]],
) -> Path:
    """Merge finished workloads (at least one) into the tables of their dtypes; the path of the last one's file."""
    by_file: dict[Path, list[Mapping[str, Any]]] = {}
    for entry in entries:
        path = folder / table_file_name(kernel, entry["workload"]["dtype"], device["name"])
        by_file.setdefault(path, []).append(entry)
    for path, mine in by_file.items():
        write_table(path, make_table(kernel, device, provenance, mine))
    return path


def measured_loss(
    kernel: str, entry: Mapping[str, Any], workload: Mapping[str, Any]
) -> tuple[dict[str, int], float] | None:
    """What the entry's config was measured to lose on the workload nearest to this one: (its scaled keys, the loss).

    For a workload that is not the entry's own, that is the nearest of the other ones; for one of another input class,
    what was measured on that class, which is at the entry's sizes. None: nobody measured any.
    """
    keys = KEYS[kernel]
    input_class = workload.get(keys.input)
    if input_class not in (None, entry["workload"][keys.input]):
        of_class = entry.get("loss", {}).get("inputs", {}).get(input_class)
        return None if of_class is None else ({name: entry["workload"][name] for name in keys.scaled}, of_class)
    own = {name: entry["workload"][name] for name in keys.scaled}
    asked = {name: max(workload.get(name, 0), 1) for name in keys.scaled}
    found: list[tuple[float, str, dict[str, int], float]] = []
    for text, loss in entry.get("loss", {}).items():
        sizes = parse_scaled(keys, text)
        if sizes is not None and (sizes == own) == (asked == own):
            found.append((sum(abs(math.log2(sizes[n] / asked[n])) for n in keys.scaled), text, sizes, loss))
    return min(found)[2:] if found else None


def loss_at(kernel: str, entry: Mapping[str, Any], workload: Mapping[str, Any]) -> float | None:
    """What the entry's config was measured to lose at the very sizes of this workload, wherever that was measured.

    None: nobody measured it, or the entry is of another problem: an exact key or the input class differs.
    """
    keys, own = KEYS[kernel], entry["workload"]
    same = all(own[name] == workload.get(name) for name in keys.exact)
    if not same or workload.get(keys.input, own[keys.input]) != own[keys.input]:
        return None
    return entry.get("loss", {}).get(scaled_text(keys, workload))


def whole_device(described: Mapping[str, Any]) -> Device | None:
    """The device that a table describes; None where a field is missing. What else it says is for the reader."""
    from kerneltune.kernels.device import Device

    known = {field.name: described[field.name] for field in fields(Device) if field.name in described}
    try:
        return Device(**known)
    except TypeError:
        return None


def why_not(kernel: str, config: Mapping[str, Any], workload: Mapping[str, Any], device: Device) -> str | None:
    """Why a launch on `device` would refuse a config, as the launch itself judges, or None."""
    from kerneltune.registry import load_tunable

    return load_tunable(kernel).refuses(config, workload, device)


def why_not_searched(kernel: str, config: Mapping[str, Any], workload: Mapping[str, Any], device: Device) -> str | None:
    """Why a search on `device` would not try a config: a launch refuses it, or it cannot be any good; else None."""
    from kerneltune.kernels.tunable import part_params
    from kerneltune.registry import load_tunable

    tunable = load_tunable(kernel)
    if refused := tunable.refuses(config, workload, device):
        return refused
    reasons = (tunable.is_valid(part, part_params(tunable, config, part), workload, device) for part in tunable.parts)
    return next((reason for reason in reasons if reason), None)


def entry_date(entry: Mapping[str, Any], provenance: Mapping[str, Any]) -> datetime | None:
    """When an entry was measured: what it says itself, else the provenance that holds for it; None if neither does."""
    for said in (entry.get("measured", {}).get("date"), provenance.get("date")):
        try:
            then = datetime.fromisoformat(str(said))
        except ValueError:
            continue
        return then if then.tzinfo else then.replace(tzinfo=UTC)
    return None


def write_table(path: Path, table: Mapping[str, Any]) -> None:
    """Merge `table` into `path`, creating it where it is not there.

    A damaged file in its place is moved aside to `<name>.damaged`.

    Raises:
        UserError: `path` holds another kernel's or device's table, or stays locked by another process, or what is
            there and this together are too large to be read.
        OSError: the folder cannot be written.
    """
    _checked(table)
    with locked(path):
        replace_file(path, encode(merge_tables(_present(path), table, path), path))
    launch_tables.forget()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Whoever changes the table at `path` holds this from reading it to writing it; its folder is made.

    Raises:
        UserError: another process holds it for too long.
    """
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    real = path.resolve()  # by whatever links it is named, one file has one lock
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(FileLock(real.parent / f".{real.name}.lock", timeout=LOCK_SECONDS))
        except Timeout:
            raise UserError(f"{path} has been locked by another process for {LOCK_SECONDS:.0f} s") from None
        yield


def encode(table: Mapping[str, Any], path: Path) -> bytes:
    """The bytes of a table that is to be written at `path`: nothing is written that a launch would refuse.

    Raises:
        UserError: a launch would, as it does a file that is too large.
    """
    try:
        return _checked(table)
    except TableError as error:
        raise UserError(f"{path}: not written, no launch would read the result ({error}); use several files") from None


def _checked(table: Mapping[str, Any]) -> bytes:
    data = _encode(table)
    parse_table(data)
    return data


def load_table(path: str | os.PathLike[str]) -> Table:
    """Read one table: `.kernel`, `.device`, `.provenance`, `.entries`.

    Raises:
        UserError: it is not there or not sound; the message names the field.
    """
    try:
        return table_files.read_table(path)
    except TableError as error:
        raise UserError(f"{os.fspath(path)}: {error}") from None
    except OSError as error:
        raise UserError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from None


def lookup(
    kernel: str,
    workload: Mapping[str, Any],
    device: Device | None = None,
    *,
    tables: Sequence[str | os.PathLike[str]] | None = None,
) -> Match | None:
    """The entry that a launch of `kernel` on this workload would use; None: the default config.

    Args:
        workload: what is not named is as the kernel's defaults; the input class counts only if named.
        device: the GPU here if left out.
        tables: files or folders looked at before the usual places.

    Raises:
        ValueError: unknown kernel or bad workload.
        UserError: no device was given and there is no GPU here (exit code 3).
    """
    return launch_tables.find(kernel, host_workload(kernel, workload), device or _device_here(), tables=tables)


def install(path: Path) -> Path:
    """Merge a table into the user's folder, where the kernels find it; the path there."""
    target = Path(table_files.user_folder()) / path.name
    write_table(target, as_dict(load_table(path)))
    return target


def shipped_tables() -> list[Path]:
    """The tables that come with the package."""
    return [Path(path) for source in table_files.sources() if source.name == "shipped" for path in source.files]


def loaded_here() -> list[Table]:
    """The tables that a launch here would look through, in their order; as there, what is no table is warned of."""
    found = []
    for source in table_files.sources():
        for path in source.files:
            try:
                found.append(load_table(path))
            except UserError as error:
                warnings.warn(f"table left out: {error} ({source.name})", UserWarning, stacklevel=2)
    return found


def devices(first: Sequence[str | os.PathLike[str]] | None = None) -> set[str]:
    """The names of the devices of all sound tables that a lookup would read."""
    found = set()
    for source in table_files.sources(first):
        for path in source.files:
            with contextlib.suppress(TableError, OSError):  # the lookup warns of it
                found.add(str(table_files.read_table(path).device["name"]))
    return found


def as_dict(table: Table) -> dict[str, Any]:
    """The JSON form of a table that was read."""
    return make_table(table.kernel, table.device, table.provenance, table.entries)


def host_workload(kernel: str, workload: Mapping[str, Any]) -> dict[str, Any]:
    """The complete workload as an op sees it: without an input class unless one is named, which is as tables write it.

    Raises:
        ValueError: unknown kernel or bad workload.
    """
    from kerneltune.registry import load_tunable

    complete = dict(load_tunable(kernel).complete_workload(workload))
    if KEYS[kernel].input not in workload:
        complete.pop(KEYS[kernel].input, None)
    return table_workload(kernel, complete)


@dataclass(frozen=True)
class Nearest:
    """The entry that came closest without fitting, and each field that kept it out."""

    path: str
    entry: Mapping[str, Any]
    differs: tuple[str, ...]
    loss: float | None = None  # of its config at the very sizes asked for, as measured on `device`
    device: str = ""  # the table's, where it is not the one asked about


def nearest(
    kernel: str,
    workload: Mapping[str, Any],
    device: Device,
    tables: Sequence[str | os.PathLike[str]] | None = None,
) -> Nearest | None:
    """Of all entries of this kernel in all places, the one with the fewest differing fields, the closest of those."""
    best: Nearest | None = None
    least: tuple[int, float] = (0, 0.0)
    for source in table_files.sources(tables):
        for path in source.files:
            try:
                table = table_files.read_table(path)
            except (TableError, OSError):
                continue  # the lookup before this has warned of it
            if table.kernel != kernel:
                continue
            for entry in table.entries:
                differs = _differences(kernel, table, entry, workload, device)
                scaled = KEYS[kernel].scaled
                apart = sum(abs(math.log2(entry["workload"][n] / max(workload.get(n, 0), 1))) for n in scaled)
                if best is None or (len(differs), apart) < least:
                    elsewhere = "" if relation(table.device, device) == "" else table.device["name"]
                    best = Nearest(path, entry, differs, loss_at(kernel, entry, workload), elsewhere)
                    least = len(differs), apart
    return best


def _differences(
    kernel: str, table: Table, entry: Mapping[str, Any], workload: Mapping[str, Any], device: Device
) -> tuple[str, ...]:
    """What keeps an entry from serving, by the rules of `kernels.tables`; () if it fits."""
    keys, there = KEYS[kernel], entry["workload"]
    found = []
    if relation(table.device, device) is None:
        name, count, arch = (table.device.get(field) for field in ("name", "sm_count", "arch"))
        rule = "a relative has the same architecture and SM count, and is no MIG slice"
        theirs, mine = f"{name} ({arch}, {count} SMs)", f"{device.name} ({device.arch or '?'}, {device.sm_count} SMs)"
        found.append(f"device: {theirs} there, {mine} here: {rule}")
    for name in keys.exact:
        if there[name] != workload.get(name):
            found.append(f"{name}: {there[name]} there, {workload.get(name)} asked for")
    for name in keys.scaled:
        asked = max(workload.get(name, 0), 1)
        if not 1 / launch_tables.BOUND <= there[name] / asked <= launch_tables.BOUND:
            bound = f"{launch_tables.BOUND:g}"
            found.append(f"{name}: {there[name]} there, {asked} asked for, more than a factor of {bound} apart")
    ruling, _ = policies()
    for stale in staleness(kernel, entry["config"], entry.get("provenance", table.provenance)):
        if ruling[stale.kind] == "strict":
            found.append(f"{stale.kind}: {stale.reason} (to renew it: kerneltune revalidate {table.path})")
    return tuple(found)


def _device_here() -> Device:
    from kerneltune.device import detect
    from kerneltune.errors import NO_GPU

    device = detect()
    if device is None:
        raise UserError("no GPU is visible here: name a device, such as kerneltune.device.target('sm_90')", NO_GPU)
    return device


def _present(path: Path) -> dict[str, Any] | None:
    """What lies at `path`; a damaged file is moved aside first."""
    if not path.exists():
        return None
    try:
        return as_dict(parse_table(path.read_bytes(), str(path)))
    except TableError as error:
        aside = path.with_name(f"{path.name}.damaged")
        os.replace(path, aside)
        warnings.warn(f"{path} was not a sound table ({error}); it is now {aside.name}", UserWarning, stacklevel=3)
        return None


def merge_tables(old: Mapping[str, Any] | None, new: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What `path` holds when `new` is merged into what it held: entries of `new` take the place of their workloads'.

    Raises:
        UserError: they are of different kernels or devices.
    """
    if old is None:
        old = dict(new, entries=[])
    if old["kernel"] != new["kernel"]:
        raise UserError(f"{path} holds a table of {old['kernel']}, not of {new['kernel']}; choose another folder")
    for field in ("name", "sm_count"):
        if old["device"][field] != new["device"][field]:
            differs = f"device.{field} is {old['device'][field]}, not {new['device'][field]}"
            raise UserError(f"{path} holds another device's table ({differs}); choose another folder")
    keys = KEYS[new["kernel"]]
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for table in (old, new):
        for entry in table["entries"]:
            own = entry.get("provenance", table["provenance"])
            entry = {name: value for name, value in entry.items() if name != "provenance"}
            entry["workload"] = {name: entry["workload"][name] for name in keys.all}  # canonical order
            if origin(entry, own) != origin(entry, new["provenance"]):
                entry["provenance"] = own
            merged[tuple(entry["workload"].values())] = entry
    return make_table(new["kernel"], new["device"], new["provenance"], [merged[key] for key in sorted(merged)])


def origin(entry: Mapping[str, Any], provenance: Mapping[str, Any]) -> dict[str, Any]:
    """What a provenance says of an entry and every write keeps: the software, and the date if it states none itself."""
    date = entry_date(entry, provenance)
    software = {name: provenance[name] for name in SAME_SOFTWARE if name in provenance}
    return software | {"date": str(provenance.get("date")) if date is None else date.isoformat()}


def _encode(table: Mapping[str, Any]) -> bytes:
    """JSON with an entry a line, so that a diff shows which workloads changed."""
    head = {name: table[name] for name in ("schema", "kernel", "device", "provenance")}
    lines = [f" {json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in head.items()]
    entries = ",\n".join(f"  {json.dumps(entry, allow_nan=False)}" for entry in table["entries"])
    lines.append(f' "entries": [\n{entries}\n ]' if entries else ' "entries": []')
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` at `path`, whole or not at all, also when the machine stops; a link stays, its file is replaced."""
    path = path.resolve()
    for left in path.parent.glob(f".{path.name}.*.tmp"):  # of writers that were killed: the lock is ours
        left.unlink(missing_ok=True)
    if path.exists() and path.read_bytes() == data:
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name too must be on the disk
    finally:
        os.close(folder)
