"""What the text says, and that JSON, CSV and Markdown say the same."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
import report_sample as sample

from kerneltune.report.formats import to_csv, to_json, to_markdown
from kerneltune.report.load import find_folders, read_report
from kerneltune.report.text import HEADERS, number, render, to_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A live search of mla-decode beside a replayed one of moe."""
    folder = tmp_path_factory.mktemp("searches")
    sample.write_search(folder / "mla-decode", "mla-decode")
    sample.write_search(folder / "moe", "moe", source="replay:h200-moe-2026-01")
    return folder


def test_text_has_a_line_a_shape_and_every_column(folder: Path) -> None:
    text = render(folder)
    lines = text.splitlines()
    headers = [line for line in lines if line.startswith("shape")]
    assert len(headers) == 2
    assert all(header in line for line in headers for header in HEADERS)
    (entry,) = [
        e for e in read_report([folder / "mla-decode"]).rows if e.shape.startswith("batch=128 kv_len=4096 heads=16")
    ]
    (line,) = [line for line in lines if line.startswith(entry.shape)]
    assert number(entry.tuned_us) in line
    assert number(entry.default_us) in line
    assert f"{entry.gain:.2f}x" in line
    assert f"{100 * (entry.roofline or 0):.0f} %" in line
    assert line.endswith("memory")


def test_text_adds_up(folder: Path) -> None:
    text = render(folder)
    assert "x over the default (geometric mean of 10 shapes)" in text
    assert "mla-decode: 1 of 10 shapes keep the default: batch=8 kv_len=8192 heads=16 bf16" in text
    assert "NVIDIA H200, 2026-01-02: DRAM read 4413 GB/s, copy 3987 GB/s, bf16 741 TFLOPS" in text
    assert "triton 3.9.0" in text
    assert "each includes the 4.2 us of an empty graph" in text
    assert "`kerneltune search mla-decode --seed 7`" in text
    for outcome in sample.REASONS:
        assert outcome.replace("_", " ") in text


def test_a_replay_says_so_and_marks_composed_times(folder: Path) -> None:
    text = render(folder)
    assert "replayed from a recording of NVIDIA H200 (h200-moe-2026-01); times are the recorded ones" in text
    moe = [line for line in text.splitlines() if line.startswith("tokens=")]
    assert len(moe) == 10
    assert all("*" in line for line in moe)
    assert "composed: the recorded times of the parts" in text
    live = render(folder / "mla-decode")
    assert "*" not in live
    assert "replayed" not in live


def test_text_does_not_depend_on_the_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = render(folder)
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert render(folder) == before
    assert "\x1b" not in before
    assert all(line == line.rstrip() for line in before.splitlines())


def test_markup_in_a_reason_is_text(tmp_path: Path) -> None:
    sample.write_search(tmp_path, "mla-decode")
    text = (tmp_path / "records" / "mla-decode.jsonl").read_text()
    (tmp_path / "records" / "mla-decode.jsonl").write_text(
        text.replace("no answer in 30 s", "[bold]no[/] :smile: [/x]")
    )
    assert "[bold]no[/] :smile: [/x]" in render(tmp_path)


def test_json_parses_back_unrounded(folder: Path) -> None:
    report = read_report(find_folders(folder))
    data = json.loads(to_json(report))
    assert data["schema"] == 1
    assert [row["tuned_us"] for row in data["rows"]] == [row.tuned_us for row in report.rows]
    assert [row["workload"] for row in data["rows"]] == [row.workload for row in report.rows]
    assert data["geomean_gain"].keys() == {"mla-decode", "moe"}
    assert data["geomean_gain"]["moe"] > 1
    assert data["ceilings"][0]["dram_read_gbps"] == sample.CEILINGS.dram_read_gbps
    assert data["provenance"][0]["versions"]["triton"] == "3.9.0"
    assert sum(failure["count"] for failure in data["failures"]) > 0


def test_csv_parses_back_unrounded(folder: Path) -> None:
    report = read_report(find_folders(folder))
    rows = list(csv.DictReader(io.StringIO(to_csv(report))))
    assert [float(row["tuned_us"]) for row in rows] == [row.tuned_us for row in report.rows]
    assert [json.loads(row["config"]) for row in rows] == [row.config for row in report.rows]
    assert rows[0]["heads"] == "16"  # whole numbers stay whole beside a kernel that has no such key
    assert rows[0]["tokens"] == ""
    assert rows[-1]["tokens"] == "4096"


def test_markdown_is_a_table_with_as_many_cells_in_each_line(folder: Path) -> None:
    markdown = to_markdown(read_report(find_folders(folder)))
    table = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len(table) == 2 * 2 + 20
    assert {line.replace("\\|", "").count("|") for line in table} == {len(HEADERS) + 1}
    assert "### moe on NVIDIA H200" in markdown
    assert "\\*" in markdown  # a composed time's mark, not emphasis


def test_every_format_copes_without_finals(tmp_path: Path) -> None:
    sample.write_search(tmp_path, "mla-decode", finals=False)
    report = read_report([tmp_path])
    assert json.loads(to_json(report))["rows"] == []
    assert to_csv(report).startswith("kernel,device,shape,default_us,")
    assert to_csv(report).count("\n") == 1
    assert "600 trials" in to_markdown(report)
    assert "600 trials" in to_text(report)
