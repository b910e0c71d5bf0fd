"""What a tuner must never do, end to end: one section for each probe. Real processes die here; no GPU is needed."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from cpu_backend import CpuBackend, toy_tables
from proto import CEILINGS, DEVICE, proto_recordings
from test_failures import LARGE, SMALL, Scripted
from toy import TOY

from kerneltune.device import target
from kerneltune.kernels.moe.tunable import TUNABLE as MOE
from kerneltune.recordings import Recording, canonical
from kerneltune.records import Trial, read_folder
from kerneltune.registry import load_tunable
from kerneltune.report.text import render
from kerneltune.space import Space, load_space
from kerneltune.tuning.api import left_out
from kerneltune.tuning.backends import ReplayBackend
from kerneltune.tuning.options import Options
from kerneltune.tuning.progress import Silent
from kerneltune.tuning.samplers import SAMPLERS
from kerneltune.tuning.session import Result, run

ROOT = Path(__file__).parents[1]


# 1. An overflow of shared memory is known before anything is compiled


class OneByteGemm:
    """The pipeline of a grouped GEMM of one-byte operands: (stages - 1) tiles of A and B lie in shared memory."""

    name = "gemm"
    parts = ("gemm",)
    optional: Mapping[str, int] = {}

    def default_config(self, workload: Any, device: Any) -> dict[str, int]:
        return {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "num_stages": 2}

    def is_valid(self, part: str, params: Mapping[str, Any], workload: Any, device: Any) -> str | None:
        rows = params["BLOCK_M"] + params["BLOCK_N"]
        needed = (params["num_stages"] - 1) * rows * params["BLOCK_K"]
        if needed > device.shared_memory_per_block:
            return f"shared memory: needs {needed} B, device has {device.shared_memory_per_block} B"
        return None


GEMM: Any = OneByteGemm()
GEMM_SPACE = """
kernel = "mla-decode"
[parameters]
BLOCK_M = [128]
BLOCK_N = [64, 256]
BLOCK_K = [128]
num_stages = [2, 4]
[ladder.standard]
batch = [1]
kv_len = [1]
"""
TOO_LARGE = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 128, "num_stages": 4}


def test_1_an_overflow_is_known_before_compiling_with_both_figures() -> None:
    space, small, large = Space.from_text(GEMM_SPACE), target("sm_120"), target("sm_90")
    assert GEMM.is_valid("gemm", TOO_LARGE, {}, small) == "shared memory: needs 147456 B, device has 101376 B"
    assert TOO_LARGE not in space.points(GEMM, "gemm", {}, small)  # so no trial is spent on it
    assert TOO_LARGE in space.points(GEMM, "gemm", {}, large)
    assert space.survey(GEMM, "gemm", {}, small).rejected == {"shared memory": 1}
    assert space.survey(GEMM, "gemm", {}, large).rejected == {}


def test_1_a_search_counts_rejections_by_rule_over_its_workloads() -> None:
    tunable, space, small = load_tunable("moe"), load_space("moe"), target("sm_120")
    workloads = [tunable.complete_workload({"tokens": tokens}) for tokens in (64, 4096)]
    surveys = [space.survey(tunable, part, each, small) for each in workloads for part in tunable.parts]
    line = left_out(space, "moe", small, workloads)
    assert line.startswith(f"{sum(s.total for s in surveys):,} points, {sum(s.feasible for s in surveys):,} feasible; ")
    assert f"shared memory {sum(s.rejected.get('shared memory', 0) for s in surveys):,}" in line


def test_1_the_real_kernel_says_the_same() -> None:
    params = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "GROUP_M": 1, "num_warps": 8, "num_stages": 4}
    workload = MOE.complete_workload({"tokens": 4096})
    assert MOE.is_valid("gemm2", params, workload, target("sm_120")) == (
        "shared memory: needs 147456 B, device has 101376 B"
    )
    assert MOE.is_valid("gemm2", params, workload, target("sm_90")) is None


# 2. A config that faults, aborts or hangs: the winner is that of a clean run

WORKLOAD = TOY.complete_workload({"rows": 2})
CLEAN = [
    {"BLOCK_K": block, "num_warps": warps, "defect": "none"}
    for block, warps in itertools.product((16, 32, 64, 128), (1, 2, 4, 8))
]
FAULTS = {
    "out_of_bounds": ("crashed", "the GPU process died: signal 11"),  # in the interpreter a store like any other
    "compile_abort": ("compile_error", "compiler died: signal 6 (SIGABRT)"),
    "compile_hang": ("compile_error", "compiler gave no result in 10 s"),
    "host_hang": ("timed_out", "no result in 8 s"),
    "host_kill": ("crashed", "the GPU process died: signal 9 (SIGKILL)"),
}


def faulty(defect: str) -> dict[str, Any]:
    return {"BLOCK_K": 32, "num_warps": 4, "defect": defect}


def formula(config: Mapping[str, Any]) -> float:
    """What is broken would be the fastest."""
    if config["defect"] != "none":
        return 10.0
    return 50.0 + abs(config["BLOCK_K"] - 64) + 3.0 * abs(config["num_warps"] - 2)


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What would go into a table: a toy has no table of its own."""
    return toy_tables(monkeypatch)


class KillAt(Silent):
    """Kills a process of the search from outside when so many trials are done."""

    def __init__(self, at: int, victim: Any) -> None:
        self.left, self.victim = at, victim

    def trial(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            for pid in self.victim():
                os.kill(pid, signal.SIGKILL)


def live(out: Path, points: list[dict[str, Any]], progress: Any = None, **more: Any) -> tuple[Result, CpuBackend]:
    backend = CpuBackend("toy:TOY", points, formula, **more)
    try:
        options = Options(out, trials=len(points), sampler="random", seed=1)
        return run(backend, [WORKLOAD], options, progress or Silent()), backend
    finally:
        backend.close()


def search_trials(out: Path) -> list[Trial]:
    return [t for t in read_folder(out)[1] if t.stage == "search"]


def test_2_faults_aborts_and_hangs_change_nothing_but_their_own_trials(tmp_path: Path, entries: list[Any]) -> None:
    live(tmp_path / "clean", CLEAN)
    points = CLEAN[:5] + [faulty(defect) for defect in FAULTS] + CLEAN[5:]
    _, backend = live(tmp_path / "faulty", points, job_timeout_s=10, trial_timeout_s=8)
    trials = {canonical(t.config): t for t in search_trials(tmp_path / "faulty")}
    for defect, (outcome, reason) in FAULTS.items():
        trial = trials[canonical(faulty(defect))]
        assert trial.outcome == outcome
        assert trial.reason.startswith(reason)
    assert [trials[canonical(point)].outcome for point in CLEAN] == ["ok"] * len(CLEAN)
    assert backend.worker.timings >= len(CLEAN)
    assert backend.worker.survivors == []
    clean, disturbed = (entry["config"] for entry in entries)
    assert disturbed == clean


def test_2_processes_killed_from_outside_cost_no_config_its_trial(tmp_path: Path, entries: list[Any]) -> None:
    backend = CpuBackend("toy:TOY", CLEAN, formula)

    def victims() -> Iterator[int]:
        yield backend.worker.pid
        yield from [child.pid for child in backend._pool._children]

    try:
        options = Options(tmp_path, trials=len(CLEAN), sampler="exhaustive")
        run(backend, [WORKLOAD], options, KillAt(3, victims))
    finally:
        backend.close()
    assert [t.outcome for t in search_trials(tmp_path)] == ["ok"] * len(CLEAN)
    assert backend.worker.restarts == 1
    assert entries[0]["config"] == {"BLOCK_K": 64, "num_warps": 2, "defect": "none"}


def test_2_what_failed_is_not_tried_on_the_next_workload(tmp_path: Path, entries: list[Any]) -> None:
    points = [*CLEAN[:2], faulty("compile_abort"), faulty("out_of_bounds")]
    backend = CpuBackend("toy:TOY", points, formula)
    try:
        larger = {**WORKLOAD, "rows": 6}
        run(backend, [WORKLOAD, larger], Options(tmp_path, trials=4, sampler="exhaustive"), Silent())
    finally:
        backend.close()
    second = [t for t in search_trials(tmp_path) if t.workload == larger]
    assert [t.outcome for t in second if t.config["defect"] != "none"] == ["compile_error", "crashed"]
    assert all(t.reason.endswith("(as on rows=2)") for t in second if t.config["defect"] != "none")
    assert backend.worker.restarts == 1


# 3. Fast but wrong

WRONG = ("returns_at_once", "no_tail", "absent_blocks")


@pytest.mark.parametrize(("rows", "k"), [(1, 511), (33, 511), (129, 511), (2, 512)])
def test_3_fast_but_wrong_never_gets_into_a_table(tmp_path: Path, entries: list[Any], rows: int, k: int) -> None:
    """The last shape is one that every block divides: only an edge shows the mistake."""
    workload = TOY.complete_workload({"rows": rows, "k": k})
    block = 64 if rows < 100 else 256  # the interpreter takes its time over 129 rows of 8 steps
    points = [{"BLOCK_K": block, "num_warps": 4, "defect": defect} for defect in ("none", *WRONG)]
    backend = CpuBackend("toy:TOY", points, formula)
    try:
        run(backend, [workload], Options(tmp_path, trials=9, sampler="exhaustive"), Silent())
    finally:
        backend.close()
    trials = {t.config["defect"]: t for t in search_trials(tmp_path)}
    assert trials["none"].outcome == "ok"
    for defect in WRONG:
        assert trials[defect].outcome == "wrong"
        assert "relative error" in trials[defect].reason
        assert "is above 0.001" in trials[defect].reason
        if k == 512 and defect != "returns_at_once":
            assert trials[defect].reason.startswith("rows=1 k=1: ")
    assert entries[0]["config"]["defect"] == "none"
    assert not [t for t in read_folder(tmp_path)[1] if t.outcome == "ok" and t.config["defect"] != "none"]
    report = render(tmp_path)
    assert " wrong (" in report
    assert f"rows={rows}" in report


def test_3_a_finalist_that_is_wrong_on_an_edge_size_does_not_win(tmp_path: Path, entries: list[Any]) -> None:
    """Nothing that needs no other compile shows it, so its search trial is fine."""
    points = [CLEAN[0], faulty("edge_511"), faulty("edge_hang")]
    _, backend = live(tmp_path, points, trial_timeout_s=8)
    assert [t.outcome for t in search_trials(tmp_path)] == ["ok"] * 3
    finals = {t.config["defect"]: t for t in read_folder(tmp_path)[1] if t.stage == "final"}
    assert finals["edge_511"].outcome == "wrong"
    assert finals["edge_511"].reason.startswith("k=511: row ")
    assert finals["edge_hang"].outcome == "timed_out"
    assert backend.worker.survivors == []
    assert entries[0]["config"] == CLEAN[0]


# 4. Killed and resumed

RUN = """
import os, signal, sys
from pathlib import Path
from proto import proto_recordings
from kerneltune.tuning.backends import ReplayBackend
from kerneltune.tuning.options import Options
from kerneltune.tuning.progress import Silent
from kerneltune.tuning.session import run

class Killed(Silent):
    left = int(sys.argv[2])
    def trial(self, *_):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

backend = ReplayBackend(proto_recordings()[:1])
result = run(backend, backend.workloads, Options(Path(sys.argv[1]), trials=100, sampler="tpe", seed=7), Killed())
print(result.measured, result.remembered)
"""


def replay_100(out: Path, kill_at: int = -1) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ) | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "tuning"), *sys.path])}
    return subprocess.run([sys.executable, "-c", RUN, str(out), str(kill_at)], capture_output=True, text=True, env=env)


def table_entries(out: Path) -> list[dict[str, Any]]:
    import json

    found = json.loads(next((out / "tables").glob("*.json")).read_text())["entries"]
    for entry in found:
        entry["measured"].pop("date")
    return found


def test_4_killed_at_trial_37_of_100_it_resumes_to_the_same_table(tmp_path: Path) -> None:
    assert replay_100(tmp_path / "whole").returncode == 0
    assert replay_100(tmp_path / "cut", kill_at=37).returncode == -signal.SIGKILL
    path = tmp_path / "cut" / "records" / "mla-decode.jsonl"
    assert len(search_trials(tmp_path / "cut")) == 37
    data = path.read_bytes()
    last = data[:-1].rfind(b"\n") + 1
    path.write_bytes(data[: last + (len(data) - last) // 2])
    resumed = replay_100(tmp_path / "cut")
    measured, remembered = map(int, resumed.stdout.split())
    assert remembered == 36
    finals = sum(t.stage == "final" for t in read_folder(tmp_path / "cut")[1])
    assert measured == 100 - 36 + finals
    counts = Counter(canonical([t.workload, t.part, t.config, t.stage]) for t in read_folder(tmp_path / "cut")[1])
    assert set(counts.values()) == {1}
    assert table_entries(tmp_path / "cut") == table_entries(tmp_path / "whole")
    before = path.read_bytes()
    assert replay_100(tmp_path / "cut").stdout.split()[0] == "0"
    assert path.read_bytes() == before


# 9. A budget means distinct measurements


def large_recording() -> Recording:
    """1,488 points with a smooth optimum and a default far from it."""
    workload = proto_recordings()[0].workload
    points = [
        {"BLOCK_H": h, "BLOCK_N": n, "num_warps": w, "STAGES": s, "num_splits": p}
        for h, n, w, s, p in itertools.product(
            (16, 32, 64), (16, 32, 64, 128), (2, 4, 8, 16), (1, 2, 3, 4), range(1, 9)
        )
    ][:1488]
    trials = tuple(
        Trial(
            session="s",
            workload=workload,
            part="decode",
            config=point,
            stage="record",
            index=index,
            outcome="ok",
            time_us=(
                time_us := 100.0 + abs(point["BLOCK_N"] - 64) + 5 * abs(point["num_splits"] - 5) + point["STAGES"]
            ),
            p20_us=time_us * 0.999,
            p80_us=time_us * 1.001,
            samples=15,
            launch_us=4.2,
            flops=10**6,
            bytes=10**6,
        )
        for index, point in enumerate(points)
    )
    return Recording(
        kernel="mla-decode", workload=workload, parts=("decode",), shared=(), device=DEVICE, ceilings=CEILINGS,
        default_config=points[700], whole={"flops": 10**6, "bytes": 10**6, "compute": "bf16"}, rest_us={},
        launch_us=4.2, space="", kernel_hash={"only": "0" * 12}, versions={"triton": "3.6.0"},
        date="2026-11-30T00:00:00+00:00",
        command="", trials=trials,
    )  # fmt: skip


class Notes(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of lines a test."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_9_a_budget_of_200_is_200_distinct_configs(tmp_path: Path, sampler: str, unsynced: None) -> None:
    recording = large_recording()
    backend = ReplayBackend([recording])
    notes = Notes()
    run(backend, backend.workloads, Options(tmp_path, trials=200, sampler=sampler), notes)
    configs = [canonical(t.config) for t in search_trials(tmp_path)]
    assert len(configs) == len(set(configs)) == 200
    assert canonical(recording.default_config) in configs
    assert not any("feasible configs are tried" in note for note in notes.notes)


def test_9_a_budget_beyond_the_space_ends_exhausted_and_says_so(tmp_path: Path, unsynced: None) -> None:
    backend, notes = ReplayBackend([large_recording()]), Notes()
    run(backend, backend.workloads, Options(tmp_path, trials=2000, sampler="random"), notes)
    assert len({canonical(t.config) for t in search_trials(tmp_path)}) == 1488
    assert notes.notes == ["decode: all 1488 feasible configs are tried, fewer than the 2000 asked"]


# 10. Impossible bandwidth


class TooFast(Scripted):
    """Point 7 reads its 1 MB in 0.1 us more than a launch: 2.5 times the measured roof of 4,000 GB/s."""

    def measure(self, workload: Any, part: str, params: Any, stop_above_us: float | None) -> dict[str, Any]:
        figures = super().measure(workload, part, params, stop_above_us)
        if params["B"] == 7:
            figures |= {"time_us": 4.1, "p20_us": 4.1, "p80_us": 4.1, "launch_us": 4.0}
        return figures


def test_10_a_result_above_the_measured_roof_is_suspect_and_cannot_win(tmp_path: Path) -> None:
    backend = TooFast()
    result = run(backend, [SMALL, LARGE], Options(tmp_path, trials=10, sampler="exhaustive"), Silent())
    suspects = [t for t in read_folder(tmp_path)[1] if t.outcome == "suspect"]
    assert {t.config["B"] for t in suspects} == {7}
    assert all("of the measured memory ceiling" in t.reason for t in suspects)
    for _, decision in result.decisions:
        assert decision is not None
        assert decision.winner.config != {"B": 7}
        assert (decision.winner.roofline or 0) < 1.0
    assert not [t for t in read_folder(tmp_path)[1] if t.stage == "final" and t.config == {"B": 7}]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_10_what_is_read_between_two_timings_is_larger_than_the_last_level_cache(arch: str) -> None:
    from kerneltune.measure.timing import Flush

    l2_bytes = target(arch).l2_bytes
    buffer = Flush(l2_bytes, device="cpu")._buffer
    assert buffer.numel() * buffer.element_size() >= 4 * l2_bytes


def test_10_the_roofs_are_dated_and_stored_with_the_run(tmp_path: Path) -> None:
    run(Scripted(), [SMALL], Options(tmp_path, trials=2, sampler="exhaustive"), Silent())
    (session,) = read_folder(tmp_path)[0].values()
    assert session.ceilings["dram_read_gbps"] == 4000.0
    assert session.ceilings["date"]
