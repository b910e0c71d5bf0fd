"""`kerneltune merge`: tables put together, one entry for each workload."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from kerneltune.cli.export import table_files
from kerneltune.errors import UserError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: kerneltune merge node1/tables node2/tables --to my-engine/tables")(merge)


def merge(
    sources: list[Path] = typer.Argument(help="Tables of one kernel and device, or folders of them."),
    to: Path = typer.Option(..., metavar="FILE or DIR", help="Merged into what is there; a file ends in .json."),
    prefer: str = typer.Option("newest", help="Which entry of several for one workload: newest, first, fastest."),
    as_json: bool = typer.Option(False, "--json", help="Print files and conflicts as JSON."),
) -> None:
    """Put tables together, one entry for each workload; every conflict is printed with the file that won.

    All of them are checked before anything is written. In a folder there is one file for each kernel, dtype and device;
    what is there already counts as the first source.
    """
    from dataclasses import asdict

    from kerneltune import table_diff, tables
    from kerneltune.workloads import format_workload

    if prefer not in table_diff.PREFER:
        raise UserError(f"--prefer {prefer!r}: expected {', '.join(table_diff.PREFER)}")
    loaded = [tables.load_table(path) for path in table_files(list(sources))]
    if not any(table.entries for table in loaded):
        raise UserError("nothing to merge: the tables have no entries")
    groups: dict[Path, list[tables.Table]] = {}
    for table in loaded:
        dtypes = sorted({entry["workload"]["dtype"] for entry in table.entries})
        names = [tables.table_file_name(table.kernel, dtype, table.device["name"]) for dtype in dtypes]
        for path in [to] if to.suffix == ".json" else [to / name for name in names]:
            groups.setdefault(path, []).append(table)
    written: dict[str, int] = {}
    conflicts: list[table_diff.Conflict] = []
    plans = []
    for path, mine in groups.items():
        present = [tables.load_table(path)] if path.exists() else []
        entries, found = table_diff.merged([*present, *mine], prefer)
        plans.append((path, entries))
        conflicts += found
    for path, entries in plans:
        for table in {id(table): table for table, _ in entries}.values():
            kept = [entry for origin, entry in entries if origin is table]
            if to.suffix != ".json":  # a file for each dtype
                dtypes = [entry["workload"]["dtype"] for entry in kept]
                names = [tables.table_file_name(table.kernel, dtype, table.device["name"]) for dtype in dtypes]
                kept = [entry for entry, of_file in zip(kept, names, strict=True) if of_file == path.name]
            if kept:
                tables.write_table(path, tables.make_table(table.kernel, table.device, table.provenance, kept))
        written[str(path)] = len(tables.load_table(path).entries)
    if as_json:
        print(json.dumps({"files": written, "conflicts": [asdict(conflict) for conflict in conflicts]}))
        return
    for conflict in conflicts:
        print(
            f"conflict  {format_workload(loaded[0].kernel, conflict.workload)}: {conflict.taken}, not {conflict.left}"
        )
    for file, count in written.items():
        print(f"{file}  {count} entr{'y' if count == 1 else 'ies'}")
