"""The public call: shapes of every kind against the float64 reference, conventions, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kerneltune.kernels import tables
from kerneltune.kernels.mla_decode import flash_mla_with_kvcache, get_mla_metadata, mla_decode, op
from kerneltune.kernels.mla_decode.config import HOPPER
from kerneltune.kernels.mla_decode.tunable import TUNABLE, _problem
from kerneltune.kernels.tunable import Problem

pytestmark = pytest.mark.filterwarnings("ignore:mla-decode. no tuned config")
SMALL = {"BLOCK_H": 16, "BLOCK_N": 16, "num_splits": 1, "num_warps": 4, "num_stages": 2}
SENTINEL = 12345.0


def problem(lengths: list[int], device: str, seed: int = 0, **keys: Any) -> Problem:
    """A float16 problem with these lengths, otherwise small."""
    workload = TUNABLE.complete_workload({"dtype": "fp16", "heads": 3, **keys})
    return _problem(workload, lengths, device, seed)


def call(p: Problem, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`mla_decode` on a problem."""
    inputs = p.inputs
    return mla_decode(
        *(inputs["q"], inputs["kv_cache"], inputs["block_table"], inputs["cache_seqlens"]),
        softmax_scale=p.extra["softmax_scale"],
        causal=bool(p.workload["causal"]),
        kv_lora_rank=int(p.workload["kv_lora_rank"]),
        **options,
    )


def verdict(p: Problem, config: dict[str, int] | None) -> str:
    """Run a problem through sentinel-filled outputs and NaN-filled scratch; "" or what is wrong."""
    launch = TUNABLE.launch(p, config or SMALL)
    for tensor in launch.outputs.values():
        tensor.fill_(SENTINEL)
    for tensor in launch.scratch.values():
        tensor.fill_(float("nan"))
    before = {name: tensor.clone() for name, tensor in p.inputs.items()}
    launch.run()
    for name, tensor in p.inputs.items():
        assert torch.equal(tensor.nan_to_num(SENTINEL), before[name].nan_to_num(SENTINEL)), f"{name} was written"
    return TUNABLE.compare(launch.outputs, TUNABLE.reference(p), p).reason


@pytest.mark.parametrize("page_size", [1, 7, 16, 64, 100, 128])
def test_page_sizes(page_size: int, device: str) -> None:
    assert verdict(problem([70, 0, 1, 33], device, page_size=page_size), SMALL) == ""


@pytest.mark.parametrize("s_q", [*range(1, 9), 11, 16])
def test_causal_with_every_s_q(s_q: int, device: str) -> None:
    p = problem([s_q - 1, s_q, 0, 1, 40], device, s_q=s_q, causal=True)
    assert verdict(p, {**SMALL, "num_splits": 1 + s_q % 2}) == ""


@pytest.mark.parametrize(("heads", "h_kv"), [(3, 1), (9, 3), (63, 1), (8, 8), (126, 2)])
def test_heads(heads: int, h_kv: int, device: str) -> None:
    assert verdict(problem([37, 20], device, heads=heads, h_kv=h_kv), {**SMALL, "BLOCK_H": 32}) == ""


@pytest.mark.parametrize(("rank", "rope"), [(128, 32), (512, 64), (96, 24), (64, 5), (256, 128), (1024, 64)])
def test_widths_need_not_be_powers_of_two(rank: int, rope: int, device: str) -> None:
    p = problem([37, 0, 5], device, kv_lora_rank=rank, qk_rope_head_dim=rope)
    assert verdict(p, {**SMALL, "num_splits": 2}) == ""


@pytest.mark.parametrize("num_splits", [2, 3, 5, 17, 70])
def test_more_splits_than_tiles_of_some_requests(num_splits: int, device: str) -> None:
    p = problem([300, 1, 0, 16, 65], device, heads=1, kv_lora_rank=64, qk_rope_head_dim=16)
    assert verdict(p, {**SMALL, "num_splits": num_splits}) == ""


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=3),
    page_size=st.integers(1, 128),
    s_q=st.integers(1, 8),
    group=st.integers(1, 5),
    h_kv=st.integers(1, 3),
    causal=st.booleans(),
    block_n=st.sampled_from([16, 32]),
    num_splits=st.integers(1, 4),
)
def test_any_shape(lengths: list[int], block_n: int, num_splits: int, group: int, h_kv: int, **keys: Any) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    p = problem(lengths, device, heads=group * h_kv, h_kv=h_kv, kv_lora_rank=32, qk_rope_head_dim=16, **keys)
    assert verdict(p, {**SMALL, "BLOCK_N": block_n, "num_splits": num_splits}) == ""


def test_lse_is_the_natural_logarithm(device: str) -> None:
    p = problem([1], device, heads=1)
    k = p.inputs["kv_cache"][int(p.inputs["block_table"][0, 0]), 0, 0].double()
    score = float(p.inputs["q"][0, 0, 0].double() @ k) * p.extra["softmax_scale"]
    out, lse = call(p, config=SMALL)
    assert lse.shape == (1, 1, 1)
    assert lse.dtype == torch.float32
    assert float(lse) == pytest.approx(score, abs=1e-5)
    torch.testing.assert_close(out[0, 0, 0], k[:512].half(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_empty_sequences(num_splits: int, device: str) -> None:
    p = problem([0, 2], device, s_q=3, causal=True)
    config = {**SMALL, "num_splits": num_splits}
    out, lse = call(p, config=config, out=torch.full((2, 3, 3, 512), SENTINEL, dtype=torch.float16, device=device))
    assert (out[0] == 0).all()
    assert (out[1, 0] == 0).all()  # 2 keys: the first of 3 queries sees none
    assert (lse[0] == float("-inf")).all()
    assert (lse[1, :, 0] == float("-inf")).all()
    assert lse[1, :, 1:].isfinite().all()


def test_flash_mla_has_plus_infinity_for_empty_sequences(device: str) -> None:
    p = problem([0, 5], device)
    metadata, splits = get_mla_metadata(p.inputs["cache_seqlens"], 3, 1, num_heads_q=3)
    tensors = (p.inputs["q"], p.inputs["kv_cache"], p.inputs["block_table"], p.inputs["cache_seqlens"])
    out, lse = flash_mla_with_kvcache(*tensors, 512, metadata, splits)
    assert (out[0] == 0).all()
    assert (lse[0] == float("inf")).all()
    want, want_lse = call(p, config=SMALL)
    torch.testing.assert_close(lse[1], want_lse[1])
    torch.testing.assert_close(out[1], want[1], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_out_is_written_where_it_lies(num_splits: int, device: str) -> None:
    p = problem([40, 0], device)
    wide = torch.full((2, 1, 3, 600), SENTINEL, dtype=torch.float16, device=device)
    out, _ = call(p, config={**SMALL, "num_splits": num_splits}, out=wide[..., 20:532])
    assert out.data_ptr() == wide[..., 20:532].data_ptr()
    expected = TUNABLE.reference(p)["out"].half()
    torch.testing.assert_close(wide[..., 20:532], expected, rtol=2e-3, atol=1e-3)
    assert (wide[..., :20] == SENTINEL).all()
    assert (wide[..., 532:] == SENTINEL).all()


def test_q_and_cache_may_have_any_strides(device: str) -> None:
    p = problem([40, 9], device, s_q=2, h_kv=3)
    want, want_lse = call(p, config=SMALL)
    q, kv = p.inputs["q"], p.inputs["kv_cache"]
    p.inputs["q"] = torch.cat([q, q], -1).transpose(1, 2).contiguous().transpose(1, 2)[..., :576]
    p.inputs["kv_cache"] = torch.cat([kv, kv], -1).transpose(1, 2).contiguous().transpose(1, 2)[..., :576]
    assert not p.inputs["q"].is_contiguous()
    got, lse = call(p, config=SMALL)
    assert torch.equal(got, want)
    assert torch.equal(lse, want_lse)


def test_an_empty_batch(device: str) -> None:
    p = problem([3], device)
    p.inputs = {name: x if name == "kv_cache" else x[:0] for name, x in p.inputs.items()}
    out, lse = call(p)
    assert out.shape == (0, 1, 3, 512)
    assert lse.shape == (0, 3, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": lambda x: x[0]}, r"q must be \[batch"),
        ({"q": lambda x: x.float()}, "torch.float32"),
        ({"kv_cache": lambda x: x.bfloat16()}, "torch.bfloat16"),
        ({"kv_cache": lambda x: x[..., :560]}, "560"),
        ({"q": lambda x: x.expand(-1, 17, -1, -1)}, "got 17, 3, 64"),
        ({"q": lambda x: x.repeat(1, 1, 43, 1)}, "got 1, 129, 64"),
        ({"kv_cache": lambda x: x.expand(-1, -1, 2, -1)}, "multiple of h_kv: got 3 and 2"),
        ({"kv_cache": lambda x: x.repeat(1, 3, 1, 1)}, "192"),
        ({"q": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)}, "last stride"),
        ({"block_table": lambda x: x.long()}, "int64"),
        ({"block_table": lambda x: x.repeat(2, 1)}, r"got \[4, 2\]"),
        ({"cache_seqlens": lambda x: x[:1]}, r"got \[1\]"),
    ],
)
def test_bad_tensors_are_refused(change: dict[str, Any], message: str, device: str) -> None:
    p = problem([40, 9], device)
    p.inputs |= {name: edit(p.inputs[name]) for name, edit in change.items()}
    with pytest.raises(ValueError, match=message):
        call(p, config=SMALL)


def test_bad_options_are_refused(device: str) -> None:
    p = problem([40, 9], device)
    tensors = (p.inputs["q"], p.inputs["kv_cache"], p.inputs["block_table"], p.inputs["cache_seqlens"])
    with pytest.raises(ValueError, match="out must be"):
        call(p, config=SMALL, out=torch.empty(2, 1, 3, 500, dtype=torch.float16, device=device))
    with pytest.raises(ValueError, match="BLOCK_H"):
        call(p, config={"BLOCK_H": 16})
    with pytest.raises(ValueError, match="BLOCK_N 48: must be a power of two"):
        call(p, config={**SMALL, "BLOCK_N": 48})
    with pytest.raises(ValueError, match="nan"):
        mla_decode(*tensors, softmax_scale=float("nan"))
    with pytest.raises(ValueError, match="above kv_lora_rank 600"):
        mla_decode(*tensors, softmax_scale=0.1, kv_lora_rank=600)
    with pytest.raises(ValueError, match="fp8"):
        flash_mla_with_kvcache(*tensors, 512, None, is_fp8_kvcache=True)
    with pytest.raises(ValueError, match="indices"):
        flash_mla_with_kvcache(*tensors, 512, None, indices=torch.zeros(1))
    with pytest.raises(ValueError, match="attn_sink"):
        flash_mla_with_kvcache(*tensors, 512, None, attn_sink=torch.zeros(3))
    with pytest.raises(ValueError, match="topk"):
        get_mla_metadata(p.inputs["cache_seqlens"], 3, 1, topk=64)


def test_a_table_config_that_cannot_run_is_a_miss(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kerneltune.kernels import tables

    asked: list[dict[str, Any]] = []

    def resolve(kernel: str, workload: dict[str, Any], device: Any, explicit: Any) -> dict[str, int]:
        asked.append(workload)
        return {**SMALL, "BLOCK_N": 17}

    tables.forget()
    monkeypatch.setattr(tables, "resolve", resolve)
    p = problem([40, 9], device)
    out, _ = call(p, max_kv_len=50)
    call(p, max_kv_len=50)
    tables.forget()
    torch.testing.assert_close(out, TUNABLE.reference(p)["out"].half(), rtol=2e-3, atol=1e-3)
    assert len(asked) == 1  # the second call took the remembered answer
    keys = TUNABLE.exact_keys + TUNABLE.scaled_keys
    assert asked[0] == {key: {**p.workload, "batch": 2, "kv_len": 50}[key] for key in keys}


def test_tensors_that_the_tables_variant_cannot_read_get_the_portable_default(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem([40, 9], device, s_q=2, heads=4)
    want = call(p, config=SMALL)
    monkeypatch.setattr(op, "_config_for", lambda *given: HOPPER)
    p.inputs["q"] = p.inputs["q"].transpose(1, 2).contiguous().transpose(1, 2)  # heads do not lie side by side
    tables.forget()
    with pytest.warns(UserWarning, match="cannot run here .*heads of q side by side.*the default is used"):
        got = call(p)
    torch.testing.assert_close(got[0], want[0], rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(got[1], want[1])
