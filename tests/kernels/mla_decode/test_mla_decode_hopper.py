"""The Gluon variant for Hopper: what it takes, that it compiles off-GPU, and on a GPU that it is right."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from mla_decode_data import CASES, D_V, GRID, HEAD_PAIRS, Case, disagreement, make_data, reference
from test_mla_decode_compile import compile_in_child

from kerneltune.device import target
from kerneltune.kernels.mla_decode import mla_decode, op
from kerneltune.kernels.mla_decode.config import HOPPER_SHARED_BYTES, Config, is_valid
from kerneltune.kernels.mla_decode.hopper import hopper_refuses
from kerneltune.kernels.mla_decode.tunable import TUNABLE
from kerneltune.registry import load_tunable
from kerneltune.space import load_space

TILES = {"BLOCK_H": 64, "BLOCK_N": 64, "num_splits": 1, "num_warps": 4, "num_stages": 2}
HOPPER: dict[str, Any] = {**TILES, "variant": "hopper", "piece_cost": 4}
HEADS = sorted({heads for heads, h_kv in HEAD_PAIRS if h_kv == 1})
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


@pytest.mark.parametrize(
    ("config", "workload", "arch", "reason"),
    [
        ({}, {}, "sm_90", None),
        ({}, {}, "sm_100", "variant hopper: for sm_90"),
        ({"BLOCK_N": 32}, {}, "sm_90", "BLOCK_N 32: variant hopper has 64"),
        ({"num_splits": 2}, {}, "sm_90", "num_splits 2: variant hopper has 1"),
        ({"piece_cost": 0}, {}, "sm_90", "piece_cost 0: must be 1 to 64"),
        ({}, {"page_size": 17}, "sm_90", "page_size 17: variant hopper takes 16, 32, 64, 128"),
        ({}, {"h_kv": 2}, "sm_90", "h_kv 2: variant hopper is for 1"),
        ({}, {"kv_lora_rank": 256}, "sm_90", "kv_lora_rank 256: variant hopper is for 512"),
        ({}, {"batch": 5000}, "sm_90", "batch 5000: variant hopper takes at most 4096"),
        ({"variant": "split_kv"}, {}, "sm_90", "piece_cost 4: only variant hopper has one"),
    ],
)
def test_what_it_takes(config: dict[str, Any], workload: dict[str, Any], arch: str, reason: str | None) -> None:
    sizes = TUNABLE.complete_workload({"heads": 128, **workload})
    said = is_valid(Config.from_dict({**HOPPER, **config}), sizes, target(arch))
    assert said is None if reason is None else said is not None and said.startswith(reason)


def test_a_config_is_stored_without_what_it_need_not_name() -> None:
    plain = {**TILES, "num_warps": 8}
    assert Config.from_dict(plain).to_dict() == plain
    assert Config.from_dict({**plain, "variant": "split_kv", "piece_cost": 0}).to_dict() == plain
    assert Config.from_dict(HOPPER).to_dict() == HOPPER
    with pytest.raises(ValueError, match="variant of mla-decode must be split_kv or hopper: got 'cuda'"):
        Config.from_dict({**plain, "variant": "cuda"})


def test_the_space_has_it_on_hopper_alone() -> None:
    space = load_space("mla-decode")
    for arch, heads, there in (("sm_90", 128, True), ("sm_90", 16, False), ("sm_100", 128, False)):
        workload = TUNABLE.complete_workload({"heads": heads})
        points = space.points(load_tunable("mla-decode"), "decode", workload, target(arch))
        assert len({str(sorted(point.items())) for point in points}) == len(points)
        assert any(point.get("variant") == "hopper" for point in points) == there
        assert all(point.get("variant", "split_kv") != "split_kv" or "piece_cost" not in point for point in points)


def test_tensors_that_tma_cannot_read() -> None:
    q, kv_cache = torch.empty(4, 2, 128, 576), torch.empty(8, 64, 1, 576)
    assert hopper_refuses(q, kv_cache, 0.1) is None
    assert hopper_refuses(q.transpose(0, 1), kv_cache, 0.1) is not None
    assert hopper_refuses(q[:, :, :100], kv_cache, 0.1) is not None  # queries and heads do not lie at one distance
    assert hopper_refuses(q[:, :, ::2], kv_cache, 0.1) is None
    assert "31 bits" in str(hopper_refuses(q, torch.empty(1 << 26, 64, 1, 576, device="meta"), 0.1))
    apart = torch.empty(8, 64 * 576 + 8).as_strided((8, 64, 1, 576), (64 * 576 + 8, 576, 576, 1))
    assert "whole tokens" in str(hopper_refuses(q, apart, 0.1))
    assert "softmax_scale above 0" in str(hopper_refuses(q, kv_cache, -0.1))


def test_compiles_off_gpu(tmp_path: Path) -> None:
    for result in compile_in_child("sm_90", [(128, HOPPER), (64, HOPPER)], tmp_path):
        assert result["outcome"] == "ok", result
        assert result["shared_bytes"] <= HOPPER_SHARED_BYTES == result["estimate"]
        assert result["spills"] <= 64, "outside the loop over tiles"


def run(case: Case, dtype: torch.dtype, seed: int = 0, config: dict[str, Any] = HOPPER) -> str:
    """Run one case with FlashMLA's conventions; "" or what is wrong with it."""
    data = make_data(case, dtype, "cuda", seed)
    out, lse = op.decode(
        *(data.q, data.kv_cache, data.block_table, data.cache_seqlens, 576**-0.5, case.causal, D_V, float("inf")),
        config=config,
    )
    want, want_lse = reference(data, case)
    problems = [disagreement(out, want, "out"), disagreement(lse, want_lse, "lse")]
    return "; ".join(f"{case}: {problem}" for problem in problems if problem)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("heads", HEADS)
def test_whole_grid_bf16(heads: int) -> None:
    shapes = itertools.product(GRID["b"], GRID["s_q"], GRID["s_k"], GRID["varlen"], GRID["causal"])
    cases = [Case(*shape, heads, 1) for shape in shapes]
    assert [bad for i, case in enumerate(cases) if (bad := run(case, torch.bfloat16, seed=i))] == []


@pytest.mark.gpu
@on_hopper
def test_share_of_the_grid_fp16_and_zero_lengths() -> None:
    shapes = itertools.product((1, 6), GRID["s_q"], GRID["s_k"], GRID["varlen"], GRID["causal"])
    bad = [run(Case(*shape, 128, 1), torch.float16, seed=i) for i, shape in enumerate(shapes)]
    zero = CASES["flash_mla"]["zero_length_cases"]
    for heads, causal in itertools.product(HEADS, zero["causal"]):
        bad.append(run(Case(zero["b"], zero["s_q"], zero["s_k"], True, causal, heads, 1, True), torch.bfloat16))
    assert [each for each in bad if each] == []


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize(("heads", "s_q", "causal"), [(128, 1, False), (64, 1, False), (96, 2, True), (128, 8, True)])
def test_lengths_around_tiles_and_pages(page_size: int, heads: int, s_q: int, causal: bool) -> None:
    given = {"heads": heads, "s_q": s_q, "causal": causal, "page_size": page_size}
    workload = TUNABLE.complete_workload({**given, "batch": 5, "kv_len": 700, "lengths": "spread"})
    problems = [("as drawn", TUNABLE.make_problem(workload, "cuda")), *TUNABLE.edge_problems(workload, "cuda")]
    for cost in (1, 4, 64):
        for label, problem in problems:
            launch = TUNABLE.launch(problem, {**HOPPER, "piece_cost": cost})
            for tensor in (*launch.outputs.values(), *launch.scratch.values()):
                tensor.fill_(float("nan") if tensor.is_floating_point() else 12345)
            launch.run()
            verdict = TUNABLE.compare(launch.outputs, TUNABLE.reference(problem), problem)
            assert verdict.ok, (label, cost, verdict.reason)


@pytest.mark.gpu
@on_hopper
def test_many_requests_and_a_graph_whose_lengths_change() -> None:
    workload = TUNABLE.complete_workload({"heads": 128, "batch": 300, "kv_len": 1000, "lengths": "spread"})
    problem = TUNABLE.make_problem(workload, "cuda")
    launch = TUNABLE.launch(problem, HOPPER)
    launch.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.run()
    first = problem.inputs["cache_seqlens"].clone()
    for lengths in (first, first.clamp(max=77), torch.zeros_like(first), first // 2):
        problem.inputs["cache_seqlens"].copy_(lengths)
        problem.extra["lengths"] = lengths.tolist()
        graph.replay()
        verdict = TUNABLE.compare(launch.outputs, TUNABLE.reference(problem), problem)
        assert verdict.ok, verdict.reason
        again = {name: tensor.clone() for name, tensor in launch.outputs.items()}
        graph.replay()
        assert all(torch.equal(again[name], tensor) for name, tensor in launch.outputs.items())


@pytest.mark.gpu
@on_hopper
def test_later_calls_go_by_the_plan_at_other_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    data = [make_data(Case(3, 1, 500, True, False, 128, 1), torch.bfloat16, "cuda", seed) for seed in (1, 1, 2)]
    launched: list[bool] = []
    original = op.Plan.launch

    def spy(*given: Any) -> bool:
        launched.append(original(*given))
        return launched[-1]

    monkeypatch.setattr(op.Plan, "launch", spy)
    op._plans.clear()
    results = []
    for each in (*data, data[0]):
        tensors = (each.q, each.kv_cache, each.block_table, each.cache_seqlens)
        results.append(mla_decode(*tensors, softmax_scale=576**-0.5, config=HOPPER)[0])
    assert launched.count(True) >= 1
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[3])
    assert not torch.equal(results[0], results[2])


@pytest.mark.gpu
@on_hopper
def test_a_given_config_that_cannot_read_the_tensors_is_refused() -> None:
    data = make_data(Case(2, 2, 100, False, False, 128, 1), torch.bfloat16, "cuda")
    q = data.q.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="heads of q side by side"):
        mla_decode(*(q, data.kv_cache, data.block_table, data.cache_seqlens), softmax_scale=0.1, config=HOPPER)
