"""Which figures a report takes from which file, and what it makes of damaged or missing ones."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest
import report_sample as sample

from kerneltune.errors import UserError
from kerneltune.records import RecordWriter
from kerneltune.report.data import geomean, group_labels
from kerneltune.report.load import find_folders, read_curves, read_report
from kerneltune.report.text import to_text


def test_a_table_entry_is_a_row_with_its_own_figures(tmp_path: Path) -> None:
    entries = sample.write_search(tmp_path, "mla-decode")
    report = read_report([tmp_path])
    assert len(report.rows) == len(entries) == 10
    rows = {(row.workload["batch"], row.workload["kv_len"], row.workload["heads"]): row for row in report.rows}
    for entry in entries:
        row = rows[entry["workload"]["batch"], entry["workload"]["kv_len"], entry["workload"]["heads"]]
        measured = entry["measured"]
        assert row.tuned_us == measured["time_us"]
        launch_us = sample.CEILINGS.launch_us
        net_gain = (measured["default_us"] - launch_us) / (measured["time_us"] - launch_us)
        assert row.gain == pytest.approx(net_gain)
        assert (row.gbps, row.tflops, row.roofline) == (measured["gbps"], measured["tflops"], measured["roofline"])
        work = sample.cost("mla-decode", entry["workload"])
        assert row.intensity == pytest.approx(work.flops / work.bytes)
        default_tflops = work.flops / (measured["default_us"] - sample.CEILINGS.launch_us) / 1e6
        assert row.default_tflops == pytest.approx(default_tflops)


def test_records_alone_give_the_same_rows_as_the_table(tmp_path: Path) -> None:
    sample.write_search(tmp_path / "with", "moe")
    sample.write_search(tmp_path / "without", "moe", table=False)
    with_table, without = read_report([tmp_path / "with"]), read_report([tmp_path / "without"])
    assert {row.origin for row in with_table.rows} == {"table"}
    assert {row.origin for row in without.rows} == {"records"}
    for ours, theirs in zip(without.rows, with_table.rows, strict=True):
        assert (ours.workload, ours.config, ours.no_gain) == (theirs.workload, theirs.config, theirs.no_gain)
        assert (ours.tuned_us, ours.default_us, ours.tflops) == (theirs.tuned_us, theirs.default_us, theirs.tflops)


def test_the_gain_that_the_table_states_is_told(tmp_path: Path) -> None:
    entry = {
        "workload": sample.mla_workload(1, 2048, 16),
        "config": {"BLOCK_N": 64},
        "measured": {"time_us": 9.0, "default_us": 9.05, "gain": 1.0},
    }
    sample.write_table(tmp_path / "tables" / "a.json", "mla-decode", [entry])
    (row,) = read_report([tmp_path]).rows
    assert (row.gain, row.no_gain, row.default_us) == (1.0, True, 9.05)


def test_a_gain_inside_the_spread_is_no_gain(tmp_path: Path) -> None:
    workload = sample.mla_workload(8, 8192, 16)
    with RecordWriter(tmp_path / "records" / "a.jsonl") as writer:
        writer.append(sample.session("mla-decode"))
        for config, reason, time_us in (({"BLOCK_N": 32}, "default", 100.0), ({"BLOCK_N": 64}, "", 99.5)):
            writer.append(sample.final(workload, config, reason, time_us, spread_us=1.0))
    (row,) = read_report([tmp_path]).rows
    assert row.no_gain
    assert row.config == {"BLOCK_N": 32}


def test_unfinished_and_failed_trials_are_told(tmp_path: Path) -> None:
    sample.write_search(tmp_path, "mla-decode", finals=False)
    report = read_report([tmp_path])
    assert report.rows == ()
    assert len(report.unfinished) == 10
    assert all(unfinished.tried == 60 and unfinished.best_us["decode"] > 0 for unfinished in report.unfinished)
    by_outcome = {failure.outcome: failure for failure in report.failures}
    assert set(by_outcome) == set(sample.REASONS)
    assert by_outcome["suspect"].count == 10
    assert by_outcome["wrong"].rule == "request N"
    assert by_outcome["wrong"].example == sample.REASONS["wrong"]
    assert "60 configs tried, best so far" in to_text(report)


def test_only_failures(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "records" / "a.jsonl") as writer:
        writer.append(sample.session("mla-decode"))
        for index in range(3):
            writer.append(sample.failed(sample.mla_workload(1, 2048, 16), index, "crashed"))
    report = read_report([tmp_path])
    assert [(failure.outcome, failure.count) for failure in report.failures] == [("crashed", 3)]
    assert "3 configs tried, none passed yet" in to_text(report)
    assert read_curves([tmp_path]) == []


def test_a_cut_tail_costs_one_trial(tmp_path: Path) -> None:
    sample.write_search(tmp_path, "mla-decode", table=False)
    before = read_report([tmp_path])
    path = tmp_path / "records" / "mla-decode.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    after = read_report([tmp_path])
    assert after.trials == before.trials - 1
    assert len(after.rows) == 10


def test_trials_of_an_unknown_session_are_left_out(tmp_path: Path) -> None:
    sample.write_search(tmp_path, "mla-decode", table=False)
    path = tmp_path / "records" / "mla-decode.jsonl"
    path.write_bytes(path.read_bytes().split(b"\n", 1)[1])  # the session line is lost
    assert read_report([tmp_path]).trials == 0


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"kernel": 1}', '{"kernel": "moe", "device": {}, "provenance": {}, "entries": [3]}', "\x00\xff"],
)
def test_a_damaged_table_is_a_warning(tmp_path: Path, text: str) -> None:
    sample.write_search(tmp_path, "mla-decode")
    (tmp_path / "tables" / "other.json").write_text(text, encoding="latin-1")
    report = read_report([tmp_path])
    assert len(report.rows) == 10
    (warning,) = report.warnings
    assert "other.json" in warning
    assert "\n" not in warning


def test_an_entry_without_a_time_is_no_row(tmp_path: Path) -> None:
    entry = {"workload": sample.mla_workload(1, 2048, 16), "config": {"BLOCK_N": 64}}
    sample.write_table(tmp_path / "tables" / "imported.json", "mla-decode", [entry])
    assert read_report([tmp_path]).rows == ()


def test_kernel_chooses(tmp_path: Path) -> None:
    for kernel in sample.PARTS:
        sample.write_search(tmp_path / kernel, kernel)
    folders = find_folders(tmp_path)
    assert {row.kernel for row in read_report(folders).rows} == {"mla-decode", "moe"}
    assert {row.kernel for row in read_report(folders, "moe").rows} == {"moe"}
    assert {curve.kernel for curve in read_curves(folders, "moe")} == {"moe"}


def test_curves_count_distinct_configs_in_order(tmp_path: Path) -> None:
    workload = sample.mla_workload(1, 2048, 16)
    with RecordWriter(tmp_path / "records" / "a.jsonl") as writer:
        writer.append(sample.session("mla-decode"))
        writer.append(sample.failed(workload, 0, "infeasible"))  # never reached a GPU: not counted
        writer.append(sample.failed(workload, 1, "wrong"))
        for index, time_us in ((2, 30.0), (2, 10.0), (3, 20.0)):  # the second time of a config is a repeat
            writer.append(sample.searched(workload, index, time_us))
    (curve,) = read_curves([tmp_path])
    assert curve.times_us == (math.inf, 30.0, 20.0)


def test_groups_are_named_by_what_differs(tmp_path: Path) -> None:
    for kernel in sample.PARTS:
        sample.write_search(tmp_path / kernel, kernel)
    labels = set(group_labels(read_report(find_folders(tmp_path)).rows).values())
    assert labels == {
        "mla-decode heads=16",
        "mla-decode heads=128",
        "moe E=8 N=7168 K=4096 top_k=2",
        "moe E=256 N=256 K=7168 top_k=8",
    }


def test_find_folders_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    old, new = (Path("kerneltune-results") / "nvidia-h200" / kernel for kernel in sample.PARTS)
    sample.write_search(old, "mla-decode", trials=9)
    sample.write_search(new, "moe", trials=9)
    for path in old.rglob("*.json*"):
        os.utime(path, (1e9, 1e9))
    assert find_folders(None) == (new,)
    assert find_folders(None, "mla-decode") == (old,)
    assert set(find_folders(Path("kerneltune-results"))) == {old, new}


def test_find_folders_says_what_it_expected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no results in .*expected records/\*\.jsonl"):
        find_folders(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        find_folders(tmp_path / "nowhere")


def test_geomean() -> None:
    assert geomean([1.0, 4.0]) == pytest.approx(2.0)
    assert geomean([]) is None


def test_twenty_thousand_trials_in_two_seconds(tmp_path: Path) -> None:
    sample.write_search(tmp_path, "mla-decode", trials=2000)
    start = time.process_time()
    text = to_text(read_report([tmp_path]))
    assert time.process_time() - start < 2.0
    assert text.count("kv_len=") >= 10


def test_what_another_device_s_table_serves_is_told_apart(tmp_path: Path) -> None:
    """Their sizes were added up: tokens of one GPU counted as served on the other."""
    from kerneltune.report.coverage import served_lines

    for name, batch in (("NVIDIA H200", 8), ("NVIDIA B200", 64)):
        workload = sample.mla_workload(batch, 2048, 16)
        entry = {"workload": workload, "config": {"BLOCK_N": 64}, "measured": {"time_us": 9.0}}
        device = sample.H200 | {"name": name}
        sample.write_table(tmp_path / "tables" / f"{batch}.json", "mla-decode", [entry], device=device)
    assert sorted(line.split(";")[0] for line in served_lines(read_report([tmp_path]).rows)) == [
        "mla-decode on NVIDIA B200: batch 32-128",
        "mla-decode on NVIDIA H200: batch 4-16",
    ]
