"""`kerneltune simulate`: how soon does a sampler find the best? Replayed on recordings, many seeds, no GPU needed."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kerneltune.errors import UserError

if TYPE_CHECKING:
    from kerneltune.recordings import Recording
    from kerneltune.tuning.simulate import Simulation

_recordings: list[Recording] = []  # of this process
PRIORS = ("none", "default", "neighbour")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: kerneltune simulate --sampler default --sampler tpe --seeds 20")(simulate)


def simulate(
    recordings: list[Path] | None = typer.Argument(
        None, help="Recording files, or folders of them; default: the shipped ones."
    ),
    sampler: list[str] = typer.Option(["default"], help="A sampler of `kerneltune search`, or all; repeatable."),
    seeds: int = typer.Option(50, min=1, help="Searches of each sampler on each recording."),
    prior: str = typer.Option(
        "none",
        help="none, default (the kernel's default config is tried first) or neighbour (the nearest is tuned).",
    ),
    plots: Path | None = typer.Option(None, metavar="DIR", help="Draw best-so-far into this folder (PNG, SVG)."),
    jobs: int = typer.Option(0, min=0, help="Processes; default: one a core."),
    as_json: bool = typer.Option(False, "--json", help="Print a list of objects as JSON."),
) -> None:
    """Score samplers: the fraction of the optimum after 16, 32, 64 distinct measurements, and against random order.

    A measurement is one config of one part of the operation. Without a prior the search knows the space and the
    device's ceilings, but neither the kernel's default config nor any table. "worst 32": the least of a seed after 32;
    "score": 0 as random order, 1 at the optimum from the first; "ms": the sampler's own time for a measurement.
    """
    from kerneltune.recordings import find_recordings
    from kerneltune.tuning.samplers import SAMPLERS

    names = list(SAMPLERS) if "all" in sampler else list(dict.fromkeys(sampler))
    unknown = [name for name in names if name not in SAMPLERS]
    if unknown:
        raise UserError(f"--sampler {unknown[0]}: expected all or one of {', '.join(SAMPLERS)}")
    if prior not in PRIORS:
        raise UserError(f"--prior {prior}: expected one of {', '.join(PRIORS)}")
    paths = recordings or [Path(__file__).parents[1] / "results"]
    found = find_recordings(paths)
    if not found:
        raise UserError(f"no recording in {', '.join(str(path) for path in paths)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes: small matrices, and each has a core
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    tasks = [(index, name) for index in range(len(found)) for name in names]
    results: list[Simulation] = []
    with ProcessPoolExecutor(
        min(jobs or os.cpu_count() or 1, len(tasks)), get_context("spawn"), _take, (found,)
    ) as pool:
        try:
            for future in _submit(pool, tasks, seeds, prior):
                result = future.result()
                results.append(result)
                print(
                    f"[{len(results)}/{len(tasks)}] {result.recording}: {result.sampler}", file=sys.stderr, flush=True
                )
        except BrokenProcessPool:
            raise UserError("a process of the simulation was killed (out of memory?); fewer --jobs need less") from None
        except BaseException:
            for child in active_children():
                child.kill()
            raise
    if as_json:
        print(json.dumps([result.to_dict() for result in results]))
    else:
        _print_table(results)
    if plots is not None:
        from kerneltune.report.samplers import draw

        for path in draw(results, plots):
            print(f"picture: {path}", file=sys.stderr)


def _take(recordings: list[Recording]) -> None:
    """In each process, once; it ends with the command, however that ends."""
    _recordings.extend(recordings)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _submit(
    pool: ProcessPoolExecutor, tasks: list[tuple[int, str]], seeds: int, prior: str
) -> list[Future[Simulation]]:
    """All tasks; the processes start here and inherit the mask: Ctrl-C reaches this one alone, which ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return [pool.submit(_simulate, task, seeds, prior) for task in tasks]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _simulate(task: tuple[int, str], seeds: int, prior: str) -> Simulation:
    from kerneltune.tuning.simulate import simulate

    index, sampler = task
    return simulate(_recordings[index], sampler, seeds, prior=prior, others=_recordings)


def _print_table(results: list[Simulation]) -> None:
    from rich.console import Console
    from rich.table import Table

    from kerneltune.tuning.simulate import AFTER, averages

    table = Table(box=None, pad_edge=False)
    for name in ("recording", "points", "sampler", *(f"after {n}" for n in AFTER), "worst 32", "score", "ms"):
        table.add_column(name, justify="left" if name in ("recording", "sampler") else "right", no_wrap=True)
    for result in results:
        row = result.to_dict()
        figures = [f"{row['after'][str(n)]:.1%}" for n in AFTER]
        worst = f"{row['worst']['32']:.1%}"
        score = f"{row['score']:.2f}"
        table.add_row(
            row["recording"], str(row["points"]), row["sampler"], *figures, worst, score, f"{row['sampler_ms']:.1f}"
        )
    if len(results) > 1:
        table.add_section()
        for sampler, mean in averages(results).items():
            figures = [f"{mean.after[str(n)]:.1%}" for n in AFTER]
            table.add_row(f"mean of {mean.count}", "", sampler, *figures, f"{mean.worst:.1%}", f"{mean.score:.2f}", "")
    Console(width=200 if not sys.stdout.isatty() else None, soft_wrap=True).print(table)
