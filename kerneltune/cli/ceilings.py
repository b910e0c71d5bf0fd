"""`kerneltune ceilings`: measure the roofs of this GPU."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("ceilings", epilog="Example: kerneltune ceilings --device 0 --json")(ceilings)


def ceilings(
    device: Annotated[int, typer.Option(min=0, help="Number of the GPU, as torch counts.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure what this GPU can do: DRAM read and copy rates, tensor-core rates, the cost of an empty graph.

    Takes about 15 seconds on an otherwise idle GPU. The result is kept for a week for searches and reports.
    """
    from kerneltune.device import detect
    from kerneltune.errors import NO_GPU, UserError
    from kerneltune.measure.worker import GpuWorker
    from kerneltune.roofline.ceilings import store
    from kerneltune.roofline.model import Ceilings

    if detect(device) is None:
        raise UserError("ceilings are measured, never assumed, and torch sees no GPU on this machine", NO_GPU)
    with GpuWorker(None, device) as worker:
        found = Ceilings.from_dict(worker.ceilings())
    path = store(found)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
        return

    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{found.device}, measured {found.date}")
    table.add_column("ceiling")
    table.add_column("measured", justify="right")
    table.add_row("DRAM read", f"{found.dram_read_gbps:,.0f} GB/s")
    table.add_row("DRAM copy (read + written)", f"{found.dram_copy_gbps:,.0f} GB/s")
    for dtype, tflops in found.tflops.items():
        table.add_row(f"tensor core {dtype}", f"{tflops:,.0f} TFLOP/s")
    table.add_row("empty graph", f"{found.launch_us:.1f} us")
    Console().print(table)
    typer.echo(f"kept in {path}", err=True)
