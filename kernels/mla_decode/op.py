"""The public MLA decode calls: check the arguments, choose a config, launch.

Nothing here reads GPU memory or waits for the GPU. What depends only on shapes (the checks, the choice of a config, the
launches but for their addresses) is done once for each shape and kept as a plan, so a table installed later serves the
shapes that come later, or all after `tables.forget()`.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from typing import Any

import torch

from kerneltune.kernels import launch_plan, tables
from kerneltune.kernels.device import Device, current_device
from kerneltune.kernels.launch_plan import Layout, Plan
from kerneltune.kernels.mla_decode import custom_op
from kerneltune.kernels.mla_decode.combine import combine_call
from kerneltune.kernels.mla_decode.combine_pieces import combine_pieces_call
from kerneltune.kernels.mla_decode.config import HOPPER_TILE, Config, default_config, hopper_groups, is_valid
from kerneltune.kernels.mla_decode.hopper import hopper_call, hopper_refuses
from kerneltune.kernels.mla_decode.triton_split_kv import split_kv_call
from kerneltune.kernels.tunable import KernelCall

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
MAX_S_Q = 16
MAX_HEADS = 128
MAX_PAGE_SIZE = 128
MAX_PLANS = 4096  # a few KiB each


def mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    softmax_scale: float,
    causal: bool = False,
    kv_lora_rank: int = 512,
    max_kv_len: int | None = None,
    config: Mapping[str, int] | Config | None = None,
    out: torch.Tensor | None = None,
    lengths: str | None = None,
    table: str | os.PathLike[str] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from s_q new tokens to a paged latent cache: softmax(softmax_scale q k^T) v, v = k[..., :kv_lora_rank].

    Args:
        q: [batch, s_q, heads, d_qk] bf16 or fp16, any strides with the last 1; s_q 1 to 16, heads 1 to 128.
        kv_cache: [num_pages, page_size, h_kv, d_qk] like q; page_size 1 to 128; heads % h_kv == 0.
        block_table: [batch, max_pages] int32: the page of tokens page_size * i and on. Entries past the length are not
            read and may hold anything, as may the cache past the length; the others must be pages of kv_cache, which
            is not checked: that would mean waiting for the GPU.
        cache_seqlens: [batch] int32, cached tokens of each request (the new ones included), 0 to max_pages * page_size.
        causal: query i sees the keys before length - s_q + 1 + i; otherwise all.
        kv_lora_rank: latent width, which is also the width of v.
        max_kv_len: upper bound of cache_seqlens, for choosing a config (default: what the block table can hold).
        config: launch parameters; None takes the tuned table's, or the default.
        out: where to put the result, like the returned out.
        lengths: which input class the table should assume ("equal", "spread", or lengths recorded in service,
            "lens@1a2b3c4d", as the table names them); None: whichever loses least.
        table: a tuned table, or a folder of them, that is looked at before the usual places.

    Returns:
        out [batch, s_q, heads, kv_lora_rank] like q, and lse [batch, heads, s_q] float32, natural log. A query that
        sees no key has out 0 and lse -inf.

    Raises:
        ValueError: shapes, dtypes or the config do not fit.
    """
    return decode(
        *(q, kv_cache, block_table, cache_seqlens, softmax_scale, causal, kv_lora_rank, float("-inf")),
        *(max_kv_len, config, out, lengths, table),
    )


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    **unsupported: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mla_decode` with the arguments and conventions of FlashMLA's function of this name (dense decode).

    `tile_scheduler_metadata` and `num_splits` are accepted and not used: work is divided on the GPU. softmax_scale
    defaults to d_qk ** -0.5. A query that sees no key has lse +inf.

    Raises:
        ValueError: sparse indices, an fp8 cache or another option that is not supported, or what `mla_decode` rejects.
    """
    if is_fp8_kvcache:
        raise ValueError("is_fp8_kvcache=True is not supported: the KV cache must be bf16 or fp16, like q")
    if indices is not None:
        raise ValueError("indices (sparse attention) is not supported: leave it out to attend to the whole cache")
    given = [name for name, value in unsupported.items() if value is not None and value is not False]
    if given:
        raise ValueError(f"not supported by flash_mla_with_kvcache: {', '.join(given)}")
    if block_table is None or cache_seqlens is None:
        raise ValueError("block_table and cache_seqlens must be given: only dense attention is supported")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return decode(q, k_cache, block_table, cache_seqlens, scale, causal, head_dim_v, float("inf"))


def get_mla_metadata(*args: Any, is_fp8_kvcache: bool = False, **kwargs: Any) -> tuple[None, None]:
    """Take FlashMLA's arguments (cache_seqlens, num_q_tokens_per_head_k, num_heads_k, ...): nothing to prepare.

    Returns:
        (tile_scheduler_metadata, num_splits), both None: `flash_mla_with_kvcache` does not use them.

    Raises:
        ValueError: the arguments ask for an fp8 cache or sparse attention (a topk).
    """
    if is_fp8_kvcache:
        raise ValueError("is_fp8_kvcache=True is not supported: the KV cache must be bf16 or fp16, like q")
    if kwargs.get("topk") is not None:
        raise ValueError(f"topk={kwargs['topk']} (sparse attention) is not supported")
    return None, None


def decode_calls(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scratch: Mapping[str, torch.Tensor],
    config: Config,
    *,
    softmax_scale: float,
    causal: bool,
    empty_lse: float = float("-inf"),
) -> list[KernelCall]:
    """The launches of one decode, in order: the main kernel and, unless there is one split, the combine.

    `scratch` is laid out as `scratch_layout` says for this config; the other arguments are as in `mla_decode`.

    Raises:
        ValueError: the variant cannot take these tensors as they lie in memory.
    """
    if config.variant == "hopper":
        reason = hopper_refuses(q, kv_cache, softmax_scale)
        if reason:
            raise ValueError(reason)
        partials = scratch["partial_out"], scratch["partial_lse"]
        return [
            hopper_call(
                *(q, kv_cache, block_table, cache_seqlens, out, lse, *partials, scratch["cuts"]),
                piece_cost=config.piece_cost,
                softmax_scale=softmax_scale,
                causal=causal,
                empty_lse=empty_lse,
            ),
            combine_pieces_call(scratch["cuts"], *partials, out, lse, empty_lse=empty_lse),
        ]
    # With one split there are no partials: lse, a pointer of the same type, stands in for them.
    partials = scratch.get("partial_out", lse), scratch.get("partial_lse", lse)
    split = split_kv_call(
        *(q, kv_cache, block_table, cache_seqlens, out, lse, *partials, config),
        softmax_scale=softmax_scale,
        causal=causal,
        empty_lse=empty_lse,
    )
    if config.num_splits == 1:
        return [split]
    return [split, combine_call(*partials, out, lse, h_kv=kv_cache.shape[2], empty_lse=empty_lse)]


def scratch_layout(config: Config, batch: int, s_q: int, heads: int, kv_lora_rank: int, device: torch.device) -> Layout:
    """The float32 partial results of a config and what goes with them; none for one split.

    `device`: on "meta" (off-GPU compiles) the number of programs does not matter.
    """
    if config.variant == "hopper":
        groups, row_tiles = hopper_groups(s_q * heads, device_of(device))
        return {
            "partial_out": ((groups, row_tiles, 2, HOPPER_TILE, kv_lora_rank), torch.float32),
            "partial_lse": ((groups, row_tiles, 2, HOPPER_TILE), torch.float32),
            "cuts": ((batch, 2), torch.int32),
        }
    if config.num_splits == 1:
        return {}
    rows = batch * s_q * heads
    return {
        "partial_out": ((rows, config.num_splits, kv_lora_rank), torch.float32),
        "partial_lse": ((rows, config.num_splits), torch.float32),
    }


def decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    kv_lora_rank: int,
    empty_lse: float,
    max_kv_len: int | None = None,
    config: Mapping[str, int] | Config | None = None,
    out: torch.Tensor | None = None,
    lengths: str | None = None,
    table: str | os.PathLike[str] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The way of every call: by the plan of its shape, or the first time, which makes the plan."""
    if torch.compiler.is_compiling():
        return custom_op.call(
            *(q, kv_cache, block_table, cache_seqlens, softmax_scale, causal, kv_lora_rank, empty_lse),
            *(max_kv_len, config, out, lengths, table),
        )
    given = config if config is None or isinstance(config, Config) else Config.from_dict(config)
    index = q.get_device()
    # Whatever is checked, chosen or launched by, but for addresses; devices by number, -1 for the CPU.
    key = (
        *(q.shape, q.stride(), q.dtype, index),
        *(kv_cache.shape, kv_cache.stride(), kv_cache.dtype, kv_cache.get_device()),
        *(block_table.shape, block_table.stride(), block_table.dtype, block_table.get_device()),
        *(cache_seqlens.shape, cache_seqlens.stride(), cache_seqlens.dtype, cache_seqlens.get_device()),
        *(softmax_scale, causal, kv_lora_rank, empty_lse, max_kv_len, given, lengths, table),
        None if out is None else (out.shape, out.stride(), out.dtype, out.get_device()),
    )
    if index >= 0 and index != torch.cuda.current_device():  # Triton launches on the current device
        with torch.cuda.device(index):
            return decode(
                *(q, kv_cache, block_table, cache_seqlens, softmax_scale, causal, kv_lora_rank, empty_lse),
                *(max_kv_len, given, out, lengths, table),
            )
    plan = _plans.get(key)
    if plan is not None:
        batch, s_q, heads, _ = q.shape
        result = q.new_empty((batch, s_q, heads, kv_lora_rank)) if out is None else out
        lse = q.new_empty((batch, heads, s_q), dtype=torch.float32)
        pointers = [q.data_ptr(), kv_cache.data_ptr(), block_table.data_ptr(), cache_seqlens.data_ptr()]
        pointers += [result.data_ptr(), lse.data_ptr()]
        size = plan.workspace_bytes
        if plan.launch(pointers, q.new_empty(size, dtype=torch.uint8) if size else None):
            return result, lse
    _check(q, kv_cache, block_table, cache_seqlens, softmax_scale, kv_lora_rank)
    return _first(
        *(q, kv_cache, block_table, cache_seqlens, softmax_scale, causal, kv_lora_rank, empty_lse),
        *(max_kv_len, given, out, lengths, table, key),
    )


def _first(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    kv_lora_rank: int,
    empty_lse: float,
    max_kv_len: int | None,
    given: Config | None,
    out: torch.Tensor | None,
    lengths: str | None,
    table: str | os.PathLike[str] | None,
    key: tuple[Any, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose a config, launch Triton's own way, and keep the plan under `key` where there can be one."""
    batch, s_q, heads, d_qk = q.shape
    out_shape = (batch, s_q, heads, kv_lora_rank)
    if out is None:
        out = torch.empty(out_shape, dtype=q.dtype, device=q.device)
    elif out.shape != out_shape or out.dtype != q.dtype or out.device != q.device or out.stride(-1) != 1:
        raise ValueError(f"out must be {list(out_shape)} {q.dtype} on {q.device}, last stride 1: got {_describe(out)}")
    lse = torch.empty(batch, heads, s_q, dtype=torch.float32, device=q.device)
    if batch == 0:
        return out, lse
    page_size, h_kv = kv_cache.shape[1:3]
    kv_len = block_table.shape[1] * page_size if max_kv_len is None else max_kv_len
    exact = (q.dtype, heads, h_kv, s_q, causal, page_size, kv_lora_rank, d_qk - kv_lora_rank)
    path = None if table is None else os.fspath(table)
    chosen = _config_for(exact, batch, kv_len, lengths, q.device, given, path)
    reason = hopper_refuses(q, kv_cache, softmax_scale) if chosen.variant == "hopper" and given is None else None
    if reason is not None:
        workload, device = _workload(exact, batch, kv_len), device_of(q.device)
        if chosen != default_config(workload, device):  # a table's: not taken in silence
            tables.say_unusable("mla-decode", workload, reason)
        chosen = default_config(workload, device, portable=True)
    layout = scratch_layout(chosen, batch, s_q, heads, kv_lora_rank, q.device)
    scratch, offsets, workspace = launch_plan.carve(layout, q.device)
    calls = decode_calls(
        *(q, kv_cache, block_table, cache_seqlens, out, lse, scratch, chosen),
        softmax_scale=softmax_scale,
        causal=causal,
        empty_lse=empty_lse,
    )
    tensors = [q, kv_cache, block_table, cache_seqlens, out, lse, *scratch.values()]
    plan = launch_plan.launch_first(calls, tensors, offsets, len(workspace))
    if plan is not None:
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    return out, lse


_plans: dict[tuple[Any, ...], Plan] = {}
tables.on_forget(_plans.clear)


@functools.lru_cache(maxsize=4096)
def _config_for(
    exact: tuple[Any, ...],
    batch: int,
    kv_len: int,
    lengths: str | None,
    torch_device: torch.device,
    given: Config | None,
    table: str | None,
) -> Config:
    """The caller's config if it can run, or else the table's for these host-known values, or else the default.

    Raises:
        ValueError: the caller's config cannot run.
    """
    workload = _workload(exact, batch, kv_len)
    device = device_of(torch_device)
    if given is not None:
        reason = is_valid(given, workload, device)
        if reason:
            raise ValueError(f"config {given.to_dict()} cannot run: {reason}")
        return given
    if lengths is not None:
        workload["lengths"] = lengths
    found = tables.resolve(kernel="mla-decode", workload=workload, device=device, explicit=table)
    if found is not None:
        try:
            config = Config.from_dict(found)
            reason = is_valid(config, workload, device)
        except ValueError as error:  # a table made for another version of this kernel: a miss
            reason = str(error)
        if reason is None:
            return config
        tables.say_unusable("mla-decode", workload, reason)
    return default_config(workload, device)


tables.on_forget(_config_for.cache_clear)


def _workload(exact: tuple[Any, ...], batch: int, kv_len: int) -> dict[str, Any]:
    """The keys of a table lookup."""
    dtype, heads, h_kv, s_q, causal, page_size, kv_lora_rank, rope = exact
    return {
        "dtype": DTYPE_NAMES[dtype],
        "kv_dtype": DTYPE_NAMES[dtype],
        "heads": heads,
        "h_kv": h_kv,
        "s_q": s_q,
        "causal": causal,
        "page_size": page_size,
        "kv_lora_rank": kv_lora_rank,
        "qk_rope_head_dim": rope,
        "batch": batch,
        "kv_len": max(kv_len, 1),
    }


def device_of(torch_device: torch.device) -> Device:
    """The GPU behind a torch device; the CPU (Triton's interpreter) counts as a small GPU without limits of note."""
    if torch_device.type == "cuda":
        return current_device(torch.cuda.current_device() if torch_device.index is None else torch_device.index)
    return Device("CPU interpreter", "cpu", 4, 1 << 20, 1 << 20, 1 << 34)


def _check(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    softmax_scale: float,
    kv_lora_rank: int,
) -> None:
    """Raise ValueError, naming the value, for whatever the kernel cannot take."""
    if q.ndim != 4 or kv_cache.ndim != 4:
        raise ValueError(
            "q must be [batch, s_q, heads, d_qk] and kv_cache [num_pages, page_size, h_kv, d_qk]: "
            f"got {_describe(q)} and {_describe(kv_cache)}"
        )
    batch, s_q, heads, d_qk = q.shape
    _, page_size, h_kv, kv_width = kv_cache.shape
    if q.dtype not in DTYPE_NAMES or kv_cache.dtype != q.dtype:
        raise ValueError(f"q and kv_cache must both be bfloat16 or both float16: got {q.dtype} and {kv_cache.dtype}")
    if kv_width != d_qk or not 0 < kv_lora_rank < d_qk:
        raise ValueError(
            f"q and kv_cache must have the same last size, above kv_lora_rank {kv_lora_rank}: got {d_qk} and {kv_width}"
        )
    if q.stride(-1) != 1 or kv_cache.stride(-1) != 1:
        raise ValueError(f"the last stride of q and kv_cache must be 1: got {q.stride(-1)} and {kv_cache.stride(-1)}")
    if not 1 <= s_q <= MAX_S_Q or not 1 <= heads <= MAX_HEADS or not 1 <= page_size <= MAX_PAGE_SIZE:
        raise ValueError(
            f"s_q must be 1 to {MAX_S_Q}, heads 1 to {MAX_HEADS}, page_size 1 to {MAX_PAGE_SIZE}: "
            f"got {s_q}, {heads}, {page_size}"
        )
    if h_kv < 1 or heads % h_kv:
        raise ValueError(f"heads must be a multiple of h_kv: got {heads} and {h_kv}")
    if block_table.dtype != torch.int32 or block_table.ndim != 2 or block_table.shape[0] != batch:
        raise ValueError(f"block_table must be [{batch}, max_pages] int32: got {_describe(block_table)}")
    if block_table.shape[1] and block_table.stride(1) != 1:
        raise ValueError(f"the last stride of block_table must be 1: got {block_table.stride(1)}")
    if cache_seqlens.dtype != torch.int32 or cache_seqlens.shape != (batch,) or not cache_seqlens.is_contiguous():
        raise ValueError(f"cache_seqlens must be contiguous [{batch}] int32: got {_describe(cache_seqlens)}")
    if not math.isfinite(softmax_scale):
        raise ValueError(f"softmax_scale must be finite: got {softmax_scale}")
    if not q.device == kv_cache.device == block_table.device == cache_seqlens.device:
        devices = [str(x.device) for x in (q, kv_cache, block_table, cache_seqlens)]
        raise ValueError(f"all tensors must be on one device: got {', '.join(devices)}")


def _describe(x: torch.Tensor) -> str:
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
