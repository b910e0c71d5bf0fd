"""Merge the splits of MLA decode: out = sum_i w_i * partial_out_i with w_i = 2^(lse_i - lse).

One program owns one query row and BLOCK_D of its columns, and runs over the splits BLOCK_S at a time. Splits that saw
nothing (lse -inf) are not read. Traffic is the float32 partials, which mostly still lie in L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kerneltune.kernels.mla_decode.config import block_width
from kerneltune.kernels.mla_decode.triton_split_kv import LN_2, LOWEST
from kerneltune.kernels.tunable import KernelCall

FEW_ROWS = 256  # below it a row is shared out over programs of NARROW columns, or 16 rows would keep 16 SMs busy
NARROW = 64
TILE = 4096  # float32 partials that a program holds at a time: 32 registers a thread
FEW_SPLITS = 4
NOT_SPECIALIZED = ["empty_lse", "h_kv", "group", "rows", "num_splits"]


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def combine_kernel(
    partial_out_ptr,  # [batch, h_kv, rows, num_splits, LATENT] float32, contiguous
    partial_lse_ptr,  # [batch, h_kv, rows, num_splits] float32, base 2, contiguous
    out_ptr,  # [batch, s_q, heads, LATENT]
    lse_ptr,  # [batch, heads, s_q] float32, natural log, contiguous
    empty_lse,  # lse of a row that sees no key
    stride_ob,
    stride_os,
    stride_oh,
    h_kv,
    group,  # heads // h_kv
    rows,  # s_q * group
    num_splits,
    LATENT: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    flat_row = tl.program_id(0).to(tl.int64)
    row = flat_row % rows
    pid_request = flat_row // rows // h_kv
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < LATENT

    row_max = tl.full([], LOWEST, tl.float32)
    row_sum = tl.zeros([], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, num_splits, BLOCK_S):
        offs_split = start + tl.arange(0, BLOCK_S)
        partial = flat_row * num_splits + offs_split
        lse = tl.load(partial_lse_ptr + partial, offs_split < num_splits, other=float("-inf"))  # [BLOCK_S]
        new_max = tl.maximum(row_max, tl.max(lse, 0))
        alpha = tl.exp2(row_max - new_max)
        weight = tl.exp2(lse - new_max)
        part = tl.load(
            partial_out_ptr + partial[:, None] * LATENT + offs_d[None, :],
            (lse > float("-inf"))[:, None] & mask_d[None, :],
            other=0.0,
        )  # [BLOCK_S, BLOCK_D]
        acc = acc * alpha + tl.sum(part * weight[:, None], 0)
        row_sum = row_sum * alpha + tl.sum(weight, 0)
        row_max = new_max

    seen = row_sum > 0.0
    row_sum = tl.where(seen, row_sum, 1.0)
    acc = acc / row_sum
    head = flat_row // rows % h_kv * group + row % group
    s = row // group
    tl.store(
        out_ptr + pid_request * stride_ob + s * stride_os + head * stride_oh + offs_d,
        acc.to(out_ptr.dtype.element_ty),
        mask_d,
    )
    if tl.program_id(1) == 0:
        lse_row = (pid_request * h_kv * group + head) * (rows // group) + s
        tl.store(lse_ptr + lse_row, tl.where(seen, (row_max + tl.log2(row_sum)) * LN_2, empty_lse))


def combine_call(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    h_kv: int,
    empty_lse: float,
) -> KernelCall:
    """The launch over all rows and column blocks; tensors as the kernel's parameters say."""
    batch, s_q, heads, latent = out.shape
    num_splits = partial_lse.shape[-1]
    group = heads // h_kv
    rows = batch * heads * s_q
    block_d = NARROW if rows < FEW_ROWS else block_width(latent)
    return KernelCall(
        combine_kernel,
        (rows, triton.cdiv(latent, block_d)),
        (partial_out, partial_lse, out, lse, empty_lse, *out.stride()[:3], h_kv, group, s_q * group, num_splits),
        {
            "LATENT": latent,
            "BLOCK_S": FEW_SPLITS if num_splits <= FEW_SPLITS else TILE // block_d,
            "BLOCK_D": block_d,
            "num_warps": 4,
            "num_stages": 2,
            "enable_fp_fusion": True,
        },
    )
