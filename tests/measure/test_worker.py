"""The measuring process: outcomes, replacement, and that the next request is never blamed. Timing is in test_gpu.py."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from test_child import running
from toy import TOY

from kerneltune.child import Child
from kerneltune.errors import UserError
from kerneltune.kernels.tunable import Verdict
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
        ("host_kill", "crashed", "the GPU process died: signal 9 (SIGKILL)", True),
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
    times = 2 if defect == "host_kill" else int(replaced)  # a death by another's hand is tried once more
    assert (worker.restarts - before, worker.pid != pid) == (times, replaced)
    assert gated(worker, "none")["outcome"] == "ok"
    assert worker.restarts - before == times


def test_a_process_that_dies_between_requests_is_replaced(worker: GpuWorker) -> None:
    assert gated(worker, "none")["outcome"] == "ok"
    os.kill(worker.pid, signal.SIGKILL)
    time.sleep(0.2)
    assert gated(worker, "none")["outcome"] == "ok"


def test_a_process_killed_from_outside_in_a_trial_costs_the_config_nothing(worker: GpuWorker) -> None:
    assert gated(worker, "none")["outcome"] == "ok"
    before, pid = worker.restarts, worker.pid
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    reply = worker.trial(WORKLOAD, "dot", config("host_sleep"), samples=0, timeout_s=30)
    assert (reply["outcome"], worker.restarts) == ("ok", before + 1)
    assert not running(pid)


def test_a_killed_process_is_gone_before_the_next_begins(worker: GpuWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a trial left behind, nothing is measured beside it."""
    gated(worker, "none")
    pid, spawn = worker.pid, worker._spawn
    alive = []

    def spying() -> Child:
        alive.append(running(pid))
        return spawn()

    monkeypatch.setattr(worker, "_spawn", spying)
    assert gated(worker, "host_hang")["outcome"] == "timed_out"
    assert alive == [False]


def test_finalists_are_vetted_on_edge_sizes_and_the_reason_names_them() -> None:
    workload = WORKLOAD | {"k": 3 * 32}
    edges = list(TOY.edge_workloads(workload))
    with GpuWorker("toy:TOY", None) as worker:
        request = {"config": config("edge_511"), "edges": edges, "seed": 0}
        reply = worker._on_workload("vet", request, workload, 0, 60)
        assert reply["outcome"] == "wrong"
        assert reply["reason"].startswith("k=511: row ")
        reply = worker._on_workload("vet", request | {"edges": []}, workload, 0, 60)
        assert reply["outcome"] == "ok"  # nothing else shows it
        crashed = worker._on_workload("vet", request | {"config": config("raise_511")}, workload, 0, 60)
        assert (crashed["outcome"], crashed["reason"]) == ("crashed", "k=511: RuntimeError: made to fail")


def test_a_config_is_vetted_on_an_edge_once(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    from kerneltune.measure import gate

    measurer = Measurer("toy:TOY", None if device == "cpu" else 0)
    edges = list(TOY.edge_workloads(WORKLOAD))
    checked: list[str] = []
    check = gate.check

    def counting(tunable: Any, cases: Any, config: Any) -> Verdict:
        checked.append(str(config["BLOCK_K"]))
        return check(tunable, cases, config)

    monkeypatch.setattr(gate, "check", counting)
    for rows in (4, 8):
        assert measurer(("prepare", {"workload": WORKLOAD | {"rows": rows}, "seed": 0}))["outcome"] == "ok"
        for block in (16, 32):
            request = {"config": config(BLOCK_K=block), "edges": edges, "seed": 0}
            assert measurer(("vet", request))["outcome"] == "ok"
    assert checked == ["16", "16", "32", "32", "16", "32"]


def test_a_kernel_that_declares_no_fixed_order_may_differ_in_bits() -> None:
    with GpuWorker("toy:LOOSE", None) as worker:
        reply = worker._on_workload(
            "vet", {"config": config("flaky"), "edges": [], "seed": 0}, WORKLOAD | {"dtype": "fp32"}, 0, 60
        )
    assert reply["outcome"] == "ok"


def test_when_all_finalists_fail_together_the_one_to_blame_is_found() -> None:
    """Every final timing is asked of a scripted process: the third config kills it."""
    worker = GpuWorker("toy:TOY", None)
    asked: list[tuple[str, int]] = []

    def answer(method: str, request: dict[str, Any], *_: Any) -> dict[str, Any]:
        configs = request.get("configs") or [request["config"]]
        asked.append((method, len(configs)))
        if method != "vet" and any(c["BLOCK_K"] == 3 for c in configs):
            return {"outcome": "crashed", "reason": "an illegal memory access was encountered"}
        return {"outcome": "ok", "reason": "", "timings": [{"time_us": 1.0 + c["BLOCK_K"]} for c in configs]}

    with worker:
        worker._on_workload = answer  # type: ignore[assignment, method-assign]
        replies = worker.finals(WORKLOAD, [config(BLOCK_K=block) for block in (1, 2, 3, 4)])
    assert [(reply["outcome"], reply["time_us"]) for reply in replies] == [
        *(("ok", 2.0), ("ok", 3.0), ("crashed", None), ("ok", 5.0))
    ]
    assert asked == [*[("vet", 1)] * 4, ("interleave", 4), *[("trial", 1)] * 4, ("interleave", 3)]


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
