"""`kerneltune warmup`: compile the configs of tables before a server's first request does."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from kerneltune.errors import CHECK_FAILED, UserError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: kerneltune warmup --table my-engine/tables")(warmup)


def warmup(
    table: list[Path] = typer.Option([], metavar="FILE", help="A table or folder; repeatable; default: all."),
    target: str | None = typer.Option(None, metavar="ARCH", help="A GPU that is not here, as sm_90."),
    workers: int | None = typer.Option(None, min=1, help="Compile processes; default: all CPUs but two."),
    as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON."),
) -> None:
    """Compile every config of tables for the GPU here into Triton's cache (TRITON_CACHE_DIR, else ~/.triton/cache).

    Only tables of that GPU and its relatives count. Exit 1 if a config does not compile.
    """
    from dataclasses import asdict

    from kerneltune import tables
    from kerneltune.cli.export import table_files
    from kerneltune.cli.spaces import choose_device
    from kerneltune.kernels.device import relation
    from kerneltune.warmup import cache_folder, warm_up

    device = choose_device(target)
    loaded = [tables.load_table(path) for path in table_files(table)] if table else tables.loaded_here()
    mine = [each for each in loaded if relation(each.device, device) is not None]
    if not mine:
        there = ", ".join(sorted({each.device["name"] for each in loaded})) or "none"
        raise UserError(f"no table for {device.name}: those given are of {there}")
    done = warm_up(mine, device, workers)
    if as_json:
        print(json.dumps(asdict(done) | {"cache": str(cache_folder())}))
    else:
        for line in done.failed:
            print(f"failed    {line}")
        print(f"compiled  {done.binaries} new binaries of {done.configs} configs in {cache_folder()}")
        print(
            f"took      {done.wall_s:.1f} s here; a server would have waited {done.compile_s:.1f} s at first requests"
        )
    if done.failed:
        raise typer.Exit(CHECK_FAILED)
