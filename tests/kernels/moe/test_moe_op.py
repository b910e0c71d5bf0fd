"""The public call against the float64 reference: published shapes scaled down, odd routing and sizes, bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_inputs import SMALL, config, make_inputs, tolerance, worst_error

from kerneltune.kernels.moe import fused_moe, op
from kerneltune.kernels.moe.config import GemmConfig

pytestmark = pytest.mark.filterwarnings("ignore:moe. no tuned config:UserWarning")
CASES = json.loads((Path(__file__).parents[2] / "data" / "moe_cases.json").read_text())
PUBLISHED = CASES["gpu_mode_moe_mxfp4"]["tests"] + CASES["gpu_mode_moe_mxfp4"]["benchmarks"]
MODELS = CASES["models"]


def scaled(case: dict[str, int]) -> dict[str, Any]:
    """A 32nd of each width, at most 12 experts and 20 tokens."""
    return {
        "tokens": min(case["M"], 20),
        "E": min(case["E"], 12),
        "N": case["N"] // 32,
        "K": case["K"] // 32,
        "top_k": case["top_k"],
    }


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: "E{E}-N{N}-K{K}-M{M}".format(**case))
def test_published_shapes(case: dict[str, int], device: str) -> None:
    """The routed experts alone, which the shared one's weight of 1 would drown, and with it."""
    tiles = config(16, (64, 128, 1, 4, 2), (128, 64, 1, 4, 2))
    for shared in (0, case["shared"]):
        inputs = make_inputs(**scaled(case), shared=shared, device=device, seed=case["seed"])
        assert worst_error(fused_moe(**inputs, config=tiles), inputs) <= tolerance(inputs)


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_models_with_the_default_config(model: str, device: str) -> None:
    case = {"M": 3, **{key: MODELS[model][key] for key in ("E", "N", "K", "top_k")}}
    inputs = make_inputs(**scaled(case), device=device)
    assert worst_error(fused_moe(**inputs), inputs) <= tolerance(inputs)


@pytest.mark.parametrize("tokens", [0, 1, 2, 16, 17, 33, 129])
def test_token_counts(tokens: int, device: str) -> None:
    inputs = make_inputs(tokens, E=6, N=32, K=64, top_k=2, device=device)
    out = fused_moe(**inputs, config=SMALL)
    assert out.shape == (tokens, 64)
    assert worst_error(out, inputs) <= tolerance(inputs)


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize(("N", "K"), [(32, 511), (40, 96), (33, 65), (7, 20)])
def test_sizes_off_the_tile(N: int, K: int, block_m: int, device: str) -> None:
    inputs = make_inputs(19, E=3, N=N, K=K, top_k=2, device=device)
    tiles = config(block_m, (16, 64, 1, 4, 2), (32, 32, 16, 4, 2))
    assert worst_error(fused_moe(**inputs, config=tiles), inputs) <= tolerance(inputs)


@pytest.mark.parametrize("group_m", [1, 2, 16])
def test_order_of_tiles(group_m: int, device: str) -> None:
    inputs = make_inputs(70, E=3, N=64, K=96, top_k=2, device=device)
    tiles = config(16, (16, 32, group_m, 4, 2), (32, 64, group_m, 4, 2))
    assert worst_error(fused_moe(**inputs, config=tiles), inputs) <= tolerance(inputs)


@pytest.mark.parametrize("group", CASES["gpu_mode_nvfp4_group_gemm"]["groups"], ids=lambda g: "n{n}-k{k}".format(**g))
def test_published_group_sizes(group: dict[str, Any], device: str) -> None:
    """Experts of the published, uneven numbers of rows (an 8th of them), in fp16; widths a 32nd."""
    rows = [-(-m // 8) for m in group["m"]]
    ids = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), torch.tensor(rows))
    shuffled = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    inputs = make_inputs(len(ids), E=len(rows), N=group["n"] // 64, K=group["k"] // 32, top_k=1, device=device)
    inputs["topk_ids"] = shuffled[:, None].to(device)
    tiles = config(16, (64, 128, 1, 4, 2), (128, 64, 1, 4, 2))
    assert worst_error(fused_moe(**inputs, config=tiles), inputs) <= tolerance(inputs)


def _ids(kind: str, ids: torch.Tensor) -> torch.Tensor:
    ids = ids.clone()
    if kind == "all tokens to one expert":
        ids[:] = 4
    elif kind == "an expert without tokens":
        ids[ids == 2] = 3
    elif kind == "the same expert twice":
        ids[:, 1] = ids[:, 0]
    elif kind == "some -1":
        ids.view(-1)[::3] = -1
        ids[5] = -1
    elif kind == "only -1":
        ids[:] = -1
    elif kind == "ids that name no expert":
        ids[::2, 0] = 6
        ids[1::2, 1] = 1 << 30
        ids[0, 1] = -(1 << 30)
    elif kind == "int64":
        ids = ids.long()
    return ids


KINDS = [
    "all tokens to one expert",
    "an expert without tokens",
    "the same expert twice",
    "some -1",
    "only -1",
    "ids that name no expert",
    "int64",
]


@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize("kind", KINDS)
def test_routing(kind: str, tokens: int, device: str) -> None:
    inputs = make_inputs(33, E=6, N=32, K=64, top_k=2, device=device)
    inputs["topk_ids"] = _ids(kind, inputs["topk_ids"])
    for name in ("hidden", "topk_ids", "topk_weights"):
        inputs[name] = inputs[name][:tokens].contiguous()
    out = torch.full_like(inputs["hidden"], float("nan"))
    assert fused_moe(**inputs, config=SMALL, out=out) is out
    assert worst_error(out, inputs) <= tolerance(inputs)
    if kind == "only -1":
        assert (out == 0).all()


def test_ranks_of_expert_parallelism_add_up(device: str) -> None:
    """Eight experts on ranks of 5 and 3 (fewer than top_k): the ranks' sum is the whole, and each agrees by itself."""
    inputs = make_inputs(33, E=8, N=32, K=64, top_k=4, device=device)
    inputs["topk_ids"][7, 2] = -1
    total = torch.zeros(33, 64, dtype=torch.float64, device=device)
    for first, last in ((0, 5), (5, 8)):
        expert_map = torch.full((8,), -1, dtype=torch.int32, device=device)
        expert_map[first:last] = torch.arange(last - first, dtype=torch.int32, device=device)
        rank = {**inputs, "w1": inputs["w1"][first:last], "w2": inputs["w2"][first:last], "expert_map": expert_map}
        out = fused_moe(**rank, config=SMALL)
        assert worst_error(out, rank) <= tolerance(inputs)
        total += out.double()
    assert worst_error(total, inputs) <= 2 * tolerance(inputs)


def test_inputs_are_not_changed(device: str) -> None:
    inputs = make_inputs(9, E=4, N=32, K=64, top_k=2, device=device)
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    fused_moe(**inputs, config=SMALL)
    for name, tensor in inputs.items():
        assert torch.equal(tensor, before[name]), name


def test_experts_without_tokens_are_not_read(device: str) -> None:
    inputs = make_inputs(9, E=4, N=32, K=64, top_k=2, device=device)
    inputs["topk_ids"][inputs["topk_ids"] == 1] = 3
    clean = fused_moe(**inputs, config=SMALL)
    inputs["w1"][1] = inputs["w2"][1] = float("nan")
    assert torch.equal(fused_moe(**inputs, config=SMALL), clean)


def test_one_token_does_not_disturb_another(device: str) -> None:
    inputs = make_inputs(20, E=2, N=32, K=64, top_k=2, device=device)
    clean = fused_moe(**inputs, config=SMALL)
    inputs["hidden"][13] = float("nan")
    out = fused_moe(**inputs, config=SMALL)
    others = [token for token in range(20) if token != 13]
    assert out[13].isnan().all()
    assert torch.equal(out[others], clean[others])


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"hidden": torch.zeros(4, 64)}, "torch.float32 not supported yet"),
    "weight dtype": ({"w1": torch.zeros(3, 64, 64, dtype=torch.bfloat16)}, "w1 has dtype torch.bfloat16"),
    "width": ({"w1": torch.zeros(3, 64, 63).half()}, r"w1 has shape \[3, 64, 63\]: expected \[3, 64, 64\]"),
    "odd rows": ({"w1": torch.zeros(3, 63, 64).half()}, "w1 has 63 rows"),
    "w2": ({"w2": torch.zeros(3, 64, 31).half()}, r"w2 has shape \[3, 64, 31\]"),
    "tokens": ({"topk_ids": torch.zeros(5, 2).int()}, r"topk_ids has shape \[5, 2\]: expected \[4, 2\]|topk_weights"),
    "ids": ({"topk_ids": torch.zeros(4, 2)}, "topk_ids has dtype torch.float32"),
    "router": ({"topk_weights": torch.zeros(4, 2).half()}, "topk_weights has dtype torch.float16: expected"),
    "map": ({"expert_map": torch.zeros(3).long()}, "expert_map has dtype torch.int64"),
    "strides": ({"hidden": torch.zeros(64, 4).half().T}, "hidden has strides"),
    "rank": ({"hidden": torch.zeros(2, 2, 64).half()}, "expected hidden"),
    "out": ({"out": torch.zeros(4, 63).half()}, r"out has shape \[4, 63\]"),
    "activation": ({"activation": "gelu"}, "'gelu' not supported yet"),
    "config part": ({"config": {"gemm1": SMALL["gemm1"]}}, r"config has parts \['gemm1'\]"),
    "config name": ({"config": {**SMALL, "gemm2": {"BLOCK_M": 16}}}, r"config\['gemm2'\] is"),
    "config value": ({"config": config(24, (16, 32, 1, 4, 2), (16, 32, 1, 4, 2))}, "BLOCK_M is 24"),
    "config rows": ({"config": {**SMALL, "gemm2": {**SMALL["gemm2"], "BLOCK_M": 32}}}, "must be equal"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    change, message = BAD[name]
    inputs: dict[str, Any] = make_inputs(4, E=3, N=32, K=64, top_k=2, device="cpu")
    with pytest.raises(ValueError, match=message):
        fused_moe(**{**inputs, **change})


def _launched(monkeypatch: pytest.MonkeyPatch, found: object, device: str) -> dict[str, GemmConfig]:
    """The config that a launch used when the tables answered `found`, and what they were asked."""
    from kerneltune.kernels import tables

    asked: list[dict[str, Any]] = []
    used: list[dict[str, GemmConfig]] = []
    make_calls = op.make_calls

    def answer(**question: Any) -> object:
        asked.append(question)
        return found

    def spy(*args: Any) -> Any:
        used.append(args[6])
        return make_calls(*args)

    monkeypatch.setattr(tables, "resolve", answer)
    monkeypatch.setattr(op, "make_calls", spy)
    tables.forget()
    inputs = make_inputs(9, E=4, N=32, K=64, top_k=2, device=device)
    out = fused_moe(**inputs, routing="zipf")
    tables.forget()
    assert worst_error(out, inputs) <= tolerance(inputs)
    assert asked[0]["kernel"] == "moe"
    assert asked[0]["workload"] == {
        "dtype": "fp16",
        "w_dtype": "fp16",
        "group": "none",
        "E": 4,
        "global_E": 4,
        "N": 32,
        "K": 64,
        "top_k": 2,
        "activation": "silu",
        "bias": False,
        "tokens": 9,
        "routing": "zipf",
    }
    return used[0]


def test_a_config_of_the_tables_is_used(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    found = config(32, (32, 32, 2, 8, 3), (32, 64, 4, 4, 2))
    assert _launched(monkeypatch, found, device) == {part: GemmConfig(**found[part]) for part in found}


@pytest.mark.parametrize(
    "found",
    [
        None,
        {},
        {"gemm1": {"BLOCK_M": 16}, "gemm2": {}},
        {**SMALL, "gemm2": {**SMALL["gemm2"], "num_warps": 3}},
        {**SMALL, "gemm2": {**SMALL["gemm2"], "num_warps": "4"}},
    ],
    ids=str,
)
def test_what_cannot_run_is_a_miss(monkeypatch: pytest.MonkeyPatch, found: object, device: str) -> None:
    default = _launched(monkeypatch, None, device)
    assert _launched(monkeypatch, found, device) == default
