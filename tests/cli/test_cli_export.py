"""`kerneltune export` and `kerneltune lookup`: tables into a folder to ship, and which entry serves a workload."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kerneltune.cli import main
from kerneltune.device import target
from kerneltune.kernels import table_files
from kerneltune.kernels import tables as launch_tables
from kerneltune.kernels.staleness import triton_version
from kerneltune.registry import load_tunable
from kerneltune.tables import add_entry, load_table, make_entry, make_table, write_table

H200 = target("sm_90").to_dict()
NAME = "mla-decode.bf16.nvidia-h200.json"


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("KERNELTUNE_TABLES", raising=False)
    monkeypatch.setattr(table_files, "_shipped", lambda: ())
    launch_tables.forget()
    yield
    launch_tables.forget()


def command(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What the command printed: results, or with a code its line on stderr."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    captured = capsys.readouterr()
    assert left.value.code == code, captured.err
    return captured.err if code else captured.out


def entry(batch: int, splits: int = 4, **given: Any) -> dict[str, Any]:
    workload = load_tunable("mla-decode").complete_workload({"batch": batch, "kv_len": 4096, "heads": 16, **given})
    config = {"BLOCK_H": 16, "BLOCK_N": 64, "num_splits": splits, "num_warps": 4, "num_stages": 2}
    return make_entry(workload, config, {"time_us": 12.5, "default_us": 20.0, "roofline": 0.87, "bound": "memory"})


def searched(batch: int, splits: int = 4, folder: str = "nvidia-h200/mla-decode", **given: Any) -> Path:
    out = Path("kerneltune-results") / folder / "tables"
    return add_entry(out, "mla-decode", H200, {"triton": triton_version()}, entry(batch, splits, **given))


def test_export_takes_the_searches_here(capsys: pytest.CaptureFixture[str]) -> None:
    searched(1)
    searched(8)
    searched(8, dtype="fp16")
    text = command(capsys, "export", "--to", "ship")
    assert text.splitlines() == [
        f"ship/{NAME}  2 entries",
        "ship/mla-decode.fp16.nvidia-h200.json  1 entry",
    ]
    assert [e["workload"]["batch"] for e in load_table(Path("ship") / NAME).entries] == [1, 8]


def test_export_merges_into_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    first = searched(1, 2)
    command(capsys, "export", str(first), "--to", "ship")
    second = searched(8, 3, "other/mla-decode")
    shown = json.loads(command(capsys, "export", str(second.parent.parent), "--to", "ship", "--json"))
    assert shown == [{"file": f"ship/{NAME}", "entries": 2}]
    found = load_table(Path("ship") / NAME).entries
    assert [(e["workload"]["batch"], e["config"]["num_splits"]) for e in found] == [(1, 2), (8, 3)]
    assert command(capsys, "export", "kerneltune-results", "--to", "all").endswith("2 entries\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--to", "ship"], "no tables in ./kerneltune-results and none shipped"),
        (["gone", "--to", "ship"], "gone: no such file or folder"),
        (["empty", "--to", "ship"], "empty: no tables"),
        (["bad.json", "--to", "ship"], "bad.json: schema: expected 1, got nothing"),
        (["--to", "ship", "--format", "xml"], "--format 'xml': expected kerneltune"),
        ([], "Missing option '--to'"),
        (["--to", "bad.json"], "--to bad.json: not a folder"),
    ],
)
def test_export_refuses(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    Path("empty").mkdir()
    Path("bad.json").write_text("{}")
    line = command(capsys, "export", *arguments, code=2)
    assert says in line
    assert line.count("\n") == 1
    assert not Path("ship").exists()


def test_a_bad_table_among_good_ones_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    searched(1)
    Path("kerneltune-results/nvidia-h200/mla-decode/tables/z.json").write_text("{")
    assert "z.json: not valid JSON" in command(capsys, "export", "--to", "ship", code=2)
    assert not Path("ship").exists()


def test_tables_that_cannot_share_a_file_write_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """The first was written before the second was refused."""
    for name, device in (("a", H200), ("b", H200 | {"sm_count": 66}), ("empty", H200)):
        entries = [] if name == "empty" else [entry(8)]
        Path(f"{name}.json").write_text(json.dumps(make_table("mla-decode", device, {}, entries)))
    said = command(capsys, "export", "a.json", "b.json", "--to", "ship", code=2)
    assert "b.json: device.sm_count is 66, not 132 as in a.json" in said
    assert "the tables have no entries" in command(capsys, "export", "empty.json", "--to", "ship", code=2)
    assert "the tables have no entries" in command(capsys, "merge", "empty.json", "--to", "ship", code=2)
    assert "empty.json: no entries in it" in command(capsys, "import", "empty.json", "--out", "ship", code=2)
    assert not Path("ship").exists()


def test_the_loss_on_another_input_class_is_not_that_of_the_entry_s_own(capsys: pytest.CaptureFixture[str]) -> None:
    mine = entry(8)
    mine["loss"] = {"batch=8,kv_len=4096": 0.0, "inputs": {"equal": 0.0, "spread": 0.25}}
    Path("t.json").write_text(json.dumps(make_table("mla-decode", H200, {}, [mine])))
    for asked, told in (("spread", "measured loss 25.0 %"), ("ids@1a2b3c4d", "loss not measured")):
        sizes = f"batch=8,kv_len=4096,heads=16,lengths={asked}"
        shown = command(capsys, "lookup", "mla-decode", sizes, "--target", "sm_90", "--table", "t.json")
        assert f"(same sizes, tuned for lengths=equal, {told})" in shown


def test_export_falls_back_to_the_shipped_tables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_table(tmp_path / "shipped.json", make_table("mla-decode", H200, {}, [entry(1)]))
    monkeypatch.setattr(table_files, "_shipped", lambda: (str(tmp_path / "shipped.json"),))
    assert command(capsys, "export", "--to", "ship") == f"ship/{NAME}  1 entry\n"


ASKED = "batch=12,kv_len=4096,heads=16"


def test_lookup_says_that_a_folder_holds_no_tables(capsys: pytest.CaptureFixture[str]) -> None:
    searched(8, 6)
    asked = ("lookup", "mla-decode", ASKED, "--target", "sm_90", "--table", "kerneltune-results")
    assert "--table kerneltune-results: no *.json in this folder" in command(capsys, *asked, code=2)
    out = ("--table", "kerneltune-results/nvidia-h200/mla-decode")  # its `tables` are looked at
    assert "num_splits=6" in command(capsys, *asked[:-2], *out)


def test_lookup_names_file_and_entry(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = searched(8, 6)
    monkeypatch.setenv("KERNELTUNE_TABLES", str(path))
    shown = command(capsys, "lookup", "mla-decode", ASKED, "--target", "sm_90").splitlines()
    assert shown == [
        "mla-decode  batch=12 kv_len=4096 heads=16 bf16  NVIDIA H200",
        "  entry     batch=8 kv_len=4096 heads=16 bf16 (nearest, sizes a factor of 1.50 away, loss not measured)",
        "  config    BLOCK_H=16  BLOCK_N=64  num_splits=6  num_warps=4  num_stages=2",
        f"  file      {path} (KERNELTUNE_TABLES)",
        "  measured  12.5 us, default 20.0 us, 87% of the measured memory ceiling",
        "  inputs    lengths=equal",
    ]
    given = ["lookup", "mla-decode", "batch=8,kv_len=4096,heads=16", "--device", "NVIDIA H200:132", "--json"]
    answer = json.loads(command(capsys, *given))
    assert answer["match"]["exact"] is True
    assert answer["match"]["config"]["num_splits"] == 6
    assert answer["nearest"] is None


@pytest.mark.parametrize(
    "spelt", [["batch=8,kv_len=4096,heads=16"], ["batch=8 kv_len=4096 heads=16"], ["batch=8", "kv_len=4096, heads=16"]]
)
def test_a_workload_is_spelt_with_commas_or_blanks(capsys: pytest.CaptureFixture[str], spelt: list[str]) -> None:
    given = ["--target", "sm_90", "--table", str(searched(8, 6))]
    assert "(exact" in command(capsys, "lookup", "mla-decode", *spelt, *given)


def test_lookup_tells_what_is_wrong_with_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = searched(8, 6)
    Path("bad.json").write_text("{")
    Path("loop.json").symlink_to("loop.json")
    monkeypatch.setenv("KERNELTUNE_TABLES", f"gone:./bad.json:loop.json:./{path}")
    monkeypatch.setenv("KERNELTUNE_DEVICE", "NVIDIA H2OO")
    monkeypatch.setenv("KERNELTUNE_STALE", "bogus")
    warnings = [
        "KERNELTUNE_STALE: expected strict, warn, ignore, or compiler=... and source=..., got 'bogus'; the usual one",
        "no table there: gone (KERNELTUNE_TABLES)",
        "table left out: ./bad.json: not valid JSON",
        "table left out: loop.json: Too many levels of symbolic links",
        "KERNELTUNE_DEVICE: no table is of 'NVIDIA H2OO', so it does nothing; there are: NVIDIA H200",
    ]
    for _ in range(2):  # in one process too
        shown = command(capsys, "lookup", "mla-decode", ASKED, "--target", "sm_90")
        assert [line.startswith("  warning   ") for line in shown.splitlines()].count(True) == len(warnings)
        for warning in warnings:
            assert f"  warning   {warning}" in shown
    answer = json.loads(command(capsys, "lookup", "mla-decode", ASKED, "--target", "sm_90", "--json"))
    assert len(answer["warnings"]) == len(warnings)
    assert answer["match"] is not None
    monkeypatch.setenv("KERNELTUNE_DEVICE", "NVIDIA H200")
    named = command(capsys, "lookup", "mla-decode", ASKED, "--device", "Other GPU:10")
    assert "KERNELTUNE_DEVICE names it" in named
    assert "so it does nothing" not in named


def test_lookup_says_what_keeps_the_nearest_out(capsys: pytest.CaptureFixture[str]) -> None:
    path = searched(64)
    shown = command(capsys, "lookup", "mla-decode", ASKED, "--target", "sm_90", "--table", str(path))
    assert "  no entry fits; the kernel takes its default config\n" in shown
    assert f"  nearest   batch=64 kv_len=4096 heads=16 bf16 in {path}\n" in shown
    assert "  differs   batch: 64 there, 12 asked for, more than a factor of 2 apart\n" in shown
    assert "  to tune   kerneltune search mla-decode --workload batch=12,kv_len=4096,dtype=bf16," in shown


def test_lookup_without_any_table(capsys: pytest.CaptureFixture[str]) -> None:
    shown = command(capsys, "lookup", "mla-decode", ASKED, "--target", "sm_90")
    assert "no table of mla-decode is in any of the places" in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["mle", ASKED, "--target", "sm_90"], "unknown kernel 'mle'"),
        (["mla-decode", "batch", "--target", "sm_90"], "expected key=value"),
        (["mla-decode", "bach=1", "--target", "sm_90"], "bach"),
        (["mla-decode", ASKED, "--device", "NVIDIA H200"], "expected a name and its number of SMs"),
        (["mla-decode", ASKED, "--device", "NVIDIA H200:132", "--target", "sm_90"], "give one of them"),
    ],
)
def test_lookup_refuses(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    line = command(capsys, "lookup", *arguments, code=2)
    assert says in line
    assert line.count("\n") == 1


def test_the_shipped_results_folder_can_be_exported(tmp_path: Path) -> None:
    """It holds ceilings.json beside the tables."""
    results = Path(__file__).parents[2] / "results" / "nvidia-h200"
    with pytest.raises(SystemExit) as ended:
        main(["export", str(results), "--to", str(tmp_path / "ship")])
    assert ended.value.code == 0
    assert sorted(path.name for path in (tmp_path / "ship").glob("*.json")) == sorted(
        path.name for path in (results / "tables").glob("*.json")
    )
