"""The public fused mixture of experts: out[t] = sum_j topk_weights[t, j] * w2[e] @ (silu(w1g[e] @ x) * (w1u[e] @ x)).

x = hidden[t], e = topk_ids[t, j]; w1[e] holds N gate rows, then N up rows. Four launches: align pairs by expert,
gate/up GEMM with SiLU, down GEMM times the router's weight, sum over top_k in float32. Nothing waits for the GPU,
nothing is atomic: the same input gives the same bits. As for MLA decode, what depends only on shapes is done once for
each and kept as a plan.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import torch

from kerneltune.kernels import launch_plan, tables
from kerneltune.kernels.device import Device, current_device
from kerneltune.kernels.launch_plan import Plan
from kerneltune.kernels.moe import config as configs
from kerneltune.kernels.moe import custom_op
from kerneltune.kernels.moe.config import ACTIVATIONS, DTYPES, GemmConfig
from kerneltune.kernels.moe.launch import Scratch, make_calls, scratch_layout

MAX_PLANS = 4096  # a few KiB each


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
    table: str | os.PathLike[str] | None = None,
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
        table: a tuned table, or a folder of them, that is looked at before the usual places.

    Returns:
        [tokens, K], zero for a token without a local expert.

    Raises:
        ValueError: a shape, dtype or config that does not fit, with the value.
    """
    if torch.compiler.is_compiling():
        return custom_op.call(
            hidden, w1, w2, topk_weights, topk_ids, expert_map, activation, config, out, routing, table
        )
    index = hidden.get_device()
    # Whatever is checked, chosen or launched by, but for addresses; devices by number, -1 for the CPU.
    key = (
        *(hidden.shape, hidden.stride(), hidden.dtype, index),
        *(w1.shape, w1.stride(), w1.dtype, w1.get_device(), w2.shape, w2.stride(), w2.dtype, w2.get_device()),
        *(topk_weights.shape, topk_weights.stride(), topk_weights.dtype, topk_weights.get_device()),
        *(topk_ids.shape, topk_ids.stride(), topk_ids.dtype, topk_ids.get_device()),
        *(activation, None if config is None else repr(config), routing, table),
        *(() if expert_map is None else _facts(expert_map)),
        None if out is None else _facts(out),
    )
    if index >= 0 and index != torch.cuda.current_device():  # Triton launches on the current device
        with torch.cuda.device(index):
            return fused_moe(
                *(hidden, w1, w2, topk_weights, topk_ids),
                expert_map=expert_map,
                activation=activation,
                config=config,
                out=out,
                routing=routing,
                table=table,
            )
    plan = _plans.get(key)
    if plan is not None:
        result = hidden.new_empty(hidden.shape) if out is None else out
        pointers = [hidden.data_ptr(), w1.data_ptr(), w2.data_ptr(), topk_weights.data_ptr(), topk_ids.data_ptr()]
        if expert_map is not None:
            pointers.append(expert_map.data_ptr())
        pointers.append(result.data_ptr())
        if plan.launch(pointers, hidden.new_empty(plan.workspace_bytes, dtype=torch.uint8)):
            return result
    _check(hidden, w1, w2, topk_weights, topk_ids, expert_map, activation, out)
    return _first(
        *(hidden, w1, w2, topk_weights, topk_ids, expert_map, activation, config, out, routing, table, key),
    )


def _first(
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
    key: tuple[Any, ...],
) -> torch.Tensor:
    """Choose a config, launch Triton's own way, and keep the plan under `key` where there can be one."""
    if out is None:
        out = torch.empty_like(hidden)
    if hidden.numel() == 0:
        return out
    (tokens, top_k), (E, rows, K) = topk_ids.shape, w1.shape
    if top_k == 0:
        return out.zero_()
    gemms = _choose_config(hidden, w1, topk_ids, expert_map, activation, config, routing, table)
    layout = scratch_layout(tokens, top_k, E, rows // 2, K, hidden.dtype, gemms["gemm1"].BLOCK_M)
    parts, offsets, workspace = launch_plan.carve(layout, hidden.device)
    by_step = make_calls(hidden, w1, w2, topk_weights, topk_ids, expert_map, gemms, out, Scratch(**parts))
    calls = [call for calls in by_step.values() for call in calls]
    maps = [] if expert_map is None else [expert_map]
    tensors = [hidden, w1, w2, topk_weights, topk_ids, *maps, out, *parts.values()]
    plan = launch_plan.launch_first(calls, tensors, offsets, len(workspace))
    if plan is not None:
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    return out


_plans: dict[tuple[Any, ...], Plan] = {}
tables.on_forget(_plans.clear)


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()


def _choose_config(
    hidden: torch.Tensor,
    w1: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    activation: str,
    config: Mapping[str, Any] | None,
    routing: str | None,
    table: str | os.PathLike[str] | None,
) -> dict[str, GemmConfig]:
    """The caller's config, checked; else the one of the tables, if it can run here; else the default."""
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
    if config is not None:
        return configs.checked_config(config, workload, device)
    return _tuned_config(tuple(workload.items()), device, None if table is None else os.fspath(table))


@functools.lru_cache(maxsize=4096)
def _tuned_config(
    workload_items: tuple[tuple[str, Any], ...], device: Device, table: str | None
) -> dict[str, GemmConfig]:
    """The tables' config if it can run here, else the default."""
    workload = dict(workload_items)
    found = tables.resolve(kernel="moe", workload=workload, device=device, explicit=table)
    if found is not None:
        try:
            return configs.checked_config(found, workload, device)
        except (TypeError, ValueError) as error:  # a table's entry is data from outside: what is not a config is a miss
            tables.say_unusable("moe", workload, str(error))
    return configs.checked_config(configs.default_config(workload, device), workload, device)


tables.on_forget(_tuned_config.cache_clear)


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
