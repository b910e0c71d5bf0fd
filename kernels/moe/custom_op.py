"""The fused MoE as custom operators of torch: see mla_decode/custom_op.py."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

# A config travels as "part.name=value" texts, since an operator takes no mapping.
_ARGUMENTS = (
    "Tensor hidden, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids, Tensor? expert_map, str activation, "
    "str[]? config, str? routing, str? table"
)


def call(
    hidden: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    activation: str,
    config: Mapping[str, Any] | None,
    out: torch.Tensor | None,
    routing: str | None,
    table: str | os.PathLike[str] | None,
) -> torch.Tensor:
    """As `op.fused_moe`, through the operators."""
    words = None
    if config is not None:
        words = [f"{part}.{name}={value}" for part, params in config.items() for name, value in params.items()]
    path = None if table is None else os.fspath(table)
    arguments = (hidden, w1, w2, topk_weights, topk_ids, expert_map, activation, words, routing, path)
    if out is None:
        result: torch.Tensor = torch.ops.kerneltune.fused_moe(*arguments)
        return result
    torch.ops.kerneltune.fused_moe_out(*arguments, out)
    return out


@torch.library.custom_op("kerneltune::fused_moe", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor")
def _fused_moe(*arguments: Any) -> torch.Tensor:
    return _run(*arguments)


@torch.library.custom_op(
    "kerneltune::fused_moe_out", mutates_args=("out",), schema=f"({_ARGUMENTS}, Tensor(a!) out) -> ()"
)
def _fused_moe_out(*arguments: Any) -> None:
    _run(*arguments)


@_fused_moe.register_fake
def _(hidden: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return torch.empty_like(hidden)


@_fused_moe_out.register_fake
def _(*arguments: Any) -> None:
    return None


def _run(*arguments: Any) -> torch.Tensor:
    from kerneltune.kernels.moe.op import fused_moe

    *tensors, expert_map, activation, words, routing, table = arguments[:10]
    config: dict[str, dict[str, int]] | None = None
    if words is not None:
        config = {}
        for word in words:
            name, _, value = word.partition("=")
            part, _, name = name.partition(".")
            config.setdefault(part, {})[name] = int(value)
    out = arguments[10] if len(arguments) > 10 else None
    hidden, w1, w2, topk_weights, topk_ids = tensors
    return fused_moe(
        *(hidden, w1, w2, topk_weights, topk_ids),
        expert_map=expert_map,
        activation=activation,
        config=config,
        out=out,
        routing=routing,
        table=table,
    )
