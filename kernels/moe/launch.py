"""The launches of one fused MoE, and the memory between them: one way for the call, the tuner and the compiler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton

from kerneltune.kernels.launch_plan import Layout
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


def scratch_layout(tokens: int, top_k: int, E: int, N: int, K: int, dtype: torch.dtype, block_m: int) -> Layout:
    """The fields of `Scratch`, for the worst routing of this many tokens."""
    n_pairs = tokens * top_k
    blocks = max_blocks(n_pairs, E, block_m)
    return {
        "sorted_token_ids": ((blocks * block_m,), torch.int32),
        "expert_ids": ((blocks,), torch.int32),
        "num_tokens_post_padded": ((1,), torch.int32),
        "intermediate": ((n_pairs, N), dtype),
        "partials": ((n_pairs, K), dtype),
    }


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
