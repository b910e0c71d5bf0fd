"""The loss matrix as a picture: what each shape of a ladder loses with each config of the table, in percent.

Reads in black and white: the darker the more is lost, the figure stands in each cell, and the config that the table
states for a shape has a frame.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from kerneltune.report.data import Row, canonical, group_key

DARKEST = 20.0  # percent; whatever loses more is as dark
DARK = 0.55  # of the scale: from there on figures are white
CELL_INCHES = (1.0, 0.75)
FEW_SHAPES = 5  # whose names have room side by side; more stand upright
COLUMNS_PER_INCH = 6.5  # of the lines that spell the configs out, in a monospaced font of 18 points


def loss_groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that share a loss matrix: equal but for their sizes, at least two, timed with each other's configs."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        if row.losses:
            found.setdefault((row.device, *group_key(row)), []).append(row)
    return [group for group in found.values() if len(group) > 1 and any(len(row.losses) > 1 for row in group)]


def loss_matrix(rows: Sequence[Row], label: str) -> Figure:
    """Configs down, shapes across, loss in percent in each cell; the rows are one of `loss_groups`."""
    configs = list({canonical(row.config): row for row in rows}.values())
    shapes = _columns(rows)
    percent = np.array([[100 * row.losses.get(shape, np.nan) for shape in shapes] for row in configs])
    names = [chr(ord("A") + i) if i < 26 else f"A{i}" for i in range(len(configs))]
    width = max(13.0, 1.5 + CELL_INCHES[0] * len(shapes))
    spelled = [
        line for name, row in zip(names, configs, strict=True) for line in _spelled(name, row.config, width - 1.0)
    ]
    size = width, 2.8 + CELL_INCHES[1] * len(configs) + 0.32 * len(spelled) + (2.5 if len(shapes) > FEW_SHAPES else 0.5)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(np.nan_to_num(percent), cmap="Greys", vmin=0, vmax=DARKEST, aspect="auto")
    for (y, x), value in np.ndenumerate(percent):
        text = "-" if np.isnan(value) else f"{value:.1f}" if value < 99.5 else f"{value:.0f}"
        shade = "white" if value / DARKEST > DARK else "black"
        axes.text(x, y, text, ha="center", va="center", color=shade)
    for row in rows:
        y = next(i for i, other in enumerate(configs) if canonical(other.config) == canonical(row.config))
        x = next((i for i, shape in enumerate(shapes) if shape == _own(row, shapes)), None)
        if x is not None:
            axes.add_patch(Rectangle((x - 0.46, y - 0.44), 0.92, 0.88, fill=False, linewidth=3, edgecolor="black"))
    upright = len(shapes) > FEW_SHAPES
    labels = [shape.replace(",", " " if upright else "\n") for shape in shapes]
    axes.set_xticks(range(len(shapes)), labels, rotation=90 if upright else 0)
    axes.set_yticks(range(len(configs)), names)
    axes.set_ylabel("config of the table")
    axes.set_xlabel("\n".join(["", *spelled]), loc="left", family="monospace")
    worst = max((row.loss for row in rows if row.loss is not None), default=0.0)
    axes.set_title(
        f"{label}, {rows[0].device}: {len(rows)} shapes, {len(configs)} configs, worst loss {100 * worst:.1f} %\n"
        "time lost against the best config of each shape, in %; framed: what the table states",
        loc="left",
        fontsize=18,
    )
    return figure


def _spelled(name: str, config: dict[str, Any], inches: float) -> list[str]:
    """A config in words, a part a line: "A  BLOCK_H=16 num_warps=4"."""
    parts = {f"{part} ": params for part, params in config.items() if isinstance(params, dict)} or {"": config}
    lines: list[str] = []
    for part, params in parts.items():
        text = part + " ".join(f"{key}={value}" for key, value in params.items())
        lines += textwrap.wrap(
            f"{' ' if lines else name}  {text}", int(inches * COLUMNS_PER_INCH), subsequent_indent="    "
        )
    return lines


def _columns(rows: Sequence[Row]) -> list[str]:
    """The shapes, in the rows' order, then any that only a config was timed on."""
    named = dict.fromkeys(shape for row in rows for shape in row.losses)
    own = [shape for row in rows for shape in named if _is_own(row, shape)]
    return [*dict.fromkeys(own), *(shape for shape in named if shape not in own)]


def _own(row: Row, shapes: Sequence[str]) -> str | None:
    return next((shape for shape in shapes if _is_own(row, shape)), None)


def _is_own(row: Row, shape: str) -> bool:
    return all(
        str(row.workload.get(name)) == size for name, _, size in (pair.partition("=") for pair in shape.split(","))
    )
