"""`kerneltune spaces`: what a search varies, how many points are feasible, and which rule leaves the others out."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kerneltune.errors import UserError

if TYPE_CHECKING:
    from kerneltune.kernels.device import Device
    from kerneltune.space import Space

WITHOUT_GPU = "sm_90"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: kerneltune spaces mla-decode --target sm_90 --workload batch=8,kv_len=4096")(spaces)


def spaces(
    kernel: str | None = typer.Argument(None, help="mla-decode or moe; default: all."),
    space: Path | None = typer.Option(None, metavar="FILE", help="Another search space (TOML)."),
    target: str | None = typer.Option(None, metavar="ARCH", help="A GPU that is not here, as sm_90 or gfx942."),
    model: str | None = typer.Option(None, help="Model preset; default deepseek-v3 at --tp 8."),
    tp: int | None = typer.Option(None, help="Tensor-parallel GPUs; default 1 with --model, else 8."),
    ep: int = typer.Option(1, help="Expert-parallel GPUs (moe)."),
    workload: list[str] = typer.Option([], help="One whole workload, k=v,...; repeatable. Replaces the ladder."),
    ladder: str = typer.Option("standard", help="standard or full."),
    routing: str | None = typer.Option(None, help="moe: uniform, zipf, dirichlet, or a file of recorded topk_ids."),
    lengths: str | None = typer.Option(None, help="mla-decode: equal, spread, or a file of recorded lengths."),
    as_json: bool = typer.Option(False, "--json", help="Print everything as JSON."),
) -> None:
    """Show parameters and values, feasible points for a device, and what each rule leaves out."""
    from kerneltune.registry import KERNELS
    from kerneltune.space import load_space
    from kerneltune.tuning.api import Request

    if kernel is not None and kernel not in KERNELS:
        raise UserError(f"unknown kernel {kernel!r}: expected one of {', '.join(KERNELS)}")
    if space is not None:
        found = [load_space(space)]
        if kernel not in (None, found[0].kernel):
            raise UserError(f"{space}: a space of {found[0].kernel}, not of {kernel}")
    else:
        found = [load_space(name) for name in ([kernel] if kernel else KERNELS)]
    for option, given in (("workload", workload), ("routing", routing), ("lengths", lengths)):
        if len(found) > 1 and given:
            raise UserError(f"--{option}: name the kernel that it is for")
    device = choose_device(target)
    requests = [Request(one.kernel, model, tp, ep, tuple(workload), ladder, space, routing, lengths) for one in found]
    for request in requests:
        request.check()
    shown = [_survey(one, device, request.workloads()) for one, request in zip(found, requests, strict=True)]
    if as_json:
        print(json.dumps(shown))
    else:
        print("\n\n".join(_text(one) for one in shown))


def choose_device(target: str | None) -> Device:
    """The device named, else the GPU here, else an H200, saying so.

    Raises:
        UserError: an unknown architecture.
    """
    from kerneltune import device

    if target is not None:
        return device.target(target)
    here = device.detect()
    if here is not None:
        return here
    stand_in = device.target(WITHOUT_GPU)
    print(f"no GPU here: answering for --target {WITHOUT_GPU} ({stand_in.name})", file=sys.stderr)
    return stand_in


def _survey(space: Space, device: Device, workloads: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything that the command shows, as JSON values."""
    from kerneltune.registry import load_tunable
    from kerneltune.workloads import format_workload

    tunable = load_tunable(space.kernel)
    rows = []
    for workload in workloads:
        surveys = {part: space.survey(tunable, part, workload, device) for part in tunable.parts}
        parts = {
            part: {"total": s.total, "feasible": s.feasible, "rejected": dict(s.rejected)}
            for part, s in surveys.items()
        }
        rows.append({"workload": workload, "text": format_workload(space.kernel, workload), "parts": parts})
    return {
        "kernel": space.kernel,
        "space": space.path,
        "device": device.to_dict(),
        "parameters": space.parameters(device.arch),
        "workloads": rows,
    }


def _text(shown: dict[str, Any]) -> str:
    device = shown["device"]
    lines = [f"{shown['kernel']}  {shown['space']}  {device['name']} ({device['arch']})"]
    wide = max(map(len, shown["parameters"]))
    lines += [f"  {name:<{wide}}  {' '.join(map(str, values))}" for name, values in shown["parameters"].items()]
    parts = list(shown["workloads"][0]["parts"])
    texts = [row["text"] for row in shown["workloads"]]
    wide = max(map(len, [*texts, "feasible points"]))
    lines += ["", f"  {'feasible points':<{wide}}  " + "  ".join(f"{part:>8}" for part in parts)]
    for row in shown["workloads"]:
        counts = "  ".join(f"{row['parts'][part]['feasible']:>8}" for part in parts)
        lines.append(f"  {row['text']:<{wide}}  {counts}")
    rejected = {part: Counter[str]() for part in parts}
    for row in shown["workloads"]:
        for part in parts:
            rejected[part].update(row["parts"][part]["rejected"])
    rules = [rule for rule, _ in sum(rejected.values(), Counter[str]()).most_common()]
    total = sum(row["parts"][parts[0]]["total"] for row in shown["workloads"])
    wide = max(map(len, [*rules, "left out of 1,000,000"]), default=0)
    lines += ["", f"  {f'left out of {total:,}':<{wide}}  " + "  ".join(f"{part:>8}" for part in parts)]
    lines += [f"  {rule:<{wide}}  " + "  ".join(f"{rejected[part][rule]:>8}" for part in parts) for rule in rules]
    return "\n".join(line.rstrip() for line in lines)
