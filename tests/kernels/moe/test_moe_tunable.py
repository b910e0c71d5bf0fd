"""What the tuner is told of the fused mixture of experts: workloads, problems, launches, judgement, cost, rules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_inputs import SMALL, config

from kerneltune.device import TARGETS
from kerneltune.kernels.moe import reference
from kerneltune.kernels.moe.config import GemmConfig, cannot_run, default_config, shared_memory_bytes
from kerneltune.kernels.moe.routing import ROUTINGS, draw_topk_ids
from kerneltune.kernels.moe.tunable import TUNABLE
from kerneltune.kernels.tunable import Launch, Problem, Scalar
from kerneltune.measure.gate import poison

ROOT = Path(__file__).parents[3]
H200 = TARGETS["sm_90"]
SMALL_WORKLOAD: dict[str, Scalar] = {"dtype": "fp16", "E": 6, "N": 40, "K": 96, "top_k": 2, "tokens": 20}
LADDER = (1, 8, 64, 256, 1024, 4096)
SHAPES: dict[str, dict[str, Scalar]] = {
    "deepseek-v3 tp8": {},
    "deepseek-v3 ep8": {"E": 32, "global_E": 256, "N": 2048},
    "mixtral tp2": {"E": 8, "N": 7168, "K": 4096, "top_k": 2},
    "qwen3-235b tp4": {"E": 128, "N": 384, "K": 4096},
    "olmoe": {"E": 64, "N": 1024, "K": 2048},
    "odd": {"E": 8, "N": 255, "K": 511, "top_k": 2},
}


def test_workload_defaults_are_deepseek_v3_at_tp_8() -> None:
    expected = {"dtype": "bf16", "w_dtype": "bf16", "group": "none", "E": 256, "global_E": 256, "N": 256, "K": 7168}
    expected |= {"top_k": 8, "activation": "silu", "bias": False, "tokens": 64, "routing": "uniform"}
    completed = TUNABLE.complete_workload({})
    assert completed == expected
    assert list(completed) == list(expected)
    assert tuple(completed) == TUNABLE.exact_keys + TUNABLE.scaled_keys + TUNABLE.input_keys


def test_workload_follows_what_is_given() -> None:
    completed = TUNABLE.complete_workload({"tokens": 3, "E": 32, "dtype": "fp16"})
    assert (completed["global_E"], completed["w_dtype"], completed["tokens"]) == (32, "fp16", 3)
    assert TUNABLE.complete_workload({"E": 32, "global_E": 256})["global_E"] == 256
    assert TUNABLE.complete_workload(completed) == completed


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"token": 3}, "unknown workload key 'token'"),
        ({"dtype": "fp8_e4m3"}, "dtype=fp8_e4m3: not supported yet"),
        ({"w_dtype": "fp16"}, "w_dtype=fp16: not supported yet"),
        ({"tokens": 0}, "tokens=0: expected a positive integer"),
        ({"N": 2.5}, "N=2.5: expected a positive integer"),
        ({"K": True}, "K=True: expected a positive integer"),
        ({"bias": True}, "bias=True: not supported yet"),
        ({"bias": 0}, "bias=0: not supported yet"),
        ({"routing": "random"}, "routing=random: no such class and no such file, expected uniform, zipf, dirichlet"),
        ({"E": 8, "global_E": 4}, "E=8: expected at most global_E, 4"),
        ({"E": 4}, "top_k=8: expected at most global_E, 4"),
    ],
)
def test_bad_workloads(given: dict[str, Scalar], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TUNABLE.complete_workload(given)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routing_is_distinct_seeded_and_skewed_as_named(routing: str) -> None:
    ids = draw_topk_ids(routing, 500, 32, 4, seed=3)
    assert (ids.dtype, tuple(ids.shape)) == (torch.int32, (500, 4))
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert torch.equal(ids, draw_topk_ids(routing, 500, 32, 4, seed=3))
    assert not torch.equal(ids, draw_topk_ids(routing, 500, 32, 4, seed=4))
    counts = ids.long().flatten().bincount(minlength=32)
    share = counts.max().item() / counts.sum().item()  # of the busiest expert; 1 / 4 is the most there can be
    assert share < 0.06 if routing == "uniform" else share > 0.12


def _run(launch: Launch) -> None:
    """On outputs and scratch full of NaN, and of integers that are no index."""
    for tensor in (*launch.outputs.values(), *launch.scratch.values()):
        poison(tensor)
    launch.run()


FEW_LOCAL: dict[str, Scalar] = {**SMALL_WORKLOAD, "E": 3, "global_E": 9, "top_k": 4}


@pytest.mark.parametrize("workload", [SMALL_WORKLOAD, FEW_LOCAL], ids=["all experts", "fewer local ones than top_k"])
def test_launch_is_right_on_the_workload_and_its_edges(workload: dict[str, Scalar], device: str) -> None:
    problems = [("workload", TUNABLE.make_problem(workload, device)), *TUNABLE.edge_problems(workload, device)]
    labels = [label for label, _ in problems]
    assert {"tokens=1", "tokens=33", "tokens=129", "ids of -1"} <= set(labels)
    assert {"expert 0 without tokens", "all tokens to one expert"} <= set(labels)
    for label, problem in problems:
        before = {name: tensor.clone() for name, tensor in problem.inputs.items()}
        launch = TUNABLE.launch(problem, SMALL)
        _run(launch)
        verdict = TUNABLE.compare(launch.outputs, TUNABLE.reference(problem), problem)
        assert verdict.ok, f"{label}: {verdict.reason}"
        for name, tensor in problem.inputs.items():
            assert torch.equal(tensor, before[name]), (label, name)


def test_edge_problems_are_what_their_labels_say_and_share_the_weights() -> None:
    whole = TUNABLE.make_problem(SMALL_WORKLOAD, "cpu")
    edges = dict(TUNABLE.edge_problems(SMALL_WORKLOAD, "cpu"))
    assert all(edge.inputs["w1"] is whole.inputs["w1"] for edge in edges.values())
    assert 0 not in edges["expert 0 without tokens"].inputs["topk_ids"]
    assert edges["all tokens to one expert"].inputs["topk_ids"].unique().tolist() == [5]
    ids = edges["ids of -1"].inputs["topk_ids"]
    assert (ids == -1).all(dim=1).any()
    assert (ids >= 0).any()


def test_parts_repeat_what_the_whole_does(device: str) -> None:
    problem = TUNABLE.make_problem(SMALL_WORKLOAD, device)
    tiles = config(32, (32, 32, 1, 4, 2), (32, 32, 1, 4, 2))
    whole = TUNABLE.launch(problem, tiles)
    _run(whole)
    for part, name in (("gemm1", "intermediate"), ("gemm2", "partials")):
        launch = TUNABLE.launch(problem, tiles, part)
        assert list(launch.outputs) == [name]
        before = launch.outputs[name].clone()
        assert not before.isnan().any()
        poison(launch.outputs[name])
        launch.run()
        assert torch.equal(launch.outputs[name], before)


def test_a_part_alone_finds_its_inputs(device: str) -> None:
    """Without a run of the whole the expert ids would be whatever the allocator returned."""
    launch = TUNABLE.launch(TUNABLE.make_problem(SMALL_WORKLOAD, device), SMALL, "gemm2")
    launch.run()
    assert launch.outputs["partials"].isfinite().all()


def test_a_config_with_two_heights_is_refused() -> None:
    tiles = {**SMALL, "gemm2": {**SMALL["gemm2"], "BLOCK_M": 32}}
    with pytest.raises(ValueError, match="BLOCK_M is 16 in gemm1, 32 in gemm2"):
        TUNABLE.launch(TUNABLE.make_problem(SMALL_WORKLOAD, "meta"), tiles)


def test_meta_problems_have_shapes_only() -> None:
    problem = TUNABLE.make_problem({"tokens": 4096}, "meta")
    assert tuple(problem.inputs["w1"].shape) == (256, 512, 7168)
    assert len(TUNABLE.launch(problem, TUNABLE.default_config({"tokens": 4096}, H200)).calls) == 4
    assert len(TUNABLE.launch(problem, TUNABLE.default_config({"tokens": 4096}, H200), "gemm1").calls) == 1


def _wrong_answers(problem: Problem) -> dict[str, torch.Tensor]:
    inputs = problem.inputs
    least = inputs["topk_weights"].argmin(dim=1)
    one_token = inputs["topk_weights"].clone()
    one_token[4, least[4]] = 0.0
    total = inputs["topk_weights"].sum(dim=1, keepdim=True)
    tail = inputs["hidden"].clone()
    tail[:, 511 // 64 * 64 :] = 0.0
    swapped = inputs["w1"].roll(inputs["w1"].shape[1] // 2, dims=1)

    def answer(**change: Any) -> torch.Tensor:
        return reference.fused_moe_reference(**{**inputs, **change}).to(inputs["hidden"].dtype)

    return {
        "the least expert of one token skipped": answer(topk_weights=one_token),
        "router renormalised": answer(topk_weights=inputs["topk_weights"] / total),
        "tail of K not read": answer(hidden=tail),
        "gate and up swapped": answer(w1=swapped),
        "zeros": torch.zeros_like(inputs["hidden"]),
        "nan in one place": answer().index_fill(0, torch.tensor([2]), float("nan")),
        "tokens shifted by one": answer().roll(1, dims=0),
    }


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_wrong_answers_fail_and_the_rounded_right_one_passes(dtype: str) -> None:
    workload = {**SMALL_WORKLOAD, "dtype": dtype, "E": 8, "K": 511, "top_k": 6}
    problem = TUNABLE.make_problem(workload, "cpu")
    expected = TUNABLE.reference(problem)
    right = {"out": expected["out"].to(problem.inputs["hidden"].dtype)}
    assert TUNABLE.compare(right, expected, problem).ok
    for name, out in _wrong_answers(problem).items():
        verdict = TUNABLE.compare({"out": out}, expected, problem)
        assert not verdict.ok, name
        assert verdict.reason.startswith("token "), name


def test_a_token_without_experts_must_be_exactly_zero() -> None:
    problem = TUNABLE.make_problem(SMALL_WORKLOAD, "cpu")
    problem.inputs["topk_ids"][3] = -1
    expected = TUNABLE.reference(problem)
    out = expected["out"].half()
    assert TUNABLE.compare({"out": out}, expected, problem).ok
    out[3, 0] = 1e-6
    assert not TUNABLE.compare({"out": out}, expected, problem).ok


def test_cost_of_a_token_by_hand() -> None:
    """One token, 8 of 256 experts: 8 rows of N 256, K 7168, two bytes each."""
    gemm1, gemm2, whole = (TUNABLE.cost({"tokens": 1}, part) for part in ("gemm1", "gemm2", None))
    weights1, weights2 = 8 * 512 * 7168, 8 * 7168 * 256
    assert gemm1.flops == 2 * weights1
    assert gemm2.flops == 2 * weights2
    assert (gemm1.bytes_read, gemm1.bytes_written) == (2 * (weights1 + 7168), 2 * 8 * 256)
    assert (gemm2.bytes_read, gemm2.bytes_written) == (2 * (weights2 + 8 * 256), 2 * 8 * 7168)
    assert whole.flops == gemm1.flops + gemm2.flops
    assert whole.bytes_read == gemm1.bytes_read + gemm2.bytes_read + 2 * 8 * 7168
    assert whole.bytes_written == gemm1.bytes_written + gemm2.bytes_written + 2 * 7168
    assert whole.compute == "bf16"


def test_cost_counts_only_local_choices_and_experts_hit() -> None:
    workload: dict[str, Scalar] = {"E": 32, "global_E": 256, "tokens": 64, "routing": "zipf"}
    ids = TUNABLE.make_problem(workload, "meta", seed=5).workload
    drawn = draw_topk_ids("zipf", 64, 256, 8, 5)
    local = drawn < 32
    cost = TUNABLE.cost(ids, "gemm2", seed=5)
    assert cost.flops == 2 * int(local.sum()) * 256 * 7168
    assert cost.bytes_read == 2 * (len(drawn[local].unique()) * 7168 * 256 + int(local.sum()) * 256)


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_default_is_valid_everywhere(shape: str, arch: str) -> None:
    for tokens in LADDER:
        workload = TUNABLE.complete_workload({**SHAPES[shape], "tokens": tokens})
        params = default_config(workload, TARGETS[arch])
        assert params["gemm1"]["BLOCK_M"] == params["gemm2"]["BLOCK_M"]
        for part in TUNABLE.parts:
            assert TUNABLE.is_valid(part, params[part], workload, TARGETS[arch]) is None, (tokens, part, params)


@pytest.mark.parametrize(
    ("part", "change", "reason"),
    [
        ("gemm1", {"BLOCK_K": 256, "num_stages": 5}, "shared memory: needs 819200 B, device has 232448 B"),
        ("gemm2", {"BLOCK_K": 256, "num_stages": 4}, None),
        ("gemm1", {"BLOCK_M": 128}, "registers: 256 accumulators a thread"),
        ("gemm1", {"BLOCK_M": 128, "num_warps": 8}, None),
        ("gemm2", {"BLOCK_N": 8}, "tile: 64 x 8 x 64 has a side under 16"),
        ("gemm1", {"BLOCK_N": 8}, None),
        ("gemm2", {"BLOCK_K": 48}, "parameters: BLOCK_K is 48, expected a power of two"),
        ("gemm2", {"num_stages": 0}, "parameters: num_stages is 0, expected a positive integer"),
    ],
)
def test_rules(part: str, change: dict[str, int], reason: str | None) -> None:
    params = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 16, "num_warps": 4, "num_stages": 2, **change}
    said = TUNABLE.is_valid(part, params, {"tokens": 1024}, H200)
    assert said is None if reason is None else said is not None and said.startswith(reason), said


def test_blocks_far_taller_than_an_expert_are_rejected_but_run() -> None:
    """A search need not try them; a launch (an edge problem, a user's own config) may."""
    params = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_M": 1, "num_warps": 4, "num_stages": 2}
    said = TUNABLE.is_valid("gemm1", params, {"tokens": 64}, H200)
    assert said == "rows: BLOCK_M 64 is mostly padding, 32 holds the rows of the busiest expert"
    assert TUNABLE.is_valid("gemm1", params, {"tokens": 128}, H200) is None
    assert cannot_run("gemm1", params, TUNABLE.complete_workload({"tokens": 64}), H200) is None


COMPILE = """
import sys
from kerneltune.compile import compile_part
from kerneltune.device import TARGETS
workload = {"tokens": 1024, "K": int(sys.argv[1])}
names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "num_warps", "num_stages")
for line in sys.argv[2:]:
    part, *values = line.split("/")
    params = dict(zip(names, map(int, values)))
    result = compile_part("moe", part, params, workload, TARGETS["sm_90"])
    assert result.outcome == "ok", result
    print(line, result.shared_bytes, result.spills)
"""


@pytest.mark.parametrize(
    ("K", "lines"),
    [
        # wgmma; the tensor core of sm_80; one step of K, so no pipeline
        (7168, ["gemm1/64/128/64/16/8/3", "gemm2/64/64/64/1/4/2", "gemm1/16/32/128/1/4/4", "gemm2/64/64/256/1/4/3"]),
        (510, ["gemm1/16/32/64/1/4/3"]),  # copies of 4 bytes
    ],
)
def test_shared_memory_is_what_triton_reports(K: int, lines: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-W", "ignore", "-c", COMPILE, str(K), *lines]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    printed = [line.split() for line in done.stdout.splitlines()]
    assert [line for line, _, _ in printed] == lines
    for line, shared, spills in printed:
        part, *values = line.split("/")
        expected = shared_memory_bytes(part, GemmConfig(*map(int, values)), {"K": K, "N": 256}, H200)
        assert int(shared) == expected, line
        assert int(spills) == 0, line
