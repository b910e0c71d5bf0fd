"""Merge the partial results of `hopper.py`: out = sum_i w_i * partial_out_i with w_i = 2^(lse_i - lse).

The keys of all requests lie end to end and are cut evenly (see `hopper.py`), so a request is either whole, and already
in `out`, or lies in several groups of programs that follow one another: in the second place of the first, the first
place of the others. One program owns BLOCK_R rows and BLOCK_D columns of a request, and is told its groups by the main
kernel. It may start before that one has ended (programmatic dependent launch), and waits for it itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kerneltune.kernels.mla_decode.config import HOPPER_TILE
from kerneltune.kernels.mla_decode.triton_split_kv import LN_2, LOWEST
from kerneltune.kernels.tunable import KernelCall

TILE = tl.constexpr(HOPPER_TILE)
USUAL_SMS = 128  # the block sizes must not depend on the GPU: they are compiled without one
USUAL_PROGRAMS = 1024  # fewer leave SMs idle; many more, mostly with nothing to do, took 4 us to start (H200)
FEW_PARTS = 8
MOST_PARTS = 32  # side by side
NARROW = 256  # columns of a program that has many parts
NOT_SPECIALIZED = ["empty_lse", "heads", "rows", "row_tiles"]


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def combine_pieces_kernel(
    cut_ptr,  # [batch, 2] int32: the first and the last group that has a part of a request; -1 if it is whole
    partial_out_ptr,  # [groups, row_tiles, 2, 64, LATENT] float32
    partial_lse_ptr,  # [groups, row_tiles, 2, 64] float32, base 2
    out_ptr,  # [batch, s_q, heads, LATENT]
    lse_ptr,  # [batch, heads, s_q] float32, natural log, contiguous
    empty_lse,  # lse of a row that sees no key
    stride_ob,
    stride_os,
    stride_oh,
    heads,
    rows,  # s_q * heads
    row_tiles,
    LATENT: tl.constexpr,
    BLOCK_G: tl.constexpr,  # parts at a time
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    request = tl.program_id(0)
    tl.extra.cuda.gdc_wait()
    first = tl.load(cut_ptr + request * 2)
    last = tl.load(cut_ptr + request * 2 + 1)
    if first >= 0:
        offs_row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        offs_d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
        mask = offs_row < rows
        in_tile = (offs_row // TILE * 2 * TILE + offs_row % TILE).to(tl.int64)
        row_max = tl.full([BLOCK_R], LOWEST, tl.float32)
        row_sum = tl.zeros([BLOCK_R], tl.float32)
        acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
        for start in range(first, last + 1, BLOCK_G):
            if BLOCK_R > 1:
                # Few parts: one after the other, their loads together; no thread waits for another.
                for i in tl.static_range(BLOCK_G):
                    group = start + i
                    partial = in_tile + (group * row_tiles * 2 + (group == first)) * TILE  # [BLOCK_R]
                    there = mask & (group <= last)
                    lse = tl.load(partial_lse_ptr + partial, there, other=float("-inf"))
                    part = tl.load(
                        partial_out_ptr + partial[:, None] * LATENT + offs_d[None, :], there[:, None], other=0.0
                    )  # [BLOCK_R, BLOCK_D]
                    new_max = tl.maximum(row_max, lse)
                    alpha = tl.exp2(row_max - new_max)
                    weight = tl.exp2(lse - new_max)
                    acc = acc * alpha[:, None] + part * weight[:, None]
                    row_sum = row_sum * alpha + weight
                    row_max = new_max
            else:
                # Many parts of one row: side by side, then added up.
                groups = start + tl.arange(0, BLOCK_G)
                partial = tl.sum(in_tile, 0) + (groups * row_tiles * 2 + (groups == first)).to(tl.int64) * TILE
                lse = tl.load(partial_lse_ptr + partial, groups <= last, other=float("-inf"))  # [BLOCK_G]
                part = tl.load(
                    partial_out_ptr + partial[:, None] * LATENT + offs_d[None, :], (groups <= last)[:, None], other=0.0
                )  # [BLOCK_G, BLOCK_D]
                new_max = tl.maximum(row_max, tl.max(lse, 0))
                alpha = tl.exp2(row_max - new_max)
                weight = tl.exp2(lse - tl.max(new_max, 0))
                acc = acc * alpha[:, None] + tl.sum(part * weight[:, None], 0)[None, :]
                row_sum = row_sum * alpha + tl.sum(weight, 0)
                row_max = new_max
        seen = row_sum > 0.0
        row_sum = tl.where(seen, row_sum, 1.0)
        s = offs_row // heads
        head = offs_row % heads
        out_row = out_ptr + request.to(tl.int64) * stride_ob + s * stride_os + head * stride_oh
        values = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_row[:, None] + offs_d[None, :], values, mask[:, None])
        if tl.program_id(2) == 0:
            lse_row = (request.to(tl.int64) * heads + head) * (rows // heads) + s
            tl.store(lse_ptr + lse_row, tl.where(seen, (row_max + tl.log2(row_sum)) * LN_2, empty_lse), mask)


def combine_pieces_call(
    cuts: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    empty_lse: float,
) -> KernelCall:
    """The launch over all groups and blocks of rows; tensors as the kernel's parameters say."""
    batch, s_q, heads, latent = out.shape
    row_tiles = partial_lse.shape[1]
    rows = s_q * heads
    parts = USUAL_SMS // (row_tiles * batch) + 1  # of a request of average length
    if parts > FEW_PARTS:
        block_g, block_r, block_d, num_warps = min(MOST_PARTS, triton.next_power_of_2(parts)), 1, NARROW, 8
    else:
        block_r = min(8, max(2, triton.next_power_of_2(batch * rows // USUAL_PROGRAMS)))
        block_d = latent
        block_g, num_warps = (2, 8) if block_r >= 8 else (4, 4)
    return KernelCall(
        combine_pieces_kernel,
        (batch, triton.cdiv(rows, block_r), latent // block_d),
        (cuts, partial_out, partial_lse, out, lse, empty_lse, *out.stride()[:3], heads, rows, row_tiles),
        {
            "LATENT": latent,
            "BLOCK_G": block_g,
            "BLOCK_R": block_r,
            "BLOCK_D": block_d,
            "num_warps": num_warps,
            "num_stages": 2,
            "enable_fp_fusion": True,
            "launch_pdl": True,
        },
    )
