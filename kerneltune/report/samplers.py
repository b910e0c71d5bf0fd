"""Pictures of samplers compared on recordings: best so far against measurements and against GPU seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from kerneltune.report.plots import MARKERS, SHADES, STYLE, save_figure
from kerneltune.tuning.simulate import Simulation

SIZE_INCHES = (15.0, 8.0)
LOWEST = 60.0  # percent: where the axis begins
GRID = 120  # points of the axis of seconds


def draw(results: Sequence[Simulation], out: Path) -> list[Path]:
    """One picture over all recordings; returns the files written."""
    with mpl.rc_context(STYLE):
        return save_figure(best_so_far(results), out / "samplers")


def best_so_far(results: Sequence[Simulation]) -> Figure:
    """Mean fraction of the optimum over recordings and seeds, with 95 % bands of the mean over seeds."""
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    by_count, by_seconds = figure.subplots(1, 2, sharey=True)
    samplers = list(dict.fromkeys(result.sampler for result in results))
    for number, sampler in enumerate(samplers):
        own = [result for result in results if result.sampler == sampler]
        style: dict[str, Any] = {
            "color": SHADES[number % len(SHADES)],
            "marker": MARKERS[number % len(MARKERS)],
            "markersize": 9,
            "linewidth": 2.4,
        }
        length = max(result.fractions.shape[1] for result in own)
        counts = np.arange(1, length + 1)
        _line(by_count, counts, [_extended(result.fractions, length) for result in own], sampler, style)
        seconds = np.geomspace(0.1, max(result.gpu_s.max() for result in own), GRID)
        _line(by_seconds, seconds, [_at(result, seconds) for result in own], sampler, style)
    by_count.set_xscale("log", base=2)
    by_count.set_xticks([1, 2, 4, 8, 16, 32, 64], labels=["1", "2", "4", "8", "16", "32", "64"])
    by_count.set_xlabel("distinct measurements")
    by_seconds.set_xscale("log")
    by_seconds.set_xlabel("GPU seconds (gate and timing)")
    by_count.set_ylabel("best so far, % of the optimum")
    by_count.set_ylim(LOWEST, 100.5)
    by_count.legend(loc="lower right")
    recordings = len({result.recording for result in results})
    seeds = sorted({result.seeds for result in results})
    runs = f"{seeds[0]} to {seeds[-1]} seeds" if len(seeds) > 1 else f"{seeds[0]} seeds each"
    figure.suptitle(f"Samplers on {recordings} recordings, {runs}, prior: {results[0].prior}")
    for axes in (by_count, by_seconds):
        axes.grid(alpha=0.3)
    return figure


def _line(axes: Any, x: NDArray[Any], rows: Sequence[NDArray[np.float64]], label: str, style: dict[str, Any]) -> None:
    by_seed = 100 * np.mean(np.array(rows), axis=0)  # [seeds, x]: mean over recordings
    mean = by_seed.mean(axis=0)
    half = 1.96 * by_seed.std(axis=0) / np.sqrt(len(by_seed))
    axes.plot(x, mean, label=label, markevery=max(len(x) // 8, 1), **style)
    axes.fill_between(x, mean - half, mean + half, color=style["color"], alpha=0.2, linewidth=0)


def _extended(fractions: NDArray[np.float64], length: int) -> NDArray[np.float64]:
    """Cut, or its last column repeated: a space that is exhausted keeps its best."""
    missing = max(length - fractions.shape[1], 0)
    return np.pad(fractions, ((0, 0), (0, missing)), mode="edge")[:, :length]


def _at(result: Simulation, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """[seeds, seconds]: best so far at these times."""
    rows = []
    for own, spent in zip(result.fractions, result.gpu_s, strict=True):
        done = np.searchsorted(spent, seconds, side="right")
        rows.append(np.concatenate([[0.0], own])[done])
    return np.array(rows)
