"""FlashMLA's own grid of shapes, with its data and tolerance: a part in the interpreter, all of it on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from mla_decode_data import CASES, D_V, GRID, HEAD_PAIRS, Case, disagreement, make_data, reference

from kerneltune.kernels.mla_decode import flash_mla_with_kvcache, get_mla_metadata

pytestmark = pytest.mark.filterwarnings("ignore:mla-decode. no tuned config")
SHAPES = [GRID[key] for key in ("b", "s_k", "varlen", "causal")]
SMALL = [  # every head pair once, every s_q, both masks, lengths around the tiles; small enough for the interpreter
    Case((1, 2)[i % 2], GRID["s_q"][i % 3], GRID["s_k"][i % 2], i % 4 >= 2, i % 3 != 1, *pair)
    for i, pair in enumerate(HEAD_PAIRS)
]


def check(case: Case, dtype: torch.dtype, device: str, seed: int = 0) -> str:
    """Run one case; "" or what is wrong with it."""
    data = make_data(case, dtype, device, seed)
    metadata, num_splits = get_mla_metadata(data.cache_seqlens, case.s_q * case.h_q // case.h_kv, case.h_kv)
    out, lse = flash_mla_with_kvcache(
        *(data.q, data.kv_cache, data.block_table, data.cache_seqlens, D_V, metadata, num_splits), causal=case.causal
    )
    want, want_lse = reference(data, case)
    problems = [disagreement(out, want, "out"), disagreement(lse, want_lse, "lse")]
    return "; ".join(f"{case}: {problem}" for problem in problems if problem)


def test_grid_has_the_published_size() -> None:
    assert len(HEAD_PAIRS) == 16
    assert len(HEAD_PAIRS) * len(list(itertools.product(*SHAPES))) * len(GRID["s_q"]) == 2304
    assert CASES["flash_mla"]["d_qk"] == 576


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_small_part_of_the_grid(case: Case, device: str) -> None:
    assert check(case, torch.float16, device) == ""


@pytest.mark.parametrize("causal", [False, True])
def test_zero_lengths_small(causal: bool, device: str) -> None:
    assert check(Case(6, 2, 40, True, causal, 3, 1, zero_lengths=True), torch.float16, device) == ""


def test_long_sequence(device: str) -> None:
    assert check(Case(1, 1, 4096, False, False, 9, 1), torch.float16, device) == ""


@pytest.mark.gpu
@pytest.mark.parametrize("s_q", GRID["s_q"])
@pytest.mark.parametrize("pair", HEAD_PAIRS, ids=str)
def test_whole_grid_bf16(pair: tuple[int, int], s_q: int) -> None:
    cases = [Case(b, s_q, s_k, varlen, causal, *pair) for b, s_k, varlen, causal in itertools.product(*SHAPES)]
    assert len(cases) == 48
    assert [bad for i, case in enumerate(cases) if (bad := check(case, torch.bfloat16, "cuda", seed=i))] == []


@pytest.mark.gpu
@pytest.mark.parametrize("pair", HEAD_PAIRS, ids=str)
def test_zero_lengths_bf16(pair: tuple[int, int]) -> None:
    zero = CASES["flash_mla"]["zero_length_cases"]
    cases = [Case(zero["b"], zero["s_q"], zero["s_k"], True, causal, *pair, True) for causal in zero["causal"]]
    assert [bad for case in cases if (bad := check(case, torch.bfloat16, "cuda"))] == []


@pytest.mark.gpu
@pytest.mark.parametrize("pair", [pair for pair in HEAD_PAIRS if pair[1] == 1], ids=str)
def test_share_of_the_grid_fp16(pair: tuple[int, int]) -> None:
    shapes = itertools.product((1, 6), GRID["s_q"], GRID["s_k"], GRID["varlen"], GRID["causal"])
    cases = [Case(*shape, *pair) for shape in shapes]
    assert [bad for i, case in enumerate(cases) if (bad := check(case, torch.float16, "cuda", seed=i))] == []
