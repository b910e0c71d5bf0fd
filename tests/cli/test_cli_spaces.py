"""`kerneltune spaces`: what it shows, for which device, and the user's own space."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kerneltune.cli import main
from kerneltune.device import detect

OWN = """
kernel = "mla-decode"
[parameters]
BLOCK_H = [16]
BLOCK_N = [32, 64]
num_splits = [1, 2]
num_warps = [4]
num_stages = [2]
[[where]]
rule = "num_splits == 1 or BLOCK_N == 64"
why = "splits of small tiles"
"""


def spaces(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(["spaces", *arguments])
    captured = capsys.readouterr()
    assert left.value.code == 0, captured.err
    return captured.out


def test_text_has_parameters_points_and_rejections(capsys: pytest.CaptureFixture[str]) -> None:
    shown = spaces(capsys, "moe", "--target", "sm_90").splitlines()
    assert shown[0] == "moe  moe.toml  NVIDIA H200 (sm_90)"
    assert "  BLOCK_K     64 128 256" in shown
    [row] = [line for line in shown if line.startswith("  tokens=64 ")]
    assert len(row.split()) == 8  # five sizes, dtype, and the points of gemm1 and gemm2
    assert all(int(count) > 50 for count in row.split()[-2:])
    assert any(line.startswith("  shared memory ") for line in shown)


def test_json_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(spaces(capsys, "--target", "sm_80", "--json"))
    assert [one["kernel"] for one in shown] == ["mla-decode", "moe"]
    for one in shown:
        assert one["device"]["arch"] == "sm_80"
        for row in one["workloads"]:
            for counts in row["parts"].values():
                assert counts["total"] == counts["feasible"] + sum(counts["rejected"].values())


def test_own_space_and_workloads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.toml").write_text(OWN)
    arguments = ["--space", str(tmp_path / "own.toml"), "--target", "sm_90", "--json"]
    shown: Any = json.loads(spaces(capsys, *arguments, "--workload", "batch=8,kv_len=4096", "--workload", "batch=2"))
    [one] = shown
    assert one["space"].endswith("own.toml")
    assert [row["workload"]["batch"] for row in one["workloads"]] == [8, 2]
    assert one["workloads"][0]["workload"]["heads"] == 16  # DeepSeek-V3 on each of 8 GPUs
    counts = one["workloads"][0]["parts"]["decode"]
    assert counts == {"total": 4, "feasible": 3, "rejected": {"splits of small tiles": 1}}


def test_model_and_parallelism(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["moe", "--target", "sm_90", "--model", "mixtral-8x7b", "--tp", "2", "--ep", "4", "--json"]
    workload = json.loads(spaces(capsys, *arguments))[0]["workloads"][0]["workload"]
    assert {name: workload[name] for name in ("E", "global_E", "N")} == {"E": 2, "global_E": 8, "N": 7168}


def test_a_space_without_the_ladder_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.toml").write_text(OWN)
    with pytest.raises(SystemExit) as left:
        main(["spaces", "--space", str(tmp_path / "own.toml"), "--target", "sm_90"])
    assert left.value.code == 2
    assert "own.toml: no ladder 'standard'" in capsys.readouterr().err


@pytest.mark.skipif(detect() is not None, reason="there is a GPU here")
def test_without_a_gpu_it_says_for_which_it_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["spaces", "mla-decode", "--workload", "batch=8,kv_len=4096"])
    captured = capsys.readouterr()
    assert captured.err.startswith("no GPU here: answering for --target sm_90 (NVIDIA H200)")
    assert "NVIDIA H200 (sm_90)" in captured.out
