"""Configs from elsewhere that a search tries first: written by `kerneltune import`, read by `kerneltune search`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kerneltune import engines, tables
from kerneltune.device import TARGETS
from kerneltune.errors import UserError
from kerneltune.kernels import table_files
from kerneltune.kernels.table_format import KEYS, TableError, table_workload
from kerneltune.kernels.tables import scaled_distance
from kerneltune.registry import load_tunable
from kerneltune.workloads import base_sizes, parse_workload

FOLDER = "imports"
MOST = 4  # configs that a workload starts with


def import_files(
    files: Sequence[Path], out: Path, model: str | None, tp: int | None, ep: int, given: str
) -> list[dict[str, Any]]:
    """Write the imported configs below `out`; file, source, entries and notes of each table written.

    Raises:
        UserError: a file is not what it should be, or does not say enough; nothing is written then.
    """
    engine_files: dict[tuple[int, int], list[engines.EngineFile]] = {}
    ours = []
    for path in files:
        if not path.is_file():
            raise UserError(f"{path}: no such file")
        if path.name.startswith("E="):
            read = engines.read_engine_file(path)
            engine_files.setdefault((read.E, read.N), []).append(read)
        else:
            ours.append(tables.load_table(path))
    planned: list[tuple[Path, dict[str, Any], str, list[str]]] = []
    for (E, N), mine in engine_files.items():
        table, notes = _from_engine(E, N, mine, model, tp, ep, given)
        source = ", ".join(Path(each.path).name for each in mine)
        name = tables.table_file_name("moe", table["entries"][0]["workload"]["dtype"], table["device"]["name"])
        planned.append((out / FOLDER / name, table, source, notes))
    for each in ours:
        planned.append((out / FOLDER / Path(each.path).name, tables.as_dict(each), Path(each.path).name, []))
    for path, table, _, _ in planned:
        tables.write_table(path, table)
    return [
        {"file": str(path), "source": source, "entries": len(table["entries"]), "notes": notes}
        for path, table, source, notes in planned
    ]


def _from_engine(
    E: int, N: int, files: list[engines.EngineFile], model: str | None, tp: int | None, ep: int, given: str
) -> tuple[dict[str, Any], list[str]]:
    """A table of ours from one engine's files for the same experts; what was taken otherwise than it stands there."""
    first = files[0]
    if all(each.down for each in files):
        raise UserError(f"{first.path}: of the second GEMM alone: name the file without _down too")
    if model is None and not {"K", "top_k"} <= {item.partition("=")[0] for item in given.split(",")}:
        raise UserError(f"{first.path}: does not say K and top_k: name --model (and --tp), or --workload K=..,top_k=..")
    base = base_sizes("moe", model, tp, ep)
    for name, value in (("E", E), ("N", N)):
        if model is not None and base[name] != value and not (name == "E" and value == base[name] + 1):
            raise UserError(f"{first.path}: {name}={value}, but {model} at this parallelism has {name}={base[name]}")
    base |= {"E": E, "N": N, "global_E": max(E, int(base.get("global_E", E)))}
    tunable = load_tunable("moe")
    notes = []
    if first.dtype:
        notes.append(f"tuned for {first.dtype}; a start for another format")
    device = next((each for each in TARGETS.values() if each.name == first.device), None)
    if device is None:
        known = ", ".join(each.name for each in TARGETS.values())
        notes.append(f"{first.device} is not one of {known}; stored as of {TARGETS['sm_90'].name}")
        device = TARGETS["sm_90"]
    entries, refused = [], 0
    for tokens, config in engines.imported_configs(files).items():
        sizes = parse_workload(",".join(filter(None, [given, f"tokens={tokens}"])), base)
        workload = dict(tunable.complete_workload(sizes))
        if any(tunable.is_valid(part, config[part], workload, device) for part in tunable.parts):
            refused += 1
        entries.append(tables.make_entry(table_workload("moe", workload), config, {}))
    if not entries:
        raise UserError(f"{first.path}: no token counts in it")
    if refused:
        notes.append(f"{refused} of them the kernel would not run as they are; a search passes over those")
    own = {"source": "import", "command": "kerneltune import", "imported": [Path(each.path).name for each in files]}
    if first.triton:
        own["triton"] = first.triton
    return tables.make_table("moe", device.to_dict(), own, entries), notes


def imported_configs(out: Path, kernel: str, workload: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The configs that were imported for the sizes nearest to this workload, the nearest first; devices do not matter.

    A file that is no sound table is passed over, with the warning of `check` as the place to learn why.
    """
    keys = KEYS.get(kernel)
    if keys is None:
        return []
    exact = tuple(workload.get(name) for name in keys.exact)
    found: list[tuple[float, int, dict[str, Any]]] = []
    for path in sorted((out / FOLDER).glob("*.json")):
        try:
            table = table_files.read_table(path)
        except (TableError, OSError):
            continue
        for entry in table.by_exact.get(exact, ()) if table.kernel == kernel else ():
            distance = scaled_distance(keys, entry["workload"], workload)
            if distance is not None:
                found.append((distance, len(found), dict(entry["config"])))
    return [config for _, _, config in sorted(found, key=lambda each: each[:2])[:MOST]]
