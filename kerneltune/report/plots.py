"""Pictures of a search (PNG, SVG): how far under the roof each shape lies, how soon the best was found, losses.

All read in black and white and at half size: groups differ by marker, default and tuned by hollow and filled, roofs
by line style with their figure written on them.
"""

from __future__ import annotations

import math
import re
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure  # no pyplot: no backend, no state shared with the user's own plots
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kerneltune.report.data import Curve, Row, group_key, group_labels
from kerneltune.report.heatmap import loss_groups, loss_matrix
from kerneltune.report.load import find_folders, read_curves, read_report

SIZE_INCHES = (13.0, 9.0)
STYLE = {
    "font.size": 18,  # 9 pt at half size
    "axes.linewidth": 1.2,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "kerneltune",  # the same ids, and so the same file, from the same data
    "svg.fonttype": "none",  # text stays text: searchable, and small
    "legend.frameon": False,
    "lines.solid_capstyle": "round",
}
MARKERS = "osD^vP*X<>ph"
SHADES = ("#0b3c6f", "#c4501b", "#3b7d3a", "#7a4a91", "#8a6d1a", "#444444")
ROOF = "#222222"
ROOF_DASHES = ("-", "--", "-.", ":")
NEAR_BEST = 95.0  # percent
HALF_WIDTH = 38  # characters of a label that fit beside another
LABEL_ROOM = 1.6  # roofs closer than this factor have no room for a label each


def save_plots(folder: Path, out: Path) -> list[Path]:
    """Draw what `folder` (the --out folder of a search) holds into `out`; returns the files written, if any."""
    return draw(find_folders(folder), out)


def draw(folders: Sequence[Path], out: Path, kernel: str | None = None) -> list[Path]:
    """Draw the pictures for which there is data: one roofline a device, one convergence plot in all, one loss
    matrix for each ladder."""
    report = read_report(folders, kernel)
    ceilings = {
        str(found["device"]): found for found in report.ceilings if found.get("dram_read_gbps") and found.get("tflops")
    }
    devices = [device for device in dict.fromkeys(row.device for row in report.rows) if device in ceilings]
    written: list[Path] = []
    with mpl.rc_context(STYLE):
        for device in devices:
            rows = [row for row in report.rows if row.device == device and row.intensity]
            name = "roofline" if len(devices) == 1 else f"roofline-{re.sub(r'[^a-z0-9]+', '-', device.lower())}"
            if rows:
                written += save_figure(roofline(rows, ceilings[device]), out / name)
        if curves := read_curves(folders, kernel):
            written += save_figure(convergence(curves), out / "convergence")
        labels = group_labels(report.rows)
        groups = loss_groups(report.rows)
        for rows in groups:
            label = labels[group_key(rows[0])]
            several = label if len(devices) < 2 else f"{label} {rows[0].device}"
            name = "loss-matrix" if len(groups) == 1 else f"loss-matrix-{re.sub(r'[^a-z0-9]+', '-', several.lower())}"
            written += save_figure(loss_matrix(rows, label), out / name)
    return written


def roofline(rows: Sequence[Row], ceilings: dict[str, Any]) -> Figure:
    """Rate against intensity, log-log, under the measured roofs; the default is hollow, the tuned filled."""
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    slope = ceilings["dram_read_gbps"] / 1e3  # TFLOPS at one FLOP per byte
    peaks = {name: rate for name, rate in ceilings.get("tflops", {}).items() if name in _dtypes(rows)}
    peaks = peaks or dict(ceilings.get("tflops", {}))
    top = max(peaks.values())
    intensities = [row.intensity or 1.0 for row in rows]
    rates = [rate for row in rows for rate in (row.tflops, row.default_tflops) if rate]
    left, right = min(*intensities, top / slope) / 3, max(*intensities, top / slope) * 4
    bottom = min(min(rates), left * slope) / 1.6
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom, top * 2.2))
    _draw_roofs(axes, slope, ceilings["dram_read_gbps"], peaks, left, right)
    labels = group_labels(rows)
    for index, (group, label) in enumerate(labels.items()):
        members = [row for row in rows if group_key(row) == group]
        _draw_points(
            axes,
            members,
            textwrap.fill(label, 2 * HALF_WIDTH),
            MARKERS[index % len(MARKERS)],
            SHADES[index % len(SHADES)],
        )
    axes.set_xlabel("arithmetic intensity, FLOP per byte of compulsory traffic")
    axes.set_ylabel("TFLOPS")
    for axis, decades in ((axes.xaxis, math.log10(right / left)), (axes.yaxis, math.log10(top / bottom))):
        axis.set_major_locator(LogLocator(base=10, subs=(1,) if decades > 3 else (1, 2, 5), numticks=30))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(which="major", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.plot(
        [],
        [],
        "o",
        color="#555555",
        markerfacecolor="white",
        markeredgewidth=1.6,
        markersize=11,
        label="hollow: the default config",
    )
    columns = 2 if max(len(label) for label in labels.values()) <= HALF_WIDTH else 1
    figure.legend(loc="outside lower center", ncols=columns, handletextpad=0.3, columnspacing=1.5)
    measured = f"{ceilings.get('device', '')}, ceilings measured {str(ceilings.get('date', ''))[:10]}"
    axes.set_title(
        f"{measured}\n{len(rows)} shapes, each tuned (filled) and with the default config (hollow)",
        loc="left",
        fontsize=18,
    )
    return figure


def convergence(curves: Sequence[Curve]) -> Figure:
    """Speed of the best config so far, in percent of the best found at the end, against distinct configs tried."""
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    longest = max(len(curve.times_us) for curve in curves)
    lines = np.array([_percent_of_best(curve, longest) for curve in curves])
    for curve, line in zip(curves, lines, strict=True):
        count = len(curve.times_us)
        axes.step(np.arange(1, count + 1), line[:count], where="post", color="#9a9a9a", linewidth=1.1, alpha=0.8)
    median = np.median(lines, axis=0)
    axes.step(np.arange(1, longest + 1), median, where="post", color="black", linewidth=3.5)
    axes.set(xscale="log", xlim=(1, max(longest, 2)), ylim=(_lowest_shown(lines), 101))
    axes.set_xlabel("distinct configs tried")
    axes.set_ylabel("speed of the best so far, % of the final best")
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=30))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.plot([], [], color="black", linewidth=3.5, label="median")
    workloads = len({(curve.kernel, curve.shape) for curve in curves})
    parts = len(curves) > workloads
    axes.plot([], [], color="#9a9a9a", linewidth=1.5, label="one part of a workload" if parts else "one workload")
    axes.legend(loc="lower right")
    needed = statistics.median(int(np.argmax(line >= NEAR_BEST)) + 1 for line in lines)
    names = " and ".join(dict.fromkeys(curve.kernel for curve in curves))
    what = f"{names}: {workloads} workloads" + (f", {len(curves)} parts" if parts else "")
    configs = "config" if needed == 1 else "configs"
    near = f"within {100 - NEAR_BEST:g} % of the final best after {needed:g} {configs} (median)"
    axes.set_title(f"{what}\n{near}", loc="left", fontsize=18)
    return figure


def _draw_roofs(axes: Any, slope: float, read_gbps: float, peaks: dict[str, float], left: float, right: float) -> None:
    descending = sorted(peaks.items(), key=lambda item: -item[1])
    top = descending[0][1]
    axes.plot([left, top / slope], [left * slope, top], color=ROOF, linewidth=2.2)
    for index, (_, peak) in enumerate(descending):
        axes.plot([peak / slope, right], [peak, peak], color=ROOF, linewidth=2.2, linestyle=ROOF_DASHES[index % 4])
    while descending:
        peak = descending[0][1]
        near = [item for item in descending if item[1] > peak / LABEL_ROOM]  # their labels would overlap: one for all
        text = ", ".join(f"{name} {rate:.0f}" for name, rate in near) + " TFLOPS"
        axes.annotate(text, (right, peak), xytext=(-4, 6), textcoords="offset points", ha="right", va="bottom")
        descending = descending[len(near) :]
    x, y = left * 1.3, left * 1.3 * slope * 1.12
    axes.text(
        x,
        y,
        f"DRAM read {read_gbps / 1e3:.2f} TB/s",
        rotation=math.degrees(math.atan(y / x)),  # parallel to the roof in log-log, whatever the scales
        rotation_mode="anchor",
        transform_rotates_text=True,
        va="bottom",
    )


def _draw_points(axes: Any, rows: Sequence[Row], label: str, marker: str, shade: str) -> None:
    for row in rows:
        if row.default_tflops and not row.no_gain:
            axes.plot([row.intensity] * 2, [row.default_tflops, row.tflops], color=shade, linewidth=1.4, zorder=2)
            axes.plot(
                row.intensity, row.default_tflops, marker, color=shade, markerfacecolor="white", markersize=10, zorder=3
            )
    axes.plot(
        [row.intensity for row in rows],
        [row.tflops for row in rows],
        marker,
        color=shade,
        markeredgecolor="white",
        markersize=12,
        linestyle="none",
        label=label,
        zorder=4,
    )


def _percent_of_best(curve: Curve, length: int) -> np.ndarray:
    """`[length]` best so far in percent of the final best; 0 before the first that passed, 100 after the last tried."""
    times = np.minimum.accumulate(np.array(curve.times_us, dtype=float))
    percent = 100.0 * times[-1] / times  # x / inf is 0
    return np.concatenate([percent, np.full(length - len(times), 100.0)])


def _lowest_shown(lines: np.ndarray) -> float:
    """Where the y axis starts: below nine tenths of all values, so that one bad start does not squeeze the rest."""
    return float(np.floor(min(80.0, np.quantile(lines[lines > 0], 0.02)) / 10) * 10)


def _dtypes(rows: Sequence[Row]) -> set[str]:
    return {str(row.workload.get("dtype", "")) for row in rows}


def save_figure(figure: Figure, path: Path) -> list[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None, "Creator": None})):
        figure.savefig(path.with_suffix(suffix), dpi=100, metadata=metadata)
        written.append(path.with_suffix(suffix))
    return written
