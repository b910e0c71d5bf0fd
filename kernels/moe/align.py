"""Sort (token, choice) pairs by local expert, each expert's run padded to whole blocks of BLOCK_M rows.

pair = token * top_k + choice, n_pairs of them. Out come, for the grouped GEMMs:
    sorted_token_ids        the pairs in expert order, stable; n_pairs marks a padding row
    expert_ids              the local expert of each block of BLOCK_M rows
    num_tokens_post_padded  rows in use; blocks beyond are not written

Plan
- One launch, one program an expert, no atomics: the same input gives the same order on every run.
- Each program counts all experts by itself (a histogram over all pairs, which L2 serves: 128 KiB of ids for 4096
  tokens at top-8), so it knows where its run starts without waiting for another program or a second launch.
- It then walks the pairs once more and scatters its own; a running count makes the rank stable.
- BLOCK_M is a run-time value: one compile serves every config.

Pairs without a local expert (id -1, out of range, or mapped to -1) get no row at all.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 1024  # pairs read at a time
NOT_SPECIALIZED = ["n_pairs", "block_m"]


@triton.jit
def local_expert(
    topk_ids_ptr, expert_map_ptr, pair, mask, E: tl.constexpr, GLOBAL_E: tl.constexpr, HAS_MAP: tl.constexpr
):
    """The local expert of each pair, -1 where there is none."""
    expert = tl.load(topk_ids_ptr + pair, mask=mask, other=-1)
    known = (expert >= 0) & (expert < GLOBAL_E)
    if HAS_MAP:
        expert = tl.load(expert_map_ptr + expert, mask=known, other=-1)
        known = (expert >= 0) & (expert < E)
    return tl.where(known, expert.to(tl.int32), -1)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def align_kernel(
    topk_ids_ptr,  # [n_pairs] int32 or int64
    expert_map_ptr,  # [GLOBAL_E] int32; unused without HAS_MAP
    sorted_token_ids_ptr,  # [max_blocks * block_m] int32
    expert_ids_ptr,  # [max_blocks] int32
    num_tokens_post_padded_ptr,  # [1] int32
    n_pairs,
    block_m,
    E: tl.constexpr,
    GLOBAL_E: tl.constexpr,
    HAS_MAP: tl.constexpr,
    E_POW2: tl.constexpr,
    CHUNK: tl.constexpr,
):
    pid_expert = tl.program_id(0)
    offs_expert = tl.arange(0, E_POW2)
    offs_chunk = tl.arange(0, CHUNK)

    counts = tl.zeros([E_POW2], tl.int32)
    for start in range(0, n_pairs, CHUNK):
        pair = start + offs_chunk
        expert = local_expert(topk_ids_ptr, expert_map_ptr, pair, pair < n_pairs, E, GLOBAL_E, HAS_MAP)  # [CHUNK]
        counts += tl.histogram(expert, E_POW2, mask=expert >= 0)
    blocks = (counts + block_m - 1) // block_m
    if pid_expert == 0:
        tl.store(num_tokens_post_padded_ptr, tl.sum(blocks, 0) * block_m)
    first_block = tl.sum(tl.where(offs_expert < pid_expert, blocks, 0), 0)
    own_blocks = tl.sum(tl.where(offs_expert == pid_expert, blocks, 0), 0)
    if own_blocks == 0:
        return

    run_ptr = sorted_token_ids_ptr + first_block.to(tl.int64) * block_m
    filled = 0
    for start in range(0, n_pairs, CHUNK):
        pair = start + offs_chunk
        expert = local_expert(topk_ids_ptr, expert_map_ptr, pair, pair < n_pairs, E, GLOBAL_E, HAS_MAP)
        own = (expert == pid_expert).to(tl.int32)
        tl.store(run_ptr + filled + tl.cumsum(own, 0) - 1, pair, mask=own != 0)
        filled += tl.sum(own, 0)
    for start in range(filled, own_blocks * block_m, CHUNK):
        row = start + offs_chunk
        tl.store(run_ptr + row, tl.full([CHUNK], n_pairs, tl.int32), mask=row < own_blocks * block_m)
    for start in range(0, own_blocks, CHUNK):
        block = start + offs_chunk
        expert = tl.full([CHUNK], pid_expert, tl.int32)
        tl.store(expert_ids_ptr + first_block + block, expert, mask=block < own_blocks)


def max_blocks(n_pairs: int, E: int, block_m: int) -> int:
    """The most blocks that any routing of n_pairs can need: known to the host without looking at the ids.

    Every block holds a pair; each run, of which there are at most min(E, n_pairs), has fewer than block_m padding rows.
    """
    return min(n_pairs, (n_pairs + min(E, n_pairs) * (block_m - 1)) // block_m)
