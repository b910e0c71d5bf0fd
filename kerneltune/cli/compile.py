"""`kerneltune compile`: compile configs for a GPU that need not be here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kerneltune.kernels.device import Device
    from kerneltune.kernels.tunable import Tunable

EXAMPLE = "Example: kerneltune compile mla-decode --target sm_90 --workload batch=8,kv_len=4096 --config num_warps=8"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("compile", epilog=EXAMPLE)(compile_)


def compile_(
    kernel: Annotated[str, typer.Argument(help="mla-decode or moe.")],
    target: Annotated[
        str | None, typer.Option(metavar="ARCH", help="sm_90, gfx942, ...; default: the GPU here, else sm_90.")
    ] = None,
    workload: Annotated[list[str] | None, typer.Option(help="One workload, k=v,...; repeatable.")] = None,
    model: Annotated[str | None, typer.Option(help="Model preset; default deepseek-v3 at --tp 8.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel GPUs; default 1 with --model, else 8.")] = None,
    ep: Annotated[int, typer.Option(help="Expert-parallel GPUs (moe).")] = 1,
    config: Annotated[
        str | None,
        typer.Option(help="Parameters, k=v,...; of one part: gemm1.BLOCK_M=64; default: the default config."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compile a config without a GPU and show its registers, spilled bytes and shared memory, part by part.

    Exit code 1 if a part does not compile or does not fit the device.
    """
    from kerneltune.cli.spaces import choose_device
    from kerneltune.compile import CompilePool, resolve_tunable
    from kerneltune.errors import UserError
    from kerneltune.kernels.tunable import part_params

    device = choose_device(target)
    try:
        tunable = resolve_tunable(kernel)
        workloads = _workloads(tunable, kernel, model, tp, ep, workload or [])
    except ValueError as error:
        raise UserError(str(error)) from None
    jobs = [
        (complete, part, part_params(tunable, whole, part))
        for complete in workloads
        for whole in [_config(tunable, complete, device, config)]
        for part in tunable.parts
    ]
    with CompilePool(kernel, device, workers=min(len(jobs), 8)) as pool:
        for number, (complete, part, params) in enumerate(jobs):
            pool.submit(number, part, params, complete)
        results = [pool.result(number) for number in range(len(jobs))]
    rows = [
        {"workload": complete, "part": part, "config": params} | _fields(result)
        for (complete, part, params), result in zip(jobs, results, strict=True)
    ]
    if as_json:
        typer.echo(json.dumps({"kernel": kernel, "device": device.to_dict(), "compiled": rows}, indent=2))
    else:
        _print(kernel, device, rows)
    if any(result.outcome != "ok" for result in results):
        raise typer.Exit(1)


def _workloads(
    tunable: Tunable, kernel: str, model: str | None, tp: int | None, ep: int, given: list[str]
) -> list[dict[str, Any]]:
    """One whole workload for each --workload, on top of the model's sizes."""
    from kerneltune.workloads import base_sizes, parse_workload

    base = base_sizes(kernel, model, tp, ep)
    texts = given or [""]
    return [tunable.complete_workload(parse_workload(text, base) if text else base) for text in texts]


def _config(tunable: Tunable, workload: dict[str, Any], device: Device, text: str | None) -> dict[str, Any]:
    """The default config with the parameters of `text` replaced, in all parts that have them or in the one named."""
    from kerneltune.errors import UserError
    from kerneltune.kernels.tunable import join_parts, part_params

    default = tunable.default_config(workload, device)
    by_part = {part: part_params(tunable, default, part) for part in tunable.parts}
    for params in by_part.values():
        params |= {name: value for name, value in tunable.optional.items() if name not in params}
    for item in text.split(",") if text else []:
        name, equals, value = (piece.strip() for piece in item.partition("="))
        part, dot, short = name.partition(".")
        parts = [part] if dot else list(tunable.parts)
        short = short if dot else name
        if not equals or not all(short in by_part.get(each, {}) for each in parts):
            known = ", ".join(by_part[tunable.parts[0]])
            raise UserError(f"--config: {item!r} is not NAME=VALUE with a parameter of {tunable.name} ({known})")
        for each in parts:
            by_part[each][short] = _value(value)
    named = {
        part: {name: value for name, value in params.items() if value != tunable.optional.get(name)}
        for part, params in by_part.items()
    }
    return join_parts(tunable, named)


def _value(text: str) -> int | float | bool | str:
    """A scalar as JSON writes it, else the text itself."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float | bool | str) else text


def _fields(result: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(result)


def _print(kernel: str, device: Device, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from kerneltune.workloads import format_workload

    console = Console()
    console.print(f"{kernel} for {device.name} ({device.arch})", highlight=False)
    for workload in {id(row["workload"]): row["workload"] for row in rows}.values():
        table = Table(title=format_workload(kernel, workload), title_justify="left")
        table.add_column("part", no_wrap=True)
        table.add_column("config")
        table.add_column("outcome")
        for name in ("registers", "spills", "shared", "seconds"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in rows:
            if row["workload"] is workload:
                table.add_row(*_cells(row))
        console.print(table)


def _cells(row: dict[str, Any]) -> list[str]:
    config = " ".join(f"{name}={value}" for name, value in row["config"].items())
    outcome = row["outcome"] if row["outcome"] == "ok" else f"{row['outcome']}: {row['reason']}"
    numbers = ["-" if row[name] is None else f"{row[name]:,}" for name in ("registers", "spills", "shared_bytes")]
    numbers[1:] = [text if text == "-" else f"{text} B" for text in numbers[1:]]
    return [row["part"], config, outcome, *numbers, f"{row['compile_s']:.1f}"]
