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
    if to.suffix != ".json" and to.exists() and not to.is_dir():
        raise UserError(f"--to {to}: a file there that does not end in .json; name a folder, or a file that does")
    loaded = [tables.load_table(path) for path in table_files(list(sources))]
    if not any(table.entries for table in loaded):
        raise UserError("nothing to merge: the tables have no entries")
    written, conflicts = table_diff.merge_into(to, loaded, prefer)
    if as_json:
        files = {str(path): count for path, count in written.items()}
        print(json.dumps({"files": files, "conflicts": [asdict(conflict) for conflict in conflicts]}))
        return
    for each in conflicts:
        print(f"conflict  {format_workload(each.kernel, each.workload)}: {each.taken}, not {each.left}")
    for path, count in written.items():
        print(f"{path}  {count} entr{'y' if count == 1 else 'ies'}")
