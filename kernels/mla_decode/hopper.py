"""MLA decode for Hopper in Gluon, bound by the matrix units: out = softmax(softmax_scale * q k^T) v, v = k[..., :512].

Usual sizes: rows = s_q * heads query rows share the one KV head; a tile is 64 rows x 64 keys; d_qk 576 = 512 + 64.

Plan
- Persistent: `groups` x `row_tiles` programs; the row tiles of a group run side by side on the same keys, so the KV
  comes from DRAM once. All tiles of keys of all requests, end to end and with `piece_cost` tiles on top for each
  request, are divided evenly over the groups, by the true lengths; whoever gets a part of a request leaves
  a float32 partial result, which `combine_pieces` merges.
- Three roles in a program. A producer warp (hopper_load.py) brings Q and the KV by TMA, in two stages of one tile, each
  as 256 + 256 columns + 64 rotary ones with a barrier each, and tells L2 of the next pair of tiles. Two warpgroups
  (hopper_attend.py) own half of the 512 output columns each, and take turns at the tiles: number t's scores and softmax
  are warpgroup t % 2's, while the other multiplies the tile before with V. Both then multiply tile t with their half
  of V.
- The running maximum goes from tile to tile through shared memory, so P is never rescaled, and the accumulators only
  when a row's maximum grew by more than 2^8 (a branch on one flag for the whole tile).
- P of tile t lies over the rotary columns of its own stage, which its scores no longer need.

The schedule is that of FlashMLA's "seesaw" (github.com/deepseek-ai/FlashMLA, docs/20250422-new-kernel-deep-dive.md)
without the rescaling of P, and with a producer.
"""

from __future__ import annotations

import math

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kerneltune.kernels.mla_decode.hopper_attend import consumer
from kerneltune.kernels.mla_decode.hopper_common import (
    HALF,
    ROPE,
    TILE,
    Barriers,
    HandOver,
    Result,
    Rows,
    Shared,
    Source,
    Work,
)
from kerneltune.kernels.mla_decode.hopper_load import producer
from kerneltune.kernels.tunable import KernelCall

SWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
TMA_BYTES = 16  # rows start at multiples of it
ALIGNED = TMA_BYTES // 2  # elements
NOT_SPECIALIZED = [
    *("scale_log2", "empty_lse", "stride_tb", "batch", "heads", "rows", "causal", "row_tiles", "groups", "piece_cost"),
]


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def hopper_kernel(
    q_half_desc,  # [batch * s_q * heads, 576], block [64, 256]
    q_rope_desc,  # the same, block [64, 64]
    kv_half_desc,  # [num_pages * page_size, 576], block [min(64, PAGE_SIZE), 256]
    kv_rope_desc,  # the same, block [min(64, PAGE_SIZE), 64]
    kv_ptr,  # [num_pages, page_size, 1, 576], for the prefetch
    block_table_ptr,  # [batch, max_pages] int32
    cache_seqlens_ptr,  # [batch] int32
    out_ptr,  # [batch, s_q, heads, 512]
    lse_ptr,  # [batch, heads, s_q] float32, contiguous
    partial_out_ptr,  # [groups, row_tiles, 2, 64, 512] float32
    partial_lse_ptr,  # [groups, row_tiles, 2, 64] float32, base 2
    cut_ptr,  # [batch, 2] int32: the first and the last group that has a part of a request; -1 if it is whole
    scale_log2,  # softmax_scale * log2(e), above 0
    empty_lse,
    q_rows_per_request,
    kv_rows_per_page,
    stride_tb,
    stride_kn,
    stride_ob,
    stride_os,
    stride_oh,
    batch,
    heads,
    rows,  # s_q * heads
    causal,
    row_tiles,
    groups,
    piece_cost,
    PAGE_SIZE: gl.constexpr,
    BATCH_BLOCK: gl.constexpr,
):
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    row_tile = gl.program_id(0) % row_tiles
    group = gl.program_id(0) // row_tiles

    # Every warp holds all numbers, so that sums need no exchange between warps.
    flat: gl.constexpr = gl.BlockedLayout([BATCH_BLOCK // 32], [32], [4], [0])
    offs_b = gl.arange(0, BATCH_BLOCK, flat)
    lengths = gl.load(cache_seqlens_ptr + offs_b, offs_b < batch, other=0)
    costs = gl.where(offs_b < batch, (gl.maximum(lengths, 0) + TILE - 1) // TILE + piece_cost, 0)
    ends = gl.associative_scan(costs, 0, _add)
    total = gl.sum(costs, 0)
    share = (total + groups - 1) // groups
    # Requests of one length are not cut, where that makes the longest share at most 1/16 longer.
    most = gl.maximum(gl.max(costs, 0), 1)
    whole = (share + most - 1) // most * most
    share = gl.where(whole <= share + share // 16, whole, share)
    begin = group * share
    end = gl.minimum(begin + share, total)
    first = gl.sum(((ends <= begin) & (offs_b < batch)).to(gl.int32), 0)
    last = gl.sum(((ends - costs < end) & (offs_b < batch)).to(gl.int32), 0)
    first_at = gl.sum(gl.where(offs_b < first, costs, 0), 0)
    launch_dependents()

    half_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_half = gl.allocate_shared_memory(DTYPE, [2, TILE, HALF], half_layout)
    q_rope = gl.allocate_shared_memory(DTYPE, [1, TILE, ROPE], half_layout)
    kv_half = gl.allocate_shared_memory(DTYPE, [4, TILE, HALF], half_layout)  # stage * 2 + half
    kv_rope = gl.allocate_shared_memory(DTYPE, [2, TILE, ROPE], half_layout)  # by stage; P later
    rows_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    alpha_mem = gl.allocate_shared_memory(gl.float32, [2, TILE], rows_layout)
    max_mem = gl.allocate_shared_memory(gl.float32, [2, TILE], rows_layout)
    sum_mem = gl.allocate_shared_memory(gl.float32, [4, TILE], rows_layout)
    flag_mem = gl.allocate_shared_memory(gl.int32, [2, 1], rows_layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    kv_full = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())  # stage * 3 + piece
    kv_free = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())  # stage * 2 + half
    p_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    sum_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full.index(0), count=1)
    mbarrier.init(q_free.index(0), count=2)
    for i in gl.static_range(6):
        mbarrier.init(kv_full.index(i), count=1)
    for i in gl.static_range(4):
        mbarrier.init(kv_free.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(p_ready.index(i), count=1)
        mbarrier.init(sum_ready.index(i), count=1)
    fence_async_shared()

    work = Work(cache_seqlens_ptr, first, last, first_at, begin, end, share, piece_cost)
    shared = Shared(q_half, q_rope, kv_half, kv_rope)
    barriers = Barriers(q_full, q_free, kv_full, kv_free, p_ready, sum_ready)
    hand_over = HandOver(alpha_mem, max_mem, sum_mem, flag_mem)
    result = Result(
        out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, cut_ptr, stride_ob, stride_os, stride_oh, empty_lse
    )
    rows = Rows(heads, rows, causal, row_tile, row_tiles, group)
    source = Source(
        q_half_desc,
        q_rope_desc,
        kv_half_desc,
        kv_rope_desc,
        kv_ptr,
        block_table_ptr,
        stride_tb,
        stride_kn,
        q_rows_per_request,
        kv_rows_per_page,
    )
    gl.warp_specialize(
        [
            (consumer, (work, shared, barriers, hand_over, result, rows, scale_log2, gl.constexpr(0))),
            (consumer, (work, shared, barriers, hand_over, result, rows, scale_log2, gl.constexpr(1))),
            (producer, (work, shared, barriers, source, rows, PAGE_SIZE)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def launch_dependents():
    """Let the next kernel of the stream start, if it was launched so; it waits for this one's results itself."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


def hopper_call(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    cuts: torch.Tensor,
    *,
    piece_cost: int,
    softmax_scale: float,
    causal: bool,
    empty_lse: float,
) -> KernelCall:
    """The launch of `groups` x `row_tiles` programs, by the shape of the partials; tensors as the kernel says."""
    batch, s_q, heads, d_qk = q.shape
    num_pages, page_size = kv_cache.shape[:2]
    groups, row_tiles = partial_lse.shape[:2]
    row, token = q.stride(2), kv_cache.stride(1)
    q_rows, kv_rows = q.stride(0) // row, kv_cache.stride(0) // token
    q_flat = [(batch - 1) * q_rows + s_q * heads, d_qk], [row, 1]
    kv_flat = [(num_pages - 1) * kv_rows + page_size, d_qk], [token, 1]
    half, rope, tile = HALF.value, ROPE.value, TILE.value
    page_rows = min(page_size, tile)
    return KernelCall(
        hopper_kernel,
        (groups * row_tiles,),
        (
            *(TensorDescriptor(q, *q_flat, [tile, columns], SWIZZLED) for columns in (half, rope)),
            *(TensorDescriptor(kv_cache, *kv_flat, [page_rows, columns], SWIZZLED) for columns in (half, rope)),
            *(kv_cache, block_table, cache_seqlens, out, lse, partial_out, partial_lse, cuts),
            *(softmax_scale * math.log2(math.e), empty_lse, q_rows, kv_rows),
            *(block_table.stride(0), token, *out.stride()[:3]),
            *(batch, heads, s_q * heads, int(causal), row_tiles, groups, piece_cost),
        ),
        {
            "PAGE_SIZE": page_size,
            "BATCH_BLOCK": max(32, triton.next_power_of_2(batch)),
            "num_warps": 4,
            "enable_fp_fusion": True,
        },
    )


def hopper_refuses(q: torch.Tensor, kv_cache: torch.Tensor, softmax_scale: float) -> str | None:
    """None, or why the kernel cannot take these tensors as they lie in memory: its TMA reads rows at even distances."""
    if softmax_scale <= 0:
        return f"variant hopper needs softmax_scale above 0: got {softmax_scale}"
    if (
        q.stride(2) % ALIGNED
        or q.stride(0) % q.stride(2)
        or (q.shape[1] > 1 and q.stride(1) != q.shape[2] * q.stride(2))
    ):
        return f"variant hopper needs heads of q side by side, aligned to {TMA_BYTES} bytes: got strides {q.stride()}"
    if kv_cache.stride(1) % ALIGNED or kv_cache.stride(0) % kv_cache.stride(1):
        return (
            f"variant hopper needs whole tokens, aligned to {TMA_BYTES} bytes: kv_cache has strides {kv_cache.stride()}"
        )
    if q.data_ptr() % TMA_BYTES or kv_cache.data_ptr() % TMA_BYTES:
        return f"variant hopper needs q and kv_cache at multiples of {TMA_BYTES} bytes"
    if kv_cache.shape[0] * (kv_cache.stride(0) // kv_cache.stride(1)) >= 1 << 31:
        return f"variant hopper counts tokens in 31 bits: kv_cache has {kv_cache.shape[0]} pages"
    return None
