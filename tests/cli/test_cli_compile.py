"""`kerneltune compile` and `kerneltune ceilings` as a user calls them, on a machine without a GPU."""

from __future__ import annotations

import json

import pytest
import torch

from kerneltune.cli import main

MOE = ["moe", "--target", "sm_90", "--workload", "tokens=8,E=8,N=64,K=128,top_k=2"]
MLA = ["mla-decode", "--target", "sm_90", "--workload", "batch=2,kv_len=256"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out, captured.err


def test_compile_prints_what_each_part_uses(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "compile", *MOE, "--json")
    rows = json.loads(out)["compiled"]
    assert code == 0, rows
    assert [row["part"] for row in rows] == ["gemm1", "gemm2"]
    assert all(row["outcome"] == "ok" and row["registers"] > 0 for row in rows)
    assert rows[0]["workload"]["tokens"] == 8


def test_a_config_that_does_not_fit_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "compile", *MLA, "--config", "BLOCK_N=128,num_stages=4", "--json")
    row = json.loads(out)["compiled"][0]
    assert (code, row["outcome"]) == (1, "infeasible")
    assert row["config"]["num_stages"] == 4
    assert "shared memory" in row["reason"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["compile", "no-such", "--target", "sm_90"], "unknown kernel 'no-such'"),
        (["compile", "moe", "--target", "sm_33"], "unknown target 'sm_33'"),
        (["compile", *MOE, "--config", "BLOCK_Q=3"], "--config: 'BLOCK_Q=3' is not NAME=VALUE"),
        (["compile", *MOE, "--config", "gemm3.BLOCK_M=16"], "--config: 'gemm3.BLOCK_M=16'"),
        (["compile", "moe", "--target", "sm_90", "--workload", "tokens=0"], "tokens=0"),
    ],
)
def test_bad_input_is_one_line_and_2(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert expected in err
    assert err.count("\n") == 1


def test_ceilings_need_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    code, out, err = run(capsys, "ceilings")
    assert (code, out) == (3, "")
    assert "never assumed" in err
    assert err.count("\n") == 1
