"""MoE tables of vLLM and SGLang, in and out: file names, fields, and what their tiles are in our terms.

Facts of vLLM 0.33 and SGLang 0.5.23. Both name a file by local experts E, intermediate size N of a shard, device and
format, and map token counts (string keys) to the parameters of one Triton launch:

    vLLM    E=..,N=..,device_name=..[,dtype=..][,block_shape=[128,128]].json, one file for both GEMMs. Each GPU's name
            with the word H200 in it becomes NVIDIA_H200. A "triton_version" key is allowed.
    SGLang  configs/triton_3_6_0/E=.., with `[128, 128]`, then ,per_channel_quant=True, then _down for the second GEMM,
            whose BLOCK_SIZE_M is overwritten by the first's. Keys that are no token count break it.

Their first GEMM computes BLOCK_SIZE_N of the 2N rows of w1; ours computes BLOCK_N columns of gate and as many of up, so
BLOCK_SIZE_N = 2 * BLOCK_N there, and they are equal in the second GEMM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kerneltune.errors import UserError

ENGINES = ("vllm", "sglang")
NAMES = {
    "BLOCK_SIZE_M": "BLOCK_M",
    "BLOCK_SIZE_N": "BLOCK_N",
    "BLOCK_SIZE_K": "BLOCK_K",
    "GROUP_SIZE_M": "GROUP_M",
    "num_warps": "num_warps",
    "num_stages": "num_stages",
}
TRITON_DEFAULTS = {"num_warps": 4, "num_stages": 3}  # what a launch takes that names none, as SGLang's files may
MAX_FILE_BYTES = 1 << 20
PLAIN_DTYPES = ("bf16", "fp16")  # files name no dtype for these

_FILE = re.compile(
    r"E=(?P<E>\d+),N=(?P<N>\d+),device_name=(?P<device>[^,]+?)(,dtype=(?P<dtype>[a-z0-9_]+))?"
    r"(,block_shape=\[(?P<block>\d+, ?\d+)\])?(,per_channel_quant=True)?(?P<down>_down)?\.json"
)


@dataclass(frozen=True)
class EngineFile:
    """One file of either engine."""

    path: str
    E: int
    N: int
    device: str  # as the driver names it, as far as the file tells
    dtype: str  # "" for bf16 and fp16
    down: bool  # SGLang's file for the second GEMM alone
    triton: str  # "" if it does not say
    notes: tuple[str, ...]  # what its rows say that a launch of ours has no use for, or leave out
    rows: Mapping[int, Mapping[str, Any]]  # tokens -> parameters in the engine's names


def read_engine_file(path: Path) -> EngineFile:
    """Read one file of vLLM or SGLang.

    Raises:
        UserError: its name or its content is not one; the message names file and field.
    """
    match = _FILE.fullmatch(path.name)
    if match is None:
        raise UserError(f"{path}: not named as vLLM or SGLang name MoE tables (E=..,N=..,device_name=...json)")
    for name in ("E", "N"):
        if not 0 < int(match[name][:12]) < 2**31:
            raise UserError(f"{path}: {name}={match[name]:.20}: expected a whole number from 1 to 2**31 - 1")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        raw = json.loads(data) if len(data) <= MAX_FILE_BYTES else None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: expected an object of at most {MAX_FILE_BYTES} bytes, token counts to parameters")
    triton = raw.pop("triton_version", "")
    if not isinstance(triton, str) or len(triton) > 40:
        raise UserError(f"{path}: triton_version: expected a text, got {triton!r:.60}")
    folder = re.fullmatch(r"triton_(\d+)_(\d+)_(\d+)", path.resolve().parent.name)
    rows: dict[int, Mapping[str, Any]] = {}
    for key, row in raw.items():
        if not key.isascii() or not key.isdecimal() or key.startswith("0") or not int(key[:12]) < 2**31:
            raise UserError(f"{path}: {key!r:.60}: expected a number of tokens")
        _check_row(row, f"{path}: {key}")
        rows[int(key)] = row
    return EngineFile(
        path=str(path),
        E=int(match["E"]),
        N=int(match["N"]),
        device=match["device"].replace("_", " "),
        dtype=match["dtype"] or "",
        down=match["down"] is not None,
        triton=triton or (".".join(folder.groups()) if folder else ""),
        notes=tuple(_row_notes(rows.values())),
        rows=rows,
    )


def _row_notes(rows: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    several = list(rows)
    unknown = sorted({str(name)[:40] for row in several for name in row} - set(NAMES))
    if unknown:
        shown = ", ".join(name if name.isidentifier() else repr(name) for name in unknown[:4])
        yield f"{shown}{', ...' if len(unknown) > 4 else ''} dropped: no parameter of ours"
    for name, value in TRITON_DEFAULTS.items():
        if any(name not in row for row in several):
            yield f"{name} not said: taken as {value}, Triton's own"


def _check_row(row: object, where: str) -> None:
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected parameters, got {row!r:.60}")
    for name in NAMES:
        value = row.get(name, TRITON_DEFAULTS.get(name))
        if type(value) is not int or not 0 < value < 2**16:
            raise UserError(f"{where}.{name}: expected a whole number, got {value!r:.60}")


def our_config(up: Mapping[str, Any], down: Mapping[str, Any] | None = None) -> dict[str, dict[str, int]]:
    """A config of ours from an engine's row for the first GEMM, and one for the second where there is one."""
    parts = {"gemm1": {**TRITON_DEFAULTS, **up}, "gemm2": {**TRITON_DEFAULTS, **(down or up)}}
    config = {part: {ours: int(row[theirs]) for theirs, ours in NAMES.items()} for part, row in parts.items()}
    config["gemm1"]["BLOCK_N"] = max(config["gemm1"]["BLOCK_N"] // 2, 1)
    config["gemm2"]["BLOCK_M"] = config["gemm1"]["BLOCK_M"]
    return config


def engine_row(params: Mapping[str, int], part: str) -> dict[str, int]:
    """The parameters of one of our GEMMs as an engine's launch takes them."""
    row = {theirs: params[ours] for theirs, ours in NAMES.items()}
    if part == "gemm1":
        row["BLOCK_SIZE_N"] *= 2
    return row


def imported_configs(files: Sequence[EngineFile]) -> dict[int, dict[str, dict[str, int]]]:
    """Tokens -> config, of a file and, from SGLang, of the one beside it for the second GEMM.

    A row of the second that has none of its tokens takes the nearest, as the engine does.
    """
    ups, downs = [f for f in files if not f.down], [f for f in files if f.down]
    found: dict[int, dict[str, dict[str, int]]] = {}
    for up in ups:
        rows = {tokens: row for down in downs if (down.E, down.N) == (up.E, up.N) for tokens, row in down.rows.items()}
        for tokens, row in up.rows.items():
            near = min(rows, key=lambda each: abs(each - tokens), default=None)
            found[tokens] = our_config(row, None if near is None else rows[near])
    return found


def _whole_params(entry: Mapping[str, Any], part: str) -> Mapping[str, int]:
    """The parameters of one GEMM of an entry.

    Raises:
        UserError: one that a launch needs is no whole number.
    """
    params = entry["config"].get(part)
    for name in NAMES.values():
        if not isinstance(params, Mapping) or type(params.get(name)) is not int:
            place = f"the entry of tokens={entry['workload']['tokens']}"
            raise UserError(f"{place}: config.{part}.{name}: expected a whole number (kerneltune check says more)")
    return params


def file_name(engine: str, E: int, N: int, device_name: str, down: bool = False) -> str:
    """The name under which an engine's loader looks for a bf16 or fp16 table.

    Args:
        device_name: as the driver reports it.
    """
    if engine == "vllm":
        device = re.sub(r"[\s/]+", "_", device_name)
        if "H200" in device.split("_"):
            device = "NVIDIA_H200"
        return f"E={E},N={N},device_name={device}.json"
    return f"E={E},N={N},device_name={device_name.replace(' ', '_')}{'_down' if down else ''}.json"


def engine_folder(engine: str, triton: str) -> str:
    """Where below the named folder the loader looks: nowhere deeper for vLLM's VLLM_TUNED_CONFIG_FOLDER.

    Raises:
        UserError: SGLang's folder cannot be told from this version.
    """
    if engine == "vllm":
        return "."
    if not re.fullmatch(r"\d+(\.[0-9A-Za-z]+)+([+].*)?", triton):  # it comes from a table and becomes a folder
        raise UserError(f"Triton version {triton!r:.60}: expected one like 3.6.0")
    return f"configs/triton_{re.sub('[+].*', '', triton).replace('.', '_')}"


def engine_files(
    engine: str, device_name: str, triton: str, entries: Iterable[Mapping[str, Any]]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Relative path -> content for an engine's loader, and notes on what it cannot express.

    vLLM launches both GEMMs with one set of parameters: the first's is written, since it has the larger weights; SGLang
    gets a file for each.
    """
    if ".." in re.split(r"[/\\]", device_name) or not device_name.isprintable():  # it comes from a table
        raise UserError(f"device.name {device_name!r:.60}: no part of a file's name")
    files: dict[str, dict[str, Any]] = {}
    notes: dict[str, None] = {}
    seen: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for entry in sorted(entries, key=lambda each: each["workload"]["tokens"]):
        work, config = entry["workload"], entry["config"]
        if work["w_dtype"] not in PLAIN_DTYPES:
            notes[f"left out: w_dtype={work['w_dtype']}, for which the kernels differ"] = None
            continue
        key = (work["E"], work["N"], work["tokens"])
        hidden = (work["K"], work["top_k"], work["routing"], work["dtype"])
        if seen.setdefault(key, hidden) != hidden:
            what = "K, top_k, routing or dtype"
            notes[f"left out: E={key[0]} N={key[1]} tokens={key[2]} twice, {engine} cannot tell {what} apart"] = None
            continue
        for part in ("gemm1",) if engine == "vllm" else ("gemm1", "gemm2"):
            name = file_name(engine, work["E"], work["N"], device_name, down=part == "gemm2")
            path = str(Path(engine_folder(engine, triton)) / name)
            files.setdefault(path, {})[str(work["tokens"])] = engine_row(_whole_params(entry, part), part)
        if engine == "vllm" and config["gemm1"] != config.get("gemm2"):
            notes["vllm has one config for both GEMMs: the first GEMM's is written, the second's is lost"] = None
    return files, list(notes)
