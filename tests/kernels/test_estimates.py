"""Estimates and edge sizes hold for every model, shape and device that the tool names, not only for those measured."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kerneltune.device import TARGETS
from kerneltune.errors import UserError
from kerneltune.kernels.tunable import part_params
from kerneltune.registry import KERNELS, load_tunable
from kerneltune.roofline.model import Ceilings, place
from kerneltune.space import load_space
from kerneltune.workloads import ladder_workloads, model_workload, models

CEILINGS = Ceilings("NVIDIA H200", "2026-12-01", 4542.0, 4283.0, {"bf16": 785.0, "fp16": 755.0}, 2.9)
POINTS = 40  # of a space, evenly spaced, for each workload


def bases(kernel: str) -> list[dict[str, Any]]:
    """The sizes of every model, whole and on 8 GPUs."""
    found = []
    for model in models():
        for tp, ep in ((1, 1), (8, 1), *([(1, 8)] if kernel == "moe" else [])):
            try:
                found.append(model_workload(kernel, model, tp, ep))
            except UserError as error:
                assert "has no multi-head latent attention" in str(error)  # noqa: PT017 - others are faults of a preset
    return found


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_estimates_are_finite_positive_and_tell_configs_apart(kernel: str, arch: str) -> None:
    tunable, space, device = load_tunable(kernel), load_space(kernel), TARGETS[arch]
    wholes = bases(kernel)
    assert len(wholes) == {"mla-decode": 8, "moe": 24}[kernel]
    for number, base in enumerate(wholes):
        ladder = ladder_workloads(kernel, base, "standard", space)
        for workload in ladder:
            default = tunable.default_config(workload, device)
            for part in tunable.parts:
                params = default if len(tunable.parts) == 1 else default[part]
                time_us = tunable.estimate(part, params, workload, device, CEILINGS.to_dict())
                assert math.isfinite(time_us)
                assert time_us > 0
        workload = ladder[number % len(ladder)]
        for part in tunable.parts:
            points = space.points(tunable, part, workload, device)
            some = points[:: max(len(points) // POINTS, 1)]
            times = [tunable.estimate(part, each, workload, device, CEILINGS.to_dict()) for each in some]
            assert all(math.isfinite(time) and time > 0 for time in times)
            assert len(set(times)) > len(some) // 4
            cost = tunable.cost(workload, part)
            if cost.flops:  # the drawn routing may leave an expert-parallel rank without work
                floor_us = place(cost, 1.0, CEILINGS, 0.0).floor_us
                assert 0.3 * floor_us < min(times) < 30 * floor_us + 40


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_model_has_edge_sizes_on_which_its_default_is_valid(kernel: str) -> None:
    tunable = load_tunable(kernel)
    for base in bases(kernel):
        workload = tunable.complete_workload(base)
        edges = dict(tunable.edge_workloads(workload))
        assert edges
        for edge in edges.values():
            assert tunable.complete_workload(edge) == edge
            assert tunable.cost(edge).flops > 0
        for device in TARGETS.values():
            default = tunable.default_config(workload, device)
            valid = [
                all(
                    tunable.is_valid(part, part_params(tunable, default, part), edge, device) is None
                    for part in tunable.parts
                )
                for edge in edges.values()
            ]
            # A variant made for some sizes alone has fewer edges; all others have to run on each.
            assert any(valid) if "variant" in default else all(valid)


def test_a_rank_without_work_has_a_place_under_the_roof() -> None:
    """One token may choose no expert of this rank: nothing is computed, nothing is read."""
    tunable = load_tunable("moe")
    workload = tunable.complete_workload({**model_workload("moe", "mixtral-8x7b", 1, 8), "tokens": 1})
    cost = tunable.cost(workload, "gemm1")
    assert (cost.flops, cost.bytes) == (0, 0)
    placed = place(cost, 4.0, CEILINGS)
    assert (placed.roofline, placed.intensity, placed.suspect) == (0.0, 0.0, False)
