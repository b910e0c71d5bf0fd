"""Seeded inputs for tests of the fused mixture of experts."""

from __future__ import annotations

from typing import Any

import torch

from kerneltune.kernels.moe.config import DTYPES
from kerneltune.kernels.moe.reference import fused_moe_reference
from kerneltune.kernels.moe.routing import draw_topk_ids, draw_topk_weights
from kerneltune.kernels.moe.tunable import TOLERANCE


def make_inputs(
    tokens: int,
    E: int,
    N: int,
    K: int,
    top_k: int,
    device: str,
    *,
    dtype: torch.dtype = torch.float16,
    shared: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of fused_moe. `shared` more experts follow the E routed ones: every token takes them, with weight 1."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, std, generator=generator)

    ids = draw_topk_ids("uniform", tokens, E, top_k, seed)
    extra_ids = torch.arange(E, E + shared, dtype=torch.int32).expand(tokens, shared)
    weights = torch.cat([draw_topk_weights(tokens, top_k, seed), torch.ones(tokens, shared)], dim=1)
    return {
        "hidden": normal(tokens, K),
        "w1": normal(E + shared, 2 * N, K, std=K**-0.5),
        "w2": normal(E + shared, K, N, std=N**-0.5),
        "topk_weights": weights.to(device),
        "topk_ids": torch.cat([ids, extra_ids], dim=1).to(device),
    }


def worst_error(out: torch.Tensor, inputs: dict[str, Any]) -> float:
    """Largest relative error of a token against float64; infinite for NaN, or where zero is expected and not found."""
    expected = fused_moe_reference(**inputs)
    norm = expected.norm(dim=1)
    difference = (out.double() - expected).norm(dim=1)
    error = torch.where(norm > 0, difference / norm, torch.where(difference == 0, 0.0, float("inf")))
    return error.nan_to_num(nan=float("inf"), posinf=float("inf")).max().item() if len(error) else 0.0


def tolerance(inputs: dict[str, Any]) -> float:
    return TOLERANCE[DTYPES[inputs["hidden"].dtype]]


def config(block_m: int, gemm1: tuple[int, ...], gemm2: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """From BLOCK_M and (BLOCK_N, BLOCK_K, GROUP_M, num_warps, num_stages) of each GEMM."""
    names = ("BLOCK_N", "BLOCK_K", "GROUP_M", "num_warps", "num_stages")
    parts = {"gemm1": gemm1, "gemm2": gemm2}
    return {part: {"BLOCK_M": block_m, **dict(zip(names, values, strict=True))} for part, values in parts.items()}


SMALL = config(16, (64, 64, 1, 4, 2), (128, 32, 2, 4, 2))
