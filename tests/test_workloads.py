"""Presets, parallelism, ladders and `--workload`: the workloads that a search gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kerneltune import workloads
from kerneltune.errors import UserError
from kerneltune.kernels.table_format import KEYS
from kerneltune.registry import load_tunable
from kerneltune.space import load_space
from kerneltune.workloads import (
    format_workload,
    ladder_workloads,
    model_workload,
    models,
    parse_workload,
    served_note,
)

CASES = json.loads((Path(__file__).parent / "data" / "moe_cases.json").read_text())


@pytest.mark.parametrize(
    ("model", "tp", "heads"),
    [
        ("deepseek-v3", 8, 16),
        ("deepseek-r1", 1, 128),
        ("DeepSeek-V2", 4, 32),
        ("deepseek-v2-lite", 1, 16),
        ("kimi-k2", 8, 8),
    ],
)
def test_mla_heads_are_divided(model: str, tp: int, heads: int) -> None:
    assert model_workload("mla-decode", model, tp) == {"heads": heads, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


def test_moe_width_and_experts_are_divided() -> None:
    sizes = model_workload("moe", "mixtral-8x7b", tp=2, ep=4)
    assert sizes == {"E": 2, "global_E": 8, "N": 7168, "K": 4096, "top_k": 2}


@pytest.mark.parametrize(
    ("kernel", "model", "tp", "ep", "says"),
    [
        ("moe", "mixtral-8x7b", 3, 1, "--tp 3 does not divide N = 14336 of mixtral-8x7b"),
        ("moe", "olmoe-1b-7b", 1, 7, "--ep 7 does not divide the 64 experts of olmoe-1b-7b"),
        ("mla-decode", "deepseek-v3", 5, 1, "--tp 5 does not divide the 128 heads of deepseek-v3"),
        ("moe", "olmoe-1b-7b", 0, 1, "--tp: expected a whole number from 1, got 0"),
        (
            "mla-decode",
            "mixtral-8x7b",
            1,
            1,
            "mixtral-8x7b has no multi-head latent attention; models with it: deepseek",
        ),
        ("moe", "deepseek-v4", 1, 1, "unknown model 'deepseek-v4': did you mean 'deepseek-v"),
        ("moe", "llama", 1, 1, "unknown model 'llama': expected one of deepseek-v3, deepseek-r1, "),
    ],
)
def test_what_cannot_be_is_said_in_one_line(kernel: str, model: str, tp: int, ep: int, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        model_workload(kernel, model, tp, ep)
    assert "\n" not in str(caught.value)


def test_fp8_models_are_said_to_run_in_bf16() -> None:
    assert served_note("mla-decode", "deepseek-v3") is None
    assert served_note("moe", "mixtral-8x7b") is None
    for model in ("deepseek-v3", "deepseek-r1", None):
        assert "runs in bf16: fp8 is not supported yet" in str(served_note("moe", model))


def test_presets_have_the_published_sizes() -> None:
    assert set(models()) >= {"deepseek-v3", "deepseek-v2", "deepseek-v2-lite", "kimi-k2", "qwen3-235b-a22b"}
    assert set(models()) >= {"qwen3-30b-a3b", "mixtral-8x7b", "olmoe-1b-7b"}
    published = CASES["models"]
    for name, model in models().items():
        assert model.moe is not None
        assert {key: published[name][key] for key in ("E", "N", "K", "top_k")} == {
            "E": model.moe.E,
            "N": model.moe.N,
            "K": model.moe.K,
            "top_k": model.moe.top_k,
        }


def test_presets_have_the_published_heads() -> None:
    published = json.loads((Path(__file__).parent / "data" / "mla_decode_cases.json").read_text())["models"]
    found = {
        name: {"heads": mla.heads, "kv_lora_rank": mla.kv_lora_rank, "qk_rope_head_dim": mla.qk_rope_head_dim}
        for name, model in models().items()
        if (mla := model.mla) is not None
    }
    assert {name: sizes for name, sizes in found.items() if name in published} == published


def test_a_fault_in_the_presets_names_file_and_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models.toml").write_text("[toy]\nmoe = { E = 8, N = 1, K = 1, topk = 1 }\n")
    monkeypatch.setattr(workloads, "SHIPPED", tmp_path)
    models.cache_clear()
    try:
        with pytest.raises(UserError, match=r"models.toml: toy: .*topk"):
            models()
    finally:
        models.cache_clear()


def test_named_keys_replace_the_base_and_types_are_read() -> None:
    base = {"batch": 1, "heads": 16}
    given = parse_workload("batch=8, kv_len=4096,causal=false,dtype=fp16", base)
    assert given == {"batch": 8, "heads": 16, "kv_len": 4096, "causal": False, "dtype": "fp16"}
    assert base == {"batch": 1, "heads": 16}


@pytest.mark.parametrize("text", ["", "batch", "batch=", "=8", "batch=8,", "batch=8,batch=9", "batch 8"])
def test_malformed_workloads_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--workload"):
        parse_workload(text, {})


def test_standard_ladders() -> None:
    mla = ladder_workloads("mla-decode", {"heads": 16}, "standard", load_space("mla-decode"))
    assert len(mla) == 11
    assert all(step["batch"] * step["kv_len"] <= 2**20 for step in mla)
    assert all(step["heads"] == 16 and tuple(step) for step in mla)
    moe = ladder_workloads("moe", {"E": 8, "global_E": 8, "top_k": 2}, "standard", load_space("moe"))
    assert [step["tokens"] for step in moe] == [1, 8, 64, 256, 1024, 4096]
    assert [step["tokens"] for step in load_space("moe").ladder("full")] == CASES["token_ladder"]
    full = load_space("mla-decode").ladder("full")
    assert len(full) == 57
    assert all(step in full for step in load_space("mla-decode").ladder("standard"))


@pytest.mark.parametrize("kernel", list(KEYS))
def test_table_keys_are_the_kernels(kernel: str) -> None:
    tunable: Any = load_tunable(kernel)
    keys = KEYS[kernel]
    assert set(keys.exact) == set(tunable.exact_keys)
    assert keys.scaled == tuple(tunable.scaled_keys)
    assert (keys.input,) == tuple(tunable.input_keys)
    complete = tunable.complete_workload({})
    assert set(complete) == set(keys.all)
    assert complete[keys.input] == keys.usual_input


@pytest.mark.parametrize(
    ("kernel", "given", "text"),
    [
        ("mla-decode", {"batch": 8, "kv_len": 4096, "heads": 16}, "batch=8 kv_len=4096 heads=16 bf16"),
        ("mla-decode", {"batch": 1, "kv_len": 64, "heads": 8, "s_q": 2, "dtype": "fp16"}, "heads=8 s_q=2 fp16"),
        ("moe", {"tokens": 64}, "tokens=64 E=256 N=256 K=7168 top_k=8 bf16"),
        ("moe", {"tokens": 64, "E": 32, "global_E": 256, "routing": "zipf"}, "top_k=8 global_E=256 routing=zipf bf16"),
    ],
)
def test_text_shows_what_is_not_as_usual(kernel: str, given: dict[str, Any], text: str) -> None:
    complete = load_tunable(kernel).complete_workload(given)
    assert format_workload(kernel, complete).endswith(text)
