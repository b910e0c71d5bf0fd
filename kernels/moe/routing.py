"""How tokens spread over experts: drawn on the CPU from a seed, so that the load is the same on every machine."""

from __future__ import annotations

import random

import torch

ROUTINGS = ("uniform", "zipf", "dirichlet")
DIRICHLET_ALPHA = 0.3  # a few experts take most tokens
SMALLEST_SHARE = 1e-30  # keeps the logarithm of a share finite


def draw_topk_ids(routing: str, tokens: int, experts: int, top_k: int, seed: int) -> torch.Tensor:
    """Distinct experts of each token, [tokens, top_k] int32 on the CPU.

    uniform: every expert is as likely as another; zipf: the r-th most popular (a random one) in proportion to 1 / r;
    dirichlet: popularity from Dirichlet(0.3). A token draws without replacement in proportion to popularity.
    """
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
