"""The surrogate: finds minima by measurement, starts from estimates, learns where they are wrong, carries them over."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kerneltune.tuning.surrogate import Surrogate, coordinates_of, transferred

POINTS: list[dict[str, Any]] = [
    {"BLOCK": block, "stages": stages, "warps": warps}
    for block in (16, 32, 64, 128, 256)
    for stages in (1, 2, 3, 4)
    for warps in (2, 4, 8)
]


def true_us(point: dict[str, Any]) -> float:
    return 20.0 * (1 + abs(math.log2(point["BLOCK"] / 64)) / 4) * (1 + abs(point["stages"] - 3) / 5) + point["warps"]


TIMES = [true_us(point) for point in POINTS]
OPTIMUM = min(TIMES)


def measurements_needed(estimates: list[float] | None, seed: int) -> int:
    surrogate = Surrogate(coordinates_of(POINTS), estimates, seed)
    told: dict[int, float] = {}
    is_open = np.ones(len(POINTS), bool)
    for count in range(1, len(POINTS) + 1):
        point = surrogate.propose(told, [], is_open)
        assert is_open[point]
        is_open[point] = False
        told[point] = math.log(TIMES[point])
        if TIMES[point] == OPTIMUM:
            return count
    raise AssertionError("the optimum was never proposed")


def test_coordinates_are_logarithms_in_0_to_1_and_constants_have_none() -> None:
    found = coordinates_of([{"a": 16, "b": "x", "c": 4}, {"a": 64, "b": "y", "c": 4}, {"a": 32, "b": "z", "c": 4}])
    assert found.shape == (3, 4)  # one for a, three for b
    assert found[:, 0].tolist() == pytest.approx([0.0, 1.0, 0.5])
    assert found[:, 1:].sum(axis=1).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("seed", range(4))
def test_without_estimates_the_optimum_of_60_points_is_found_in_20(seed: int) -> None:
    assert measurements_needed(None, seed) <= 20


@pytest.mark.parametrize("seed", range(4))
def test_good_estimates_start_at_the_optimum_and_a_wrong_scale_does_not_matter(seed: int) -> None:
    assert measurements_needed([3.7 * us for us in TIMES], seed) == 1


@pytest.mark.parametrize("seed", range(4))
def test_estimates_that_point_the_wrong_way_are_unlearnt(seed: int) -> None:
    wrong = [us * (3.0 if point["BLOCK"] == 64 else 1.0) for us, point in zip(TIMES, POINTS, strict=True)]
    assert 1 < measurements_needed(wrong, seed) <= 30


def test_the_chance_of_a_gain_falls_once_the_optimum_is_known() -> None:
    surrogate = Surrogate(coordinates_of(POINTS), list(TIMES), 0)
    order = np.argsort(TIMES)
    is_open = np.ones(len(POINTS), bool)
    worst = {int(order[-1]): math.log(TIMES[order[-1]])}
    is_open[order[-1]] = False
    assert surrogate.chance(worst, is_open, 0.01) > 0.9
    told = {int(point): math.log(TIMES[point]) for point in order[:12]}
    is_open[order[:12]] = False
    assert surrogate.chance(told, is_open, 0.01) < 0.05
    assert surrogate.chance(told, np.zeros(len(POINTS), bool), 0.01) == 0.0


def test_what_the_rest_takes_moves_the_choice() -> None:
    surrogate = Surrogate(coordinates_of(POINTS), list(TIMES), 0)
    best = int(np.argmin(TIMES))
    rest = np.array([0.0 if point["BLOCK"] == 256 else 1000.0 for point in POINTS])
    is_open = np.ones(len(POINTS), bool)
    first = surrogate.propose({}, [], is_open, rest)
    assert POINTS[first]["BLOCK"] == 256
    assert first != best
    is_open[first] = False
    second = surrogate.propose({first: math.log(TIMES[first])}, [], is_open, rest)
    assert POINTS[second]["BLOCK"] == 256


def test_a_neighbours_measurements_correct_estimates() -> None:
    """The estimate does not know that 8 warps are slow; the neighbour, twice as long, has seen it."""

    def with_surprise(us: float, point: dict[str, Any]) -> float:
        return us * (1.5 if point["warps"] == 8 else 1.0)

    there = [2 * us for us in TIMES]
    seen = {i: with_surprise(there[i], POINTS[i]) for i in range(0, len(POINTS), 3)} | {
        i: with_surprise(there[i], POINTS[i]) for i in range(1, len(POINTS), 3)
    }
    seen[2] = with_surprise(there[2], POINTS[2])
    corrected = transferred(POINTS, TIMES, POINTS, there, seen, trust=1.0)
    assert transferred(POINTS, TIMES, POINTS, there, seen, trust=0.0) == pytest.approx(TIMES)
    truth = [with_surprise(us, point) for us, point in zip(TIMES, POINTS, strict=True)]
    before = np.corrcoef(np.log(TIMES), np.log(truth))[0, 1]
    after = np.corrcoef(np.log(corrected), np.log(truth))[0, 1]
    assert after > max(before, 0.9)
