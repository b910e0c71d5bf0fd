"""FlashMLA's test data, reference and tolerance, written from the description in tests/data/mla_decode_cases.json."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import torch

CASES = json.loads((Path(__file__).parents[2] / "data" / "mla_decode_cases.json").read_text())
GRID = CASES["flash_mla"]["correctness"]
TOLERANCE = CASES["flash_mla"]["tolerance"]
UNUSED_PAGE = 2147480000
D_QK, D_V, PAGE = 576, 512, 64
HEAD_PAIRS = [(q, kv) for q, kv in itertools.product(GRID["h_q"], GRID["h_kv"]) if q % kv == 0]


@dataclass(frozen=True)
class Case:
    b: int
    s_q: int
    s_k: int
    varlen: bool
    causal: bool
    h_q: int
    h_kv: int
    zero_lengths: bool = False


@dataclass(frozen=True)
class Data:
    q: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    lengths: list[int]


def make_data(case: Case, dtype: torch.dtype, device: str, seed: int = 0) -> Data:
    """q, KV = randn / 10 clamped to [-1, 1], pages in random order, NaN past the lengths, huge unused table entries."""
    cpu = torch.Generator().manual_seed(seed)
    lengths = [case.s_k] * case.b
    if case.varlen:
        lengths = [max(int(case.s_k + case.s_k / 2 * z), case.s_q) for z in torch.randn(case.b, generator=cpu).tolist()]
    if case.zero_lengths:
        zeros = (torch.rand(case.b, generator=cpu) < 0.3).tolist()
        lengths = [0 if zero else n for zero, n in zip(zeros, lengths, strict=True)]
    width = -(-max(*lengths, 1) // 256) * 256 // PAGE
    table = torch.randperm(case.b * width, generator=cpu, dtype=torch.int32).view(case.b, width)
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, device=device) / 10).clamp_(-1, 1).to(dtype)

    q = draw(case.b, case.s_q, case.h_q, D_QK)
    kv_cache = draw(case.b * width, PAGE, case.h_kv, D_QK)
    starts = torch.arange(width) * PAGE
    kept = (torch.tensor(lengths)[:, None] - starts).clamp(0, PAGE)  # [b, width] tokens of each page
    unread = torch.arange(PAGE) >= kept[..., None]  # [b, width, PAGE]
    in_order = torch.empty(case.b * width, PAGE, dtype=torch.bool)
    in_order[table.flatten().long()] = unread.flatten(0, 1)
    kv_cache[in_order.to(device)] = float("nan")
    table = torch.where(kept > 0, table, UNUSED_PAGE)
    return Data(q, kv_cache, table.to(device), torch.tensor(lengths, dtype=torch.int32, device=device), lengths)


def reference(data: Data, case: Case, scale: float = D_QK**-0.5) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse in float32; what sees no key is 0 and +inf, as FlashMLA has it."""
    q = data.q.float()
    out = torch.zeros(case.b, case.s_q, case.h_q, D_V, device=q.device)
    lse = torch.full((case.b, case.h_q, case.s_q), float("inf"), device=q.device)
    for b, length in enumerate(data.lengths):
        if length == 0:
            continue
        k = data.kv_cache[data.block_table[b, : -(-length // PAGE)].long()].flatten(0, 1)[:length].float()
        grouped = q[b].view(case.s_q, case.h_kv, -1, D_QK)
        scores = torch.einsum("shgd,nhd->shgn", grouped, k) * scale
        if case.causal:
            limit = length - case.s_q + 1 + torch.arange(case.s_q, device=q.device)
            hidden = torch.arange(length, device=q.device) >= limit[:, None]
            scores.masked_fill_(hidden[:, None, None, :], float("-inf"))
        lse_b = scores.logsumexp(-1)  # [s_q, h_kv, group]
        weights = (scores - lse_b[..., None]).exp().nan_to_num(0.0)
        out[b] = torch.einsum("shgn,nhd->shgd", weights, k[..., :D_V]).flatten(1, 2)
        lse[b] = torch.where(lse_b == float("-inf"), float("inf"), lse_b).flatten(1, 2).T
    return out, lse


def disagreement(got: torch.Tensor, want: torch.Tensor, what: str) -> str:
    """ "" if FlashMLA's bar holds: each element within the absolute or the relative bound, and the cosine distance."""
    bound = TOLERANCE[what]
    got, want = got.double(), want.double()
    if not torch.equal(got.isnan(), want.isnan()) or not torch.equal(got.isinf(), want.isinf()):
        return f"{what}: NaN or infinite in other places"
    infinite = want.isinf()
    if not torch.equal(got[infinite], want[infinite]):
        return f"{what}: the wrong infinity"
    got, want = got[~infinite], want[~infinite]
    off = (got - want).abs()
    bad = (off > bound["abs"]) & (off > bound["rel"] * want.abs())
    if bad.any():
        worst = float(off[bad].max())
        return f"{what}: {int(bad.sum())} of {bad.numel()} elements outside the bounds, by up to {worst:.2e}"
    squares = float((got.square() + want.square()).sum())
    distance = 1 - 2 * float((got * want).sum()) / squares if squares else 0.0
    if distance > bound.get("cosine_distance", 1.0):
        return f"{what}: cosine distance {distance:.2e}"
    return ""
