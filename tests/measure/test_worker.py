"""The measuring process: outcomes, replacement, and that the next request is never blamed. Timing is in test_gpu.py."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from toy import TOY

from kerneltune.errors import UserError
from kerneltune.measure.worker import GpuWorker, Measurer
from kerneltune.records import OUTCOMES, Trial

WORKLOAD = TOY.complete_workload({})


def config(defect: str = "none", **other: Any) -> dict[str, Any]:
    return {"BLOCK_K": 32, "num_warps": 4, "defect": defect} | other


@pytest.fixture(scope="module")
def worker() -> Iterator[GpuWorker]:
    with GpuWorker("toy:TOY", None, trial_timeout_s=2) as made:
        made.start()
        yield made


def gated(worker: GpuWorker, defect: str) -> dict[str, Any]:
    return worker.trial(WORKLOAD, "dot", config(defect), samples=0)


def test_a_reply_holds_fields_of_a_trial(worker: GpuWorker) -> None:
    reply = gated(worker, "none")
    assert reply["outcome"] == "ok"
    assert reply["gate_s"] > 0
    trial = Trial(session="s", workload={}, part="", config={}, stage="search", index=0, **reply)
    assert trial.error == reply["error"] is not None
    assert trial.time_us is None


@pytest.mark.parametrize(
    ("defect", "outcome", "reason", "replaced"),
    [
        ("untouched", "wrong", "row 7: ", False),
        ("no_tail", "wrong", "rows=1 k=1: ", False),
        ("host_raise", "crashed", "RuntimeError: made to fail", False),
        ("writes_input", "wrong", "the launch changed input 'x'", True),
        ("host_exit", "crashed", "the GPU process died: exit code 7", True),
        ("host_hang", "timed_out", "no result in 2 s", True),
    ],
)
def test_each_accident_has_its_outcome_and_the_next_is_fine(
    worker: GpuWorker, defect: str, outcome: str, reason: str, replaced: bool
) -> None:
    gated(worker, "none")
    before, pid = worker.restarts, worker.pid
    reply = gated(worker, defect)
    assert (reply["outcome"], reply["time_us"]) == (outcome, None)
    assert reply["reason"].startswith(reason)
    assert "\n" not in reply["reason"]
    assert reply["outcome"] in OUTCOMES
    assert (worker.restarts - before, worker.pid != pid) == (int(replaced), replaced)
    assert gated(worker, "none")["outcome"] == "ok"
    assert worker.restarts - before == int(replaced)


def test_a_process_that_dies_between_requests_is_replaced(worker: GpuWorker) -> None:
    assert gated(worker, "none")["outcome"] == "ok"
    os.kill(worker.pid, signal.SIGKILL)
    time.sleep(0.2)
    assert gated(worker, "none")["outcome"] == "ok"


def test_finals_gate_each_config_and_require_the_same_bits() -> None:
    with GpuWorker("toy:TOY", None) as worker:
        workload = WORKLOAD | {"dtype": "fp32"}
        replies = worker.finals(workload, [config("flaky"), config("untouched"), config("host_exit")])
    assert [reply["outcome"] for reply in replies] == ["nondeterministic", "wrong", "crashed"]
    assert replies[0]["reason"].startswith("out differs")


def test_without_a_gpu_nothing_is_timed(worker: GpuWorker) -> None:
    reply = worker.trial(WORKLOAD, "dot", config(), samples=5)
    assert reply["outcome"] == "crashed"
    assert "no GPU" in reply["reason"]
    with pytest.raises(UserError, match="no GPU"):
        worker.ceilings()


def test_a_workload_that_cannot_be_prepared_is_said_to_be_the_reason(worker: GpuWorker) -> None:
    reply = worker.trial(WORKLOAD | {"dtype": "fp99"}, "dot", config(), samples=0)
    assert reply["outcome"] == "crashed"
    assert reply["reason"].startswith("preparing the workload: KeyError")
    assert gated(worker, "none")["outcome"] == "ok"


def test_a_kernel_that_cannot_be_imported() -> None:
    with GpuWorker("no_such_module:TOY", None) as worker, pytest.raises(UserError, match="ModuleNotFoundError"):
        worker.start()


def test_close_ends_the_process_at_once() -> None:
    worker = GpuWorker("toy:TOY", None)
    begin = time.monotonic()
    worker.close()
    assert time.monotonic() - begin < 3


def test_in_process(device: str) -> None:
    """The same handler without a process between."""
    measurer = Measurer("toy:TOY", None if device == "cpu" else 0)
    assert measurer(("prepare", {"workload": WORKLOAD, "seed": 1}))["outcome"] == "ok"
    request = {"part": "", "config": config(), "stop_above_us": None, "samples": 0, "budget_s": 1.0}
    assert measurer(("trial", request | {"gate": True, "raw": False}))["outcome"] == "ok"
    damaged = measurer(("trial", request | {"config": config("writes_input"), "gate": True, "raw": False}))
    assert damaged == {"outcome": "wrong", "reason": "the launch changed input 'x'", "fatal": True}
