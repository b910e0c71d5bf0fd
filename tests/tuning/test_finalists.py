"""Pairs share what must be shared, and a winner must beat the default by more than the noise."""

from __future__ import annotations

from typing import Any

from kerneltune.records import Trial
from kerneltune.tuning.finalists import choose, decide


def trial(part: str, config: dict[str, Any], time_us: float | None, spread: float = 0.0, **more: Any) -> Trial:
    return Trial(
        session="s", workload={}, part=part, config=config, stage="search", index=more.pop("index", 0),
        outcome="ok" if time_us else "wrong", time_us=time_us, p20_us=time_us and time_us - spread,
        p80_us=time_us and time_us + spread, launch_us=4.0, **more,
    )  # fmt: skip


def test_one_part_takes_the_fastest_that_are_right() -> None:
    trials = [trial("decode", {"B": i}, t) for i, t in enumerate([30.0, None, 10.0, 20.0])]
    assert choose(trials, ("decode",), (), limit=2) == [{"B": 2}, {"B": 3}]


def test_pairs_agree_in_the_shared_parameter_and_the_best_sum_comes_first() -> None:
    trials = [
        trial("gemm1", {"M": 16, "N": 1}, 10.0),
        trial("gemm1", {"M": 64, "N": 1}, 30.0),
        trial("gemm2", {"M": 16, "N": 1}, 50.0),
        trial("gemm2", {"M": 64, "N": 2}, 20.0),
        trial("gemm2", {"M": 128, "N": 2}, 1.0),  # no first GEMM with this M
    ]
    chosen = choose(trials, ("gemm1", "gemm2"), ("M",))
    assert chosen[0] == {"gemm1": {"M": 64, "N": 1}, "gemm2": {"M": 64, "N": 2}}
    assert chosen[1] == {"gemm1": {"M": 16, "N": 1}, "gemm2": {"M": 16, "N": 1}}
    assert len(chosen) == 2


def test_a_gain_below_the_noise_keeps_the_default() -> None:
    default = trial("", {"B": 0}, 100.0, spread=5.0)
    decision = decide(default, [trial("", {"B": 1}, 97.0, spread=5.0)])
    assert decision is not None
    assert decision.kept_default
    assert decision.winner is default
    assert decision.gain == 1.0


def test_a_clear_gain_wins_and_is_net_of_the_launch() -> None:
    decision = decide(trial("", {"B": 0}, 104.0), [trial("", {"B": 2}, 60.0), trial("", {"B": 1}, 54.0)])
    assert decision is not None
    assert decision.winner.config == {"B": 1}
    assert decision.gain == 2.0


def test_a_default_that_fails_loses_to_anything_that_runs() -> None:
    decision = decide(trial("", {"B": 0}, None), [trial("", {"B": 1}, 54.0)])
    assert decision is not None
    assert decision.winner.config == {"B": 1}
    assert decision.gain is None


def test_nothing_that_runs_is_no_decision() -> None:
    assert decide(trial("", {"B": 0}, None), []) is None
