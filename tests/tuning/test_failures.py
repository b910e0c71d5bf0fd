"""What failed for the sizes of a kernel is not tried again on its next workload, nor after a restart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kerneltune.records import Trial, read_folder
from kerneltune.tuning.backends import Work
from kerneltune.tuning.failures import Failures
from kerneltune.tuning.options import Options
from kerneltune.tuning.progress import Silent
from kerneltune.tuning.seconds import Seconds
from kerneltune.tuning.session import run

CEILINGS = {"device": "made up", "date": "2026-11-30", "dram_read_gbps": 4000.0, "dram_copy_gbps": 3900.0,
            "tflops": {"bf16": 700.0}, "launch_us": 4.0}  # fmt: skip
DEVICE = {"name": "made up", "arch": "sm_90", "sm_count": 1, "shared_memory_per_block": 1, "l2_bytes": 1,
          "memory_bytes": 1, "warp_size": 32}  # fmt: skip
SMALL = {"dtype": "bf16", "kv_dtype": "bf16", "heads": 16, "h_kv": 1, "s_q": 1, "causal": False, "page_size": 64,
         "kv_lora_rank": 512, "qk_rope_head_dim": 64, "batch": 1, "kv_len": 2048, "lengths": "equal"}  # fmt: skip
LARGE = SMALL | {"batch": 64}
OTHER = LARGE | {"heads": 128}
FAILING = {1: "infeasible", 2: "compile_error", 3: "crashed", 4: "timed_out", 5: "wrong", 6: "nondeterministic"}


class Scripted:
    """A backend of ten points: what FAILING names fails on every workload; counts what it is asked to do."""

    kernel, source, kernel_hash = "mla-decode", "live", {"split_kv": "0" * 12}
    parts: tuple[str, ...] = ("decode",)
    optional: Mapping[str, int] = {}
    shared: tuple[str, ...] = ()
    varying_keys: tuple[str, ...] = ("batch", "kv_len", "lengths")

    def __init__(self) -> None:
        self.device: dict[str, Any] = dict(DEVICE)
        self.ceilings: dict[str, Any] = dict(CEILINGS)
        self.versions = {"triton": "3.6.0"}
        self.seconds = Seconds()
        self.compiled: list[tuple[int, int]] = []  # (heads * 1000 + batch, point)
        self.ran: list[tuple[int, int]] = []

    def points(self, workload: Any, part: str) -> list[dict[str, Any]]:
        return [{"B": i} for i in range(10)]

    def default_config(self, workload: Any) -> dict[str, Any]:
        return {"B": 0}

    def admit(self, workload: Any, configs: Any) -> None:
        return None

    def incumbents(self, workload: Any) -> list[dict[str, Any]]:
        return []

    def work(self, workload: Any, part: str) -> Work:
        return Work(flops=10**6, bytes=10**6, compute="bf16")

    def prepare(self, workload: Any, part: str, params: Any) -> None:
        self.compiled.append((workload["heads"] * 1000 + workload["batch"], params["B"]))

    def prefetch(self, workload: Any, likely: Any) -> None:
        for part, params in likely:
            self.prepare(workload, part, params)

    def prepare_finals(self, workload: Any, configs: Any) -> None: ...

    def measure(self, workload: Any, part: str, params: Any, stop_above_us: float | None) -> dict[str, Any]:
        self.ran.append((workload["heads"] * 1000 + workload["batch"], params["B"]))
        if outcome := FAILING.get(params["B"]):
            return {"outcome": outcome, "reason": f"made to be {outcome}", "compile_s": 1.0}
        return {"outcome": "ok", "time_us": 100.0 + params["B"], "p20_us": 100.0, "p80_us": 110.0, "samples": 5}

    def estimates(self, workload: Any, part: str) -> list[float] | None:
        return None

    def why_not(self, workload: Any, config: Any) -> str | None:
        return None

    def finals(self, workload: Any, configs: Any, part: str = "", rounds: int = 3) -> list[dict[str, Any]]:
        return [self.measure(workload, part, config, None) for config in configs]

    def conditions(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


def search(backend: Scripted, out: Path, *workloads: dict[str, Any]) -> list[Trial]:
    run(backend, workloads, Options(out, trials=10, sampler="exhaustive"), Silent())
    return [t for t in read_folder(out)[1] if t.stage == "search"]


def test_a_failed_config_is_neither_compiled_nor_run_for_the_next_workload(tmp_path: Path) -> None:
    backend = Scripted()
    trials = search(backend, tmp_path, SMALL, LARGE)
    again = {point for where, point in backend.compiled if where == 16064}
    assert again == {0, 5, 6, 7, 8, 9}
    assert [p for where, p in backend.ran if where == 16064 and p in (1, 2, 3, 4)] == []
    second = {t.config["B"]: t for t in trials if t.workload == LARGE}
    assert len(second) == 10  # each has its trial all the same
    for point, outcome in FAILING.items():
        assert second[point].outcome == outcome
    told = "made to be crashed (as on batch=1 kv_len=2048 lengths=equal)"
    assert second[3].reason == told
    assert second[3].compile_s == 0.0
    assert second[5].reason == "made to be wrong"  # checked again: another size may be right


def test_a_resumed_search_knows_them_too_and_names_the_first_workload(tmp_path: Path) -> None:
    search(Scripted(), tmp_path, SMALL, LARGE)
    backend = Scripted()
    trials = search(backend, tmp_path, SMALL, LARGE, LARGE | {"kv_len": 4096})
    assert {point for _, point in backend.compiled} == {0, 5, 6, 7, 8, 9}
    assert {t.reason for t in trials if t.config["B"] == 2 and t.workload["kv_len"] == 4096} == {
        "made to be compile_error (as on batch=1 kv_len=2048 lengths=equal)"
    }


def test_other_exact_keys_are_tried_again(tmp_path: Path) -> None:
    backend = Scripted()
    search(backend, tmp_path, SMALL, OTHER)
    assert {point for where, point in backend.compiled if where == 128064} == set(range(10))


def test_a_default_that_fails_is_not_run_again_in_the_finals(tmp_path: Path) -> None:
    backend = Scripted()
    backend.default_config = lambda workload: {"B": 4}  # type: ignore[method-assign]
    search(backend, tmp_path, SMALL, LARGE)
    assert backend.ran.count((16001, 4)) == 1
    finals = [t for t in read_folder(tmp_path)[1] if t.stage == "final" and t.config == {"B": 4}]
    assert [t.outcome for t in finals] == ["timed_out", "timed_out"]


@pytest.mark.parametrize(
    "reason",
    [
        "out of GPU memory",
        "preparing the workload: RuntimeError: no",
        "the GPU process was killed twice: signal 9 (SIGKILL)",
    ],
)
def test_what_tells_of_the_size_or_the_machine_is_not_held_against_the_config(reason: str) -> None:
    failures = Failures(("batch",))
    trial = Trial(session="s", workload={"batch": 4, "heads": 1}, part="p", config={"B": 1}, stage="search", index=0,
                  outcome="crashed", reason=reason)  # fmt: skip
    failures.add(trial)
    assert failures.recall({"batch": 1, "heads": 1}, "p", {"B": 1}) is None
