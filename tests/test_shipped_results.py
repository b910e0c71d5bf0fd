"""What results/ ships is whole, current, reachable at launch, compiles, and lets a search find the best."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kerneltune import tables
from kerneltune.compile import CompilePool
from kerneltune.device import target
from kerneltune.kernels import tables as launch_tables
from kerneltune.kernels.device import Device
from kerneltune.provenance import kernel_hash
from kerneltune.recordings import canonical, find_recordings
from kerneltune.records import read_folder
from kerneltune.registry import KERNELS, load_tunable
from kerneltune.roofline.model import Ceilings
from kerneltune.tuning.backends import ReplayBackend
from kerneltune.tuning.finalists import net_us
from kerneltune.tuning.options import Options
from kerneltune.tuning.progress import Silent
from kerneltune.tuning.session import run
from kerneltune.tuning.simulate import optimum_us

RESULTS = Path(__file__).parents[1] / "results"
TABLES = tables.shipped_tables()
RECORDINGS = {kernel: find_recordings([RESULTS], kernel) for kernel in KERNELS}


def test_there_is_a_table_of_each_kernel() -> None:
    assert {tables.load_table(path).kernel for path in TABLES} == set(KERNELS)


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name)
def test_every_entry_is_what_a_launch_finds_and_can_run(path: Path) -> None:
    table = tables.load_table(path)
    tunable = load_tunable(table.kernel)
    device = Device(**{name: table.device[name] for name in Device.__dataclass_fields__})
    assert table.entries
    for entry in table.entries:
        workload = tunable.complete_workload(entry["workload"])
        match = launch_tables.find(table.kernel, workload, device, tables=[path], only=True)
        assert match is not None
        assert match.exact
        assert canonical(match.config) == canonical(entry["config"])
        for part in tunable.parts:
            params = entry["config"] if len(tunable.parts) == 1 else entry["config"][part]
            assert tunable.is_valid(part, params, workload, device) is None


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name)
def test_tables_belong_to_the_present_kernels(path: Path) -> None:
    raw = json.loads(path.read_text())
    assert raw["provenance"]["kernel_hash"] == kernel_hash(load_tunable(raw["kernel"]))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name)
def test_every_shipped_config_compiles_for_its_gpu(path: Path) -> None:
    table = tables.load_table(path)
    tunable = load_tunable(table.kernel)
    device = target(str(table.device["arch"]))
    jobs: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {}
    for entry in table.entries:
        workload = tunable.complete_workload(entry["workload"])
        fixed = {name: workload[name] for name in tunable.exact_keys}
        for part in tunable.parts:
            params = dict(entry["config"] if len(tunable.parts) == 1 else entry["config"][part])
            compiled = {name: value for name, value in params.items() if name != "num_splits"}  # a run-time value
            jobs.setdefault(canonical([part, compiled, fixed]), (part, params, workload))
    with CompilePool(table.kernel, device, workers=2) as pool:
        for key, (part, params, workload) in jobs.items():
            pool.submit(key, part, params, workload)
        results = {key: pool.result(key) for key in jobs}
    bad = {key: result.reason for key, result in results.items() if result.outcome != "ok"}
    assert not bad
    assert len(results) >= 3


def test_records_name_their_sessions_and_repeat_nothing() -> None:
    for folder in (path.parent for path in RESULTS.rglob("records")):
        sessions, trials = read_folder(folder)
        assert trials
        assert {t.session for t in trials} == set(sessions)
        seen = Counter(canonical([t.workload, t.part, t.config, t.stage]) for t in trials)
        assert max(seen.values()) == 1
        for session in sessions.values():
            assert Ceilings.from_dict(session.ceilings).dram_read_gbps > 0
            assert session.source == "live"


@pytest.mark.parametrize("kernel", KERNELS)
def test_at_least_six_workloads_are_recorded_from_memory_bound_to_compute_bound(kernel: str) -> None:
    recordings = RECORDINGS[kernel]
    assert len(recordings) >= 6
    ridges = [
        1000 * Ceilings.from_dict(r.ceilings).tflops["bf16"] / Ceilings.from_dict(r.ceilings).dram_read_gbps
        for r in recordings
    ]
    ratios = [
        int(r.whole["flops"]) / int(r.whole["bytes"]) / ridge for r, ridge in zip(recordings, ridges, strict=True)
    ]
    assert min(ratios) < 0.3
    assert max(ratios) > 1
    for recording in recordings:
        assert recording.kernel_hash.items() <= kernel_hash(load_tunable(kernel)).items()
        assert max(recording.rounds.values()) >= 3


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_default_search_comes_within_two_percent_of_each_recorded_optimum(kernel: str, tmp_path: Path) -> None:
    backend = ReplayBackend(RECORDINGS[kernel])
    result = run(backend, backend.workloads, Options(tmp_path, trials=64), Silent())
    decisions = {canonical(workload): decision for workload, decision in result.decisions}
    for recording in RECORDINGS[kernel]:
        decision = decisions[canonical(recording.workload)]
        assert decision is not None
        assert net_us(decision.winner) <= optimum_us(recording) * 1.02
