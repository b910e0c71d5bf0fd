"""MLA decode as custom operators of torch, which `torch.compile` puts into its graphs whole instead of tracing them.

They are entered only while compiling: an operator of its own costs more host time in eager mode than the launches.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

# A config travels as "name=value" texts, since an operator takes no mapping.
_ARGUMENTS = (
    "Tensor q, Tensor kv_cache, Tensor block_table, Tensor cache_seqlens, float softmax_scale, bool causal, "
    "int kv_lora_rank, float empty_lse, SymInt? max_kv_len, str[]? config, str? lengths, str? table"
)


def call(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    kv_lora_rank: int,
    empty_lse: float,
    max_kv_len: int | None,
    config: Mapping[str, int] | Any | None,
    out: torch.Tensor | None,
    lengths: str | None,
    table: str | os.PathLike[str] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `op.mla_decode`, through the operators."""
    if config is not None and not isinstance(config, Mapping):
        config = config.to_dict()
    words = None if config is None else [f"{name}={value}" for name, value in config.items()]
    path = None if table is None else os.fspath(table)
    arguments = (q, kv_cache, block_table, cache_seqlens, softmax_scale, causal, kv_lora_rank, empty_lse)
    more = (max_kv_len, words, lengths, path)
    if out is None:
        return torch.ops.kerneltune.mla_decode(*arguments, *more)
    return out, torch.ops.kerneltune.mla_decode_out(*arguments, *more, out)


@torch.library.custom_op("kerneltune::mla_decode", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)")
def _mla_decode(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _run(*arguments)


@torch.library.custom_op(
    "kerneltune::mla_decode_out", mutates_args=("out",), schema=f"({_ARGUMENTS}, Tensor(a!) out) -> Tensor"
)
def _mla_decode_out(*arguments: Any) -> torch.Tensor:
    return _run(*arguments)[1]


@_mla_decode.register_fake
def _(q: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batch, s_q, heads, _ = q.shape
    return q.new_empty(batch, s_q, heads, arguments[5]), _fake_lse(q)


@_mla_decode_out.register_fake
def _(q: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return _fake_lse(q)


def _fake_lse(q: torch.Tensor) -> torch.Tensor:
    batch, s_q, heads, _ = q.shape
    return q.new_empty(batch, heads, s_q, dtype=torch.float32)


def _run(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from kerneltune.kernels.mla_decode import op

    words, out = arguments[9], arguments[12] if len(arguments) > 12 else None
    config = None if words is None else {name: int(value) for name, _, value in (w.partition("=") for w in words)}
    q, kv_cache, block_table, cache_seqlens, softmax_scale, causal, kv_lora_rank, empty_lse, max_kv_len = arguments[:9]
    return op.decode(
        *(q, kv_cache, block_table, cache_seqlens, softmax_scale, causal, kv_lora_rank, empty_lse),
        *(max_kv_len, config, out, *arguments[10:12]),
    )
