"""Table entries (DESIGN.md §6) from what a search decided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kerneltune.kernels.table_format import table_workload
from kerneltune.records import Trial
from kerneltune.tuning import finalists, matrix


def winner_entry(kernel: str, workload: Mapping[str, Any], decision: finalists.Decision) -> dict[str, Any]:
    """The table entry of a decided workload while the search is under way (DESIGN.md §6)."""
    return _entry(kernel, workload, decision.winner, decision.default, decision.gain, {})


def served_entry(kernel: str, served: matrix.Served) -> dict[str, Any]:
    """The table entry of a workload by the loss matrix: figures of the config that the table states."""
    return _entry(kernel, served.workload, served.timed.trial, served.timed.default, served.gain, served.loss)


def _entry(
    kernel: str,
    workload: Mapping[str, Any],
    winner: Trial,
    default: Trial | None,
    gain: float | None,
    loss: Mapping[str, Any],
) -> dict[str, Any]:
    known = table_workload(kernel, workload)
    inputs = next((known[name] for name in ("lengths", "routing") if name in known), "")
    measured = {
        "time_us": _round(winner.time_us, 3),
        "p20_us": _round(winner.p20_us, 3),
        "p80_us": _round(winner.p80_us, 3),
        "launch_us": _round(winner.launch_us, 3),
        "samples": winner.samples,
        "gbps": _round(winner.gbps, 1),
        "tflops": _round(winner.tflops, 2),
        "intensity": _round(winner.intensity, 2),
        "roofline": _round(winner.roofline, 4),
        "bound": winner.bound,
        "default_us": _round(default.time_us, 3) if default else None,
        "gain": _round(gain, 4),
        "inputs": inputs,
        "date": winner.date,
    }
    if winner.composed:
        measured["composed"] = True
    return {"workload": known, "config": dict(winner.config), "measured": measured, "loss": dict(loss)}


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
