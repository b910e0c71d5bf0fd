"""What a search tells besides times: the GPU's conditions, and where its seconds went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_failures import LARGE, SMALL, Scripted

from kerneltune.measure.conditions import Snapshot
from kerneltune.records import Conditions, Summary, read_lines, read_notes
from kerneltune.report.formats import to_json
from kerneltune.report.load import read_report
from kerneltune.report.text import render
from kerneltune.tuning.options import Options
from kerneltune.tuning.progress import Silent
from kerneltune.tuning.seconds import KINDS, Seconds, seconds_text
from kerneltune.tuning.session import run


class Slowing(Scripted):
    """Its GPU's clock is lower at each look."""

    sm_mhz = 1980.0

    def conditions(self) -> dict[str, Any]:
        self.sm_mhz -= 200
        return Snapshot(sm_mhz=self.sm_mhz, others=0).to_dict()


class Notes(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def searched(tmp_path: Path) -> tuple[Path, list[str]]:
    progress = Notes()
    run(Slowing(), [SMALL, LARGE], Options(tmp_path, trials=8, sampler="exhaustive"), progress)
    return tmp_path, progress.notes


def test_a_doubtful_measurement_is_said_and_recorded(searched: tuple[Path, list[str]]) -> None:
    out, notes = searched
    assert notes[0] == "warning: the SM clock went from 1780 to 1580 MHz; times may not repeat"
    found = [note for note in read_notes(out) if isinstance(note, Conditions)]
    assert [note.workload for note in found] == [SMALL, LARGE]
    assert found[0].warnings == [notes[0].removeprefix("warning: ")]
    assert (found[0].before["sm_mhz"], found[0].after["sm_mhz"]) == (1780.0, 1580.0)
    assert found[0].samples > 0


def test_the_report_prints_both_and_gives_them_as_json(searched: tuple[Path, list[str]]) -> None:
    out, _ = searched
    text = render(out)
    assert "the SM clock went from 1780 to 1580 MHz" in text
    assert "measured in" in text
    data = json.loads(to_json(read_report([out])))
    assert data["doubts"][0]["warnings"] == ["the SM clock went from 1780 to 1580 MHz; times may not repeat"]
    assert list(data["searches"][0]["seconds"]) == list(KINDS)


def test_the_seconds_add_up_and_are_printed_once(searched: tuple[Path, list[str]]) -> None:
    out, notes = searched
    assert [note for note in notes if note.startswith("seconds: ")] == [notes[-1]]
    (summary,) = [note for note in read_notes(out) if isinstance(note, Summary)]
    assert set(summary.seconds) == set(KINDS)
    assert summary.measured > 8
    assert sum(summary.seconds.values()) > 0


def test_a_search_that_measures_nothing_adds_no_line(searched: tuple[Path, list[str]]) -> None:
    out, _ = searched
    records = out / "records" / "mla-decode.jsonl"
    before, progress = records.read_bytes(), Notes()
    run(Slowing(), [SMALL, LARGE], Options(out, trials=8, sampler="exhaustive"), progress)
    assert records.read_bytes() == before
    assert progress.notes == []


def test_older_readers_see_trials_only(searched: tuple[Path, list[str]]) -> None:
    out, _ = searched
    kinds = {type(line).__name__ for line in read_lines(out / "records" / "mla-decode.jsonl")}
    assert kinds == {"Session", "Trial"}


def test_every_second_has_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 4.0, 10.0])
    monkeypatch.setattr("kerneltune.tuning.seconds.time.monotonic", lambda: next(now))
    seconds = Seconds()
    with seconds.of("sampler"):
        pass
    seconds.add("gate", 2.0)
    split = seconds.split()
    assert (split["sampler"], split["gate"], split["other"]) == (3.0, 2.0, 5.0)
    assert sum(split.values()) == 10.0
    assert list(split) == list(KINDS)
    assert seconds_text(split).startswith("10.0 s: start 0.0 (0%), compile wait 0.0 (0%), gate 2.0 (20%)")
