"""The launches of one fused MoE, and the memory between them: one way for the call, the tuner and the compiler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton

from kerneltune.kernels.moe.align import CHUNK, align_kernel, max_blocks
from kerneltune.kernels.moe.config import GemmConfig
from kerneltune.kernels.moe.grouped_gemm import down_kernel, gate_up_kernel, sum_kernel
from kerneltune.kernels.tunable import KernelCall

SUM_BLOCK = 1024  # columns of a program of sum_kernel: 4 warps read 16 bytes a thread
DIRECT_PAIRS_PER_EXPERT = 16  # not sorted: at most E / 16 pairs, of which hardly two share an expert


@dataclass(frozen=True)
class Scratch:
    """Everything between the launches. Nothing need be initialised."""

    sorted_token_ids: torch.Tensor  # [max_blocks * BLOCK_M] int32
    expert_ids: torch.Tensor  # [max_blocks] int32
    num_tokens_post_padded: torch.Tensor  # [1] int32
    intermediate: torch.Tensor  # [tokens * top_k, N], in pair order
    partials: torch.Tensor  # [tokens * top_k, K], in pair order


def make_scratch(hidden: torch.Tensor, w1: torch.Tensor, topk_ids: torch.Tensor, block_m: int) -> Scratch:
    """Allocate for the worst routing of this many tokens."""
    n_pairs, device = topk_ids.numel(), hidden.device
    blocks = max_blocks(n_pairs, len(w1), block_m)
    return Scratch(
        sorted_token_ids=torch.empty(blocks * block_m, dtype=torch.int32, device=device),
        expert_ids=torch.empty(blocks, dtype=torch.int32, device=device),
        num_tokens_post_padded=torch.empty(1, dtype=torch.int32, device=device),
        intermediate=torch.empty((n_pairs, w1.shape[1] // 2), dtype=hidden.dtype, device=device),
        partials=torch.empty((n_pairs, hidden.shape[1]), dtype=hidden.dtype, device=device),
    )


def make_calls(
    hidden: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    gemms: Mapping[str, GemmConfig],
    out: torch.Tensor,
    scratch: Scratch,
) -> dict[str, list[KernelCall]]:
    """The launches of checked, non-empty inputs by step, in order: align (none if direct), gemm1, gemm2, sum."""
    (tokens, top_k), (E, rows, K) = topk_ids.shape, w1.shape
    N, n_pairs, block_m = rows // 2, tokens * top_k, gemms["gemm1"].BLOCK_M
    direct = tokens == 1 or n_pairs * DIRECT_PAIRS_PER_EXPERT <= E
    blocks = n_pairs if direct else max_blocks(n_pairs, E, block_m)
    routed = (topk_ids, topk_ids if expert_map is None else expert_map)
    experts = {"E": E, "GLOBAL_E": E if expert_map is None else len(expert_map), "HAS_MAP": expert_map is not None}
    aligned = (scratch.sorted_token_ids, scratch.expert_ids, scratch.num_tokens_post_padded)
    tail = (*routed, *aligned, n_pairs, int(direct))

    def gemm(fn: Any, columns: int, gemm: GemmConfig, args: tuple[Any, ...], **sizes: int) -> KernelCall:
        grid = (blocks * triton.cdiv(columns, gemm.BLOCK_N),)
        return KernelCall(fn, grid, (*args, *tail), {**experts, "N": N, "K": K, **sizes, **asdict(gemm)})

    align = KernelCall(
        align_kernel,
        (E,),
        (*routed, *aligned, n_pairs, block_m),
        {**experts, "E_POW2": triton.next_power_of_2(E), "CHUNK": CHUNK, "num_warps": 4},
    )
    sum_options = {**experts, "K": K, "TOP_K": top_k, "BLOCK": SUM_BLOCK, "num_warps": 4}
    return {
        "align": [] if direct else [align],
        "gemm1": [gemm(gate_up_kernel, N, gemms["gemm1"], (hidden, w1, scratch.intermediate), TOP_K=top_k)],
        "gemm2": [gemm(down_kernel, K, gemms["gemm2"], (scratch.intermediate, w2, topk_weights, scratch.partials))],
        "sum": [
            KernelCall(sum_kernel, (tokens, triton.cdiv(K, SUM_BLOCK)), (scratch.partials, *routed, out), sum_options)
        ],
    }
