"""A replayed search: nothing lost, nothing twice, the same table whatever happens to the process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from proto import proto_recordings

from kerneltune.recordings import canonical, write_recording
from kerneltune.records import RecordsInUse, RecordWriter, read_folder
from kerneltune.tuning.backends import ReplayBackend
from kerneltune.tuning.options import Options
from kerneltune.tuning.progress import Silent
from kerneltune.tuning.session import Result, run


class Stop(Exception):
    pass


class StopAfter(Silent):
    """Raises in the middle of a search, as Ctrl-C or a crash would."""

    def __init__(self, trials: int) -> None:
        self.left = trials

    def trial(self, *args: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise Stop


def replay(out: Path, progress: Any = None, **options: Any) -> Result:
    backend = ReplayBackend(proto_recordings())
    settings: dict[str, Any] = {"trials": 24, "sampler": "tpe"} | options
    chosen = Options(out, **settings)
    return run(backend, backend.workloads, chosen, progress or Silent())


def entries(result: Result) -> list[dict[str, Any]]:
    """The table's entries, without the dates."""
    assert result.table is not None
    found = json.loads(result.table.read_text())["entries"]
    for entry in found:
        entry["measured"].pop("date")
    return found


def keys(out: Path) -> Counter[str]:
    return Counter(canonical([t.workload, t.part, t.config, t.stage]) for t in read_folder(out)[1])


def test_a_search_ends_with_the_recordings_best_configs(tmp_path: Path) -> None:
    result = replay(tmp_path, trials=400, max_loss=0.0)
    by_workload = {canonical(e["workload"]): e for e in entries(result)}
    for recording in proto_recordings():
        optimum = min(t.time_us for t in recording.trials if t.time_us)
        found = by_workload[canonical(recording.workload)]["measured"]["time_us"]
        assert found == pytest.approx(optimum, rel=1e-3)


def test_every_trial_is_distinct_and_the_default_is_among_them(tmp_path: Path) -> None:
    result = replay(tmp_path)
    assert set(keys(tmp_path).values()) == {1}
    trials = read_folder(tmp_path)[1]
    for workload, decision in result.decisions:
        mine = [t for t in trials if t.workload == workload and t.stage == "search"]
        assert len(mine) == 24
        assert decision is not None
        assert decision.default is not None
        assert decision.default.config in [t.config for t in mine]


def test_the_same_command_again_measures_nothing_and_keeps_the_table(tmp_path: Path) -> None:
    first = replay(tmp_path)
    before = entries(first)
    again = replay(tmp_path)
    assert again.measured == 0
    assert again.remembered == first.measured
    assert entries(again) == before


@pytest.mark.parametrize("after", [0, 5, 37, 60])
def test_interrupted_and_cut_in_half_it_resumes_to_the_same_table(tmp_path: Path, after: int) -> None:
    whole = replay(tmp_path / "whole")
    with pytest.raises(Stop):
        replay(tmp_path / "cut", StopAfter(after))
    records = tmp_path / "cut" / "records" / "mla-decode.jsonl"
    kept = len(read_folder(tmp_path / "cut")[1])
    data = records.read_bytes()
    records.write_bytes(data[: len(data) - 40])
    result = replay(tmp_path / "cut")
    assert entries(result) == entries(whole)
    assert set(keys(tmp_path / "cut").values()) == {1}
    assert keys(tmp_path / "cut") == keys(tmp_path / "whole")
    assert result.remembered >= kept - 1


def test_a_budget_counts_recorded_seconds_and_repeats_itself(tmp_path: Path) -> None:
    short = replay(tmp_path / "a", budget_s=8.0)
    again = replay(tmp_path / "b", budget_s=8.0)
    assert entries(short) == entries(again)
    assert short.measured < replay(tmp_path / "c").measured


def test_more_trials_go_on_from_the_recorded_ones(tmp_path: Path) -> None:
    few = replay(tmp_path, trials=16)
    more = replay(tmp_path, trials=32)
    assert more.remembered >= 16 * len(few.decisions)
    assert set(keys(tmp_path).values()) == {1}


def test_a_shorter_search_into_the_same_folder_keeps_the_better_config(tmp_path: Path) -> None:
    long = replay(tmp_path, Silent(), trials=48)
    short = replay(tmp_path, Silent(), trials=1)
    for (_, one), (_, other) in zip(long.decisions, short.decisions, strict=True):
        assert one is not None
        assert other is not None
        assert other.winner.time_us == one.winner.time_us


def test_a_second_search_on_the_same_records_is_refused(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "records" / "mla-decode.jsonl"), pytest.raises(RecordsInUse):
        replay(tmp_path)


def test_records_of_another_kernel_version_are_not_taken_over(tmp_path: Path) -> None:
    replay(tmp_path, trials=8)
    path = tmp_path / "records" / "mla-decode.jsonl"
    path.write_text(path.read_text().replace('"000000000000"', '"111111111111"'))
    assert replay(tmp_path, trials=8).remembered == 0


def command(out: Path, recordings: Path) -> list[str]:
    return [sys.executable, "-m", "kerneltune", "search", "mla-decode", "--replay", str(recordings), "--out", str(out),
            "--trials", "40", "--sampler", "tpe", "--json"]  # fmt: skip


def test_kill_minus_nine_loses_at_most_one_trial(tmp_path: Path) -> None:
    """The real command, killed with SIGKILL in the middle, its last line cut in half, started again."""
    for index, recording in enumerate(proto_recordings()):
        write_recording(tmp_path / "recordings" / f"{index}.parquet", recording)
    undisturbed = subprocess.run(
        command(tmp_path / "whole", tmp_path / "recordings"), capture_output=True, text=True, check=True
    )
    process = subprocess.Popen(
        command(tmp_path / "cut", tmp_path / "recordings"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    records = tmp_path / "cut" / "records" / "mla-decode.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not records.exists() or records.read_bytes().count(b"\n") < 37):
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    data = records.read_bytes()
    whole_lines = data.count(b"\n")
    cut = data.rstrip(b"\n")
    records.write_bytes(cut[: cut.rfind(b"\n") + 1 + 30])
    resumed = subprocess.run(
        command(tmp_path / "cut", tmp_path / "recordings"), capture_output=True, text=True, check=True
    )
    report = json.loads(resumed.stdout)
    assert report["remembered"] >= whole_lines - 3  # the session line, the cut line, one under way
    assert set(keys(tmp_path / "cut").values()) == {1}
    assert report["winners"] == json.loads(undisturbed.stdout)["winners"]
    third = subprocess.run(
        command(tmp_path / "cut", tmp_path / "recordings"), capture_output=True, text=True, check=True
    )
    assert json.loads(third.stdout)["measured"] == 0
