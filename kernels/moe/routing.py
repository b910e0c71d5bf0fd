"""How tokens spread over experts: drawn on the CPU from a seed, so that the load is the same on every machine.

Either after a named distribution, or from `topk_ids` that were recorded in service (kernels/inputs.py).
"""

from __future__ import annotations

import random

import torch

from kerneltune.kernels import inputs

ROUTINGS = ("uniform", "zipf", "dirichlet")
DIRICHLET_ALPHA = 0.3  # a few experts take most tokens
SMALLEST_SHARE = 1e-30  # keeps the logarithm of a share finite


def complete_routing(value: object, experts: int, top_k: int) -> str:
    """A name of ROUTINGS, or a file of ids as `<path>@<hash8>`.

    Raises:
        ValueError: neither, or a file of other ids than `top_k` columns in 0 ... experts - 1 (or -1: not local).
    """
    return inputs.complete("routing", value, ROUTINGS, "topk_ids", lambda ids: _check_ids(ids, experts, top_k))


def draw_topk_ids(routing: str, tokens: int, experts: int, top_k: int, seed: int) -> torch.Tensor:
    """Experts of each token, [tokens, top_k] int32 on the CPU; of the named distributions distinct ones.

    uniform: every expert is as likely as another; zipf: the r-th most popular (a random one) in proportion to 1 / r;
    dirichlet: popularity from Dirichlet(0.3). A token draws without replacement in proportion to popularity.
    Anything else is a file, `<path>@<hash8>`: consecutive rows of it from a random one on, so that tokens of one batch
    stay together; it starts again at its end.
    """
    if routing not in ROUTINGS:
        ids = inputs.recorded("routing", routing, "topk_ids", lambda ids: _check_ids(ids, experts, top_k))
        return inputs.window(ids, tokens, seed).int()
    generator = torch.Generator().manual_seed(seed)
    if routing == "zipf":
        popularity = 1.0 / (1 + torch.randperm(experts, generator=generator))
    elif routing == "dirichlet":
        rng = random.Random(seed)
        popularity = torch.tensor([rng.gammavariate(DIRICHLET_ALPHA, 1.0) for _ in range(experts)])
    else:
        popularity = torch.ones(experts)
    # The top_k of log(popularity) + Gumbel noise are a draw without replacement.
    noise = -torch.empty(tokens, experts).exponential_(generator=generator).log()
    return (popularity.clamp_min(SMALLEST_SHARE).log() + noise).topk(top_k).indices.int()


def draw_topk_weights(tokens: int, top_k: int, seed: int) -> torch.Tensor:
    """Router weights, [tokens, top_k] float32 on the CPU.

    They are even enough that each choice matters, and sum to 0.4 ... 0.9, as those of a softmax over all experts do: a
    kernel that renormalises them, or drops a choice, is far off.
    """
    generator = torch.Generator().manual_seed(seed)
    total = 0.4 + 0.5 * torch.rand(tokens, 1, generator=generator)
    return torch.softmax(0.5 * torch.randn(tokens, top_k, generator=generator), dim=-1) * total


def _check_ids(ids: torch.Tensor, experts: int, top_k: int) -> None:
    if ids.ndim != 2 or not ids.numel():
        raise ValueError(f"expected rows of {top_k} ids (top_k), a row a token, found shape {list(ids.shape)}")
    if ids.shape[1] != top_k:
        raise ValueError(f"rows of {ids.shape[1]} ids: expected {top_k} (top_k)")
    wrong = (ids < -1) | (ids >= experts)
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        raise ValueError(f"row {row}: id {int(ids[row, column])}: expected 0 to {experts - 1}, or -1 (not local)")
