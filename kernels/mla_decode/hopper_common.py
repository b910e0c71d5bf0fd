"""What the roles of `hopper.py` share: sizes, what they tell each other, and which tiles are a program's."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kerneltune.kernels.mla_decode.config import HOPPER_TILE

LN_2 = gl.constexpr(math.log(2.0))
LOWEST = gl.constexpr(-1.0e30)  # where the running maximum starts: finite, so that inf - inf never arises
GROWTH = gl.constexpr(8.0)  # log2 by which a maximum must grow to be moved: P stays below 2^8
TILE = gl.constexpr(HOPPER_TILE)  # rows, and keys
HALF = gl.constexpr(256)  # columns of V that a warpgroup owns
ROPE = gl.constexpr(64)


class Work(NamedTuple):
    """The keys that a group of programs has to do: requests first ... last - 1, from begin to end of all costs."""

    seqlens_ptr: Any
    first: Any
    last: Any
    first_at: Any  # where the first request's cost begins
    begin: Any
    end: Any
    share: Any
    piece_cost: Any


class Shared(NamedTuple):
    """Tiles in shared memory."""

    q_half: Any  # [2, 64, 256]
    q_rope: Any  # [1, 64, 64]
    kv_half: Any  # [stage * 2 + half, 64, 256]
    kv_rope: Any  # [stage, 64, 64]: rotary columns of K, then P


class Barriers(NamedTuple):
    """One arrival each, but two for q_free."""

    q_full: Any
    q_free: Any
    kv_full: Any  # [stage * 3 + piece]: left, right, rotary
    kv_free: Any  # [stage * 2 + half]
    p_ready: Any  # [warpgroup]
    sum_ready: Any  # [warpgroup]


class HandOver(NamedTuple):
    """What one warpgroup tells the other, [warpgroup, ...]."""

    alpha: Any  # [2, 64] factor that the newest tile brings to the accumulators
    row_max: Any  # [2, 64]
    row_sum: Any  # [piece % 2 * 2 + warpgroup, 64]
    grew: Any  # [2, 1] whether any alpha is not 1


class Result(NamedTuple):
    """Where output and partial results go."""

    out_ptr: Any
    lse_ptr: Any
    partial_out_ptr: Any
    partial_lse_ptr: Any
    cut_ptr: Any
    stride_ob: Any
    stride_os: Any
    stride_oh: Any
    empty_lse: Any


class Rows(NamedTuple):
    """Which query rows a program has."""

    heads: Any
    count: Any  # s_q * heads
    causal: Any
    row_tile: Any
    row_tiles: Any
    group: Any


class Source(NamedTuple):
    """Where Q and the KV come from."""

    q_half_desc: Any
    q_rope_desc: Any
    kv_half_desc: Any
    kv_rope_desc: Any
    kv_ptr: Any
    table_ptr: Any
    stride_tb: Any
    stride_kn: Any
    q_rows_per_request: Any
    kv_rows_per_page: Any


class Piece(NamedTuple):
    """The part of a request that a program has: tiles t0 ... t1 - 1."""

    length: Any
    row_limit: Any  # [64] first key that a row must not see
    seen_by_all: Any
    t0: Any
    t1: Any


@gluon.jit
def piece_of(length, at, work):
    """The tiles t0 ... t1 - 1 of a request, whose cost starts at `at`, that are this group's; and how many it has."""
    tiles = (gl.maximum(length, 0) + TILE - 1) // TILE
    t0 = gl.minimum(gl.maximum(work.begin - at - work.piece_cost, 0), tiles)
    t1 = gl.minimum(gl.maximum(work.end - at - work.piece_cost, 0), tiles)
    return t0, t1, tiles
