"""The edge sizes on which finalists are vetted: what they vary, and that the defaults are right on them."""

from __future__ import annotations

from typing import Any

import pytest

from kerneltune.device import TARGETS
from kerneltune.kernels.source_hash import reached
from kerneltune.kernels.tunable import Scalar
from kerneltune.measure import gate
from kerneltune.registry import KERNELS, load_tunable

SMALL: dict[str, dict[str, Scalar]] = {
    "mla-decode": {"dtype": "fp16", "heads": 16, "batch": 2, "kv_len": 64, "kv_lora_rank": 32,
                   "qk_rope_head_dim": 16},
    "moe": {"dtype": "fp16", "E": 4, "N": 64, "K": 64, "top_k": 2, "tokens": 4},
}  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS)
def test_edges_are_whole_workloads_of_other_exact_keys_and_the_same_for_a_whole_ladder(kernel: str) -> None:
    tunable = load_tunable(kernel)
    workload = tunable.complete_workload(SMALL[kernel])
    edges = list(tunable.edge_workloads(workload))
    assert len(edges) == len(dict(edges)) == 2
    for _, edge in edges:
        assert tunable.complete_workload(edge) == edge
        assert any(edge[key] != workload[key] for key in tunable.exact_keys)
    for key in tunable.scaled_keys:
        assert list(tunable.edge_workloads({**workload, key: 999})) == edges


def test_edges_lie_off_every_tile() -> None:
    moe, mla = load_tunable("moe"), load_tunable("mla-decode")
    depths = [edge[key] for _, edge in moe.edge_workloads(moe.complete_workload({"K": 512})) for key in ("K", "N")]
    assert 511 in depths
    assert all(int(depth) % 16 for depth in depths)
    odd = dict(mla.edge_workloads(mla.complete_workload({})))
    assert {1, 7} == {edge["heads"] for edge in odd.values()}
    assert any(int(edge["page_size"]) % 16 and edge["causal"] and edge["s_q"] == 2 for edge in odd.values())


@pytest.mark.parametrize("device", [TARGETS["sm_90"], TARGETS["sm_120"]], ids=["sm_90", "sm_120"])
def test_the_tall_blocks_of_a_search_are_vetted_too(device: Any) -> None:
    """A rule about the rows of an expert must not exempt them."""
    tunable = load_tunable("moe")
    tall = {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 32, "GROUP_M": 1, "num_warps": 8, "num_stages": 2}
    for top_k in (1, 8):
        workload = tunable.complete_workload({"tokens": 4096, "top_k": top_k})
        for _, edge in tunable.edge_workloads(workload):
            for part in tunable.parts:
                assert tunable.is_valid(part, tall, edge, device) is None


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_defaults_are_right_on_their_edges(kernel: str, device: str) -> None:
    tunable = load_tunable(kernel)
    workload = tunable.complete_workload(SMALL[kernel])
    config = tunable.default_config(workload, TARGETS["sm_90"])
    for label, edge in tunable.edge_workloads(workload):
        small = {**edge, "tokens": 33, "E": 3, "global_E": 3, "top_k": 2} if kernel == "moe" else edge
        if device == "cuda":
            small = edge
        cases = [gate.make_case(tunable, tunable.make_problem(small, device), label)]
        verdict = gate.check(tunable, cases, config)
        assert verdict.ok, verdict.reason


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_that_claims_a_fixed_order_has_no_atomics(kernel: str) -> None:
    tunable = load_tunable(kernel)
    assert tunable.deterministic
    for roots in tunable.variants.values():
        code = reached(roots)
        assert any(product in text for text in code.values() for product in ("tl.dot", "warpgroup_mma"))
        assert not any(f"{module}.atomic" in text for text in code.values() for module in ("tl", "gl"))
