"""The arithmetic of timings; what needs a GPU is in test_gpu.py."""

from __future__ import annotations

import numpy as np
import pytest

from kerneltune.measure.timing import Timing, quantile


@pytest.mark.parametrize("count", [1, 2, 4, 5, 15])
@pytest.mark.parametrize("q", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_quantiles_are_numpys(count: int, q: float) -> None:
    values = np.random.default_rng(count).normal(100, 5, count).tolist()
    assert quantile(values, q) == pytest.approx(float(np.quantile(values, q)))


def test_a_timing_is_a_median_with_its_spread() -> None:
    timing = Timing((5.0, 1.0, 3.0, 2.0, 4.0))
    assert (timing.time_us, timing.p20_us, timing.p80_us) == (3.0, 1.8, 4.2)
