"""`kerneltune import`: tables of engines, or of ours, as the first configs that a search tries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

SHOWN = 8  # rows that a search passes over


def register(app: typer.Typer) -> None:
    """Add the command."""
    example = "Example: kerneltune import E=256,N=256,device_name=NVIDIA_H200.json --model deepseek-v3 --tp 8 --out moe"
    app.command("import", epilog=example)(import_)


def import_(
    files: list[Path] = typer.Argument(metavar="FILES", help="vLLM's or SGLang's MoE tables, or kerneltune's own."),
    out: Path = typer.Option(..., metavar="DIR", help="The --out folder of the searches that start from them."),
    model: str | None = typer.Option(None, help="Model preset, for what a file's name does not say (K, top_k)."),
    tp: int | None = typer.Option(None, help="Tensor-parallel GPUs; default 1 with --model, else 8."),
    ep: int = typer.Option(1, help="Expert-parallel GPUs."),
    workload: str = typer.Option("", help="k=v,... on top of the model: K=7168,top_k=8,dtype=bf16."),
    as_json: bool = typer.Option(False, "--json", help="Print what was written as JSON."),
) -> None:
    """Let searches with this --out try imported configs first, right after the default.

    Nothing is measured and no kernel loads what is written (DIR/imports/*.json); a search takes the configs of the
    nearest sizes, within a factor of two.
    """
    from kerneltune.tuning import imports

    written = imports.import_files(files, out, model, tp, ep, workload)
    if as_json:
        print(json.dumps(written))
        return
    for each in written:
        print(_text(each))


def _text(each: dict[str, Any]) -> str:
    from kerneltune.kernels.table_format import KEYS, scaled_text

    notes = "".join(f"; {note}" for note in each["notes"])
    lines = [f"{each['file']}  {each['entries']} configs from {each['source']}{notes}"]
    refused = each["refused"]
    if refused:
        lines += [f"  {len(refused)} of them the kernel would not run, so a search passes over them:"]
        lines += [f"  {scaled_text(KEYS[each['kernel']], row['workload'])}: {row['why']}" for row in refused[:SHOWN]]
    if len(refused) > SHOWN:
        lines += [f"  and {len(refused) - SHOWN} more (--json names all)"]
    return "\n".join(lines)
