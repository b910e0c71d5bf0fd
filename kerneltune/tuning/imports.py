"""Configs from elsewhere that a search tries first: written by `kerneltune import`, read by `kerneltune search`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kerneltune import engines, tables
from kerneltune.device import TARGETS
from kerneltune.errors import UserError
from kerneltune.kernels import table_files
from kerneltune.kernels.table_format import KEYS, TableError, parse_table, table_workload
from kerneltune.kernels.tables import scaled_distance
from kerneltune.registry import load_tunable
from kerneltune.workloads import base_sizes, parse_workload

if TYPE_CHECKING:
    from kerneltune.kernels.device import Device
    from kerneltune.kernels.table_format import Table
    from kerneltune.kernels.tunable import Tunable

FOLDER = "imports"
MOST = 4  # configs that a workload starts with


@dataclass(frozen=True)
class Refused:
    """A row whose config this kernel would not run, and why."""

    workload: dict[str, Any]
    why: str


def import_files(
    files: Sequence[Path], out: Path, model: str | None, tp: int | None, ep: int, given: str
) -> list[dict[str, Any]]:
    """Write the imported configs below `out`; file, source, entries, notes and refused rows of each table written.

    Raises:
        UserError: a file is not what it should be, or does not say enough; nothing is written then.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: not a folder")
    engine_files: dict[tuple[Path, str], list[engines.EngineFile]] = {}  # SGLang's two of a name belong together
    ours = []
    for path in files:
        if not path.is_file():
            raise UserError(f"{path}: {'not a regular file' if path.exists() else 'no such file'}")
        if path.name.startswith("E="):
            read = engines.read_engine_file(path)
            pair = path.resolve().parent, path.stem.removesuffix("_down")
            engine_files.setdefault(pair, []).append(read)
        else:
            ours.append(tables.load_table(path))
    planned: list[tuple[Path, dict[str, Any], str, list[str], list[Refused]]] = []
    for mine in engine_files.values():
        table, notes, refused = _from_engine(mine, model, tp, ep, given)
        source = ", ".join(Path(each.path).name for each in mine)
        name = tables.table_file_name("moe", table["entries"][0]["workload"]["dtype"], table["device"]["name"])
        planned.append((_place(out, name, table), table, source, notes, refused))
    for each in ours:
        if not each.entries:
            raise UserError(f"{each.path}: no entries in it")
        name, table = Path(each.path).name, tables.as_dict(each)
        planned.append((_place(out, name, table), table, name, [], _refused(each)))
    for _, table, source, *_ in planned:
        try:
            parse_table(json.dumps(table).encode())
        except TableError as error:
            raise UserError(f"{source}: {error}") from None
    for path, table, *_ in planned:
        tables.write_table(path, table)
    return [
        {
            "file": str(path),
            "kernel": table["kernel"],
            "source": source,
            "entries": len(table["entries"]),
            "notes": notes,
            "refused": [asdict(each) for each in refused],
        }
        for path, table, source, notes, refused in planned
    ]


def _refused(table: Table) -> list[Refused]:
    device = tables.whole_device(table.device)
    if device is None:
        return []
    found = []
    for entry in table.entries:
        try:
            complete = load_tunable(table.kernel).complete_workload(entry["workload"])
            why = tables.why_not_searched(table.kernel, entry["config"], complete, device)
        except ValueError as error:
            why = str(error)
        if why:
            found.append(Refused(dict(entry["workload"]), why))
    return found


def _place(out: Path, name: str, table: Mapping[str, Any]) -> Path:
    """A file of its own for each source: in one file, a workload's later config would replace the earlier."""
    configs = json.dumps([[entry["workload"], entry["config"]] for entry in table["entries"]], sort_keys=True)
    return out / FOLDER / f"{name.removesuffix('.json')}.{hashlib.sha256(configs.encode()).hexdigest()[:8]}.json"


def _from_engine(
    files: list[engines.EngineFile], model: str | None, tp: int | None, ep: int, given: str
) -> tuple[dict[str, Any], list[str], list[Refused]]:
    """A table of ours from one file, or SGLang's two; what was taken otherwise than it stands there, and what no
    kernel of ours runs."""
    first = files[0]
    E, N = first.E, first.N
    if all(each.down for each in files):
        raise UserError(f"{first.path}: of the second GEMM alone: name the file without _down beside it too")
    named = parse_workload(given, {}).keys() if given.strip() else set()
    for name, place in (("E", "its name"), ("N", "its name"), ("tokens", "its rows")):
        if name in named:
            raise UserError(f"{first.path}: says {name} in {place}: leave it out of --workload")
    if model is None and not {"K", "top_k"} <= named:
        raise UserError(f"{first.path}: does not say K and top_k: name --model (and --tp), or --workload K=..,top_k=..")
    base = base_sizes("moe", model, tp, ep)
    for name, value in (("E", E), ("N", N)):
        if model is not None and base[name] != value and not (name == "E" and value == base[name] + 1):
            raise UserError(f"{first.path}: {name}={value}, but {model} at this parallelism has {name}={base[name]}")
    if model is None:  # what base holds is the default model's
        base |= {"E": E, "N": N, "global_E": E * ep}
    tunable = load_tunable("moe")
    notes = list(dict.fromkeys(note for each in files for note in each.notes))
    if first.dtype:
        notes.append(f"tuned for {first.dtype}; a start for another format")
    if model is None and "global_E" not in named:
        notes.append(f"global_E not said: taken as {base['global_E']}")
    if base["E"] != E:
        notes.append(f"its expert {E} is a shared one that SGLang fuses: a start for E={base['E']}")
    device = next((each for each in TARGETS.values() if each.name == first.device), None)
    if device is None:
        known = ", ".join(each.name for each in TARGETS.values())
        notes.append(f"{first.device} is not one of {known}; stored as of {TARGETS['sm_90'].name}")
        device = TARGETS["sm_90"]
    entries, changed = [], 0
    refused: list[Refused] = []
    for tokens, config in engines.imported_configs(files).items():
        sizes = parse_workload(",".join(filter(None, [given.strip(), f"tokens={tokens}"])), base)
        try:
            workload = dict(tunable.complete_workload(sizes))
        except ValueError as error:
            raise UserError(f"{first.path}: {error}") from None
        fitted = {part: _fitted(tunable, part, config[part], workload, device) for part in tunable.parts}
        entry = tables.make_entry(table_workload("moe", workload), fitted, {})
        if why := tables.why_not_searched("moe", fitted, workload, device):
            refused.append(Refused(entry["workload"], why))
            entry["config"] = config
        changed += entry["config"] != config
        entries.append(entry)
    if not entries:
        raise UserError(f"{first.path}: no token counts in it")
    if changed:
        notes.append(f"{changed} of them clamped to what fits: tiles of 16 and more, fewer num_stages, then BLOCK_K")
    own = {"source": "import", "command": "kerneltune import", "imported": [Path(each.path).name for each in files]}
    if first.triton:
        own["triton"] = first.triton
    return tables.make_table("moe", device.to_dict(), own, entries), notes, refused


def _fitted(
    tunable: Tunable, part: str, params: Mapping[str, int], workload: Mapping[str, Any], device: Device
) -> dict[str, int]:
    """The nearest parameters that this kernel runs; `params` where lowering stages and depth does not help.

    A table of an 8-bit format has tiles of twice the depth that 16-bit operands leave room for.
    """
    from kerneltune.kernels.moe.config import SMALLEST_TILE

    least = {"BLOCK_M": SMALLEST_TILE, "BLOCK_N": SMALLEST_TILE // 2 if part == "gemm1" else SMALLEST_TILE}
    least["BLOCK_K"] = SMALLEST_TILE
    tried = {name: max(value, least.get(name, 1)) for name, value in params.items()}
    while tunable.is_valid(part, tried, workload, device) is not None:
        if tried["num_stages"] > 2:
            tried["num_stages"] -= 1
        elif tried["BLOCK_K"] > 32:
            tried["BLOCK_K"] //= 2
        else:
            return dict(params)
    return tried


def imported_configs(
    out: Path, kernel: str, workload: Mapping[str, Any], device: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], int]:
    """The configs that a search of this workload starts with, of all that were imported for sizes near it; and how many
    distinct others there are that run on `device`.

    Each file (a source) gives its nearest sizes first; the files take turns, the one with the nearest sizes first, and
    a config that another file gave before costs none of the MOST places. A file that is no sound table is passed over,
    with the warning of `check` as the place to learn why.
    """
    keys = KEYS.get(kernel)
    if keys is None:
        return [], 0
    exact = tuple(workload.get(name) for name in keys.exact)
    gpu = tables.whole_device(device)
    by_source: list[list[tuple[float, dict[str, Any]]]] = []
    for path in sorted((out / FOLDER).glob("*.json")):
        try:
            table = table_files.read_table(path)
        except (TableError, OSError):
            continue
        mine = []
        for entry in table.by_exact.get(exact, ()) if table.kernel == kernel else ():
            distance = scaled_distance(keys, entry["workload"], workload)
            runs = gpu is None or tables.why_not_searched(kernel, entry["config"], workload, gpu) is None
            if distance is not None and runs:
                mine.append((distance, dict(entry["config"])))
        if mine:
            by_source.append(sorted(mine, key=lambda each: each[0]))
    by_source.sort(key=lambda mine: mine[0][0])
    found: list[dict[str, Any]] = []
    while any(by_source):
        for mine in by_source:
            while mine:
                config = mine.pop(0)[1]
                if config not in found:
                    found.append(config)
                    break
    return found[:MOST], len(found[MOST:])
