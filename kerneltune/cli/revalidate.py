"""`kerneltune revalidate`: vet and time the stale entries of tables again, and renew them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kerneltune.errors import CHECK_FAILED, INTERRUPTED, UserError

if TYPE_CHECKING:
    from kerneltune.tuning.revalidate import Renewed


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: kerneltune revalidate results/nvidia-h200/tables")(revalidate)


def revalidate(
    paths: list[Path] = typer.Argument(None, metavar="[PATHS]", help="Tables or folders; default: the user's folder."),
    everything: bool = typer.Option(False, "--all", help="Every entry, not only the stale ones."),
    device: int = typer.Option(0, help="Number of the GPU."),
    as_json: bool = typer.Option(False, "--json", help="Print what became of each entry as a JSON list."),
) -> None:
    """Check and time again the entries whose compiler or kernel source has changed, and write them renewed.

    Takes seconds an entry, on a GPU of the tables' kind. Every entry is written when it is done: an interruption keeps
    those. What is wrong is left as it is and named, the others go on, and the exit code is 1. `kerneltune search`
    looks for better configs; this only renews what is there.
    """
    from dataclasses import asdict

    from kerneltune.cli.export import table_files
    from kerneltune.cli.search import command_line
    from kerneltune.kernels.table_files import user_folder
    from kerneltune.tuning import revalidate as revalidation

    files = table_files(paths or [Path(user_folder())])
    begin = time.monotonic()
    found = []
    try:
        for each in revalidation.revalidate(
            files, revalidation.on_gpu(device), everything=everything, command=command_line()
        ):
            found.append(each)
            if not as_json:
                print(f"{each.outcome:8}  {_place(each)}: {_text(each)}", flush=True)
    except KeyboardInterrupt:
        raise UserError("interrupted: every entry that was done is written", INTERRUPTED) from None
    if as_json:
        print(json.dumps([asdict(each) for each in found]))
    else:
        _print_counts(found, time.monotonic() - begin)
    if any(each.fault for each in found):
        raise typer.Exit(CHECK_FAILED)


def _print_counts(found: list[Renewed], seconds: float) -> None:
    counts = {kind: sum(each.outcome == kind for each in found) for kind in ("kept", "default", "broken", "left")}
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "nothing is stale"
    print(f"{told}; {seconds:.0f} s")


def _place(each: Renewed) -> str:
    """The workload; of what is left also where it lies, for whoever has to put it right."""
    from kerneltune.workloads import format_workload

    if each.number is None:
        return each.path
    workload = format_workload(each.kernel, each.workload)
    return f"{each.path} entries[{each.number}] ({workload})" if each.outcome == "left" else workload


def _text(each: Renewed) -> str:
    if each.time_us is None or each.outcome == "left":
        return str(each.reason)
    before = "" if each.before_us is None else f"{each.before_us:.1f} us -> "
    gain = f", {each.gain:.2f}x the default" if each.gain and each.gain > 1 else ", as the default"
    return f"{before}{each.time_us:.1f} us{gain}" + (f" (its config: {each.reason})" if each.reason else "")
