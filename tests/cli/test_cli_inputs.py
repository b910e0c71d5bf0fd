"""Recorded routing and lengths from the command line to tables: named, searched, shown, found again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from kerneltune import tables
from kerneltune.cli import main
from kerneltune.kernels import table_files
from kerneltune.kernels import tables as launch_tables
from kerneltune.kernels.device import Device
from kerneltune.kernels.table_format import TableError, parse_table
from kerneltune.recordings import find_recordings, read_recording
from kerneltune.records import read_folder
from kerneltune.tuning import recorder
from kerneltune.tuning.api import Request
from kerneltune.tuning.backends import ReplayBackend
from kerneltune.tuning.options import Options
from kerneltune.tuning.progress import Silent

RESULTS = Path(__file__).parents[2] / "results"
UNIFORM = next(r for r in find_recordings([RESULTS], "moe") if (r.workload["tokens"], r.workload["E"]) == (64, 256))


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("KERNELTUNE_TABLES", raising=False)
    monkeypatch.setattr(table_files, "_shipped", lambda: ())
    monkeypatch.chdir(tmp_path)
    launch_tables.forget()


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    """Recorded ids of DeepSeek-V3: eight of 256, the same few again and again."""
    path = tmp_path / "served" / "my ids.json"
    path.parent.mkdir()
    path.write_text(
        json.dumps({"topk_ids": [[(token + 3 * choice) % 30 for choice in range(8)] for token in range(50)]})
    )
    return path


def kerneltune(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What the command printed: stdout, or the one line on stderr of a failure."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    captured = capsys.readouterr()
    assert left.value.code == code, captured.err
    return captured.out if code == 0 else captured.err


def test_spaces_takes_a_file_in_a_workload_and_for_a_ladder(ids: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = ids.rename(ids.with_name("ids.json"))
    one = ["spaces", "moe", "--target", "sm_90", "--json"]
    [row] = json.loads(kerneltune(capsys, *one, "--workload", f"tokens=64,routing={ids}"))[0]["workloads"]
    value = row["workload"]["routing"]
    assert value.startswith(f"{ids}@")
    assert len(value) == len(str(ids)) + 9
    assert row["text"] == f"tokens=64 E=256 N=256 K=7168 top_k=8 routing=ids@{value[-8:]} bf16"
    assert row["parts"]["gemm1"]["feasible"] > 50
    ladder = json.loads(kerneltune(capsys, *one, "--routing", str(ids)))[0]["workloads"]
    assert len(ladder) > 5
    assert {each["workload"]["routing"] for each in ladder} == {value}
    mixed = ["--workload", "tokens=1", "--workload", "tokens=2,routing=zipf", "--routing", str(ids)]
    rows = json.loads(kerneltune(capsys, *one, *mixed))[0]["workloads"]
    assert [each["workload"]["routing"] for each in rows] == [value, "zipf"]


def test_lengths_for_a_ladder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lens.json").write_text("[100, 3000, 17]")
    rows = json.loads(
        kerneltune(capsys, "spaces", "mla-decode", "--target", "sm_90", "--lengths", "lens.json", "--json")
    )
    assert {each["workload"]["lengths"][:10] for each in rows[0]["workloads"]} == {"lens.json@"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["moe", "--workload", "routing=bad.json"], "routing=bad.json: rows of 2 ids: expected 8 (top_k)"),
        (["moe", "--routing", "bad.json"], "routing=bad.json: rows of 2 ids: expected 8 (top_k)"),
        (["moe", "--routing", "none.json"], "routing=none.json: no such class and no such file"),
        (["moe", "--lengths", "spread"], "--lengths spread: moe has no lengths, but --routing"),
        (["mla-decode", "--routing", "zipf"], "--routing zipf: mla-decode has no routing, but --lengths"),
        (["mla-decode", "--lengths", "bad.json"], "lengths=bad.json: expected a list of lengths"),
    ],
)
@pytest.mark.parametrize("command", ["spaces", "search", "record"])
def test_faults_are_one_line_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, arguments: list[str], says: str
) -> None:
    (tmp_path / "bad.json").write_text("[[1, 2]]")
    line = kerneltune(capsys, command, *arguments, code=2)
    assert line.splitlines()[-1].startswith(f"error: {says}")
    assert not (tmp_path / "kerneltune-results").exists()


def recorded_beside_uniform(folder: Path, ids: Path, elsewhere: str) -> str:
    """Two recordings of one shape: uniform, and the ids, as if recorded where they lay in another folder."""
    [workload] = Request("moe", single=("tokens=64",), routing=str(ids)).workloads()
    value = elsewhere + str(workload["routing"]).removeprefix(str(ids.parent))
    other = dataclasses.replace(UNIFORM, workload=UNIFORM.workload | {"routing": value}, date="2027-01-01")
    backend = ReplayBackend([UNIFORM, other])
    paths = recorder.record(backend, backend.workloads, UNIFORM.space, Options(folder), Silent())
    assert [path.parent for path in paths] == [folder / "recordings"] * 2  # no folder of the value in the name
    assert (
        sorted(path.name for path in paths)[0]
        == f"moe-bf16-e256-n256-k7168-top-k8-tokens64-my-ids-{value[-8:]}.parquet"
    )
    assert {read_recording(path).workload["routing"] for path in paths} == {"uniform", value}
    return value


def test_two_classes_stand_side_by_side(tmp_path: Path, ids: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = recorded_beside_uniform(tmp_path / "recorded", ids, "/of/another/machine")
    name = f"my-ids@{value[-8:]}"
    named = ["--workload", "tokens=64,routing=uniform", "--workload", "tokens=64", "--routing", str(ids)]
    arguments = ["search", "moe", *named, "--replay", str(tmp_path / "recorded"), "--out", "out", "--trials", "12"]
    shown = kerneltune(capsys, *arguments)
    assert name in shown
    assert "machine" not in shown

    records = read_folder(Path("out"))[1]
    assert {trial.workload["routing"] for trial in records} == {"uniform", value}
    [path] = Path("out/tables").glob("*.json")
    entries = tables.load_table(path).entries
    assert [each["workload"]["routing"] for each in entries] == [name, "uniform"]
    assert [each["measured"]["inputs"] for each in entries] == [name, "uniform"]
    assert "machine" not in path.read_text()
    rows = json.loads(kerneltune(capsys, "report", "out", "--json"))["rows"]
    assert sorted(row["inputs"] for row in rows) == [name, "uniform"]

    def looked_up(shape: str) -> Any:
        lookup = ["lookup", "moe", shape, "--target", "sm_90", "--table", str(path), "--json"]
        return json.loads(kerneltune(capsys, *lookup))["match"]

    for hint in (name, str(ids)):  # as the table says it, or the file itself
        match = looked_up(f"tokens=64,routing={hint}")
        assert match["exact"]
        assert match["entry"]["workload"]["routing"] == name
    assert looked_up("tokens=64")["entry"]["workload"]["routing"] == "uniform"  # nothing is known of losses
    assert looked_up("tokens=64,routing=zipf")["exact"] is False


def entry(routing: str, warps: int, **loss: float) -> dict[str, Any]:
    part = {"BLOCK_M": 16, "num_warps": warps}
    return tables.make_entry(UNIFORM.workload | {"routing": routing}, {"gemm1": part}, {}, {"inputs": loss})


def warps_of(entries: list[dict[str, Any]], tmp_path: Path, **hint: str) -> int:
    path = tmp_path / "t.json"
    path.unlink(missing_ok=True)
    tables.write_table(path, tables.make_table("moe", UNIFORM.device, {}, entries))
    asked = {name: value for name, value in UNIFORM.workload.items() if name != "routing"} | hint
    match = launch_tables.find("moe", asked, Device(**UNIFORM.device), tables=[path], only=True)
    assert match is not None
    return int(match.config["gemm1"]["num_warps"])


def test_without_a_hint_the_smallest_worst_loss_over_all_classes_wins(tmp_path: Path) -> None:
    ids = "ids@1a2b3c4d"
    both = [
        entry("uniform", 1, **{"uniform": 0.0, ids: 0.2}),
        entry(ids, 2, **{"uniform": 0.05, ids: 0.0}),
    ]
    assert warps_of(both, tmp_path) == 2
    assert warps_of(both, tmp_path, routing="uniform") == 1
    assert warps_of(both, tmp_path, routing=f"/here/ids.json@{ids[-8:]}") == 2
    one_unknown = [both[0], entry(ids, 2, **{ids: 0.0})]  # what it loses on uniform routing nobody measured
    assert warps_of(one_unknown, tmp_path) == 1
    none_known = [entry("zipf", 4), entry(ids, 2), entry("uniform", 1)]
    assert warps_of(none_known, tmp_path) == 1


@pytest.mark.parametrize("routing", ["/data/ids.json@1a2b3c4d", "../ids@1a2b3c4d", "ids@1a2b", "my ids", "a\\b", ""])
def test_a_table_with_anything_but_a_class_is_refused(routing: str) -> None:
    table = tables.make_table("moe", UNIFORM.device, {}, [entry(routing, 4)])
    with pytest.raises(TableError, match=r"entries\[0\]\.workload\.routing: expected"):
        parse_table(json.dumps(table).encode())
