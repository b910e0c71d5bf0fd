"""The Python call: the same search, the same words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from proto import proto_recordings

import kerneltune
from kerneltune.errors import UserError
from kerneltune.recordings import write_recording
from kerneltune.records import read_folder


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


def test_workloads_of_two_dtypes_end_in_two_tables_and_both_are_named(tmp_path: Path) -> None:
    shipped = Path(kerneltune.__file__).parent / "results"
    asked = ["batch=32,kv_len=2048", "batch=16,kv_len=4096,dtype=fp16,lengths=spread"]
    result = kerneltune.search("mla-decode", workloads=asked, replay=shipped, trials=2, out=tmp_path / "out")
    assert sorted(path.name.split(".")[1] for path in result.tables) == ["bf16", "fp16"]
    assert [len(kerneltune.load_table(path).entries) for path in result.tables] == [1, 1]


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


def shipped_space_with(tmp_path: Path, **lists: str) -> Path:
    text = (Path(kerneltune.__file__).parent / "search_spaces" / "mla-decode.toml").read_text()
    for name, values in lists.items():
        text = re.sub(rf"^{name} = .*$", f"{name} = {values}", text, flags=re.MULTILINE)
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def test_a_space_of_ones_own_limits_a_replay_too(tmp_path: Path) -> None:
    space = shipped_space_with(tmp_path, BLOCK_N="[32]", num_warps="[4]")
    workload = "batch=128,kv_len=4096"
    result = kerneltune.search("mla-decode", workloads=[workload], space=space, replay="shipped", out=tmp_path / "out")
    default = result.decisions[0][1]
    assert default is not None
    assert default.default is not None
    tried = [t.config for t in read_folder(tmp_path / "out")[1] if t.stage == "search"]
    others = [config for config in tried if config != default.default.config]
    assert len(others) > 5
    assert {(config["BLOCK_N"], config["num_warps"]) for config in others} == {(32, 4)}


def test_a_space_of_which_nothing_was_recorded_is_said(tmp_path: Path) -> None:
    space = shipped_space_with(tmp_path, num_splits="[5]")
    with pytest.raises(UserError, match=r"mine\.toml: none of its points was recorded"):
        kerneltune.search("mla-decode", space=space, replay="shipped", out=tmp_path / "out")


def test_one_workload_may_stand_alone(tmp_path: Path, recordings: Path) -> None:
    result = kerneltune.search(
        "mla-decode", workloads="batch=128,kv_len=4096", replay=recordings, trials=8, out=tmp_path / "out"
    )
    assert [workload["heads"] for workload, _ in result.decisions] == [16]
