"""A recording comes back from its file as it was, and a file that is none is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from proto import proto_recordings

from kerneltune.errors import UserError
from kerneltune.recordings import find_recordings, read_recording, write_recording


def test_round_trip(tmp_path: Path) -> None:
    for recording in proto_recordings():
        write_recording(tmp_path / "r.parquet", recording)
        again = read_recording(tmp_path / "r.parquet")
        assert again.id == recording.id
        assert again.workload == recording.workload
        assert [t.config for t in again.trials] == [t.config for t in recording.trials]
        assert [t.outcome for t in again.trials] == [t.outcome for t in recording.trials]
        assert [t.time_us for t in again.trials] == [t.time_us for t in recording.trials]


def test_864_points_take_less_than_40_kb(tmp_path: Path) -> None:
    for index, recording in enumerate(proto_recordings()):
        write_recording(tmp_path / f"{index}.parquet", recording)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 60_000


@pytest.mark.parametrize("data", [b"", b"PAR1", b"{}", b"\x00" * 1000])
def test_a_file_that_is_no_recording_is_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "bad.parquet"
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"bad\.parquet: not a kerneltune recording"):
        read_recording(path)


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such recording"):
        find_recordings([tmp_path / "nowhere"], "moe")


def damaged(path: Path, **header: object) -> Path:
    """A good recording with fields of its header replaced."""
    write_recording(path, proto_recordings()[0])
    table = pq.read_table(path)
    changed = json.loads(table.schema.metadata[b"kerneltune"]) | header
    metadata = dict(table.schema.metadata) | {b"kerneltune": json.dumps(changed).encode()}
    pq.write_table(table.replace_schema_metadata(metadata), path)
    return path


@pytest.mark.parametrize(
    "header",
    [
        {"device": {}}, {"device": "x"}, {"ceilings": {}}, {"workload": [1]}, {"workload": {"batch": 1}}, {"parts": []},
        {"parts": ["zzz"]}, {"default_config": {"a": 1}}, {"default_config": None}, {"whole": {}}, {"launch_us": "x"},
        {"launch_us": -1}, {"versions": None}, {"kernel": ""},
    ],
    ids=str,
)  # fmt: skip
def test_a_header_that_makes_no_sense_is_one_line_naming_the_file(tmp_path: Path, header: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"bad\.parquet: not a kerneltune recording"):
        read_recording(damaged(tmp_path / "bad.parquet", **header))
