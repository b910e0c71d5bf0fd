"""`kerneltune search`: find the fastest correct config of every workload, write and install the table."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kerneltune.errors import CHECK_FAILED, INTERRUPTED, UserError

if TYPE_CHECKING:
    from kerneltune.tuning.session import Result


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: kerneltune search mla-decode --model deepseek-v3 --tp 8 --budget 5m")(search)


def search(
    kernel: str = typer.Argument(help="mla-decode or moe."),
    model: str | None = typer.Option(None, help="Model preset; default deepseek-v3 at --tp 8."),
    tp: int | None = typer.Option(None, help="Tensor-parallel GPUs; default 1 with --model, else 8."),
    ep: int = typer.Option(1, help="Expert-parallel GPUs (moe)."),
    workload: list[str] = typer.Option([], help="One whole workload, k=v,...; repeatable. Replaces the ladder."),
    ladder: str = typer.Option("standard", help="A ladder of the space: standard or full."),
    routing: str | None = typer.Option(None, help="moe: uniform, zipf, dirichlet, or a file of recorded topk_ids."),
    lengths: str | None = typer.Option(None, help="mla-decode: equal, spread, or a file of recorded lengths."),
    space: Path | None = typer.Option(None, help="Another search space (TOML)."),
    trials: int | None = typer.Option(
        None,
        min=1,
        help="Distinct configs for each workload (and part), recorded ones included. Default: until another is unlikely"
        " to pay.",
    ),
    budget: str | None = typer.Option(None, help="Time for the whole search: 90s, 10m, 1h; a bare number is seconds."),
    sampler: str = typer.Option("default", help="default, tpe, gp, cmaes, random, exhaustive or descent."),
    seed: int = typer.Option(0, min=0, max=2**32 - 1, help="Of the sampler and the inputs."),
    max_loss: str = typer.Option(
        "2%", metavar="FRACTION", help="What a shape may lose so that few configs serve all: 2%, 0.02; 0: none."
    ),
    out: Path | None = typer.Option(None, help="Default: ./kerneltune-results/<device>/<kernel>."),
    device: int = typer.Option(0, min=0, help="Which GPU."),
    replay: str | None = typer.Option(
        None, metavar="[FILE or FOLDER]", help="Measure nothing: answer from recordings (no value: the shipped ones)."
    ),
    no_install: bool = typer.Option(False, "--no-install", help="Keep the table out of the user's config folder."),
    as_json: bool = typer.Option(False, "--json", help="Print the winners as JSON."),
) -> None:
    """Find the fastest correct config of every workload; the same command again resumes.

    Without options: DeepSeek-V3 at TP 8 over the kernel's standard ladder. Without a GPU: replays the shipped
    recordings.
    """
    from kerneltune.cli.progress import ConsoleProgress
    from kerneltune.tuning import api

    budget_s = parse_budget(budget)
    progress = ConsoleProgress(kernel, budget_s)
    try:
        result = api.search(
            kernel,
            model=model,
            tp=tp,
            ep=ep,
            workloads=workload,
            ladder=ladder,
            routing=routing,
            lengths=lengths,
            space=space,
            trials=trials,
            budget_s=budget_s,
            sampler=sampler,
            seed=seed,
            max_loss=parse_fraction(max_loss),
            out=out,
            device=device,
            replay=replay,
            install=not no_install,
            progress=progress,
            command=command_line(),
        )
    except KeyboardInterrupt:
        raise UserError("interrupted: every finished trial is kept; the same command resumes", INTERRUPTED) from None
    finally:
        progress.close()
    _print(result, as_json)


def parse_budget(text: str | None) -> float | None:
    """Seconds of "90s", "10m", "1.5h", "90".

    Raises:
        UserError: anything else, or not positive.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,7}(?:\.\d{1,6})?)([smh]?)", text.strip())
    seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0
    if seconds <= 0:
        raise UserError(f"--budget {text}: expected a time such as 90s, 10m or 1h")
    return seconds


def parse_fraction(text: str) -> float:
    """The fraction that "2%", "2 %" or "0.02" means.

    Raises:
        UserError: anything else, or not from 0 to below 1.
    """
    match = re.fullmatch(r"(\d{1,3}(?:\.\d{1,9})?)\s*(%?)", text.strip())
    fraction = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= fraction < 1:
        raise UserError(f"--max-loss {text}: expected a fraction such as 2% or 0.02, from 0 to below 1")
    return fraction


def command_line() -> str:
    """The command as typed, without the path of the program, as tables take it."""
    import shlex

    from kerneltune.kernels.table_format import printable

    return "kerneltune " + printable(shlex.join(sys.argv[1:]))


def _print(result: Result, as_json: bool) -> None:
    from kerneltune.report import plots, text

    if result.table is None:
        raise UserError(f"no config of any workload ran; the reasons are in {result.out}/records", CHECK_FAILED)
    if as_json:
        print(json.dumps(_summary(result)))
    else:
        print(text.render(result.out))
    remembered = f", {result.remembered} already in the records" if result.remembered else ""
    done = "measured" if result.live else "replayed"
    print(f"trials and finalists: {result.measured} {done} now{remembered}", file=sys.stderr)
    for table in result.tables:
        print(f"table: {table}", file=sys.stderr)
    try:
        pictures = plots.save_plots(result.out, result.out / "plots")
    except OSError as error:
        print(f"warning: the pictures could not be saved: {error}", file=sys.stderr)
        pictures = []
    for path in pictures:
        if path.suffix == ".png":
            print(f"picture: {path}", file=sys.stderr)


def _summary(result: Result) -> dict[str, Any]:
    winners = [
        {
            "workload": workload,
            "config": dict(decision.winner.config),
            "time_us": decision.winner.time_us,
            "default_us": decision.default.time_us if decision.default else None,
            "gain": decision.gain,
            "roofline": decision.winner.roofline,
        }
        for workload, decision in result.decisions
        if decision is not None
    ]
    entries = [
        {
            "workload": served.workload,
            "config": dict(served.timed.trial.config),
            "time_us": served.timed.trial.time_us,
            "gain": served.gain,
            "loss": served.own_loss,
        }
        for served in result.served
    ]
    return {
        "table": str(result.table),
        "tables": [str(table) for table in result.tables],
        "out": str(result.out),
        "measured": result.measured,
        "remembered": result.remembered,
        "winners": winners,
        "entries": entries,
        "configs": result.configs,
        "worst_loss": result.worst_loss,
    }
