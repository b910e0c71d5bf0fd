"""The Python call: the same search, the same words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from proto import proto_recordings

import kerneltune
from kerneltune.errors import UserError
from kerneltune.recordings import write_recording


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    folder = tmp_path / "recordings"
    for index, recording in enumerate(proto_recordings()):
        write_recording(folder / f"{index}.parquet", recording)
    return folder


def test_search_from_python_ends_with_a_table_that_loads(tmp_path: Path, recordings: Path) -> None:
    result = kerneltune.search("mla-decode", replay=recordings, trials=10, sampler="random", out=tmp_path / "out")
    assert result.table is not None
    assert len(kerneltune.load_table(result.table).entries) == 4


def test_named_workloads_are_answered_from_their_recordings_alone(tmp_path: Path, recordings: Path) -> None:
    result = kerneltune.search(
        "mla-decode", workloads=["batch=1,kv_len=8192,heads=128"], replay=recordings, trials=10, out=tmp_path / "out"
    )
    assert [(w["batch"], w["heads"]) for w, _ in result.decisions] == [(1, 128)]


def test_a_workload_that_nobody_recorded_is_exit_3_and_lists_those_there_are(tmp_path: Path, recordings: Path) -> None:
    with pytest.raises(UserError, match=r"batch=3 .*was not recorded.*Recorded: .*batch=128") as caught:
        kerneltune.search("mla-decode", workloads=["batch=3,kv_len=77"], replay=recordings, out=tmp_path / "out")
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kernel": "gemm"}, "unknown kernel 'gemm'"),
        ({"sampler": "annealing"}, "expected one of default"),
        ({"ladder": "huge"}, "standard"),
        ({"replay": "/nowhere"}, "no such recording"),
        ({"space": "/nowhere.toml"}, "nowhere.toml"),
    ],
)
def test_bad_words_are_said_before_anything_starts(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    kernel = options.pop("kernel", "mla-decode")
    with pytest.raises(UserError, match=says):
        kerneltune.search(kernel, out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
