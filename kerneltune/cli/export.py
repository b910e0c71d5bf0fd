"""`kerneltune export`: tables copied or merged into a folder to ship."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kerneltune.errors import UserError

if TYPE_CHECKING:
    from kerneltune.kernels.table_format import Table

FORMATS = ("kerneltune", "vllm", "sglang")
SEARCHES = "kerneltune-results"  # where searches without --out write


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: kerneltune export --to my-engine/tables")(export)


def export(
    sources: list[Path] = typer.Argument(
        None, metavar="[FOLDER or FILES]", help="Tables, or folders of them; default: the searches here, else shipped."
    ),
    to: Path = typer.Option(..., metavar="DIR", help="The folder to ship; created if missing, merged into if not."),
    form: str = typer.Option("kerneltune", "--format", help="kerneltune, vllm, sglang (MoE)."),
    device_name: str | None = typer.Option(None, help="As the engine's GPU reports itself; default: the table's."),
    triton: str | None = typer.Option(None, help="SGLang's Triton version, its folder; default: the table's."),
    as_json: bool = typer.Option(False, "--json", help="Print the files written as JSON."),
) -> None:
    """Copy or merge tables into a folder that you ship, one file for each kernel, dtype and device.

    KERNELTUNE_TABLES=DIR makes the kernels read it.
    """
    from dataclasses import replace

    from kerneltune import table_diff, tables

    if form not in FORMATS:
        raise UserError(f"--format {form!r}: expected {', '.join(FORMATS)}")
    if to.exists() and not to.is_dir():
        raise UserError(f"--to {to}: not a folder")
    written: dict[Path, int] = {}
    notes: list[str] = []
    loaded = [tables.load_table(path) for path in table_files(sources)]  # all are sound before anything is written
    if form != "kerneltune":
        written, notes = _write_engine_files(form, to, loaded, device_name, triton)
        loaded = []
    plans: dict[Path, list[Table]] = {}
    for table in loaded:
        for dtype in sorted({entry["workload"]["dtype"] for entry in table.entries}):
            path = to / tables.table_file_name(table.kernel, dtype, table.device["name"])
            entries = [entry for entry in table.entries if entry["workload"]["dtype"] == dtype]
            plans.setdefault(path, []).append(replace(table, entries=entries))
    for path, mine in plans.items():
        there = [tables.load_table(path)] if path.exists() else []
        table_diff.same_device([*there, *mine])  # before anything is written
    for path, mine in plans.items():
        for table in mine:
            tables.write_table(path, tables.as_dict(table))
        written[path] = len(tables.load_table(path).entries)
    if not written:
        raise UserError("nothing to export: the tables have no entries")
    if as_json:
        print(json.dumps([{"file": str(path), "entries": count} for path, count in written.items()]))
    else:
        for path, count in written.items():
            print(f"{path}  {count} entr{'y' if count == 1 else 'ies'}")
    for note in notes:
        typer.echo(f"note: {note}", err=True)


def _write_engine_files(
    engine: str, to: Path, loaded: list[Table], device_name: str | None, triton: str | None
) -> tuple[dict[Path, int], list[str]]:
    """Write MoE tables as an engine's loader looks for them; files with their entries, and what is lost."""
    from kerneltune import engines
    from kerneltune.tables import replace_file

    mine = [table for table in loaded if table.kernel == "moe" and table.entries]
    if not mine:
        raise UserError(
            f"--format {engine}: no entries of moe in these tables, and {engine} has none of another kernel"
        )
    together: dict[tuple[str, str], list[Table]] = {}  # whose files may have one name
    for table in mine:
        version = triton or str(table.provenance.get("triton") or "")
        if engine == "sglang" and not version:
            raise UserError(f"{table.path}: does not say its Triton version, SGLang's folder: name --triton 3.6.0")
        together.setdefault((device_name or table.device["name"], version), []).append(table)
    planned: dict[Path, dict[str, Any]] = {}
    notes: dict[str, None] = {}
    for (name, version), tables in together.items():
        entries = [entry for table in tables for entry in table.entries]
        try:
            files, lost = engines.engine_files(engine, name, version, entries)
        except UserError as error:
            raise UserError(f"{', '.join(table.path for table in tables)}: {error}") from None
        notes |= dict.fromkeys(lost)
        for relative, content in files.items():
            if to / relative in planned:  # vLLM folds every H200 into one name
                notes[f"{to / relative}: of several devices' tables the last is written"] = None
            planned[to / relative] = content
    for path, content in planned.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, (json.dumps(content, indent=4) + "\n").encode())
    return {path: len(content) for path, content in planned.items()}, list(notes)


def table_files(sources: list[Path] | None) -> list[Path]:
    """The table files meant; one named twice, itself and in its folder, counts once.

    Raises:
        UserError: a source is missing or has no tables, or there is nothing to export.
    """
    from kerneltune import tables

    if sources:
        files = [file for source in sources for file in _files_of(source)]
        return list({file.resolve(): file for file in reversed(files)}.values())[::-1]
    found = sorted(Path(SEARCHES).glob("*/*/tables/*.json")) or tables.shipped_tables()
    if not found:
        raise UserError(f"no tables in ./{SEARCHES} and none shipped: run `kerneltune search mla-decode` first")
    return found


def _files_of(source: Path) -> list[Path]:
    if not source.exists():
        raise UserError(f"{source}: no such file or folder")
    if not source.is_dir():
        return [source]
    for pattern in ("tables/*.json", "*/tables/*.json", "*/*/tables/*.json", "*.json"):
        if found := sorted(path for path in source.glob(pattern) if not path.name.startswith(".")):
            return found
    raise UserError(f"{source}: no tables (*.json) there or in its folders named tables")
