"""Engines' tables, in: nothing is lost or changed in silence. Out: nothing is written beside the named folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kerneltune import tables
from kerneltune.cli import main
from kerneltune.device import target
from kerneltune.kernels.moe.config import is_valid
from kerneltune.registry import load_tunable
from kerneltune.tuning.imports import imported_configs
from kerneltune.workloads import model_workload

H200 = target("sm_90")
NAME = "E=8,N=7168,device_name=NVIDIA_H200.json"
FP8 = "E=8,N=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8.json"
SIZES = {"E": 8, "global_E": 8, "N": 7168, "K": 4096, "top_k": 2, "tokens": 64}


def row(**given: Any) -> dict[str, Any]:
    known = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1}
    return known | {"num_warps": 4, "num_stages": 3} | given


def engine_file(folder: Path, name: str = NAME, **rows: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps({key.lstrip("m"): value for key, value in rows.items()}))
    return folder / name


def command(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    with pytest.raises(SystemExit) as left:
        main([str(each) for each in arguments])
    captured = capsys.readouterr()
    assert left.value.code == code, captured.err
    return captured.err if code else captured.out


def imported(capsys: pytest.CaptureFixture[str], out: Path, *files: Path) -> str:
    return command(capsys, "import", *files, "--workload", "K=4096,top_k=2", "--out", out)


def first_tried(out: Path) -> list[dict[str, Any]]:
    return imported_configs(out, "moe", load_tunable("moe").complete_workload(SIZES), H200.to_dict())[0]


@pytest.mark.parametrize("together", [True, False])
def test_sources_for_the_same_experts_are_all_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], together: bool
) -> None:
    files = [
        engine_file(tmp_path / "vllm", m64=row(BLOCK_SIZE_N=64)),
        engine_file(tmp_path / "vllm", FP8, m64=row(BLOCK_SIZE_N=128)),
        engine_file(tmp_path / "triton_3_6_0", m64=row(BLOCK_SIZE_N=256)),
    ]
    for some in [files] if together else [[file] for file in files] * 2:  # twice: the same again adds nothing
        imported(capsys, tmp_path / "out", *some)
    assert sorted(config["gemm1"]["BLOCK_N"] for config in first_tried(tmp_path / "out")) == [32, 64, 128]


def test_what_does_not_fit_is_clamped_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep = row(BLOCK_SIZE_M=64, BLOCK_SIZE_N=256, BLOCK_SIZE_K=256, num_warps=8, num_stages=4)
    file = engine_file(tmp_path, FP8, m64=deep, m32=row(BLOCK_SIZE_M=8), m128=row())
    shown = imported(capsys, tmp_path / "out", file)
    assert "2 of them clamped" in shown
    assert "would not run" not in shown
    near = first_tried(tmp_path / "out")
    assert {config["gemm1"]["BLOCK_M"] for config in near} == {16, 64}
    for config in near:
        for part in ("gemm1", "gemm2"):
            workload = load_tunable("moe").complete_workload(SIZES)
            assert is_valid(part, config[part], workload, H200) is None
            assert config[part]["BLOCK_K"] >= 32


def test_what_cannot_be_clamped_is_kept_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = {f"m{tokens}": row(BLOCK_SIZE_N=96) for tokens in range(2, 12)}
    file = engine_file(tmp_path, NAME, m1=row(), **bad)
    shown = imported(capsys, tmp_path / "out", file).splitlines()
    assert "11 configs" in shown[0]
    assert "of them clamped" not in shown[0]
    assert shown[1] == "  10 of them the kernel would not run, so a search passes over them:"
    assert shown[2] == "  tokens=2: config['gemm1'] cannot run: parameters: BLOCK_N is 48, expected a power of two"
    assert shown[-1] == "  and 2 more (--json names all)"
    arguments = ["import", file, "--workload", "K=4096,top_k=2", "--out", tmp_path / "out", "--json"]
    (told,) = json.loads(command(capsys, *arguments))
    assert [each["workload"]["tokens"] for each in told["refused"]] == list(range(2, 12))
    mine = our_table(tmp_path / "ours.json", {"tokens": 64}, gemm2={"BLOCK_Q": 1})
    assert "  tokens=64: config['gemm2'] is {'BLOCK_Q': 1}: " in command(
        capsys, "import", mine, "--out", tmp_path / "ours"
    )
    assert first_tried(tmp_path / "ours") == []


def test_many_sources_take_turns_and_the_rest_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The four entries of the first file took all places."""
    many = {f"m{tokens}": row(BLOCK_SIZE_N=64, GROUP_SIZE_M=tokens) for tokens in (48, 56, 64, 72)}
    engine_file(tmp_path / "a", NAME, **many)
    engine_file(tmp_path / "b", NAME, m60=row(BLOCK_SIZE_N=128), m64=row(BLOCK_SIZE_N=64, GROUP_SIZE_M=64))  # as a's
    engine_file(tmp_path / "c", NAME, m96=row(BLOCK_SIZE_N=256), m127=row(BLOCK_SIZE_N=96))  # the last cannot run
    for folder in "abc":
        imported(capsys, tmp_path / "out", tmp_path / folder / NAME)
    complete = load_tunable("moe").complete_workload(SIZES)
    found, more = imported_configs(tmp_path / "out", "moe", complete, H200.to_dict())
    tiles = [(config["gemm1"]["BLOCK_N"], config["gemm1"]["GROUP_M"]) for config in found]
    assert tiles[0] == (32, 64)  # the very size
    assert set(tiles) == {(32, 64), (64, 1), (128, 1), (32, 72)}
    assert more == 2


def test_fields_dropped_or_taken_from_triton_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without = {name: value for name, value in row(SPLIT_K=1, USE_TMA=True).items() if name != "num_stages"}
    shown = imported(capsys, tmp_path / "out", engine_file(tmp_path, m64=without))
    assert "SPLIT_K, USE_TMA dropped" in shown
    assert "num_stages not said: taken as 3" in shown
    assert "num_warps not said" not in shown
    assert " dropped:" not in imported(capsys, tmp_path / "out", engine_file(tmp_path, m64=row()))


def test_experts_in_all_are_never_those_of_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = imported(capsys, tmp_path / "out", engine_file(tmp_path, m64=row()))
    assert "global_E not said: taken as 8" in shown
    assert len(first_tried(tmp_path / "out")) == 1
    arguments = ["import", tmp_path / NAME, "--workload", "K=4096,top_k=2,global_E=32", "--out", tmp_path / "told"]
    assert "global_E not said" not in command(capsys, *arguments)
    (written,) = (tmp_path / "told" / "imports").glob("*.json")
    assert {each["workload"]["global_E"] for each in tables.load_table(written).entries} == {32}


def test_a_fused_shared_expert_is_a_start_for_the_model_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = engine_file(tmp_path, "E=257,N=256,device_name=NVIDIA_H200.json", m64=row())
    arguments = ["import", file, "--model", "deepseek-v3", "--tp", 8, "--out", tmp_path / "out"]
    assert "a start for E=256" in command(capsys, *arguments)
    asked = load_tunable("moe").complete_workload(model_workload("moe", "deepseek-v3", 8) | {"tokens": 64})
    assert len(imported_configs(tmp_path / "out", "moe", asked, H200.to_dict())[0]) == 1


def test_token_counts_are_written_one_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ "01" beside "1" would be two rows for one count."""
    file = engine_file(tmp_path, m1=row(), m01=row())
    says = command(capsys, "import", file, "--workload", "K=64,top_k=2", "--out", tmp_path / "out", code=2)
    assert "'01': expected a number of tokens" in says
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("device", "triton", "says"),
    [
        ("x/../../../../escaped/evil", "3.6.0", "device.name 'x/../../../../escaped/evil'"),
        ("x/../../../../escaped/evil\0", "3.6.0", "device.name"),
        ("NVIDIA H200", "3/6", "Triton version '3/6'"),
        ("NVIDIA H200", "..", "Triton version '..'"),
    ],
)
def test_an_export_stays_in_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str, triton: str, says: str
) -> None:
    config = {part: dict(zip(ours(), (16, 32, 64, 1, 4, 3), strict=True)) for part in ("gemm1", "gemm2")}
    made = tables.make_entry(dict(load_tunable("moe").complete_workload(SIZES)), config, {})
    table = tables.make_table("moe", H200.to_dict() | {"name": device}, {"triton": triton}, [made])
    (tmp_path / "hostile.json").write_text(json.dumps(table))
    before = sorted(tmp_path.rglob("*"))
    arguments = ["export", tmp_path / "hostile.json", "--format", "sglang", "--to", tmp_path / "a" / "b"]
    assert says in command(capsys, *arguments, code=2)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "workload", "says"),
    [
        ("E=0,N=16,device_name=X.json", "K=64,top_k=2", "E=0: expected a whole number from 1"),
        ("E=8,N=99999999999,device_name=X.json", "K=64,top_k=2", "N=99999999999: expected a whole number from 1"),
        ("E=8,N=16,device_name=X.json", "K=64,top_k=9", "top_k=9: expected at most global_E, 8"),
        ("E=8,N=16,device_name=X.json", "K=99999999999,top_k=2", "workload.K: expected a whole number from 1"),
        ("E=8,N=16,device_name=X.json", "K=64,top_k=2,tokens=5", "says tokens in its rows: leave it out of --workload"),
        ("E=8,N=16,device_name=X.json", "K=64,top_k=2,E=8", "says E in its name: leave it out of --workload"),
    ],
)
def test_sizes_that_cannot_be_are_one_line_with_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, workload: str, says: str
) -> None:
    good = engine_file(tmp_path / "good", "E=8,N=16,device_name=X.json", m1=row())
    bad = engine_file(tmp_path / "bad", name, m64=row())
    line = command(capsys, "import", good, bad, "--workload", workload, "--out", tmp_path / "out", code=2)
    assert says in line
    assert "device_name=X.json" in line
    assert line.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_import_takes_blanks_too_and_needs_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = engine_file(tmp_path, m64=row())
    assert "1 configs" in command(capsys, "import", file, "--workload", "K=4096 top_k=2", "--out", tmp_path / "out")
    says = command(capsys, "import", file, "--workload", "K=4096 top_k=2", "--out", file, code=2)
    assert "not a folder" in says


def our_table(path: Path, *sizes: dict[str, Any], **changed: Any) -> Path:
    config = {part: dict(zip(ours(), (16, 32, 64, 1, 4, 3), strict=True)) for part in ("gemm1", "gemm2")}
    tunable = load_tunable("moe")
    made = [tables.make_entry(dict(tunable.complete_workload(SIZES | each)), config | changed, {}) for each in sizes]
    path.write_text(json.dumps(tables.make_table("moe", H200.to_dict(), {"triton": "3.6.0"}, made)))
    return path


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_tables_whose_files_have_one_name_are_exported_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str
) -> None:
    """The later one's file replaced the earlier one's."""
    a = our_table(tmp_path / "a.json", {"tokens": 1}, {"tokens": 64})
    b = our_table(tmp_path / "b.json", {"tokens": 8}, {"tokens": 64, "dtype": "fp16"})
    command(capsys, "export", a, b, "--format", engine, "--to", tmp_path / "out")
    (file,) = (tmp_path / "out").rglob("E=8,N=7168,device_name=NVIDIA_H200.json")
    assert list(json.loads(file.read_text())) == ["1", "8", "64"]


@pytest.mark.parametrize("params", [3, {}, {"BLOCK_M": "16"}, {"BLOCK_M": 16}])
def test_an_entry_that_is_no_config_is_not_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], params: Any
) -> None:
    good = our_table(tmp_path / "a.json", {"tokens": 1})
    bad = our_table(tmp_path / "b.json", {"tokens": 8}, gemm1=params)
    says = command(capsys, "export", good, bad, "--format", "vllm", "--to", tmp_path / "out", code=2)
    assert "the entry of tokens=8: config.gemm1." in says
    assert "b.json" in says
    assert not (tmp_path / "out").exists()


def ours() -> tuple[str, ...]:
    return ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "num_warps", "num_stages")
