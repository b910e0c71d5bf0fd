"""`kerneltune lookup`: which table entry a launch would use, or what keeps the nearest one out."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import typer

from kerneltune.cli.spaces import choose_device
from kerneltune.errors import UserError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: kerneltune lookup mla-decode batch=8,kv_len=4096,heads=16 --target sm_90")(lookup)


def lookup(
    kernel: str = typer.Argument(help="mla-decode or moe."),
    workload: list[str] = typer.Argument(help="k=v,... or k=v ...; the rest is the model's, else as by default."),
    model: str | None = typer.Option(None, help="Model preset; default deepseek-v3 at --tp 8."),
    tp: int | None = typer.Option(None, help="Tensor-parallel GPUs; default 1 with --model, else 8."),
    ep: int = typer.Option(1, help="Expert-parallel GPUs (moe)."),
    target: str | None = typer.Option(None, metavar="ARCH", help="A GPU that is not here, as sm_90 or gfx942."),
    device: str | None = typer.Option(
        None, metavar="NAME:SMS[:ARCH]", help="Any GPU, as 'NVIDIA H100 80GB HBM3:132:sm_90'."
    ),
    table: list[Path] = typer.Option([], metavar="FILE", help="A file or folder looked at first; repeatable."),
    stale: str | None = typer.Option(
        None, metavar="POLICY", help="As KERNELTUNE_STALE: strict, warn, ignore, or compiler=warn,source=strict."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the answer as JSON."),
) -> None:
    """Say which file and entry a launch would use, or why none: the nearest entry and the fields that differ."""
    import dataclasses
    import os

    from kerneltune import tables
    from kerneltune.kernels import staleness, table_files, table_format
    from kerneltune.registry import KERNELS
    from kerneltune.workloads import base_sizes, format_workload, parse_workload

    if kernel not in KERNELS:
        raise UserError(f"unknown kernel {kernel!r}: expected one of {', '.join(KERNELS)}")
    if device is not None and target is not None:
        raise UserError("--target and --device name the same thing; give one of them")
    for path in table:
        if not path.exists():
            raise UserError(f"--table {path}: no such file or folder")
        if not any(source.files for source in table_files.sources([path], only=True)):
            raise UserError(f"--table {path}: no *.json in this folder, nor in its folder `tables`")
    if stale is not None:
        staleness.parse_policies(stale)
        os.environ[staleness.VARIABLE] = stale
    gpu = choose_device(target) if device is None else _named_device(device)
    asked = tables.host_workload(kernel, parse_workload(",".join(workload), base_sizes(kernel, model, tp, ep)))
    first = [str(path) for path in table] or None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tables.launch_tables.say_anew()
        answer = tables.launch_tables.search(kernel, asked, gpu, tables=first)
    said = [str(each.message) for each in caught] + _unknown_device(first)
    match = answer.match
    unfit = _why_not(kernel, asked, match, gpu)
    nearest = None if match else tables.nearest(kernel, asked, gpu, first)
    lost = tables.measured_loss(kernel, match.entry, asked) if match else None
    measured_on = tables.load_table(match.path).device["name"] if match else ""
    sizes = table_format.scaled_text(table_format.KEYS[kernel], asked)
    if as_json:
        found = {
            "kernel": kernel,
            "workload": asked,
            "device": {"name": gpu.name, "sm_count": gpu.sm_count},
            "warnings": said,
            "policy": staleness.policies()[0],
            "match": dataclasses.asdict(match) if match else None,
            "cannot_run": unfit,
            "left_out": [dataclasses.asdict(each) for each in answer.left_out],
            "nearest": dataclasses.asdict(nearest) if nearest else None,
            "loss": {"at": lost[0], "measured": lost[1], "on": measured_on} if lost else None,
        }
        print(json.dumps(found))
        return
    ruling = staleness.policies()[0]
    lines = [f"{kernel}  {format_workload(kernel, asked)}  {gpu.name}"]
    lines += [f"  warning   {text}" for text in said]
    if match:
        elsewhere = f" on {measured_on}, not here" if match.relation else ""
        fits = "exact" if match.exact else f"nearest, sizes a factor of {2**match.distance:.2f} away"
        if match.distance == 0 and not match.exact:
            fits = f"same sizes, tuned for {_inputs_text(kernel, match.entry['workload'])}"
        if lost:
            place = "" if match.distance == 0 else f" at {' '.join(f'{name}={size}' for name, size in lost[0].items())}"
            fits += f", measured loss {100 * lost[1]:.1f} %{place}{elsewhere}"
        elif not match.exact:
            fits += ", loss not measured"
        lines += [f"  entry     {format_workload(kernel, match.entry['workload'])} ({fits})"]
        lines += [f"  config    {_config_text(match.config)}"]
        lines += [f"  file      {match.path} ({match.source})"]
        lines += [f"  measured  {_measured_text(match.entry.get('measured', {}))}{elsewhere}"]
        lines += [f"  inputs    {_inputs_text(kernel, match.entry['workload'])}"]
        if match.relation:
            lines += [f"  relative  of {measured_on}: {match.relation}"]
        lines += [f"  stale     {each.reason} (policy: {ruling[each.kind]})" for each in match.stale]
        if unfit:
            lines += [f"  but       it cannot run here, so the kernel takes its default config: {unfit}"]
    else:
        lines += ["  no entry fits; the kernel takes its default config"]
        if nearest:
            lines += [f"  nearest   {format_workload(kernel, nearest.entry['workload'])} in {nearest.path}"]
            lines += [f"  differs   {difference}" for difference in nearest.differs]
            if nearest.loss is not None:
                elsewhere = f" on {nearest.device}, not here" if nearest.device else ""
                lines += [f"  loss      measured loss {100 * nearest.loss:.1f} % at {sizes}{elsewhere}"]
        else:
            lines += [f"  no table of {kernel} is in any of the places (KERNELTUNE_TABLES, the user's folder, shipped)"]
        lines += [f"  to tune   kerneltune search {kernel} --workload {tables.launch_tables.shape_text(kernel, asked)}"]
    for each in answer.left_out:
        why = "; ".join(reason.reason for reason in each.stale)
        lines += [f"  left out  {format_workload(kernel, each.entry['workload'])} in {each.path}: {why}"]
        lines += [f"  to renew  kerneltune revalidate {each.path}"]
    print("\n".join(lines))


def _unknown_device(first: list[str] | None) -> list[str]:
    """That KERNELTUNE_DEVICE names what no table is of: then it does nothing."""
    import os

    from kerneltune.kernels.device import VARIABLE
    from kerneltune.tables import devices

    name = os.environ.get(VARIABLE)
    known = devices(first) if name else set()
    if not name or name in known:
        return []
    return [f"{VARIABLE}: no table is of {name!r}, so it does nothing; there are: {', '.join(sorted(known)) or 'none'}"]


def _why_not(kernel: str, workload: dict[str, Any], match: Any, gpu: Any) -> str | None:
    """Why the launch would refuse the config of an entry, so that the default is used."""
    from kerneltune.registry import load_tunable
    from kerneltune.tables import why_not

    if match is None or not gpu.shared_memory_per_block:  # named alone: nothing is known that a config could break
        return None
    return why_not(kernel, match.config, load_tunable(kernel).complete_workload(workload), gpu)


def _named_device(text: str) -> Any:
    """A device that only has what a table is matched by: its name, its SMs and, for relatives, its architecture.

    Raises:
        UserError: not NAME:SMS[:ARCH].
    """
    from kerneltune.kernels.device import Device

    name, count, arch = [*text.split(":"), "", ""][:3]
    if not name or not count.isdecimal() or not 0 < int(count) < 100_000 or text.count(":") > 2:
        expected = "a name and its number of SMs, as 'NVIDIA H100 80GB HBM3:132' or with its architecture, ':sm_90'"
        raise UserError(f"--device {text!r}: expected {expected}")
    return Device(name, arch, int(count), 0, 0, 0)


def _inputs_text(kernel: str, workload: dict[str, Any]) -> str:
    from kerneltune.kernels.table_format import KEYS

    name = KEYS[kernel].input
    return f"{name}={workload[name]}"


def _config_text(config: dict[str, Any]) -> str:
    return "  ".join(
        f"{name}: {_config_text(value)}" if isinstance(value, dict) else f"{name}={value}"
        for name, value in config.items()
    )


def _measured_text(measured: Any) -> str:
    figures = {name: value for name, value in measured.items() if isinstance(value, int | float) and value > 0}
    words = []
    if "time_us" in figures:
        words.append(f"{figures['time_us']} us")
    if "default_us" in figures:
        words.append(f"default {figures['default_us']} us")
    if "roofline" in figures and measured.get("bound") in ("memory", "compute"):
        words.append(f"{figures['roofline']:.0%} of the measured {measured['bound']} ceiling")
    return ", ".join(words) or "nothing (an imported entry)"
