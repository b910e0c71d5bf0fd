"""The gate lets right kernels pass and each kind of wrong one fail, on the interpreter or the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy import TOY, TWO

from kerneltune.kernels.tunable import Launch
from kerneltune.measure import gate

WORKLOAD = TOY.complete_workload({})


def config(defect: str = "none", **other: Any) -> dict[str, Any]:
    return {"BLOCK_K": 32, "num_warps": 4, "defect": defect} | other


@pytest.fixture
def cases(device: str) -> list[gate.Case]:
    return gate.make_cases(TOY, WORKLOAD, device, seed=3)


def test_a_right_kernel_passes_with_its_worst_error(cases: list[gate.Case]) -> None:
    verdict = gate.check(TOY, cases, config())
    assert verdict.ok
    assert 0 < verdict.error < 1e-3
    assert [case.label for case in cases] == ["", "rows=1 k=1", "rows=3 k=95"]


def test_an_output_nobody_wrote_fails(cases: list[gate.Case]) -> None:
    gate.check(TOY, cases, config())  # leaves a right result in memory that the next launch may be given
    verdict = gate.check(TOY, cases, config("untouched"))
    assert not verdict.ok
    assert verdict.reason.startswith("row 7: ")


def test_what_is_right_for_whole_blocks_only_is_caught_by_an_edge(cases: list[gate.Case]) -> None:
    assert WORKLOAD["k"] % 32 == 0  # so the workload itself does not show it
    assert gate.check(TOY, cases[:1], config("no_tail")).ok
    verdict = gate.check(TOY, cases, config("no_tail"))
    assert not verdict.ok
    assert verdict.reason.startswith("rows=1 k=1: row 0: ")


def test_a_tail_that_is_skipped_fails(device: str) -> None:
    cases = gate.make_cases(TOY, TOY.complete_workload({"k": 511}), device)
    assert not gate.check(TOY, cases[:1], config("no_tail", BLOCK_K=64)).ok


def test_a_changed_input_is_named(cases: list[gate.Case]) -> None:
    with pytest.raises(gate.MemoryChanged, match="the launch changed input 'x'"):
        gate.check(TOY, cases, config("writes_input"))


def test_memory_of_another_case_counts(cases: list[gate.Case]) -> None:
    cases[2].reference["out"][1] += 1
    with pytest.raises(gate.MemoryChanged, match=r"rows=3 k=95: .*the reference 'out'"):
        gate.check(TOY, cases, config())


def test_bytes_outside_a_view_are_watched(device: str) -> None:
    whole = torch.zeros(64, dtype=torch.float16, device=device)
    problem = TOY.make_problem(WORKLOAD, device)
    problem.inputs["w"] = whole[8:].copy_(torch.ones(56))
    problem.inputs["x"] = problem.inputs["x"][:, :56].contiguous()
    case = gate.make_case(TOY, problem)
    gate.require_unchanged([case])
    whole[3] = 1.0
    with pytest.raises(gate.MemoryChanged, match="input 'w'"):
        gate.require_unchanged([case])


def test_the_parts_of_an_operation_are_judged_as_a_whole(device: str) -> None:
    cases = gate.make_cases(TWO, WORKLOAD, device)
    assert gate.check(TWO, cases, {"first": config(), "second": config()}).ok
    assert not gate.check(TWO, cases, {"first": config("no_tail", BLOCK_K=64), "second": config()}).ok


def test_determinism_is_to_the_bit(device: str) -> None:
    workload = WORKLOAD | {"dtype": "fp32"}
    problem = TOY.make_problem(workload, device)
    assert gate.deterministic(TOY.launch(problem, config()), 10) == ""
    assert gate.check(TOY, [gate.make_case(TOY, problem)], config("flaky")).ok  # right, but not the same twice
    assert gate.deterministic(TOY.launch(problem, config("flaky")), 10).startswith("out differs between two launches")


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.bool),
    ],
)
def test_poison_leaves_no_element_as_it_was(dtype: torch.dtype, device: str) -> None:
    tensor = torch.zeros(5, 3, device=device).to(dtype)
    gate.poison(tensor)
    values = tensor.to(torch.float32)
    if dtype.is_floating_point:
        assert values.isnan().all()
    else:
        assert (values != 0).all()


def test_poison_reaches_scratch_and_views(device: str) -> None:
    base = torch.zeros(4, 6, device=device)
    launch = Launch([], {"out": base[:, :3]}, {"scratch": torch.zeros(2, dtype=torch.int32, device=device)})
    gate.run_poisoned(launch)
    assert base[:, :3].isnan().all()
    assert (base[:, 3:] == 0).all()
    assert (launch.scratch["scratch"] == gate.INT_SENTINEL).all()
