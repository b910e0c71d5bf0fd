"""The producer of `hopper.py`: one warp that brings Q and the KV to shared memory by TMA, and the next tiles to L2."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kerneltune.kernels.mla_decode.hopper_common import HALF, ROPE, TILE, piece_of

# Its name as Triton 3.6 has it, or as later ones do.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def producer(work, shared, barriers, source, rows, PAGE_SIZE: gl.constexpr):
    """Bring Q of each piece, and its tiles of KV: stage 0 left half first, stage 1 right half first."""
    BYTES: gl.constexpr = 2
    D_QK: gl.constexpr = 2 * HALF + ROPE
    q_full = barriers.q_full.index(0)
    at = work.first_at
    pieces = 0
    count0 = 0
    count1 = 0
    for request in range(work.first, work.last):
        length = gl.load(work.seqlens_ptr + request)
        t0, t1, tiles = piece_of(length, at, work)
        at += tiles + work.piece_cost
        if t0 < t1:
            table_row = source.table_ptr + gl.cast(request, gl.int64) * source.stride_tb
            page0 = page_of(t0, t1, table_row, PAGE_SIZE)
            page1 = page_of(t0 + 1, t1, table_row, PAGE_SIZE)
            mbarrier.wait(barriers.q_free.index(0), (pieces & 1) ^ 1)
            mbarrier.expect(q_full, TILE * D_QK * BYTES)
            q_row = request * source.q_rows_per_request + rows.row_tile * TILE
            for half in gl.static_range(2):
                tma_load(source.q_half_desc, [q_row, half * HALF], q_full, shared.q_half.index(half))
            tma_load(source.q_rope_desc, [q_row, 2 * HALF], q_full, shared.q_rope.index(0))
            pieces += 1
            for t in range(t0, t1, 2):
                load_tile(t, length, page0, table_row, shared, barriers, source, count0, 0, PAGE_SIZE)
                count0 += 1
                if t + 1 < t1:
                    load_tile(t + 1, length, page1, table_row, shared, barriers, source, count1, 1, PAGE_SIZE)
                    count1 += 1
                page0 = page_of(t + 2, t1, table_row, PAGE_SIZE)
                page1 = page_of(t + 3, t1, table_row, PAGE_SIZE)
                # The next pair of tiles, no more: with two pairs ahead the L2 overflows (284 us instead of 263 at
                # batch 128 x 4096 and 128 heads, 262 instead of 194 at 64; H200).
                prefetch_tile(t + 2, t1, page0, source, rows, PAGE_SIZE)
                prefetch_tile(t + 3, t1, page1, source, rows, PAGE_SIZE)
                if (t + 2 >= t1) & (request + 1 < work.last):
                    n0, n1, _ = piece_of(gl.load(work.seqlens_ptr + request + 1), at, work)
                    page = page_of(n0, n1, table_row + source.stride_tb, PAGE_SIZE)
                    prefetch_tile(n0, n1, page, source, rows, PAGE_SIZE)


@gluon.jit
def page_of(t, end, table_row, PAGE_SIZE: gl.constexpr):
    """The page of tile t below `end`, where a tile lies in one page."""
    return gl.load(table_row + t * TILE // PAGE_SIZE, t < end, other=0) if PAGE_SIZE >= TILE else 0


@gluon.jit
def prefetch_tile(t, end, page, source, rows, PAGE_SIZE: gl.constexpr):
    """Have tile t below `end` brought to L2, this row tile's part of it."""
    BYTES: gl.constexpr = 2
    if PAGE_SIZE >= TILE and t < end:
        size = TILE * source.stride_kn * BYTES // rows.row_tiles // 16 * 16
        row = (page * source.kv_rows_per_page + t * TILE % PAGE_SIZE).to(gl.int64)
        prefetch_l2(source.kv_ptr + row * source.stride_kn + rows.row_tile * (size // BYTES), size)


@gluon.jit
def load_tile(
    t, length, page, table_row, shared, barriers, source, count, STAGE: gl.constexpr, PAGE_SIZE: gl.constexpr
):
    """Bring tile t into a stage: the half of the warpgroup whose tile it is, the other's, and the rotary columns."""
    load_piece(t, length, page, table_row, shared, barriers, source, count, STAGE, STAGE, PAGE_SIZE)
    load_piece(t, length, page, table_row, shared, barriers, source, count, STAGE, 1 - STAGE, PAGE_SIZE)
    load_piece(t, length, page, table_row, shared, barriers, source, count, STAGE, 2, PAGE_SIZE)


@gluon.jit
def load_piece(
    t,
    length,
    page,
    table_row,
    shared,
    barriers,
    source,
    count,
    STAGE: gl.constexpr,
    PIECE: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
):
    """Bring columns PIECE * 256 and on of tile t as soon as their place is free; the rotary ones follow both halves."""
    BYTES: gl.constexpr = 2
    PAGE_ROWS: gl.constexpr = TILE if PAGE_SIZE > TILE else PAGE_SIZE
    COLUMNS: gl.constexpr = ROPE if PIECE == 2 else HALF
    if PIECE < 2:
        mbarrier.wait(barriers.kv_free.index(STAGE * 2 + PIECE), (count & 1) ^ 1)
    full = barriers.kv_full.index(STAGE * 3 + PIECE)
    mbarrier.expect(full, TILE * COLUMNS * BYTES)
    for part in gl.static_range(TILE // PAGE_ROWS):
        key = t * TILE + part * PAGE_ROWS
        if PAGE_SIZE < TILE:
            page = gl.load(table_row + key // PAGE_SIZE, key < length, other=0)
        row = page * source.kv_rows_per_page + key % PAGE_SIZE
        if PIECE < 2:
            half = shared.kv_half.index(STAGE * 2 + PIECE).slice(part * PAGE_ROWS, PAGE_ROWS)
            tma_load(source.kv_half_desc, [row, PIECE * HALF], full, half)
        else:
            rope = shared.kv_rope.index(STAGE).slice(part * PAGE_ROWS, PAGE_ROWS)
            tma_load(source.kv_rope_desc, [row, 2 * HALF], full, rope)


@gluon.jit
def prefetch_l2(pointer, size):
    """One lane asks L2 for `size` bytes (a multiple of 16) from `pointer` on."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 lane;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        @first cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r",
        [pointer, size],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
