"""Records survive cut tails, unknown lines, full disks and a second writer."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kerneltune.errors import UserError
from kerneltune.records import RecordsInUse, RecordWriter, Trial, read_lines


def trial(index: int) -> Trial:
    return Trial(session="a", workload={"batch": 1}, part="decode", config={"B": index}, stage="search", index=index,
                 outcome="ok", time_us=1.5)  # fmt: skip


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "records" / "x.jsonl") as writer:
        for index in range(3):
            writer.append(trial(index))
    assert list(read_lines(tmp_path / "records" / "x.jsonl")) == [trial(0), trial(1), trial(2)]


@pytest.mark.parametrize("keep", [1, 20, -1])
def test_a_cut_tail_is_skipped_by_readers_and_removed_by_the_next_writer(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "x.jsonl"
    with RecordWriter(path) as writer:
        writer.append(trial(0))
        start = path.stat().st_size
        writer.append(trial(1))
    data = path.read_bytes()
    path.write_bytes(data[: start + keep] if keep > 0 else data[:-1])
    if keep > 0:
        assert list(read_lines(path)) == [trial(0)]
    with RecordWriter(path) as writer:
        writer.append(trial(2))
    assert list(read_lines(path)) == [trial(0), trial(2)]


def test_unknown_fields_kinds_and_damaged_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with RecordWriter(path) as writer:
        writer.append(trial(0))
    known = json.loads(path.read_text())
    lines = [json.dumps(known | {"later": 1}), json.dumps({"kind": "photo"}), "{]", "\x00\x01", "[1]"]
    with path.open("a") as file:
        file.write("\n".join(lines) + "\n")
    assert list(read_lines(path)) == [trial(0), trial(0)]


def test_a_second_writer_is_refused_in_one_line(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "x.jsonl"), pytest.raises(RecordsInUse, match=r"another --out"):
        RecordWriter(tmp_path / "x.jsonl")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_raises_and_keeps_the_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with RecordWriter(path) as writer:
        writer.append(trial(0))
        good = os.dup(writer._file.fileno())
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, writer._file.fileno())
        with pytest.raises(OSError, match="No space left"):
            writer.append(trial(1))
        os.dup2(good, writer._file.fileno())
    assert list(read_lines(path)) == [trial(0)]


@pytest.mark.parametrize(
    "change", [{"time_us": -5.0}, {"time_us": 0.0}, {"roofline": 1e308}, {"workload": {"a": [[]]}}]
)
def test_a_line_that_no_measurement_gives_is_skipped(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "x.jsonl"
    with RecordWriter(path) as writer:
        writer.append(trial(0))
    with path.open("a") as file:
        file.write(json.dumps(json.loads(path.read_text()) | change) + "\n")
    assert list(read_lines(path)) == [trial(0)]


def test_a_record_file_that_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").symlink_to("/dev/full")
    with pytest.raises(UserError, match="not a regular file"):
        RecordWriter(tmp_path / "x.jsonl")
