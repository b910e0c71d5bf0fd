"""`kerneltune export`: tables copied or merged into a folder to ship."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from kerneltune.errors import UserError

FORMATS = ("kerneltune",)
PLANNED = ("vllm", "sglang")
SEARCHES = "kerneltune-results"  # where searches without --out write


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: kerneltune export --to my-engine/tables")(export)


def export(
    sources: list[Path] = typer.Argument(
        None, metavar="[FOLDER or FILES]", help="Tables, or folders of them; default: the searches here, else shipped."
    ),
    to: Path = typer.Option(..., metavar="DIR", help="The folder to ship; created if missing, merged into if not."),
    form: str = typer.Option("kerneltune", "--format", help="kerneltune."),
    as_json: bool = typer.Option(False, "--json", help="Print the files written as JSON."),
) -> None:
    """Copy or merge tables into a folder that you ship, one file for each kernel, dtype and device.

    KERNELTUNE_TABLES=DIR makes the kernels read it.
    """
    from kerneltune import tables

    if form in PLANNED:
        raise UserError(f"--format {form} isn't there yet: expected {', '.join(FORMATS)}")
    if form not in FORMATS:
        raise UserError(f"--format {form!r}: expected {', '.join(FORMATS)}")
    written: dict[Path, int] = {}
    loaded = [tables.load_table(path) for path in table_files(sources)]  # all are sound before anything is written
    for table in loaded:
        dtypes = sorted({entry["workload"]["dtype"] for entry in table.entries})
        for dtype in dtypes:
            entries = [entry for entry in table.entries if entry["workload"]["dtype"] == dtype]
            path = to / tables.table_file_name(table.kernel, dtype, table.device["name"])
            tables.write_table(path, tables.make_table(table.kernel, table.device, table.provenance, entries))
            written[path] = len(tables.load_table(path).entries)
    if as_json:
        print(json.dumps([{"file": str(path), "entries": count} for path, count in written.items()]))
    else:
        for path, count in written.items():
            print(f"{path}  {count} entr{'y' if count == 1 else 'ies'}")


def table_files(sources: list[Path] | None) -> list[Path]:
    """The table files meant.

    Raises:
        UserError: a source is missing or has no tables, or there is nothing to export.
    """
    from kerneltune import tables

    if sources:
        return [file for source in sources for file in _files_of(source)]
    found = sorted(Path(SEARCHES).glob("*/*/tables/*.json")) or tables.shipped_tables()
    if not found:
        raise UserError(f"no tables in ./{SEARCHES} and none shipped: run `kerneltune search mla-decode` first")
    return found


def _files_of(source: Path) -> list[Path]:
    if not source.exists():
        raise UserError(f"{source}: no such file or folder")
    if source.is_file():
        return [source]
    for pattern in ("tables/*.json", "*/tables/*.json", "*/*/tables/*.json", "*.json"):
        if found := sorted(path for path in source.glob(pattern) if not path.name.startswith(".")):
            return found
    raise UserError(f"{source}: no tables (*.json) there or in its folders named tables")
