"""`kerneltune check`: are these tables sound, reachable, fresh and legal on their device?"""

from __future__ import annotations

import json
from pathlib import Path

import typer

from kerneltune.errors import CHECK_FAILED


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: kerneltune check my-engine/tables --measure")(check)


def check(
    paths: list[Path] = typer.Argument(None, metavar="[PATHS]", help="Tables, or folders of them; default: shipped."),
    measure: bool = typer.Option(False, "--measure", help="Also vet and time each entry against the default (GPU)."),
    device: int = typer.Option(0, help="Number of the GPU that --measure uses."),
    schema: bool = typer.Option(False, "--schema", help="Print the JSON Schema of a table and do nothing else."),
    as_json: bool = typer.Option(False, "--json", help="Print the findings as a JSON list."),
) -> None:
    """Say what is wrong with tables: exit 1 on a fault, 0 with notes alone.

    A table is judged by the device in its header, with or without a GPU here; another compiler is a note.
    """
    from dataclasses import asdict

    from kerneltune import table_schema, tables
    from kerneltune.table_check import check_tables, table_paths

    if schema:
        print(json.dumps(table_schema.make_schema(), indent=1))
        return
    given = paths or tables.shipped_tables()
    findings = check_tables(given)
    if measure:
        from kerneltune.tuning.revalidate import measure_entries, on_gpu

        sound = [path for path in table_paths(given)[0] if not any(f.path == str(path) and f.fault for f in findings)]
        for finding in measure_entries(sound, on_gpu(device)):
            findings.append(finding)
            typer.echo(finding, err=True)
    faults = sum(finding.fault for finding in findings)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        for finding in findings:
            print(finding)
        print(f"{faults} fault{'' if faults == 1 else 's'}, {len(findings) - faults} notes in {len(given)} paths")
    if faults:
        raise typer.Exit(CHECK_FAILED)
