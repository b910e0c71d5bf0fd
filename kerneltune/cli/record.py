"""`kerneltune record`: brute-force a space into recordings that searches can be replayed on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer

from kerneltune.errors import INTERRUPTED, NO_GPU, UserError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: kerneltune record moe --workload tokens=64 --workload tokens=1024")(record)


def record(
    kernel: str = typer.Argument(help="mla-decode or moe."),
    model: str | None = typer.Option(None, help="Model preset; default deepseek-v3 at --tp 8."),
    tp: int | None = typer.Option(None, help="Tensor-parallel GPUs; default 1 with --model, else 8."),
    ep: int = typer.Option(1, help="Expert-parallel GPUs (moe)."),
    workload: list[str] = typer.Option([], help="One whole workload, k=v,...; repeatable. Replaces the ladder."),
    ladder: str = typer.Option("standard", help="standard or full."),
    routing: str | None = typer.Option(None, help="moe: uniform, zipf, dirichlet, or a file of recorded topk_ids."),
    lengths: str | None = typer.Option(None, help="mla-decode: equal, spread, or a file of recorded lengths."),
    space: Path | None = typer.Option(None, help="Another search space (TOML)."),
    seed: int = typer.Option(0, min=0, max=2**32 - 1, help="Of the inputs."),
    out: Path | None = typer.Option(None, help="Default: ./kerneltune-results/<device>/<kernel>."),
    device: int = typer.Option(0, min=0, help="Which GPU."),
    as_json: bool = typer.Option(False, "--json", help="Print the paths as JSON."),
) -> None:
    """Measure every feasible config of every workload; the same command again resumes. Needs a GPU."""
    from kerneltune.cli.progress import ConsoleProgress
    from kerneltune.cli.search import command_line
    from kerneltune.device import detect, slug
    from kerneltune.tuning import recorder
    from kerneltune.tuning.api import RESULTS, Request
    from kerneltune.tuning.backends import LiveBackend
    from kerneltune.tuning.options import Options
    from kerneltune.workloads import served_note

    request = Request(kernel, model, tp, ep, tuple(workload), ladder, space, routing, lengths)
    checked = request.check()
    workloads = request.workloads()
    if detect(device) is None:
        raise UserError(f"record measures on a GPU, and GPU {device} is not here", NO_GPU)
    backend = LiveBackend(kernel, checked, device, seed, workloads[0])
    folder = out if out is not None else RESULTS / slug(str(backend.device["name"])) / kernel
    progress = ConsoleProgress(kernel)
    note = served_note(kernel, model)
    if note is not None:
        progress.note(note)
    try:
        options = Options(folder, seed=seed, sampler="exhaustive", command=command_line())
        paths = recorder.record(backend, workloads, checked.text, options, progress)
    except KeyboardInterrupt:
        raise UserError("interrupted: every finished trial is kept; the same command resumes", INTERRUPTED) from None
    finally:
        progress.close()
        backend.close()
    if as_json:
        print(json.dumps([str(path) for path in paths]))
    else:
        for path in paths:
            print(path)
    print(f"{len(paths)} recordings; replay with `kerneltune search {kernel} --replay {folder}`", file=sys.stderr)
