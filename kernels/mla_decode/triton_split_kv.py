"""MLA decode over one split of the keys: out = softmax(softmax_scale * q k^T) v with v = k[..., :kv_lora_rank].

Usual sizes: d_qk 576 = kv_lora_rank 512 + qk_rope_head_dim 64, h_kv 1; group = heads / h_kv heads share a KV head.

Plan
- The rows = s_q * group query rows of one KV head are packed into tiles of BLOCK_H. One program owns one tile of one
  (request, KV head, split); the tile index runs fastest in the grid, so the tiles of a split run side by side and the
  KV, which dominates the traffic, comes from DRAM once.
- A request's keys are divided over the splits by its true length, which only the GPU knows, in whole tiles of
  BLOCK_N keys; trailing splits may be empty.
- A tile of KV is loaded once, as 512 + 64 columns (block shapes are powers of two), and used as K and as V.
- Softmax is online, in base 2. With one split the result goes straight out; otherwise float32 partials go to scratch
  and `combine.py` merges them.

Limits: table entries and KV past a length are never read. Offsets that can pass 2^31 elements are 64-bit. Sizes that
change what is computed at a fixed shape of tile (heads, s_q, causal, num_splits) are run-time values: one compile
serves them all. The token stride is a constexpr, so that the addresses of a tile are one base plus immediates.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kerneltune.kernels.mla_decode.config import Config, block_width
from kerneltune.kernels.tunable import KernelCall

LN_2 = tl.constexpr(math.log(2.0))
LOWEST = tl.constexpr(-1.0e30)  # where the running maximum starts: finite, so that inf - inf never arises

# Run-time values whose being 1 or a multiple of 16 must not cause another compile.
NOT_SPECIALIZED = ["scale_log2", "empty_lse", "stride_tb", "h_kv", "group", "rows", "causal", "num_splits", "row_tiles"]


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def split_kv_kernel(
    q_ptr,  # [batch, s_q, heads, LATENT + ROPE]
    kv_ptr,  # [num_pages, PAGE_SIZE, h_kv, LATENT + ROPE]
    block_table_ptr,  # [batch, max_pages] int32
    cache_seqlens_ptr,  # [batch] int32
    out_ptr,  # [batch, s_q, heads, LATENT]
    lse_ptr,  # [batch, heads, s_q] float32, contiguous
    partial_out_ptr,  # [batch, h_kv, rows, num_splits, LATENT] float32, contiguous; unused with one split
    partial_lse_ptr,  # [batch, h_kv, rows, num_splits] float32, base 2, contiguous; unused with one split
    scale_log2,  # softmax_scale * log2(e)
    empty_lse,  # lse of a row that sees no key
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kp,
    stride_kh,
    stride_tb,
    stride_ob,
    stride_os,
    stride_oh,
    h_kv,
    group,  # heads // h_kv
    rows,  # s_q * group
    causal,  # 1: query s of s_q sees the keys < length - s_q + 1 + s; 0: all
    num_splits,
    row_tiles,  # ceil(rows / BLOCK_H)
    STRIDE_KN: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,  # LATENT rounded up to a power of two; so too BLOCK_ROPE
    BLOCK_ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    pid = tl.program_id(0)
    pid_tile = pid % row_tiles
    pid = pid // row_tiles
    pid_split = pid % num_splits
    pid = pid // num_splits
    pid_kv_head = pid % h_kv
    pid_request = pid // h_kv

    offs_row = pid_tile * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H] packed as (s_q, group)
    mask_row = offs_row < rows
    offs_s = offs_row // group
    offs_head = pid_kv_head * group + offs_row % group
    offs_latent = tl.arange(0, BLOCK_LATENT)
    offs_rope = tl.arange(0, BLOCK_ROPE)
    offs_n = tl.arange(0, BLOCK_N)
    mask_latent = offs_latent < LATENT
    mask_rope = offs_rope < ROPE

    q_rows = q_ptr + pid_request.to(tl.int64) * stride_qb + offs_s * stride_qs + offs_head * stride_qh
    q_latent = tl.load(q_rows[:, None] + offs_latent[None, :], mask_row[:, None] & mask_latent[None, :], other=0.0)
    q_rope = tl.load(
        q_rows[:, None] + LATENT + offs_rope[None, :], mask_row[:, None] & mask_rope[None, :], other=0.0
    )  # [BLOCK_H, BLOCK_ROPE]

    length = tl.maximum(tl.load(cache_seqlens_ptr + pid_request), 0)
    row_limit = length - causal * (rows // group - 1 - offs_s)  # [BLOCK_H] first key that a row must not see
    seen_by_all = length - causal * (rows // group - 1)
    key_tiles = tl.cdiv(length, BLOCK_N)
    tiles_per_split = tl.cdiv(key_tiles, num_splits)
    first_key = pid_split * tiles_per_split * BLOCK_N
    last_key = tl.minimum(first_key + tiles_per_split * BLOCK_N, length)

    table_row = block_table_ptr + pid_request.to(tl.int64) * stride_tb
    kv_head = kv_ptr + pid_kv_head.to(tl.int64) * stride_kh

    row_max = tl.full([BLOCK_H], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_LATENT], tl.float32)

    # Keys past the end are read as the last key, and masked in the scores: cheaper than masking each load. The page
    # index of a tile is loaded one tile ahead: loaded where it is used, it would cost the pipeline a stage.
    page = load_pages(table_row, first_key, offs_n, last_key, PAGE_SIZE, BLOCK_N)
    for start in tl.range(first_key, last_key, BLOCK_N):
        offs_key = tl.minimum(offs_n, last_key - 1 - start)  # [BLOCK_N] from the start of the tile
        if PAGE_SIZE % BLOCK_N == 0:  # noqa: SIM108 (a constexpr decides)
            offs_token = start % PAGE_SIZE + offs_key  # in the page
        else:
            offs_token = (start + offs_key) % PAGE_SIZE
        tokens = kv_head + page.to(tl.int64) * stride_kp + offs_token * STRIDE_KN
        page = load_pages(table_row, start + BLOCK_N, offs_n, last_key, PAGE_SIZE, BLOCK_N)
        if BLOCK_LATENT == LATENT:
            kv_latent = tl.load(tokens[:, None] + offs_latent[None, :])  # [BLOCK_N, BLOCK_LATENT]
        else:
            kv_latent = tl.load(tokens[:, None] + offs_latent[None, :], mask_latent[None, :], other=0.0)
        if BLOCK_ROPE == ROPE:
            k_rope = tl.load(tokens[:, None] + LATENT + offs_rope[None, :])  # [BLOCK_N, BLOCK_ROPE]
        else:
            k_rope = tl.load(tokens[:, None] + LATENT + offs_rope[None, :], mask_rope[None, :], other=0.0)

        # Scaled before they are added, and masked in a branch: Triton gives each warp group all columns of a dot whose
        # result runs straight into another dot, which is 76 wgmma a tile instead of 40 (sm_90, 64 x 64, 8 warps).
        scores = tl.dot(q_rope, tl.trans(k_rope)) * scale_log2
        scores += tl.dot(q_latent, tl.trans(kv_latent)) * scale_log2  # [BLOCK_H, BLOCK_N]
        if start + BLOCK_N > seen_by_all:
            scores = tl.where((start + offs_n)[None, :] < row_limit[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        alpha = tl.exp2(row_max - new_max)
        p = tl.exp2(scores - new_max[:, None])
        row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(kv_latent.dtype), kv_latent, acc)
        row_max = new_max

    seen = row_sum > 0.0
    row_sum = tl.where(seen, row_sum, 1.0)
    acc = acc / row_sum[:, None]  # 0 for a row that saw nothing
    lse_log2 = row_max + tl.log2(row_sum)
    if num_splits == 1:
        out_rows = out_ptr + pid_request.to(tl.int64) * stride_ob + offs_s * stride_os + offs_head * stride_oh
        lse_rows = (pid_request.to(tl.int64) * h_kv * group + offs_head) * (rows // group) + offs_s
        tl.store(
            out_rows[:, None] + offs_latent[None, :],
            acc.to(out_ptr.dtype.element_ty),
            mask_row[:, None] & mask_latent[None, :],
        )
        tl.store(lse_ptr + lse_rows, tl.where(seen, lse_log2 * LN_2, empty_lse), mask_row)
    else:
        flat_row = (pid_request.to(tl.int64) * h_kv + pid_kv_head) * rows + offs_row
        partial = flat_row * num_splits + pid_split
        tl.store(partial_lse_ptr + partial, tl.where(seen, lse_log2, float("-inf")), mask_row)
        # The combine reads no partial whose lse is -inf, so a row that saw nothing writes none.
        tl.store(
            partial_out_ptr + partial[:, None] * LATENT + offs_latent[None, :],
            acc,
            (mask_row & seen)[:, None] & mask_latent[None, :],
        )


@triton.jit
def load_pages(table_row, start, offs_n, last_key, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pages of the keys of the tile at `start`: one index if the tile lies in one page, else [BLOCK_N], the last key's
    for keys past the end. A tile that starts past the end has none: the table is not read."""
    if PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(table_row + start // PAGE_SIZE, start < last_key, other=0)
    else:
        offs_key = tl.minimum(start + offs_n, last_key - 1)
        page = tl.load(table_row + offs_key // PAGE_SIZE, offs_key >= start, other=0)
    return page


def split_kv_call(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    config: Config,
    *,
    softmax_scale: float,
    causal: bool,
    empty_lse: float,
) -> KernelCall:
    """The launch over all (row tile, split, KV head, request); tensors as the kernel's parameters say."""
    batch, s_q, heads, d_qk = q.shape
    page_size, h_kv = kv_cache.shape[1:3]
    latent = out.shape[-1]
    group = heads // h_kv
    row_tiles = triton.cdiv(s_q * group, config.BLOCK_H)
    return KernelCall(
        split_kv_kernel,
        (row_tiles * config.num_splits * h_kv * batch,),
        (
            *(q, kv_cache, block_table, cache_seqlens, out, lse, partial_out, partial_lse),
            *(softmax_scale * math.log2(math.e), empty_lse),
            *(*q.stride()[:3], kv_cache.stride(0), kv_cache.stride(2), block_table.stride(0), *out.stride()[:3]),
            *(h_kv, group, s_q * group, int(causal), config.num_splits, row_tiles),
        ),
        {
            "STRIDE_KN": kv_cache.stride(1),
            "PAGE_SIZE": page_size,
            "LATENT": latent,
            "ROPE": d_qk - latent,
            "BLOCK_LATENT": block_width(latent),
            "BLOCK_ROPE": block_width(d_qk - latent),
            "BLOCK_H": config.BLOCK_H,
            "BLOCK_N": config.BLOCK_N,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "enable_fp_fusion": True,
        },
    )
