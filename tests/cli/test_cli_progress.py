"""What a search says while it runs, where stderr is no terminal."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kerneltune.cli.progress import ConsoleProgress
from kerneltune.records import Trial


def trial(workload: dict[str, Any], part: str) -> Trial:
    return Trial(session="s", workload=workload, part=part, config={}, stage="search", index=0, outcome="ok")


def test_a_workload_that_goes_on_later_is_named_and_timed_as_itself(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = ({"batch": 1, "kv_len": length, "heads": 16, "dtype": "bf16"} for length in (2048, 8192))
    progress = ConsoleProgress("mla-decode", budget_s=60)
    progress.begin([first, second])
    for position, workload in enumerate((first, second)):
        progress.workload(position, workload, 1000)
        progress.trial(trial(workload, "decode"), 20.0 + position, 0.5, False)
    for _ in range(2):
        progress.trial(trial(first, "decode"), 10.0, 0.6, False)
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    found = [re.sub(r" in 0\.\d s", "", line).rpartition(", ")[0] for line in lines]
    assert found == [
        "[1/2] batch=1 kv_len=2048 heads=16 bf16: 1 trial, best 20.0 us (50% of roof)",
        "[2/2] batch=1 kv_len=8192 heads=16 bf16: 1 trial, best 21.0 us (50% of roof)",
        "[1/2] batch=1 kv_len=2048 heads=16 bf16, going on: 2 trials, best 10.0 us (60% of roof)",
    ]
    left = [int(re.search(r"at most about (\d+) s left", line)[1]) for line in lines]  # type: ignore[index]
    assert max(left) <= 60


def test_a_sum_of_parts_is_not_called_the_time_of_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    workload = {"tokens": 1, "E": 8, "N": 64, "K": 64, "top_k": 2, "dtype": "bf16"}
    progress = ConsoleProgress("moe")
    progress.begin([workload])
    progress.workload(0, workload, 2)
    progress.trial(trial(workload, "gemm1"), None, None, False)
    progress.trial(trial(workload, "gemm2"), 30.0, None, False)
    progress.close()
    assert "2 trials in 0.0 s, best gemm1 + gemm2 30.0 us, " in capsys.readouterr().err
