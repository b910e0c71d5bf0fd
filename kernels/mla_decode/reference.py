"""What MLA decode must compute, one request after another, in float64 and plain torch."""

from __future__ import annotations

import torch


def mla_decode_reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: list[int],
    *,
    softmax_scale: float,
    causal: bool = False,
    kv_lora_rank: int = 512,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(softmax_scale * q k^T) v with v = k[..., :kv_lora_rank], and its log-sum-exp.

    Args:
        q: [batch, s_q, heads, d_qk]; kv_cache: [num_pages, page_size, h_kv, d_qk]; block_table: [batch, max_pages]
            int32.
        lengths: cached tokens of each request, as host integers. With `causal`, query i sees the keys before
            length - s_q + 1 + i.

    Returns:
        out [batch, s_q, heads, kv_lora_rank] and lse [batch, heads, s_q] (natural log), float64. A query that sees no
        key has out 0 and lse -inf.
    """
    (batch, s_q, heads, _), (page_size, h_kv) = q.shape, kv_cache.shape[1:3]
    out = q.new_zeros(batch, s_q, heads, kv_lora_rank, dtype=torch.float64)
    lse = q.new_full((batch, heads, s_q), float("-inf"), dtype=torch.float64)
    for b, length in enumerate(lengths):
        for i in range(s_q):
            keys = length - s_q + 1 + i if causal else length
            if keys <= 0:
                continue
            pages = block_table[b, : -(-keys // page_size)].long()
            k = kv_cache[pages].flatten(0, 1)[:keys].double()  # [keys, h_kv, d_qk]
            scores = softmax_scale * torch.einsum("hgd,nhd->hgn", q[b, i].double().view(h_kv, -1, q.shape[-1]), k)
            out[b, i] = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), k[..., :kv_lora_rank]).flatten(0, 1)
            lse[b, :, i] = scores.logsumexp(-1).flatten()
    return out, lse
