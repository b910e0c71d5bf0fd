"""Calls by plan on a GPU: right, captured, never waiting, apart from each other, and cheap."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_launch_plan import SPLITS, mla_inputs, moe_inputs

from kerneltune.kernels import launch_plan, tables
from kerneltune.kernels.mla_decode import mla_decode
from kerneltune.kernels.mla_decode import op as mla_op
from kerneltune.kernels.moe import fused_moe
from kerneltune.kernels.moe import op as moe_op

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*no tuned config")]
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "launch_cost.py"


@pytest.fixture
def plans() -> Iterator[dict[Any, Any]]:
    tables.forget()
    yield mla_op._plans
    tables.forget()


def test_the_second_call_goes_by_the_plan_with_its_own_tensors(
    plans: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = mla_inputs("cuda", batch=3, kv_len=512), mla_inputs("cuda", batch=3, kv_len=512)
    second[0].normal_()
    second[1].copy_(torch.randn_like(second[1]))
    second[2].copy_(first[2])
    wanted = mla_decode(*second, softmax_scale=0.1, config=SPLITS)
    plans.clear()
    mla_decode(*first, softmax_scale=0.1, config=SPLITS)
    assert len(plans) == 1
    launched: list[bool] = []
    original = launch_plan.Plan.launch

    def spy(*arguments: Any) -> bool:
        launched.append(original(*arguments))
        return launched[-1]

    monkeypatch.setattr(launch_plan.Plan, "launch", spy)
    got = mla_decode(*second, softmax_scale=0.1, config=SPLITS)
    assert launched == [True]
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)
    a, b = moe_inputs("cuda"), moe_inputs("cuda")
    b[0].normal_()
    b[4].copy_(torch.flip(b[4], (0,)))
    wanted = fused_moe(*b)
    moe_op._plans.clear()
    fused_moe(*a)
    out = torch.empty_like(b[0])
    assert torch.equal(fused_moe(*b), wanted)
    assert torch.equal(fused_moe(*b, out=out), wanted)
    assert torch.equal(fused_moe(*b, out=out.fill_(7)), wanted)
    assert all(launched)


def test_addresses_of_another_alignment_go_triton_s_own_way(plans: dict[Any, Any]) -> None:
    q, kv, table, lengths = mla_inputs("cuda")
    wanted, _ = mla_decode(q, kv, table, lengths, softmax_scale=0.1)
    moved = torch.empty(kv.numel() + 4, dtype=kv.dtype, device="cuda")[4:].view(kv.shape).copy_(kv)  # 8 bytes off
    for _ in range(2):
        got, _ = mla_decode(q, moved, table, lengths, softmax_scale=0.1)
        torch.testing.assert_close(got, wanted)
    plans.clear()
    mla_decode(q, moved, table, lengths, softmax_scale=0.1)
    assert not plans  # and is no plan for aligned ones


def test_one_tensor_in_two_roles_makes_no_plan(plans: dict[Any, Any]) -> None:
    hidden, w1, w2, weights, ids = moe_inputs("cuda")
    wanted = fused_moe(hidden, w1, w2, weights, ids)
    moe_op._plans.clear()
    fused_moe(hidden.clone(), w1, w2, weights, ids, out=(same := hidden.clone()))
    moe_op._plans.clear()
    fused_moe(same, w1, w2, weights, ids, out=same)
    assert not moe_op._plans
    assert torch.equal(fused_moe(hidden, w1, w2, weights, ids, out=torch.empty_like(hidden)), wanted)


def test_a_graph_captures_without_compiling_and_follows_new_lengths(plans: dict[Any, Any]) -> None:
    import triton

    q, kv, table, lengths = mla_inputs("cuda", kv_len=512)
    moe = moe_inputs("cuda", tokens=40)
    mla_decode(q, kv, table, lengths, softmax_scale=0.1, config=SPLITS)
    fused_moe(*moe)
    compiled: list[Any] = []
    triton.knobs.runtime.jit_cache_hook = lambda **facts: bool(compiled.append(facts))  # type: ignore[func-returns-value]
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = mla_decode(q, kv, table, lengths, softmax_scale=0.1, config=SPLITS)
            mixed = fused_moe(*moe)
    finally:
        triton.knobs.runtime.jit_cache_hook = None
    assert not compiled
    lengths.copy_(torch.tensor([0, 33], dtype=torch.int32))
    moe[4].copy_(torch.flip(moe[4], (0,)))
    graph.replay()
    torch.cuda.synchronize()
    wanted_out, wanted_lse = mla_decode(q, kv, table, lengths, softmax_scale=0.1, config=SPLITS)
    assert torch.equal(out, wanted_out)
    assert torch.equal(lse, wanted_lse)
    assert torch.equal(mixed, fused_moe(*moe))


def test_calls_wait_for_nothing_and_allocate_outputs_and_one_workspace(plans: dict[Any, Any]) -> None:
    mla, moe = mla_inputs("cuda", kv_len=512), moe_inputs("cuda", tokens=40)

    def count(call: Any) -> int:
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        kept = call()
        assert kept is not None
        return int(torch.cuda.memory_stats()["allocation.all.allocated"] - before)

    for turn in range(2):
        torch.cuda.set_sync_debug_mode("error")
        try:
            counts = [
                count(lambda: mla_decode(*mla, softmax_scale=0.1, config=SPLITS)),
                count(lambda: mla_decode(*mla, softmax_scale=0.1, config=SPLITS | {"num_splits": 1})),
                count(lambda: fused_moe(*moe)),
            ]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if turn:
            assert counts == [3, 2, 2]


@pytest.mark.parametrize("where", ["streams", "threads"])
def test_overlapping_calls_never_share_a_workspace(plans: dict[Any, Any], where: str) -> None:
    cases = [mla_inputs("cuda", batch=8, kv_len=2048) for _ in range(4)]
    for number, case in enumerate(cases):
        torch.manual_seed(number)
        case[0].normal_()
    config = SPLITS | {"num_splits": 16}
    wanted = [mla_decode(*case, softmax_scale=0.1, config=config)[0] for case in cases]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()), torch.inference_mode():
            outs = [mla_decode(*cases[number], softmax_scale=0.1, config=config)[0] for _ in range(50)]
            torch.cuda.current_stream().synchronize()
            wrong.extend(number for out in outs if not torch.equal(out, wanted[number]))

    if where == "threads":
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        streams = [torch.cuda.Stream() for _ in cases]
        outs: list[list[torch.Tensor]] = [[] for _ in cases]
        for _ in range(50):
            for number, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    outs[number].append(mla_decode(*cases[number], softmax_scale=0.1, config=config)[0])
        torch.cuda.synchronize()
        wrong = [n for n, mine in enumerate(outs) for out in mine if not torch.equal(out, wanted[n])]
    assert not wrong


def test_a_profiler_sees_every_launch(plans: dict[Any, Any]) -> None:
    import triton

    inputs = mla_inputs("cuda")
    mla_decode(*inputs, softmax_scale=0.1, config=SPLITS)
    seen: list[str] = []

    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        mla_decode(*inputs, softmax_scale=0.1, config=SPLITS)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert seen == ["split_kv_kernel", "combine_kernel"]


def test_the_host_time_is_near_a_bare_launch_s(plans: dict[Any, Any]) -> None:
    """At most 1.25 times a bare Triton launch, and 1 us for the lookup; docs/tables.md has the figures."""
    spec = importlib.util.spec_from_file_location("launch_cost", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    launch_cost = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(launch_cost)
    for kernel, sizes in launch_cost.CASES.values():
        row = launch_cost.measure(kernel, sizes)
        assert row["ratio"] <= 1.25, row
        assert row["lookup"] <= 1.0, row
