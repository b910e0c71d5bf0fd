"""The two consumers of `hopper.py`: warpgroups that take turns at the softmax and own half of the output each."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kerneltune.kernels.mla_decode.hopper_common import GROWTH, HALF, LN_2, LOWEST, TILE, Piece, piece_of

# Its name as Triton 3.6 has it, or as later ones do.
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier


@gluon.jit
def consumer(work, shared, barriers, hand_over, result, rows, scale_log2, X: gl.constexpr):
    """Warpgroup X: scores and softmax of every other tile, and columns X * 256 and on of the output."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])

    last_query = rows.count // rows.heads - 1
    offs_row = rows.row_tile * TILE + gl.arange(0, TILE, gl.SliceLayout(1, SCORES))
    hidden = rows.causal * (last_query - offs_row // rows.heads)  # keys at the end that a row does not see

    at = work.first_at
    pieces = 0
    count0 = 0
    count1 = 0
    for request in range(work.first, work.last):
        length = gl.maximum(gl.load(work.seqlens_ptr + request), 0)
        t0, t1, tiles = piece_of(length, at, work)
        starts_here = at >= work.begin
        at += tiles + work.piece_cost
        if (t0 < t1) | ((tiles == 0) & starts_here):
            acc = gl.zeros([TILE, HALF], gl.float32, OUT)
            max_o = gl.full([TILE], LOWEST, gl.float32, gl.SliceLayout(1, OUT))
            sum_o = gl.zeros([TILE], gl.float32, gl.SliceLayout(1, OUT))
            if t0 < t1:
                row_max = gl.full([TILE], LOWEST, gl.float32, gl.SliceLayout(1, SCORES))  # at the newest own tile
                row_sum = gl.zeros([TILE], gl.float32, gl.SliceLayout(1, SCORES))
                piece = Piece(length, length - hidden, length - rows.causal * last_query, t0, t1)
                mbarrier.wait(barriers.q_full.index(0), pieces & 1)
                for t in range(t0 + X, t1, 2):
                    acc, row_max, row_sum = own_tile(
                        t, count0, count1, acc, row_max, row_sum, piece, shared, barriers, hand_over, scale_log2, X
                    )
                    count0 += 1
                    count1 += (X == 1) | (t > t0)
                if (X == 1) & (t1 - t0 == 1):
                    mbarrier.arrive(barriers.q_free.index(0), count=1)
                # The last tile, when it was the other's.
                newest = X
                if (t1 - t0 - 1) % 2 != X:
                    newest = 1 - X
                    acc = other_tile(t1 - 1, count0 if X else count1, acc, length, shared, barriers, hand_over, X)
                    if X == 0:
                        count1 += 1
                    else:
                        count0 += 1
                # The row sums of both, brought to the newest maximum.
                newest_max = hand_over.row_max.index(newest)
                place = (pieces & 1) * 2
                scaled = row_sum * gl.exp2(row_max - newest_max.load(gl.SliceLayout(1, SCORES)))
                hand_over.row_sum.index(place + X).store(scaled)
                max_o = newest_max.load(gl.SliceLayout(1, OUT))
                mbarrier.arrive(barriers.sum_ready.index(X), count=1)
                mbarrier.wait(barriers.sum_ready.index(1 - X), pieces & 1)
                sum_o = hand_over.row_sum.index(place).load(gl.SliceLayout(1, OUT))
                sum_o += hand_over.row_sum.index(place + 1).load(gl.SliceLayout(1, OUT))
                pieces += 1
            last_group = (at - 1) // work.share
            write_piece(acc, max_o, sum_o, request, t0, (t1 - t0) == tiles, last_group, result, rows, X)


@gluon.jit
def own_tile(t, count0, count1, acc, row_max, row_sum, piece, shared, barriers, hand_over, scale_log2, X: gl.constexpr):
    """Scores and softmax of tile t; before its P is needed, the tile before with V; then tile t with V.

    `count0`, `count1`: tiles that the stages held before tile t and the one before it. A piece's first tile has none
    before it, and multiplies what lies there instead, which its own product overwrites: a copy of this code without
    that, cold in the instruction cache, cost 3 us (H200).
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    DTYPE: gl.constexpr = shared.kv_half.dtype
    Y: gl.constexpr = 1 - X
    follows = t > piece.t0
    count = count1 if X else count0
    other_count = count0 if X else count1

    zero = opaque_zero(t)
    # 1. The scores, own half first: it was freed first.
    mbarrier.wait(barriers.kv_full.index(X * 3 + X), count & 1)
    own_k = shared.kv_half.index(X * 2 + X + zero).permute((1, 0))
    empty = gl.zeros([TILE, TILE], gl.float32, SCORES)
    scores = warpgroup_mma(shared.q_half.index(X + zero), own_k, empty, use_acc=False, is_async=True)
    mbarrier.wait(barriers.kv_full.index(X * 3 + Y), count & 1)
    other_k = shared.kv_half.index(X * 2 + Y + zero).permute((1, 0))
    scores = warpgroup_mma(shared.q_half.index(Y + zero), other_k, scores, is_async=True)
    mbarrier.wait(barriers.kv_full.index(X * 3 + 2), count & 1)
    rope_k = shared.kv_rope.index(X + zero).permute((1, 0))
    scores = warpgroup_mma(shared.q_rope.index(zero), rope_k, scores, is_async=True)
    # 2. The tile before with V, behind them.
    mbarrier.wait(barriers.p_ready.index(Y), other_count & 1, pred=follows)
    grew = gl.max(hand_over.grew.index(Y).load(ONE), 0)
    if grew != 0:
        acc = acc * gl.expand_dims(hand_over.alpha.index(Y).load(gl.SliceLayout(1, OUT)), 1)
    old_max = gl.where(follows, hand_over.row_max.index(Y).load(gl.SliceLayout(1, SCORES)), row_max)
    acc = warpgroup_mma(shared.kv_rope.index(Y + zero), shared.kv_half.index(Y * 2 + X + zero), acc, is_async=True)
    # 3. The scores are there; that product still runs.
    scores = warpgroup_mma_wait(1, deps=[scores])
    if t + 2 >= piece.t1:
        mbarrier.arrive(barriers.q_free.index(0), count=1)
    # 4. Softmax.
    if t * TILE + TILE > piece.seen_by_all:
        offs_key = t * TILE + gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
        seen = gl.expand_dims(offs_key, 0) < gl.expand_dims(piece.row_limit, 1)
        scores = gl.where(seen, scores, float("-inf"))
    tile_max = gl.max(scores, 1) * scale_log2
    grows = tile_max > old_max + GROWTH
    new_max = gl.where(grows, tile_max, old_max)
    alpha = gl.exp2(old_max - new_max)
    grew = gl.max(grows.to(gl.int32), 0)
    # 5. The V of the tile before is free as soon as can be: the other warpgroup's next scores wait for it.
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(barriers.kv_free.index(Y * 2 + X), count=1, pred=follows)
    p = gl.exp2(scores * scale_log2 - gl.expand_dims(new_max, 1))
    row_sum = row_sum * gl.exp2(row_max - new_max) + gl.sum(p, 1)
    p = p.to(DTYPE)
    # 6. P, alpha, maximum and flag for the other.
    shared.kv_rope.index(X).store(p)
    hand_over.alpha.index(X).store(alpha)
    hand_over.row_max.index(X).store(new_max)
    hand_over.grew.index(X).store(gl.full([1], 0, gl.int32, ONE) + grew)
    clear_unused(t, piece.length, shared.kv_half, X * 2 + X)
    fence_async_shared()
    mbarrier.arrive(barriers.p_ready.index(X), count=1)
    # 7. Tile t with V, P from registers.
    if grew != 0:
        acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, OUT)), 1)
    p = gl.convert_layout(p, gl.DotOperandLayout(0, OUT, 2))
    acc = warpgroup_mma(p, shared.kv_half.index(X * 2 + X + zero), acc, use_acc=follows, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(barriers.kv_free.index(X * 2 + X), count=1)
    return acc, new_max, row_sum


@gluon.jit
def other_tile(t, count, acc, length, shared, barriers, hand_over, X: gl.constexpr):
    """The last tile with V, where the other warpgroup made its P."""
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    Y: gl.constexpr = 1 - X
    zero = opaque_zero(t)
    mbarrier.wait(barriers.p_ready.index(Y), count & 1)
    grew = gl.max(hand_over.grew.index(Y).load(ONE), 0)
    if grew != 0:
        acc = acc * gl.expand_dims(hand_over.alpha.index(Y).load(gl.SliceLayout(1, OUT)), 1)
    clear_unused(t, length, shared.kv_half, Y * 2 + X)
    fence_async_shared()
    thread_barrier()
    acc = warpgroup_mma(shared.kv_rope.index(Y + zero), shared.kv_half.index(Y * 2 + X + zero), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(barriers.kv_free.index(Y * 2 + X), count=1)
    return acc


@gluon.jit
def clear_unused(t, length, kv_half, place):
    """Zero the keys past the length in half a tile of V: they may hold anything, and 0 * NaN is NaN."""
    if t * TILE + TILE > length:
        COLUMNS: gl.constexpr = 64
        L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        offs_key = t * TILE + gl.arange(0, TILE, gl.SliceLayout(1, L))
        for column in gl.static_range(0, HALF, COLUMNS):
            part = kv_half.index(place).slice(column, COLUMNS, dim=1)
            values = part.load(L)
            part.store(gl.where(gl.expand_dims(offs_key < length, 1), values, 0.0))


@gluon.jit
def write_piece(acc, row_max, row_sum, request, t0, whole, last_group, result, rows, X: gl.constexpr):
    """Half of the output of a whole request, or of a partial result, divided by the row sums."""
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    offs_m = gl.arange(0, TILE, gl.SliceLayout(1, OUT))
    offs_column = X * HALF + gl.arange(0, HALF, gl.SliceLayout(0, OUT))
    seen = row_sum > 0.0
    row_sum = gl.where(seen, row_sum, 1.0)
    acc = acc * gl.expand_dims(1.0 / row_sum, 1)
    lse_log2 = row_max + gl.log2(row_sum)
    if (X == 0) & (rows.row_tile == 0) & (t0 == 0):
        gl.store(result.cut_ptr + request * 2, gl.where(whole, -1, rows.group))
        gl.store(result.cut_ptr + request * 2 + 1, last_group)
    if whole:
        # Four lanes hold 64 bytes of a row between them instead of 16: 8,000 cycles of stores became 3,500 (H200).
        W: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64], [0, 128]],
            [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
            [[16, 0], [32, 0]],
            [],
            [64, 256],
        )
        row = rows.row_tile * TILE + gl.arange(0, TILE, gl.SliceLayout(1, W))
        in_request = (row // rows.heads) * result.stride_os + (row % rows.heads) * result.stride_oh
        out_row = result.out_ptr + request.to(gl.int64) * result.stride_ob + in_request
        out_pointers = gl.expand_dims(out_row, 1) + gl.expand_dims(
            X * HALF + gl.arange(0, HALF, gl.SliceLayout(0, W)), 0
        )
        values = gl.convert_layout(acc.to(result.out_ptr.dtype.element_ty), W)
        gl.store(out_pointers, values, gl.expand_dims(row < rows.count, 1))
        if X == 0:
            row_o = rows.row_tile * TILE + offs_m
            s_q = rows.count // rows.heads
            lse_row = (request.to(gl.int64) * rows.heads + row_o % rows.heads) * s_q + row_o // rows.heads
            gl.store(result.lse_ptr + lse_row, gl.where(seen, lse_log2 * LN_2, result.empty_lse), row_o < rows.count)
    else:
        # A group's first request may have started in the group before, its last may go on in the next.
        slot = (rows.group * rows.row_tiles + rows.row_tile) * 2 + (t0 == 0).to(gl.int32)
        partial = slot.to(gl.int64) * TILE + offs_m
        pointers = result.partial_out_ptr + gl.expand_dims(partial * (2 * HALF), 1) + gl.expand_dims(offs_column, 0)
        gl.store(pointers, acc)
        if X == 0:
            gl.store(result.partial_lse_ptr + partial, gl.where(seen, lse_log2, float("-inf")))


@gluon.jit
def opaque_zero(x):
    """0, which the compiler cannot know: it keeps operands' addresses from being hoisted out of a loop and spilled."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1) - x
