"""A workload's study: parts in turns, each judged by what it takes together with the others."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kerneltune.tuning.samplers import SAMPLERS
from kerneltune.tuning.study import WorkloadStudy

SIZES = (16, 32, 64)
POINTS: dict[str, list[dict[str, Any]]] = {
    part: [{"BLOCK_M": m, "BLOCK_N": n} for m in SIZES for n in (32, 64, 128, 256)] for part in ("gemm1", "gemm2")
}
# Alone, gemm1 is fastest with 16 and gemm2 with 64; together 32 is best: 55 + 52 against 50 + 90 and 90 + 50.
BASE = {"gemm1": {16: 50.0, 32: 55.0, 64: 90.0}, "gemm2": {16: 90.0, 32: 52.0, 64: 50.0}}


def us(part: str, point: dict[str, Any]) -> float:
    return BASE[part][point["BLOCK_M"]] * (1 + abs(point["BLOCK_N"] - 128) / 256)


def search(sampler: str, count: int, look_ahead: int = 1, **more: Any) -> list[tuple[str, dict[str, Any]]]:
    study = WorkloadStudy(POINTS, ("BLOCK_M",), sampler, 0, **more)
    asked: list[tuple[str, dict[str, Any]]] = []
    pending: list[tuple[str, int]] = []
    for _ in range(count):
        if len(pending) == look_ahead:
            part, point = pending.pop(0)
            study.tell(part, point, us(part, study.params(part, point)))
        found = study.ask()
        assert found is not None
        pending.append(found)
        asked.append((found[0], study.params(*found)))
    return asked


def best_whole(asked: list[tuple[str, dict[str, Any]]]) -> float:
    return min(
        us("gemm1", one) + us("gemm2", other)
        for (_, one), (_, other) in itertools.product(
            [each for each in asked if each[0] == "gemm1"], [each for each in asked if each[0] == "gemm2"]
        )
        if one["BLOCK_M"] == other["BLOCK_M"]
    )


def test_parts_take_turns_and_no_point_is_asked_twice() -> None:
    asked = search("random", 24)
    assert [part for part, _ in asked] == ["gemm1", "gemm2"] * 12
    assert len({(part, tuple(point.items())) for part, point in asked}) == 24


@pytest.mark.parametrize(("look_ahead", "count"), [(1, 16), (8, 20)])
def test_the_default_seeks_the_fastest_whole_not_the_fastest_parts(look_ahead: int, count: int) -> None:
    assert best_whole(search("default", count, look_ahead)) == pytest.approx(55 + 52)


def test_estimates_of_both_parts_make_the_first_pair_fit_together() -> None:
    estimates: dict[str, Any] = {part: [us(part, point) for point in points] for part, points in POINTS.items()}
    (_, one), (_, other) = search("default", 2, estimates_us=estimates)
    assert one == other == {"BLOCK_M": 32, "BLOCK_N": 128}


def test_a_limit_ends_each_part_and_exhaustion_ends_all() -> None:
    study = WorkloadStudy(POINTS, ("BLOCK_M",), "random", 0)
    count = 0
    while (found := study.ask(limit=5)) is not None:
        study.tell(*found, 100.0)
        count += 1
    assert count == 10
    while (found := study.ask()) is not None:
        study.tell(*found, None)
        count += 1
    assert count == 24


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_only_the_default_can_tell_the_chance_of_a_gain(sampler: str) -> None:
    study = WorkloadStudy(POINTS, ("BLOCK_M",), sampler, 0)
    while (found := study.ask(limit=11)) is not None:
        study.tell(*found, us(found[0], study.params(*found)))
    assert study.chance(0.01) < 0.5 if sampler == "default" else study.chance(0.01) == 1.0
