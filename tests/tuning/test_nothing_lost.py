"""A search that cannot write says so in one line and keeps what there is; two searches never mix their records."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from proto import proto_recordings

from kerneltune.recordings import write_recording
from kerneltune.records import read_folder


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    for index, recording in enumerate(proto_recordings()):
        write_recording(tmp_path / "recordings" / f"{index}.parquet", recording)
    return tmp_path / "recordings"


def command(out: Path, recordings: Path, trials: int = 40) -> list[str]:
    return [sys.executable, "-m", "kerneltune", "search", "mla-decode", "--replay", str(recordings), "--out", str(out),
            "--trials", str(trials), "--sampler", "random", "--json"]  # fmt: skip


def small_files() -> None:
    """No file may grow beyond 40 KB, as on a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))


def test_a_full_disk_is_one_line_and_the_search_goes_on_from_there(tmp_path: Path, recordings: Path) -> None:
    out = tmp_path / "out"
    full = subprocess.run(command(out, recordings), capture_output=True, text=True, preexec_fn=small_files)
    assert full.returncode == 2
    (line,) = [line for line in full.stderr.splitlines() if line.startswith("error: ")]
    assert "what was recorded before is kept" in line
    assert "mla-decode.jsonl" in line
    assert "Traceback" not in full.stderr
    kept = len(read_folder(out)[1])
    assert kept > 20
    assert (out / "records" / "mla-decode.jsonl").read_bytes().endswith(b"\n")
    again = subprocess.run(command(out, recordings), capture_output=True, text=True, check=True)
    assert f"{kept} already in the records" in again.stderr
    assert (out / "tables").is_dir()


@pytest.mark.parametrize("kind", ["a folder nobody can make", "a file in its place", "read-only"])
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, recordings: Path, kind: str) -> None:
    out = tmp_path / "out"
    if kind == "a folder nobody can make":
        out = Path("/proc/kerneltune-results")
    elif kind == "a file in its place":
        out.write_text("not a folder")
    elif os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    else:
        out.mkdir(mode=0o500)
    done = subprocess.run(command(out, recordings), capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert str(out) in line
    assert "Traceback" not in done.stderr


def test_a_second_process_on_the_same_records_is_refused_and_harms_nothing(tmp_path: Path, recordings: Path) -> None:
    out = tmp_path / "out"
    records = out / "records" / "mla-decode.jsonl"
    first = subprocess.Popen(command(out, recordings, 200), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while time.monotonic() < end and not (records.exists() and records.stat().st_size):
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)  # so that the second is sure to meet it
    second = subprocess.run(command(out, recordings), capture_output=True, text=True)
    assert first.poll() is None
    first.send_signal(signal.SIGCONT)
    first.communicate(timeout=120)
    assert first.returncode == 0
    assert second.returncode == 2
    assert "is being written by another kerneltune" in second.stderr
    sessions, trials = read_folder(out)
    assert len(sessions) == 1
    expected = sum(min(200, len(recording.trials)) for recording in proto_recordings())
    assert len([t for t in trials if t.stage == "search"]) == expected
