"""The public fused mixture of experts: out[t] = sum_j topk_weights[t, j] * w2[e] @ (silu(w1g[e] @ x) * (w1u[e] @ x)).

x = hidden[t], e = topk_ids[t, j]; w1[e] holds N gate rows, then N up rows. Four launches: align pairs by expert,
gate/up GEMM with SiLU, down GEMM times the router's weight, sum over top_k in float32. Nothing waits for the GPU,
nothing is atomic: the same input gives the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from kerneltune.kernels import tables
from kerneltune.kernels.device import Device, current_device
from kerneltune.kernels.moe import config as configs
from kerneltune.kernels.moe.config import ACTIVATIONS, DTYPES, GemmConfig
from kerneltune.kernels.moe.launch import make_calls, make_scratch


def fused_moe(
    hidden: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    expert_map: torch.Tensor | None = None,
    activation: str = "silu",
    config: Mapping[str, Any] | None = None,
    out: torch.Tensor | None = None,
    routing: str | None = None,
) -> torch.Tensor:
    """Route each token through its top_k experts and sum their weighted results.

    Args:
        hidden: [tokens, K] bf16 or fp16, contiguous; tokens may be 0.
        w1: [E, 2N, K], gate rows then up rows; w2: [E, K, N]; both of hidden's dtype, contiguous; E local experts.
        topk_weights: [tokens, top_k] float32; they are used as they are, not renormalised.
        topk_ids: [tokens, top_k] int32 or int64, global expert ids; -1 (any id that names no expert) adds nothing.
        expert_map: [global_E] int32, global id -> local id in [0, E), or -1 for an expert of another rank.
        activation: "silu": silu(gate) * up.
        config: {"gemm1": {...}, "gemm2": {...}}, see GemmConfig; None: from the tuned tables, else the default.
        out: [tokens, K] of hidden's dtype, contiguous: filled and returned; None: a new tensor.
        routing: how tokens spread over the experts ("uniform", "zipf", "dirichlet", or what was recorded in service,
            "ids@1a2b3c4d", as the table names it), a hint for the tables.

    Returns:
        [tokens, K], zero for a token without a local expert.

    Raises:
        ValueError: a shape, dtype or config that does not fit, with the value.
    """
    _check(hidden, w1, w2, topk_weights, topk_ids, expert_map, activation, out)
    if out is None:
        out = torch.empty_like(hidden)
    if hidden.numel() == 0:
        return out
    if topk_ids.shape[1] == 0:
        return out.zero_()
    gemms = _choose_config(hidden, w1, topk_ids, expert_map, activation, config, routing)
    scratch = make_scratch(hidden, w1, topk_ids, gemms["gemm1"].BLOCK_M)
    for calls in make_calls(hidden, w1, w2, topk_weights, topk_ids, expert_map, gemms, out, scratch).values():
        for call in calls:
            call()
    return out


def _choose_config(
    hidden: torch.Tensor,
    w1: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    activation: str,
    config: Mapping[str, Any] | None,
    routing: str | None,
) -> dict[str, GemmConfig]:
    """The caller's config, checked; else the one of the tables or the default, remembered for each shape."""
    dtype = DTYPES[hidden.dtype]
    workload: dict[str, int | float | str | bool] = {
        "dtype": dtype,
        "w_dtype": dtype,
        "group": "none",
        "E": len(w1),
        "global_E": len(w1) if expert_map is None else len(expert_map),
        "N": w1.shape[1] // 2,
        "K": hidden.shape[1],
        "top_k": topk_ids.shape[1],
        "activation": activation,
        "bias": False,
        "tokens": hidden.shape[0],
    }
    if routing is not None:
        workload["routing"] = routing
    device = _device(hidden.device)
    if config is None:
        config = tables.resolve(kernel="moe", workload=workload, device=device)
        return _usable_config(_frozen(config), tuple(workload.items()), device)
    return configs.checked_config(config, workload, device)


@functools.lru_cache(maxsize=4096)
def _usable_config(
    found: tuple[tuple[str, Any], ...] | None, workload_items: tuple[tuple[str, Any], ...], device: Device
) -> dict[str, GemmConfig]:
    """What the tables said, if it can run here, else the default."""
    workload = dict(workload_items)
    if found is not None:
        try:
            return configs.checked_config({part: dict(params) for part, params in found}, workload, device)
        except (TypeError, ValueError) as error:  # a table's entry is data from outside: what is not a config is a miss
            tables.say_unusable("moe", workload, str(error))
    return configs.checked_config(configs.default_config(workload, device), workload, device)


def _frozen(config: Mapping[str, Any] | None) -> tuple[tuple[str, Any], ...] | None:
    """A table's config as a key: it is not remembered past the table's own lifetime."""
    return None if config is None else tuple((part, tuple(params.items())) for part, params in config.items())


def _device(device: torch.device) -> Device:
    """The tensors' GPU; for tensors on the CPU, which Triton's interpreter serves, one without limits."""
    return current_device(device.index) if device.type == "cuda" else configs.INTERPRETER


def _check(
    hidden: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    activation: str,
    out: torch.Tensor | None,
) -> None:
    """Raise ValueError on what the kernels would not survive; looks at shapes only, never at the GPU's contents."""
    if hidden.dtype not in DTYPES:
        raise ValueError(
            f"hidden.dtype {hidden.dtype} not supported yet: expected one of {', '.join(map(str, DTYPES))}"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} not supported yet: expected one of {', '.join(ACTIVATIONS)}")
    if hidden.dim() != 2 or w1.dim() != 3 or topk_ids.dim() != 2:
        raise ValueError(
            "expected hidden [tokens, K], w1 [E, 2N, K], topk_ids [tokens, top_k], "
            f"not {list(hidden.shape)}, {list(w1.shape)}, {list(topk_ids.shape)}"
        )
    tokens, K = hidden.shape
    E, rows = w1.shape[:2]
    if rows % 2:
        raise ValueError(f"w1 has {rows} rows an expert: expected an even number, gate then up")
    tensors = {
        "hidden": (hidden, (tokens, K), (hidden.dtype,)),
        "w1": (w1, (E, rows, K), (hidden.dtype,)),
        "w2": (w2, (E, K, rows // 2), (hidden.dtype,)),
        "topk_weights": (topk_weights, tuple(topk_ids.shape), (torch.float32,)),
        "topk_ids": (topk_ids, (tokens, topk_ids.shape[1]), (torch.int32, torch.int64)),
    }
    if expert_map is not None:
        tensors["expert_map"] = (expert_map, (expert_map.numel(),), (torch.int32,))
    if out is not None:
        tensors["out"] = (out, (tokens, K), (hidden.dtype,))
    for name, (tensor, shape, dtypes) in tensors.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}: expected {list(shape)}")
        if tensor.dtype not in dtypes:
            raise ValueError(f"{name} has dtype {tensor.dtype}: expected {' or '.join(map(str, dtypes))}")
        if tensor.device != hidden.device:
            raise ValueError(f"{name} is on {tensor.device}: expected {hidden.device}, where hidden is")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {list(tensor.stride())}: expected it contiguous")
