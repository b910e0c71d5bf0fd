"""What a fused mixture of experts must compute, in naive torch: the specification of the kernels."""

from __future__ import annotations

import torch


def local_ids(topk_ids: torch.Tensor, expert_map: torch.Tensor | None, num_experts: int) -> torch.Tensor:
    """Local expert of each choice, -1 where there is none: [tokens, top_k] int64."""
    known = (topk_ids >= 0) & (topk_ids < (num_experts if expert_map is None else len(expert_map)))
    ids = torch.where(known, topk_ids, 0).long()
    if expert_map is not None:
        ids = expert_map[ids].long()
        known &= (ids >= 0) & (ids < num_experts)
    return torch.where(known, ids, -1)


def fused_moe_reference(
    hidden: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """hidden [tokens, K], w1 [E, 2N, K], w2 [E, K, N], topk_* [tokens, top_k] -> out float64. Waits for the GPU."""
    experts = local_ids(topk_ids, expert_map, len(w1))
    out = torch.zeros(hidden.shape, dtype=torch.float64, device=hidden.device)
    for expert in experts[experts >= 0].unique().tolist():
        token, choice = torch.nonzero(experts == expert, as_tuple=True)
        gate, up = (hidden[token].double() @ w1[expert].double().T).chunk(2, dim=-1)
        result = (torch.nn.functional.silu(gate) * up) @ w2[expert].double().T
        out.index_add_(0, token, result * topk_weights[token, choice].double()[:, None])
    return out
