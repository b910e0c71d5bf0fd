"""Every sampler asks distinct feasible points, repeats itself from its seed, and the default finds the optimum."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from proto import proto_recordings

from kerneltune.errors import UserError
from kerneltune.tuning.samplers import SAMPLERS, PointStudy

POINTS: list[dict[str, Any]] = [
    {"BLOCK": block, "warps": warps, "variant": variant}
    for block in (16, 32, 64, 128)
    for warps in (4, 8)
    for variant in ("plain", "tma")
    if not (block == 128 and warps == 4)
]


def asked(sampler: str, seed: int, count: int = len(POINTS)) -> list[int]:
    study = PointStudy(POINTS, sampler, seed)
    order = []
    for _ in range(count):
        index = study.ask()
        assert index is not None
        order.append(index)
        study.tell(index, 100.0 + POINTS[index]["BLOCK"] if index % 5 else None)
    return order


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_each_point_is_asked_exactly_once_then_none(sampler: str) -> None:
    study = PointStudy(POINTS, sampler, 3)
    order = []
    while (index := study.ask()) is not None:
        order.append(index)
        study.tell(index, 50.0 + index)
    assert sorted(order) == list(range(len(POINTS)))
    assert study.ask() is None


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_same_seed_asks_the_same(sampler: str) -> None:
    assert asked(sampler, 7) == asked(sampler, 7)


def test_the_same_seed_asks_the_same_in_another_process() -> None:
    code = (
        "import sys; sys.path[:0] = ['tests/tuning', '.']; from test_samplers import asked; print(asked('default', 5))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == str(asked("default", 5))


def test_another_seed_asks_in_another_order() -> None:
    assert asked("random", 1) != asked("random", 2)


def test_exhaustive_keeps_the_order_of_the_list() -> None:
    assert asked("exhaustive", 9) == list(range(len(POINTS)))


def test_warm_starts_come_first_and_unknown_ones_are_left_out() -> None:
    study = PointStudy(POINTS, "random", 0, [POINTS[5], {"BLOCK": 999, "warps": 4, "variant": "plain"}, POINTS[2]])
    assert [study.ask(), study.ask()] == [5, 2]


def test_a_space_of_one_point_works() -> None:
    study = PointStudy([{"BLOCK": 16}], "default", 0)
    assert study.ask() == 0
    study.tell(0, None)
    assert study.ask() is None


def test_an_unknown_sampler_is_refused() -> None:
    with pytest.raises(UserError, match="expected one of"):
        PointStudy(POINTS, "annealing")


@pytest.mark.parametrize("position", range(4))
def test_the_default_finds_a_config_within_three_percent_in_48_trials(position: int) -> None:
    recording = proto_recordings()[position]
    times = {i: t.time_us for i, t in enumerate(recording.trials)}
    optimum = min(t for t in times.values() if t)
    study = PointStudy([t.config for t in recording.trials], "default", 0)
    best = float("inf")
    for _ in range(48):
        index = study.ask()
        assert index is not None
        study.tell(index, times[index])
        best = min(best, times[index] or best)
    assert best <= optimum * 1.03
