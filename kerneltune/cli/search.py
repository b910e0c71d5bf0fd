"""`kerneltune search`: find the fastest correct config of every workload, write and install the table."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kerneltune.errors import NO_GPU, UserError

if TYPE_CHECKING:
    from kerneltune.recordings import Recording
    from kerneltune.tuning.backends import Backend
    from kerneltune.tuning.session import Result

RESULTS = Path("kerneltune-results")
SHIPPED = "shipped"  # the value of --replay without a value


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: kerneltune search mla-decode --model deepseek-v3 --tp 8 --budget 5m")(search)


def search(
    kernel: str = typer.Argument(help="mla-decode or moe."),
    model: str | None = typer.Option(None, help="Model preset; default deepseek-v3 at --tp 8."),
    tp: int | None = typer.Option(None, help="Tensor-parallel GPUs; default 1 with --model, else 8."),
    ep: int = typer.Option(1, help="Expert-parallel GPUs (moe)."),
    workload: list[str] = typer.Option([], help="One whole workload, k=v,...; repeatable. Replaces the ladder."),
    ladder: str = typer.Option("standard", help="standard or full."),
    space: Path | None = typer.Option(None, help="Another search space (TOML)."),
    trials: int = typer.Option(
        48, min=1, help="Distinct configs for each workload (and part), recorded ones included."
    ),
    budget: str | None = typer.Option(None, help="Time for the whole search: 90s, 10m, 1h."),
    sampler: str = typer.Option("default", help="default, tpe, gp, cmaes, random or exhaustive."),
    seed: int = typer.Option(0, help="Of the sampler and the inputs."),
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
    from kerneltune.device import detect, slug
    from kerneltune.registry import KERNELS
    from kerneltune.tuning.samplers import SAMPLERS
    from kerneltune.tuning.session import Options, run

    if kernel not in KERNELS:
        raise UserError(f"unknown kernel {kernel!r}: expected one of {', '.join(KERNELS)}")
    if sampler not in SAMPLERS:
        raise UserError(f"--sampler {sampler}: expected one of {', '.join(SAMPLERS)}")
    seconds = parse_budget(budget)
    named = Named(kernel, model, tp, ep, tuple(workload), ladder, space)
    if replay is None and detect(device) is None:
        if device:
            raise UserError(f"--device {device}: there is no such GPU here", NO_GPU)
        print("no GPU here: replaying the recordings shipped in results/ (nothing is measured)", file=sys.stderr)
        replay = SHIPPED
    backend: Backend
    if replay is not None:
        recordings = choose_recordings(kernel, replay, named)
        backend, workloads = replay_backend(recordings)
    else:
        workloads = named.workloads()
        backend = live_backend(named, device, seed)
    folder = out if out is not None else RESULTS / slug(str(backend.device["name"])) / kernel
    progress = ConsoleProgress(kernel)
    options = Options(folder, trials, seconds, sampler, seed, command_line())
    try:
        result = run(backend, workloads, options, progress)
    except KeyboardInterrupt:
        print(f"interrupted: every finished trial is in {folder}/records; the same command resumes", file=sys.stderr)
        raise
    finally:
        progress.close()
        backend.close()
    _finish(result, live=replay is None, install=not no_install, as_json=as_json)


class Named:
    """The workloads that a command line names: a model at a parallelism, a ladder or single workloads."""

    def __init__(
        self,
        kernel: str,
        model: str | None,
        tp: int | None,
        ep: int,
        single: tuple[str, ...],
        ladder: str,
        space: Path | None,
    ) -> None:
        from kerneltune.space import load_space
        from kerneltune.workloads import DEFAULT_MODEL, DEFAULT_TP, model_workload

        self.kernel, self.single = kernel, single
        self.explicit = bool(model or single or tp is not None or ep != 1)
        self.space = load_space(space if space is not None else kernel)
        if self.space.kernel != kernel:
            raise UserError(f"{space}: a space of {self.space.kernel}, not of {kernel}")
        self._ladder = ladder
        self._tp = tp if tp is not None else (1 if model else DEFAULT_TP)
        self._sizes = lambda: model_workload(kernel, model or DEFAULT_MODEL, self._tp, ep)
        self.space.ladder(ladder)  # a wrong name is said before anything starts

    def workloads(self) -> list[dict[str, Any]]:
        """Complete, checked workloads, as the kernel writes them."""
        from kerneltune.registry import load_tunable
        from kerneltune.workloads import ladder_workloads, parse_workload

        base = self._sizes()
        if not self.single:
            return ladder_workloads(self.kernel, base, self._ladder, self.space)
        tunable = load_tunable(self.kernel)
        return [tunable.complete_workload(parse_workload(text, base)) for text in self.single]


def live_backend(named: Named, device: int, seed: int) -> Backend:
    """The GPU of this machine, started after everything that can be wrong with the command has been checked."""
    from kerneltune.tuning.backends import LiveBackend

    return LiveBackend(named.kernel, named.space, device, seed)


def replay_backend(recordings: Sequence[Recording]) -> tuple[Backend, list[dict[str, Any]]]:
    """A backend over recordings and the workloads it can answer."""
    from kerneltune.tuning.backends import ReplayBackend

    backend = ReplayBackend(recordings)
    return backend, backend.workloads


def choose_recordings(kernel: str, replay: str, named: Named) -> list[Recording]:
    """The recordings that a replay answers from: those of the workloads named, or all.

    Raises:
        UserError: exit 3 when a workload was named that nobody recorded, or nothing was recorded at all.
    """
    from kerneltune.recordings import canonical, find_recordings
    from kerneltune.workloads import format_workload

    shipped = Path(__file__).parents[1] / "results"
    paths = [shipped] if replay == SHIPPED else [Path(replay)]
    found = find_recordings(paths, kernel)
    if not found:
        raise UserError(f"no recording of {kernel} in {'the shipped results' if replay == SHIPPED else replay}", NO_GPU)
    first = found[0]
    found = [r for r in found if r.device == first.device and r.kernel_hash == first.kernel_hash]
    if not named.explicit:
        return found
    wanted = {canonical(workload): workload for workload in named.workloads()}
    chosen = [r for r in found if canonical(r.workload) in wanted]
    missing = [w for key, w in wanted.items() if key not in {canonical(r.workload) for r in found}]
    if (missing and named.single) or not chosen:
        there = "; ".join(format_workload(kernel, r.workload) for r in found)
        what = format_workload(kernel, missing[0])
        raise UserError(f"not recorded, and there is no GPU to measure it: {what}. Recorded: {there}", NO_GPU)
    if missing:
        print(f"replaying the {len(chosen)} of {len(wanted)} workloads that were recorded", file=sys.stderr)
    return chosen


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


def command_line() -> str:
    """The command as typed, without the path of the program."""
    import shlex

    return "kerneltune " + shlex.join(sys.argv[1:])


def _finish(result: Result, *, live: bool, install: bool, as_json: bool) -> None:
    from kerneltune import tables
    from kerneltune.report import plots, text

    if result.table is None:
        raise UserError(f"no config of any workload ran; the reasons are in {result.out}/records", 1)
    drawn = plots.save_plots(result.out, result.out / "plots")
    installed = tables.install(result.table) if live and install else None
    if as_json:
        winners = [
            {"workload": workload, "config": dict(decision.winner.config), "time_us": decision.winner.time_us,
             "default_us": decision.default.time_us if decision.default else None, "gain": decision.gain,
             "roofline": decision.winner.roofline}
            for workload, decision in result.decisions
            if decision is not None
        ]  # fmt: skip
        print(json.dumps({"table": str(result.table), "out": str(result.out), "measured": result.measured,
                          "remembered": result.remembered, "winners": winners}))  # fmt: skip
    else:
        print(text.render(result.out))
    print(f"trials: {result.measured} measured now, {result.remembered} taken from the records", file=sys.stderr)
    print(f"table: {result.table}", file=sys.stderr)
    for path in drawn:
        if path.suffix == ".png":
            print(f"picture: {path}", file=sys.stderr)
    if installed is not None:
        print(f"installed: {installed} (the kernels load it from now on)", file=sys.stderr)
