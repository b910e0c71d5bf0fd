"""The smallest set of configs: as brute force finds it, never worse than allowed, the same every time."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kerneltune.tuning.cover import smallest

Times = dict[str, dict[str, float]]

rows = st.dictionaries(
    st.sampled_from("abcdef"), st.sampled_from([100.0, 101.0, 101.9, 102.0, 103.0, 150.0]), min_size=1
)
matrices = st.lists(rows, min_size=1, max_size=7).map(lambda found: {f"w{i}": row for i, row in enumerate(found)})


def brute_force(times: Times, max_loss: float) -> tuple[int, float]:
    """Size of the smallest sets, and the least total loss among them."""
    configs = sorted({config for row in times.values() for config in row})
    for size in range(1, len(configs) + 1):
        totals = []
        for chosen in itertools.combinations(configs, size):
            losses = [
                min((row[c] for c in chosen if c in row), default=math.inf) / min(row.values()) - 1
                for row in times.values()
            ]
            if max(losses) <= max_loss + 1e-9:
                totals.append(sum(losses))
        if totals:
            return size, min(totals)
    raise AssertionError("every workload has its own best")


@settings(max_examples=300, deadline=None)
@given(times=matrices, max_loss=st.sampled_from([0.0, 0.01, 0.02, 0.5]))
def test_exact_is_brute_force(times: Times, max_loss: float) -> None:
    found = smallest(times, max_loss)
    size, total = brute_force(times, max_loss)
    assert len(found.configs) == size
    assert sum(found.loss.values()) == pytest.approx(total, abs=1e-9)
    assert set(found.serves.values()) == set(found.configs)
    for workload, config in found.serves.items():
        assert times[workload][config] == min(t for c, t in times[workload].items() if c in found.configs)
        assert times[workload][config] / min(times[workload].values()) - 1 == found.loss[workload] <= max_loss + 1e-9


@settings(max_examples=100, deadline=None)
@given(times=matrices, max_loss=st.sampled_from([0.0, 0.02]))
def test_greedy_keeps_the_bound_and_wastes_nothing(times: Times, max_loss: float) -> None:
    found = smallest(times, max_loss, max_nodes=0)
    assert found.serves.keys() == times.keys()
    assert found.worst <= max_loss + 1e-9
    assert len(found.configs) >= brute_force(times, max_loss)[0]


@given(times=matrices, data=st.data())
def test_the_order_of_rows_and_columns_decides_nothing(times: Times, data: st.DataObject) -> None:
    shuffled = {
        workload: dict(data.draw(st.permutations(list(times[workload].items()))))
        for workload in data.draw(st.permutations(list(times)))
    }
    assert smallest(shuffled, 0.02) == smallest(times, 0.02)


def test_one_config_for_all_is_found_where_each_has_its_own_best() -> None:
    times = {f"w{i}": {f"own{i}": 100.0, "all": 101.5, "most": 100.1 if i else 110.0} for i in range(5)}
    assert smallest(times, 0.02).configs == ("all",)
    assert smallest(times, 0.02).worst == pytest.approx(0.015)
    assert smallest(times, 0.0).configs == tuple(f"own{i}" for i in range(5))


def test_a_ladder_of_forty_workloads_and_sixty_configs_ends() -> None:
    rng = random.Random(1)
    times = {f"w{i}": {f"c{j}": rng.uniform(100, 120) for j in rng.sample(range(60), 30)} for i in range(40)}
    found = smallest(times, 0.02)
    assert found == smallest(times, 0.02)
    assert found.worst <= 0.02 + 1e-9
    assert len(found.configs) < 40
