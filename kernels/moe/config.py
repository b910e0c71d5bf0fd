"""The parameters of the two grouped GEMMs: what they mean, which can run on a device, and a default for any of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from kerneltune.kernels.device import Device

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
ACTIVATIONS = ("silu",)
PARTS = ("gemm1", "gemm2")
ELEMENT_BYTES = 2

SMALLEST_TILE = 16  # tl.dot's smallest side
MAX_ACCUMULATORS = 128  # float32 a thread of 255 registers holds beside addresses; 256 always spill
SKEW = 16  # the busiest expert may have this many times the mean; taller blocks than that are padding everywhere

# Where tensors on the CPU run: Triton's interpreter, which knows no limits.
INTERPRETER = Device("Triton interpreter", "cpu", 1, 1 << 30, 1 << 20, 1 << 30)


@dataclass(frozen=True)
class GemmConfig:
    """One grouped GEMM. gemm1 computes BLOCK_N columns of gate and of up: its weight tile has 2 * BLOCK_N rows."""

    BLOCK_M: int  # rows, (token, choice) pairs of one expert; the same in both GEMMs
    BLOCK_N: int  # columns of the result
    BLOCK_K: int  # depth of one step
    GROUP_M: int  # row blocks whose columns are worked through together
    num_warps: int
    num_stages: int  # software pipeline: steps in flight, the one being multiplied included


NAMES = tuple(field.name for field in fields(GemmConfig))


def default_config(workload: Mapping[str, Any], device: Device) -> dict[str, dict[str, int]]:
    """A decent config from the mean rows an expert, cut down until it fits the device.

    The steps are where the best tiles of a search over vLLM's kernel on an H200 changed (bf16: DeepSeek-V3 at TP 8 with
    2 and 32 rows an expert, Qwen3-235B at TP 4 with 1 token, Mixtral at TP 2 with 16, 256 and 1024 rows).
    """
    rows = _rows_per_expert(workload)
    blocks = min(workload["E"], workload["tokens"] * workload["top_k"])
    if rows <= 8 and blocks * workload["N"] < 32 * device.sm_count:  # too few programs: narrower tiles make more
        gemm1, gemm2 = GemmConfig(16, 16, 256, 1, 4, 4), GemmConfig(16, 64, 64, 1, 4, 3)
    elif rows <= 8:
        gemm1, gemm2 = GemmConfig(16, 32, 128, 1, 4, 4), GemmConfig(16, 64, 128, 1, 4, 3)
    elif rows <= 24:
        gemm1, gemm2 = GemmConfig(32, 64, 128, 1, 4, 4), GemmConfig(32, 64, 128, 1, 4, 3)
    elif rows <= 192:
        gemm1, gemm2 = GemmConfig(64, 128, 64, 16, 8, 4), GemmConfig(64, 128, 64, 16, 4, 2)
    else:
        gemm1, gemm2 = GemmConfig(128, 128, 64, 16, 8, 4), GemmConfig(128, 256, 64, 16, 8, 4)
    fitted = {"gemm1": _fit("gemm1", gemm1, workload, device), "gemm2": _fit("gemm2", gemm2, workload, device)}
    return {part: asdict(params) for part, params in fitted.items()}


def is_valid(part: str, params: Mapping[str, Any], workload: Mapping[str, Any], device: Device) -> str | None:
    """None, or why these parameters cannot run or cannot be any good: what a search need not try."""
    reason = cannot_run(part, params, workload, device)
    if reason is not None:
        return reason
    tallest = max(SMALLEST_TILE, _power_of_two(min(SKEW * _rows_per_expert(workload), workload["tokens"])))
    if params["BLOCK_M"] > tallest:
        return f"rows: BLOCK_M {params['BLOCK_M']} is mostly padding, {tallest} holds the rows of the busiest expert"
    return None


def cannot_run(part: str, params: Mapping[str, Any], workload: Mapping[str, Any], device: Device) -> str | None:
    """None, or the hard limit of the device or the kernel that these parameters break."""
    for name in NAMES:
        if not isinstance(params.get(name), int) or params[name] < 1:
            return f"parameters: {name} is {params.get(name)!r}, expected a positive integer"
    for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps"):
        if params[name] & (params[name] - 1):
            return f"parameters: {name} is {params[name]}, expected a power of two"
    gemm = GemmConfig(**{name: params[name] for name in NAMES})
    columns = gemm.BLOCK_N * (2 if part == "gemm1" else 1)
    if min(gemm.BLOCK_M, columns, gemm.BLOCK_K) < SMALLEST_TILE:
        return f"tile: {gemm.BLOCK_M} x {columns} x {gemm.BLOCK_K} has a side under {SMALLEST_TILE}"
    if device is INTERPRETER:
        return None
    accumulators = gemm.BLOCK_M * columns // (device.warp_size * gemm.num_warps)
    if accumulators > MAX_ACCUMULATORS:
        return f"registers: {accumulators} accumulators a thread, at most {MAX_ACCUMULATORS} leave room for addresses"
    needed = shared_memory_bytes(part, gemm, workload, device)
    if needed > device.shared_memory_per_block:
        return f"shared memory: needs {needed} B, device has {device.shared_memory_per_block} B"
    return None


def shared_memory_bytes(part: str, gemm: GemmConfig, workload: Mapping[str, Any], device: Device) -> int:
    """What Triton 3.6 to 3.9 allocate for the tiles of a and w; a lower bound where they go through registers.

    Exact for pipelined loops on sm_80, sm_90 and sm_120 (sampled: 70 configs each), 16 B of barriers short on sm_100,
    on AMD sometimes too much, because there a tile may bypass shared memory.

    The pipeline keeps num_stages steps in shared memory where the tensor core reads its operands there (wgmma on
    sm_90, tcgen05 on sm_100; both need 64 rows), one fewer where it reads registers. There is no pipeline with one
    stage, with one step, or over rows of an odd length, which cannot be copied asynchronously.
    """
    rows = gemm.BLOCK_N * (2 if part == "gemm1" else 1)
    depth = int(workload["K" if part == "gemm1" else "N"])
    tile = (gemm.BLOCK_M + rows) * gemm.BLOCK_K * ELEMENT_BYTES
    from_shared = device.arch in ("sm_90", "sm_100", "sm_103") and gemm.BLOCK_M >= 64 and gemm.num_warps >= 4
    pipelined = gemm.num_stages > 1 and depth > gemm.BLOCK_K and depth % 2 == 0
    if pipelined:
        return tile * (gemm.num_stages if from_shared else gemm.num_stages - 1)
    return tile if from_shared else gemm.BLOCK_M * gemm.BLOCK_K * ELEMENT_BYTES


def parse_config(config: Mapping[str, Any]) -> dict[str, GemmConfig]:
    """Both parts of a config.

    Raises:
        ValueError: a part or a parameter is missing or unknown, or the parts' BLOCK_M differ.
    """
    if set(config) != set(PARTS):
        raise ValueError(f"config has parts {sorted(config)}: expected {list(PARTS)}")
    for part in PARTS:
        if not isinstance(config[part], Mapping) or set(config[part]) != set(NAMES):
            raise ValueError(f"config[{part!r}] is {config[part]!r}: expected {', '.join(NAMES)}")
    gemms = {part: GemmConfig(**config[part]) for part in PARTS}
    if gemms["gemm1"].BLOCK_M != gemms["gemm2"].BLOCK_M:
        rows = gemms["gemm1"].BLOCK_M, gemms["gemm2"].BLOCK_M
        raise ValueError(
            f"BLOCK_M is {rows[0]} in gemm1, {rows[1]} in gemm2: one alignment serves both, so it must be equal"
        )
    return gemms


def checked_config(config: Mapping[str, Any], workload: Mapping[str, Any], device: Device) -> dict[str, GemmConfig]:
    """Both parts of a config that can run.

    Raises:
        ValueError: it is malformed or cannot run on the device, with the reason.
    """
    gemms = parse_config(config)
    for part in PARTS:
        reason = cannot_run(part, config[part], workload, device)
        if reason is not None:
            raise ValueError(f"config[{part!r}] cannot run: {reason}")
    return gemms


def _fit(part: str, gemm: GemmConfig, workload: Mapping[str, Any], device: Device) -> GemmConfig:
    """Fewer stages, then a shallower and a narrower tile, until it can run. BLOCK_M stays: the parts share it."""
    while cannot_run(part, asdict(gemm), workload, device) is not None:
        if gemm.num_stages > 2:
            gemm = replace(gemm, num_stages=gemm.num_stages - 1)
        elif gemm.BLOCK_K > 32:
            gemm = replace(gemm, BLOCK_K=gemm.BLOCK_K // 2)
        elif gemm.BLOCK_N > SMALLEST_TILE:
            gemm = replace(gemm, BLOCK_N=gemm.BLOCK_N // 2)
        else:
            raise ValueError(f"{device.name} has {device.shared_memory_per_block} B of shared memory a block: too few")
    return gemm


def _rows_per_expert(workload: Mapping[str, Any]) -> float:
    """Mean (token, choice) pairs of an expert."""
    return float(workload["tokens"] * workload["top_k"] / workload["global_E"])


def _power_of_two(value: float) -> int:
    """The least power of two that is no smaller."""
    return 1 << max(0, math.ceil(math.log2(value)))
