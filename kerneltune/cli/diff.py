"""`kerneltune diff`: two tables compared, by workload."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from kerneltune.cli.export import table_files
from kerneltune.errors import CHECK_FAILED


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: kerneltune diff shipped/ kerneltune-results/nvidia-h200/moe")(diff)


def diff(
    a: Path = typer.Argument(help="A table, or a folder of them."),
    b: Path = typer.Argument(help="What it is compared with."),
    as_json: bool = typer.Option(False, "--json", help="Print the differences as a JSON list."),
) -> None:
    """Say what B has otherwise than A, by workload: exit 0 if nothing, 1 if anything."""
    from dataclasses import asdict

    from kerneltune import table_diff, tables
    from kerneltune.workloads import format_workload

    left, right = ([tables.load_table(path) for path in table_files([side])] for side in (a, b))
    found = table_diff.diff(left, right)
    if as_json:
        print(json.dumps([asdict(difference) for difference in found]))
    else:
        for each in found:
            place = format_workload(each.kernel, each.workload) if each.workload else each.kernel
            print(f"{each.kind:9} {place}: {each.what}")
        print(f"{len(found)} difference{'' if len(found) == 1 else 's'}" if found else "no difference")
    if found:
        raise typer.Exit(CHECK_FAILED)
