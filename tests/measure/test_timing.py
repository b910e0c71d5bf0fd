"""The arithmetic of timings; what needs a GPU is in test_gpu.py."""

from __future__ import annotations

import numpy as np
import pytest

from kerneltune.measure.timing import Timing, quantile, turns


@pytest.mark.parametrize("count", [1, 2, 4, 5, 15])
@pytest.mark.parametrize("q", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_quantiles_are_numpys(count: int, q: float) -> None:
    values = np.random.default_rng(count).normal(100, 5, count).tolist()
    assert quantile(values, q) == pytest.approx(float(np.quantile(values, q)))


def test_a_timing_is_a_median_with_its_spread() -> None:
    timing = Timing((5.0, 1.0, 3.0, 2.0, 4.0))
    assert (timing.time_us, timing.p20_us, timing.p80_us) == (3.0, 1.8, 4.2)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_turns_are_random_orders_and_their_reverses(count: int) -> None:
    orders = turns(count, 6, seed=3)
    assert all(sorted(order) == list(range(count)) for order in orders)
    for first, second in zip(orders[::2], orders[1::2], strict=True):
        assert second == first[::-1]
    assert turns(count, 6, seed=3) == orders
    assert len(turns(count, 3, seed=0)) == 3


def test_another_seed_turns_otherwise_and_rounds_differ() -> None:
    assert turns(5, 4, seed=1) != turns(5, 4, seed=2)
    orders = turns(5, 8, seed=1)
    assert len({tuple(order) for order in orders}) > 4
