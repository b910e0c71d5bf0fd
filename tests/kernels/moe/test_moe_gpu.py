"""The published shapes at full size, a random grid, and offsets beyond 2^31, on a GPU in bf16."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_inputs import config, make_inputs, tolerance, worst_error

from kerneltune.kernels.moe import fused_moe
from kerneltune.kernels.moe.reference import fused_moe_reference
from kerneltune.kernels.moe.tunable import TUNABLE

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:moe. no tuned config:UserWarning")]
CASES = json.loads((Path(__file__).parents[2] / "data" / "moe_cases.json").read_text())["gpu_mode_moe_mxfp4"]

GRID = list(itertools.product((128, 512, 1024), (128, 511, 1024, 2048), (8, 64), (2, 6)))  # N, K, E, top_k
GRID_TOKENS = (1, 33, 222, 1024)
TILES = config(32, (64, 64, 4, 4, 3), (128, 64, 4, 8, 3))


@pytest.mark.parametrize("case", CASES["tests"] + CASES["benchmarks"], ids=lambda c: "E{E}-N{N}-K{K}-M{M}".format(**c))
def test_published_shapes_at_full_size(case: dict[str, int]) -> None:
    """The source's weights are MXFP4; here they are bf16. First the routed experts alone, then with the shared one."""
    sizes = {"tokens": case["M"], **{key: case[key] for key in ("E", "N", "K", "top_k")}}
    inputs = make_inputs(**sizes, shared=case["shared"], dtype=torch.bfloat16, device="cuda", seed=case["seed"])
    top_k = case["top_k"]
    routed = inputs | {name: inputs[name][:, :top_k].contiguous() for name in ("topk_weights", "topk_ids")}
    for given in (routed, inputs):
        out = torch.full_like(given["hidden"], float("nan"))
        assert worst_error(fused_moe(**given, out=out), given) <= tolerance(given)


@pytest.mark.parametrize(("N", "K", "E", "top_k"), random.Random(7).sample(GRID, 10))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_random_grid(dtype: torch.dtype, N: int, K: int, E: int, top_k: int) -> None:
    for tokens in GRID_TOKENS:
        inputs = make_inputs(tokens, E, N, K, top_k, dtype=dtype, device="cuda", seed=tokens)
        assert worst_error(fused_moe(**inputs, config=TILES), inputs) <= tolerance(inputs)


@pytest.mark.parametrize("tokens", [1, 8, 64, 1024])
def test_default_of_deepseek_v3_repeats_to_the_bit(tokens: int) -> None:
    problem = TUNABLE.make_problem({"tokens": tokens, "routing": "zipf"}, "cuda")
    inputs: dict[str, Any] = problem.inputs
    first = fused_moe(**inputs)
    assert TUNABLE.compare({"out": first}, TUNABLE.reference(problem), problem).ok
    for _ in range(5):
        assert torch.equal(fused_moe(**inputs), first)


def test_nothing_waits_for_the_gpu_and_a_graph_holds_it() -> None:
    inputs: dict[str, Any] = TUNABLE.make_problem({"tokens": 64}, "cuda").inputs
    expected = fused_moe(**inputs)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fused_moe(**inputs)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused_moe(**inputs)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, expected)


def _check_tokens(out: torch.Tensor, inputs: dict[str, Any], rows: list[int]) -> None:
    """Some tokens against the reference of these alone."""
    some = inputs | {name: inputs[name][rows] for name in ("hidden", "topk_weights", "topk_ids")}
    assert worst_error(out[rows], some) <= tolerance(inputs)
    assert fused_moe_reference(**some).norm(dim=1).min() > 0


def test_rows_beyond_2_to_31_elements() -> None:
    tokens, top_k, width = 140_000, 8, 2048
    assert tokens * top_k * width > 1 << 31
    inputs = make_inputs(tokens, 8, width, width, top_k, dtype=torch.bfloat16, device="cuda")
    inputs["topk_ids"][::2] = -1  # half the work, all the offsets
    out = fused_moe(**inputs)
    _check_tokens(out, inputs, [1, 65_537, 131_071, 139_997, 139_999])
    assert (out[::2] == 0).all()


def test_weights_beyond_2_to_31_elements() -> None:
    E, N, K = 300, 1024, 8192
    assert E * N * K > 1 << 31
    inputs = make_inputs(16, E, N, K, 2, dtype=torch.bfloat16, device="cuda")
    inputs["topk_ids"][:] = torch.tensor([E - 1, 0], dtype=torch.int32, device="cuda")
    assert worst_error(fused_moe(**inputs), inputs) <= tolerance(inputs)
