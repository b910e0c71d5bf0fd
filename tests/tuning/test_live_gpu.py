"""Whole searches on a GPU: they repeat themselves, and tell what they must. Run: pytest -m gpu tests/tuning"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kerneltune
from kerneltune.measure.worker import GpuWorker
from kerneltune.records import Conditions, Summary, read_folder, read_notes
from kerneltune.tuning.progress import Silent
from kerneltune.tuning.session import Result

pytestmark = pytest.mark.gpu
WORKLOADS = {
    "mla-decode": ["batch=32,kv_len=2048", "batch=64,kv_len=2048"],
    "moe": ["tokens=16,E=32,N=512,K=2048", "tokens=64,E=32,N=512,K=2048"],
}


class Notes(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def search(kernel: str, out: Path, **more: Any) -> tuple[Result, list[str]]:
    notes = Notes()
    result = kerneltune.search(
        kernel, workloads=WORKLOADS[kernel], trials=24, out=out, install=False, progress=notes, **more
    )
    return result, notes.notes


@pytest.mark.parametrize("kernel", WORKLOADS)
def test_the_same_search_twice_finds_winners_within_two_percent(tmp_path: Path, kernel: str) -> None:
    (first, notes), (second, _) = (search(kernel, tmp_path / name) for name in ("first", "second"))
    assert any(note.startswith("seconds: ") for note in notes)
    with GpuWorker(kernel) as worker:
        for (workload, one), (_, other) in zip(first.decisions, second.decisions, strict=True):
            assert one is not None
            assert other is not None
            if one.winner.config == other.winner.config:
                continue
            replies = worker.finals(workload, [one.winner.config, other.winner.config])
            net = [reply["time_us"] - reply["launch_us"] for reply in replies]
            assert net[0] == pytest.approx(net[1], rel=0.02), (workload, one.winner.config, other.winner.config)


def test_a_live_search_tells_conditions_and_seconds_and_resumes_for_nothing(tmp_path: Path) -> None:
    search("mla-decode", tmp_path)
    notes = read_notes(tmp_path)
    (summary,) = [note for note in notes if isinstance(note, Summary)]
    total = sum(summary.seconds.values())
    assert summary.seconds["timing"] > 0
    assert summary.seconds["other"] < 0.5 * total, summary.seconds
    conditions = [note for note in notes if isinstance(note, Conditions)]
    assert len(conditions) == 2
    assert all(set(note.before["probes_us"]) == {"read", "matmul"} for note in conditions)
    outcomes = {t.outcome for t in read_folder(tmp_path)[1] if t.stage == "final"}
    assert outcomes == {"ok"}
    again, _ = search("mla-decode", tmp_path)
    assert again.measured == 0
    assert len(read_notes(tmp_path)) == len(notes)
