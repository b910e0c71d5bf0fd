"""`kerneltune report`: what searches found, as a table, a file format or pictures."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Annotated

import typer


class Format(enum.StrEnum):
    """How the report is written to stdout."""

    text = "text"
    csv = "csv"
    json = "json"
    markdown = "markdown"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("report")(report)


def report(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="A search's --out folder, or one of several. Default: the last search here, else the shipped ones."
        ),
    ] = None,
    format_: Annotated[Format, typer.Option("--format", help="What to write to stdout.")] = Format.text,
    plots: Annotated[
        Path | None,
        typer.Option("--plots", metavar="DIR", help="Also draw roofline, convergence and loss matrix there."),
    ] = None,
    kernel: Annotated[
        str | None, typer.Option("--kernel", metavar="NAME", help="Only this kernel: mla-decode or moe.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Show what tuning won over the default and how close each shape is to the roof.

    Example: kerneltune report kerneltune-results/nvidia-h200/mla-decode --plots plots
    """
    from rich.console import Console

    from kerneltune.errors import UserError
    from kerneltune.report.formats import FORMATS
    from kerneltune.report.load import find_folders, read_report
    from kerneltune.report.text import print_report

    found = read_report(find_folders(folder, kernel), kernel)
    for warning in found.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if not found.trials and not found.rows:
        where = ", ".join(str(path) for path in found.folders)
        raise UserError(f"nothing measured{f' for {kernel}' if kernel else ''} yet in {where}: run `kerneltune search`")
    chosen = Format.json if json_ else format_
    if chosen is Format.text and sys.stdout.isatty():
        print_report(found, Console())
    else:
        sys.stdout.write(FORMATS[chosen](found))
    if plots is not None:
        from kerneltune.report.plots import draw

        for path in draw(found.folders, plots, kernel):
            print(f"wrote {path}", file=sys.stderr)
