"""What the tuner relies on: workloads, problems, a judge that sees one missing key, exact costs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from mla_decode_data import CASES

from kerneltune.kernels.device import Device
from kerneltune.kernels.mla_decode.config import Config, default_config, is_valid
from kerneltune.kernels.mla_decode.tunable import TUNABLE, _problem, draw_lengths, visible_keys
from kerneltune.kernels.tunable import Problem

H200 = Device("NVIDIA H200", "sm_90", 132, 232448, 62914560, 150754820096)
SMALL = {"BLOCK_H": 16, "BLOCK_N": 64, "num_splits": 2, "num_warps": 4, "num_stages": 2}


def workload(**keys: Any) -> dict[str, Any]:
    return TUNABLE.complete_workload({"dtype": "fp16", **keys})


def attend(p: Problem, request: int, keep: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact attention of one request of a problem (s_q 1, h_kv 1) over some of its keys, rounded as a kernel's is."""
    length, page = p.extra["lengths"][request], int(p.workload["page_size"])
    pages = p.inputs["block_table"][request, : -(-length // page)].long()
    k = p.inputs["kv_cache"][pages].flatten(0, 2)[:length][keep].double()
    scores = p.inputs["q"][request, 0].double() @ k.T * p.extra["softmax_scale"]
    out = scores.softmax(-1) @ k[:, : int(p.workload["kv_lora_rank"])]
    return out.to(p.inputs["q"].dtype)[None], scores.logsumexp(-1).float()[:, None]


def without(length: int, first: int, count: int) -> torch.Tensor:
    """Indices of the keys but `count` of them."""
    return torch.cat([torch.arange(first), torch.arange(first + count, length)])


def judge(p: Problem, reference: dict[str, torch.Tensor], request: int, keep: torch.Tensor | slice) -> bool:
    """What `compare` says when one request was computed over these keys only, and the rest is right."""
    outputs = {"out": reference["out"].to(p.inputs["q"].dtype), "lse": reference["lse"].float()}
    outputs["out"][request], outputs["lse"][request] = attend(p, request, keep)
    return TUNABLE.compare(outputs, reference, p).ok


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("length", [2, 33, 700, 4096, 32768])
def test_leaving_out_a_key_a_page_or_a_split_fails(length: int, dtype: str, device: str) -> None:
    p = _problem(workload(dtype=dtype), [64, length], device, seed=length)
    reference = TUNABLE.reference(p)
    assert judge(p, reference, 1, slice(None))
    for first in {0, length // 2, length - 1}:
        assert not judge(p, reference, 1, without(length, first, 1)), f"key {first}"
    if length > 64:
        last_page = (length - 1) // 64 * 64
        for first in (0, length // 128 * 64, last_page):
            assert not judge(p, reference, 1, without(length, first, min(64, length - first))), f"page at {first}"
        for splits in (2, 8):
            assert not judge(p, reference, 1, without(length, 0, length // splits)), f"first of {splits} splits"


@pytest.mark.gpu
@pytest.mark.parametrize("length", [131072, 131073])
def test_leaving_out_one_key_of_many_fails_on_the_gpu(length: int) -> None:
    p = _problem(workload(dtype="bf16"), [64, length], "cuda", seed=3)
    reference = TUNABLE.reference(p)
    launch = TUNABLE.launch(p, TUNABLE.default_config({**p.workload, "batch": 2, "kv_len": length}, H200))
    launch.run()
    assert TUNABLE.compare(launch.outputs, reference, p).reason == ""
    for first in (0, 64, length // 2, length - 1):
        assert not judge(p, reference, 1, without(length, first, 1)), f"key {first}"


@pytest.mark.parametrize("shape", CASES["gpu_mode_mixed_mla"]["tests"], ids=lambda s: f"b{s['b']}-{s['s_k']}")
def test_gpu_mode_shapes_and_their_two_wrong_answers(shape: dict[str, int], device: str) -> None:
    """Scaled down by 32 (GPU: not at all); the published bar lets both wrong answers pass."""
    gpu = device == "cuda"
    batch, kv_len = (shape["b"], shape["s_k"]) if gpu else (max(2, shape["b"] // 32), shape["s_k"] // 32)
    keys = {"dtype": "bf16" if gpu else "fp16", "page_size": 1, "batch": batch, "kv_len": kv_len}
    p = TUNABLE.make_problem(workload(**keys), device, shape["seed"])
    assert p.extra["softmax_scale"] == pytest.approx(1 / 24)
    reference = TUNABLE.reference(p)
    launch = TUNABLE.launch(p, {**SMALL, "num_splits": 1 if batch > 2 else 2})
    launch.run()
    assert TUNABLE.compare(launch.outputs, reference, p).reason == ""
    for out in (torch.zeros_like(launch.outputs["out"]), p.inputs["q"][..., :512] / 24):
        assert not TUNABLE.compare({"out": out, "lse": launch.outputs["lse"]}, reference, p).ok


@pytest.mark.parametrize("length", [33, 4096])
def test_plausible_wrong_outputs_fail_by_the_output_alone(length: int, device: str) -> None:
    p = _problem(workload(), [length, 64], device, 0)
    reference = TUNABLE.reference(p)
    right = {"out": reference["out"].half(), "lse": reference["lse"].float()}
    assert TUNABLE.compare(right, reference, p).ok
    pages = p.inputs["block_table"][0, : -(-length // 64)].long()
    mean_of_v = p.inputs["kv_cache"][pages].flatten(0, 2)[:length, :512].double().mean(0)
    one_column = right["out"].clone()
    one_column[0, 0, 3, 17] += 0.1 * right["out"][0].float().square().mean().sqrt()
    wrong = {
        "zeros": torch.zeros_like(right["out"]),
        "the mean of V": mean_of_v.half().expand_as(right["out"]),
        "NaN": right["out"] * float("nan"),
        "the other request": right["out"].flip(0),
        "the next head": right["out"].roll(1, 2),
        "one element": one_column,
    }
    for name, out in wrong.items():
        assert not TUNABLE.compare({**right, "out": out}, reference, p).ok, name


def test_lse_is_judged(device: str) -> None:
    p = _problem(workload(), [40, 0], device, 0)
    reference = TUNABLE.reference(p)
    right = {"out": reference["out"].half(), "lse": reference["lse"].float()}
    assert TUNABLE.compare(right, reference, p).ok
    for lse in (right["lse"] * 1.4427, right["lse"] * float("nan"), -right["lse"], right["lse"].nan_to_num(neginf=0.0)):
        assert not TUNABLE.compare({**right, "lse": lse}, reference, p).ok
    nonzero = right["out"].clone()
    nonzero[1, 0, 0, 0] = 1e-7
    assert not TUNABLE.compare({**right, "out": nonzero}, reference, p).ok


@pytest.mark.parametrize(
    "keys", [{"heads": 2}, {"s_q": 2, "causal": True, "heads": 2}, {"h_kv": 2, "page_size": 5, "heads": 2}]
)
def test_edge_problems_pass(keys: dict[str, Any], device: str) -> None:
    for label, p in TUNABLE.edge_problems(workload(**keys), device):
        if device == "cpu" and max(p.extra["lengths"]) > 1000 and "s_q" in keys:
            continue  # the interpreter runs the long one once
        launch = TUNABLE.launch(p, SMALL)
        launch.run()
        assert TUNABLE.compare(launch.outputs, TUNABLE.reference(p), p).reason == "", label


def test_workloads_have_every_key_in_order() -> None:
    complete = TUNABLE.complete_workload({"kv_len": 100, "heads": 128})
    assert list(complete) == [*TUNABLE.exact_keys, *TUNABLE.scaled_keys, *TUNABLE.input_keys]
    assert complete["kv_dtype"] == "bf16"
    assert TUNABLE.complete_workload(complete) == complete


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"head": 3}, "no workload key 'head'"),
        ({"dtype": "fp32"}, "dtype=fp32: expected one of bf16, fp16"),
        ({"kv_dtype": "fp8_e4m3"}, "not supported yet"),
        ({"kv_dtype": "fp16"}, "same as dtype"),
        ({"heads": 129}, "heads=129: expected a whole number from 1 to 128"),
        ({"heads": 16, "h_kv": 3}, "multiple of h_kv"),
        ({"s_q": 17}, "s_q=17"),
        ({"page_size": 0}, "page_size=0"),
        ({"batch": 1.5}, "batch=1.5"),
        ({"causal": "maybe"}, "causal=maybe"),
        ({"lengths": "random"}, "lengths=random: no such class and no such file, expected equal, spread or a file"),
    ],
)
def test_bad_workloads_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TUNABLE.complete_workload(given)


def test_meta_problems_have_the_strides_of_real_ones() -> None:
    w = workload(batch=3, kv_len=100, s_q=2, heads=4, lengths="spread")
    real, meta = TUNABLE.make_problem(w, "cpu", 5), TUNABLE.make_problem(w, "meta", 5)
    assert real.extra == meta.extra
    for name, tensor in real.inputs.items():
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (
            meta.inputs[name].shape,
            meta.inputs[name].stride(),
            meta.inputs[name].dtype,
        )
    for mine, theirs in zip(TUNABLE.launch(real, SMALL).calls, TUNABLE.launch(meta, SMALL).calls, strict=True):
        assert (mine.grid, mine.options) == (theirs.grid, theirs.options)


def test_lengths_are_drawn_from_the_seed() -> None:
    w = workload(batch=400, kv_len=4096, s_q=4, lengths="spread")
    lengths = draw_lengths(w, 1)
    assert lengths == draw_lengths(w, 1) != draw_lengths(w, 2)
    assert min(lengths) >= 4
    assert 3800 < sum(lengths) / 400 < 4400
    assert draw_lengths(workload(batch=3, kv_len=7), 0) == [7, 7, 7]


def test_what_must_not_be_read_is_poison() -> None:
    p = _problem(workload(page_size=8), [10, 0, 8], "cpu", 0)
    table = p.inputs["block_table"]
    assert (table >= 2147480000).sum(1).tolist() == [1, 3, 2]
    poisoned = (
        p.inputs["kv_cache"].isnan().flatten(1).all(1).sum() + p.inputs["kv_cache"].isnan().flatten(1).any(1).sum()
    )
    assert poisoned == 3 + 3 + 1  # three pages that no request owns, and the tail of one


@pytest.mark.parametrize(("length", "s_q", "causal"), [*itertools.product([0, 1, 3, 10], [1, 2, 8], [False, True])])
def test_visible_keys_by_counting(length: int, s_q: int, causal: bool) -> None:
    counted = sum(key < (length - s_q + 1 + i if causal else length) for i in range(s_q) for key in range(length))
    assert visible_keys(length, s_q, causal) == counted


def test_cost_of_the_usual_shapes() -> None:
    cost = TUNABLE.cost(TUNABLE.complete_workload({"heads": 128, "batch": 128, "kv_len": 4096}))
    assert cost.flops == 128 * 128 * 2 * 4096 * (576 + 512)
    assert cost.bytes_read == 2 * 576 * 128 * (4096 + 128) + 4 * (128 * 64 + 128)
    assert cost.bytes_written == 128 * 128 * (2 * 512 + 4)
    assert cost.compute == "bf16"
    assert TUNABLE.cost(workload(lengths="spread"), seed=1) != TUNABLE.cost(workload(lengths="spread"), seed=2)


def test_validity_says_why() -> None:
    w = workload(heads=128)
    good = Config(64, 64, 1, 8, 2)
    assert is_valid(good, w, H200) is None
    for change, reason in {
        ("BLOCK_N", 128): "shared memory: needs 385024 B, device has 232448 B",
        ("BLOCK_H", 8): "BLOCK_H 8: must be a power of two, at least 16",
        ("num_warps", 6): "num_warps 6: must be one of",
        ("num_stages", 0): "must be at least 1",
        ("num_splits", 5000): "scratch: num_splits 5000 needs",
    }.items():
        said = TUNABLE.is_valid("decode", {**good.to_dict(), change[0]: change[1]}, w, H200)
        assert said is not None
        assert reason in said
    assert "integers" in str(TUNABLE.is_valid("decode", {"BLOCK_H": 16}, w, H200))


def test_default_config_on_an_h200() -> None:
    def default(portable: bool = True, **keys: Any) -> tuple[Any, ...]:
        return tuple(default_config(TUNABLE.complete_workload(keys), H200, portable).to_dict().values())

    assert default(heads=128, batch=128, kv_len=4096) == (64, 64, 1, 8, 2)
    assert default(False, heads=128, batch=128, kv_len=4096) == (64, 64, 1, 4, 2, "hopper", 4)
    assert default(False, heads=128, batch=1, kv_len=2048)[-1] != 4  # too little for all groups
    assert default(False, heads=16, batch=128, kv_len=4096) == (16, 64, 1, 8, 3)
    assert default(False, heads=16, batch=128, kv_len=4096, lengths="spread")[5:] == ("hopper", 4)
    assert default(heads=16, batch=128, kv_len=4096) == (16, 64, 1, 8, 3)
    assert 48 <= default(heads=16, batch=1, kv_len=32768)[2] <= 128
    assert default(heads=16, batch=1, kv_len=1)[2] == 1
    assert default(heads=16, s_q=4)[0] == 64


@pytest.mark.parametrize("shared", [65536, 101376, 166912, 232448])
@pytest.mark.parametrize("heads", [1, 16, 24, 128])
def test_default_config_is_valid_on_small_devices(shared: int, heads: int) -> None:
    device = Device("a GPU", "sm_80", 40, shared, 1 << 22, 1 << 33)
    for batch, kv_len, page_size in itertools.product([1, 300], [1, 100, 1 << 20], [1, 64]):
        w = workload(heads=heads, batch=batch, kv_len=kv_len, page_size=page_size)
        assert is_valid(Config.from_dict(TUNABLE.default_config(w, device)), w, device) is None
