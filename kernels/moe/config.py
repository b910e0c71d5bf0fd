"""The parameters of the two grouped GEMMs: what they mean, which can run on a device, and a default for any of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from kerneltune.kernels.device import Device

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
ACTIVATIONS = ("silu",)
PARTS = ("gemm1", "gemm2")
ELEMENT_BYTES = 2

# Where tensors on the CPU run: Triton's interpreter, which knows no limits.
INTERPRETER = Device("Triton interpreter", "cpu", 1, 1 << 30, 1 << 20, 1 << 30)


@dataclass(frozen=True)
class GemmConfig:
    """One grouped GEMM. gemm1 computes BLOCK_N columns of gate and the same of up: its weight tile has 2 * BLOCK_N rows."""

    BLOCK_M: int  # rows, (token, choice) pairs of one expert; the same in both GEMMs
    BLOCK_N: int  # columns of the result
    BLOCK_K: int  # depth of one step
    GROUP_M: int  # row blocks whose columns are worked through together
    num_warps: int
    num_stages: int  # steps in flight


def default_config(workload: Mapping[str, Any], device: Device) -> dict[str, dict[str, int]]:
    return {
        "gemm1": asdict(GemmConfig(16, 32, 128, 1, 4, 4)),
        "gemm2": asdict(GemmConfig(16, 64, 128, 1, 4, 3)),
    }


def checked_config(config: Mapping[str, Any], workload: Mapping[str, Any], device: Device) -> dict[str, GemmConfig]:
    """Both GEMMs' parameters.

    Raises:
        ValueError: a part or parameter is missing or unknown, or cannot run on the device, with the reason.
    """
    return {part: GemmConfig(**config[part]) for part in PARTS}
