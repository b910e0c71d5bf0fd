"""The two grouped GEMMs of a mixture of experts and the sum that ends it.

    gate_up_kernel   intermediate[pair] = silu(hidden[token] @ w1[e, :N].T) * (hidden[token] @ w1[e, N:].T)
    down_kernel      partials[pair]     = topk_weight[pair] * (intermediate[pair] @ w2[e].T)
    sum_kernel       out[token]         = sum over the token's choices of partials[pair]

pair = token * top_k + choice, e its local expert. DeepSeek-V3 at TP 8: E 256, N 256, K 7168, top_k 8.

Plan
- A program owns BLOCK_M rows of one expert (a block made by align.py) and BLOCK_N columns. Blocks are numbered along N
  first, in groups of GROUP_M row blocks; the grid is the host's worst case, what lies beyond the rows in use exits.
- The weights dominate the traffic. They are read along their contiguous axis, 16 bytes a thread, through Triton's
  software pipeline. Rows beyond an edge are clamped, not masked: loads carry no mask unless the depth of the product
  is not a multiple of BLOCK_K. Rows are independent, so what a padding row computes is only dropped at the store.
- gate_up_kernel reads gate and up rows in turn (gate 0, up 0, gate 1, ...) as one tile of 2 * BLOCK_N rows: one product
  feeds both, and each thread holds the two halves of its columns side by side.
- intermediate and partials lie in pair order, not expert order: rows are long enough that gathering them costs nothing,
  the scratch has no padding, and the sum reads one contiguous run a token.
- With few pairs (`direct`) sorting buys nothing: each pair is a block of its own, and align_kernel is not launched.
- Pairs without a local expert have no row: nothing writes their partials, and sum_kernel does not read them.

Limits: bf16 and fp16, accumulated in float32; weights and rows contiguous. Row offsets are 64-bit throughout.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kerneltune.kernels.moe.align import local_expert

NOT_SPECIALIZED = ["n_pairs", "direct"]


@triton.jit
def _count_blocks(num_tokens_post_padded_ptr, n_pairs, direct, BLOCK_M: tl.constexpr):
    """Row blocks in use."""
    count = n_pairs
    if direct == 0:
        count = tl.load(num_tokens_post_padded_ptr) // BLOCK_M
    return count


@triton.jit
def _order(pid, num_blocks, NUM_N: tl.constexpr, GROUP_M: tl.constexpr):
    """(row block, column block) of a program: GROUP_M row blocks go through the columns together and share weights."""
    first_block = pid // (GROUP_M * NUM_N) * GROUP_M
    rows = min(num_blocks - first_block, GROUP_M)
    within = pid % (GROUP_M * NUM_N)
    return first_block + within % rows, within // rows


@triton.jit
def _block_rows(
    topk_ids_ptr, expert_map_ptr, sorted_token_ids_ptr, expert_ids_ptr, pid_m, n_pairs, direct,
    E: tl.constexpr, GLOBAL_E: tl.constexpr, HAS_MAP: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The expert (-1: none) and the pairs [BLOCK_M] of a row block; n_pairs marks a padding row."""
    offs_m = tl.arange(0, BLOCK_M)
    if direct:
        expert = local_expert(topk_ids_ptr, expert_map_ptr, pid_m, True, E, GLOBAL_E, HAS_MAP)
        pair = tl.where(offs_m == 0, pid_m, n_pairs)
    else:
        expert = tl.load(expert_ids_ptr + pid_m)
        pair = tl.load(sorted_token_ids_ptr + pid_m.to(tl.int64) * BLOCK_M + offs_m)
    return expert, pair


@triton.jit
def _multiply(
    a_row_ptr, w_row_ptr, DEPTH: tl.constexpr, BLOCK_M: tl.constexpr, ROWS_W: tl.constexpr, BLOCK_K: tl.constexpr
):
    """a @ w.T over DEPTH columns, float32 [BLOCK_M, ROWS_W], from pointers to rows [BLOCK_M] and [ROWS_W]."""
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_row_ptr[:, None] + offs_k[None, :]
    w_ptrs = w_row_ptr[:, None] + offs_k[None, :]
    acc = tl.zeros([BLOCK_M, ROWS_W], tl.float32)
    for start in range(0, DEPTH, BLOCK_K):
        if DEPTH % BLOCK_K == 0:
            a = tl.load(a_ptrs)
            w = tl.load(w_ptrs)
        else:
            mask_k = (start + offs_k < DEPTH)[None, :]
            a = tl.load(a_ptrs, mask=mask_k, other=0.0)  # [BLOCK_M, BLOCK_K]
            w = tl.load(w_ptrs, mask=mask_k, other=0.0)  # [ROWS_W, BLOCK_K]
        acc = tl.dot(a, w.T, acc)
        a_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    return acc


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def gate_up_kernel(
    hidden_ptr,  # [tokens, K]
    w1_ptr,  # [E, 2N, K], gate rows first
    intermediate_ptr,  # [n_pairs, N]
    topk_ids_ptr,  # [n_pairs] int32 or int64
    expert_map_ptr,  # [GLOBAL_E] int32; unused without HAS_MAP
    sorted_token_ids_ptr,  # these three from align_kernel; unused if direct
    expert_ids_ptr,
    num_tokens_post_padded_ptr,
    n_pairs,
    direct,  # 1: each pair is a row block of its own; 0: sorted blocks
    E: tl.constexpr,
    GLOBAL_E: tl.constexpr,
    HAS_MAP: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    NUM_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    num_blocks = _count_blocks(num_tokens_post_padded_ptr, n_pairs, direct, BLOCK_M)
    if pid >= num_blocks * NUM_N:
        return
    pid_m, pid_n = _order(pid, num_blocks, NUM_N, GROUP_M)
    expert, pair = _block_rows(
        topk_ids_ptr, expert_map_ptr, sorted_token_ids_ptr, expert_ids_ptr, pid_m, n_pairs, direct,
        E, GLOBAL_E, HAS_MAP, BLOCK_M,
    )  # fmt: skip
    if expert < 0:
        return

    token = tl.minimum(pair, n_pairs - 1) // TOP_K
    offs_w = tl.arange(0, 2 * BLOCK_N)
    w_row = tl.minimum(pid_n * BLOCK_N + offs_w // 2, N - 1) + offs_w % 2 * N  # [2 * BLOCK_N] gate, up, gate, up, ...
    acc = _multiply(
        hidden_ptr + token.to(tl.int64) * K,
        w1_ptr + expert.to(tl.int64) * (2 * N * K) + w_row.to(tl.int64) * K,
        K, BLOCK_M, 2 * BLOCK_N, BLOCK_K,
    )  # fmt: skip
    gate, up = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N, 2]))  # [BLOCK_M, BLOCK_N] each
    result = gate / (1.0 + tl.exp(-gate)) * up

    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    out_ptrs = intermediate_ptr + pair.to(tl.int64)[:, None] * N + offs_n[None, :]
    mask = (pair < n_pairs)[:, None] & (offs_n < N)[None, :]
    tl.store(out_ptrs, result.to(intermediate_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def down_kernel(
    intermediate_ptr,  # [n_pairs, N]
    w2_ptr,  # [E, K, N]
    topk_weights_ptr,  # [n_pairs] float32
    partials_ptr,  # [n_pairs, K]
    topk_ids_ptr,  # from here on as for gate_up_kernel
    expert_map_ptr,
    sorted_token_ids_ptr,
    expert_ids_ptr,
    num_tokens_post_padded_ptr,
    n_pairs,
    direct,
    E: tl.constexpr,
    GLOBAL_E: tl.constexpr,
    HAS_MAP: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # columns of the output, K of them in all
    BLOCK_K: tl.constexpr,  # a step along N
    GROUP_M: tl.constexpr,
):
    NUM_N: tl.constexpr = (K + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    num_blocks = _count_blocks(num_tokens_post_padded_ptr, n_pairs, direct, BLOCK_M)
    if pid >= num_blocks * NUM_N:
        return
    pid_m, pid_n = _order(pid, num_blocks, NUM_N, GROUP_M)
    expert, pair = _block_rows(
        topk_ids_ptr, expert_map_ptr, sorted_token_ids_ptr, expert_ids_ptr, pid_m, n_pairs, direct,
        E, GLOBAL_E, HAS_MAP, BLOCK_M,
    )  # fmt: skip
    if expert < 0:
        return

    mask_m = pair < n_pairs
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = _multiply(
        intermediate_ptr + tl.minimum(pair, n_pairs - 1).to(tl.int64) * N,
        w2_ptr + expert.to(tl.int64) * (K * N) + tl.minimum(offs_n, K - 1).to(tl.int64) * N,
        N, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    acc *= tl.load(topk_weights_ptr + pair, mask=mask_m, other=0.0)[:, None]
    out_ptrs = partials_ptr + pair.to(tl.int64)[:, None] * K + offs_n[None, :]
    tl.store(out_ptrs, acc.to(partials_ptr.dtype.element_ty), mask=mask_m[:, None] & (offs_n < K)[None, :])


@triton.jit
def sum_kernel(
    partials_ptr,  # [tokens * TOP_K, K]
    topk_ids_ptr,  # [tokens * TOP_K] int32 or int64
    expert_map_ptr,  # [GLOBAL_E] int32; unused without HAS_MAP
    out_ptr,  # [tokens, K]
    E: tl.constexpr,
    GLOBAL_E: tl.constexpr,
    HAS_MAP: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        expert = local_expert(topk_ids_ptr, expert_map_ptr, pair, True, E, GLOBAL_E, HAS_MAP)
        columns = tl.where(expert >= 0, K, 0)  # nothing is read of a choice without a partial
        acc += tl.load(partials_ptr + pair * K + offs, mask=offs < columns, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * K + offs, acc.to(out_ptr.dtype.element_ty), mask=offs < K)
