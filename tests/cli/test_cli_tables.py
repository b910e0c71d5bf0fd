"""`kerneltune check`, `diff`, `merge`, `warmup` and `revalidate` as a user starts them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_cli_export import H200, NAME, alone, command, entry

from kerneltune.cli import main
from kerneltune.kernels.source_hash import variant_hash
from kerneltune.kernels.staleness import triton_version
from kerneltune.tables import load_table, make_table, write_table

__all__ = ["alone"]  # a fixture
ROOT = Path(__file__).parents[2]
FRESH = {
    "triton": triton_version(),
    "kernel_hash": {"split_kv": variant_hash("mla-decode", "split_kv")},
    "date": "2026-11-30T12:00:00+00:00",
}


@pytest.fixture(autouse=True)
def usual_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELTUNE_STALE", "")  # put back after a `--stale`


def raw(path: Path, *entries: dict[str, Any], **header: Any) -> Path:
    """A table as anybody may write it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = make_table("mla-decode", H200, FRESH, list(entries)) | header
    path.write_text(json.dumps(whole))
    return path


# -- check -------------------------------------------------------------------------------------------------------------
def test_check_of_sound_tables_has_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw(tmp_path / "mine" / NAME, entry(8), entry(16))
    out = command(capsys, "check", str(tmp_path / "mine"))
    assert out.splitlines()[-1].startswith("0 faults, ")
    assert "measured " in out
    assert "days ago" in out or "day ago" in out


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "heads beyond the op": ({"workload": {"heads": 256}}, "no call ever asks for it"),
    "pages beyond the op": ({"workload": {"page_size": 512}}, "no call ever asks for it"),
    "not as written": ({"workload": {"kv_dtype": "bf17"}}, "no call ever asks for it"),
    "no config": ({"config": {"BLOCK_Q": 16}}, "config cannot run on NVIDIA H200"),
    "too large": ({"config": {"BLOCK_N": 256, "num_stages": 4}}, "config cannot run on NVIDIA H200: shared memory"),
    "stale source": (
        {"provenance": {"kernel_hash": {"split_kv": "0" * 12}}},
        "source changed: measured with source 000000000000 of split_kv",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_check_finds_each_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    changes, says = FAULTS[name]
    bad = entry(8)
    for field, values in changes.items():
        bad[field] = {**bad.get(field, {}), **values}
    path = raw(tmp_path / NAME, entry(16), bad)
    with pytest.raises(AssertionError):
        command(capsys, "check", str(path))
    found = json.loads(fails(capsys, "check", str(path), "--json"))
    faults = [each for each in found if each["fault"]]
    assert [each["entry"] for each in faults] == [1]
    assert says in faults[0]["what"]


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command with exit code 1 printed."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 1
    return capsys.readouterr().out


def test_check_finds_doubles_strangers_and_unsound_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine"
    raw(folder / NAME, entry(8), entry(8, splits=2))
    raw(folder / "other.json", entry(8))
    raw(folder / "deep" / "er" / NAME, entry(8))
    (folder / "cut.json").write_text('{"schema": 1')
    (folder / "deep" / "package.json").write_text("{}")  # nobody's business
    raw(folder / "no-device.json", entry(32), device={"name": "NVIDIA H200", "sm_count": 132})
    out = fails(capsys, "check", str(folder))
    faults = [line for line in out.splitlines() if line.startswith("fault")]
    assert len(faults) == 5, out
    assert sum("the same workload as" in line for line in faults) == 2
    assert sum("not valid JSON" in line and "cut.json" in line for line in faults) == 1
    assert sum("no lookup in" in line and "deep/er" in line for line in faults) == 1
    assert sum("device: fields are missing" in line for line in faults) == 1


def test_another_compiler_is_a_note_and_a_missing_path_bad_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = raw(tmp_path / NAME, entry(8), entry(16), provenance=FRESH | {"triton": "3.5.9", "torch": "2.0.0"})
    out = command(capsys, "check", str(path))
    assert out.count("compiler changed: measured with triton 3.5.9") == 1  # of the whole file
    assert "measured with torch 2.0.0" in out
    assert "no such file or folder" in command(capsys, "check", str(tmp_path / "gone"), code=2)
    assert "needs" not in command(capsys, "check", str(path), "--measure", code=3)


def test_check_of_the_shipped_tables_passes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert command(capsys, "check").splitlines()[-1].startswith("0 faults")


# -- diff and merge ----------------------------------------------------------------------------------------------------
def test_diff_says_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = raw(tmp_path / "a.json", entry(8), entry(16), entry(32))
    faster = entry(32)
    faster["measured"] = faster["measured"] | {"time_us": 1.0}
    b = raw(tmp_path / "b.json", entry(8, splits=2), entry(64), faster, provenance=FRESH | {"triton": "3.5.9"})
    out = fails(capsys, "diff", str(a), str(b))
    assert "header    mla-decode: provenance.triton: " in out
    assert "config    batch=8 " in out
    assert "num_splits 4 -> 2" in out
    assert "only a    batch=16 " in out
    assert "only b    batch=64 " in out
    assert "measured  batch=32 " in out
    assert [each["kind"] for each in json.loads(fails(capsys, "diff", str(a), str(b), "--json"))].count("config") == 1
    assert command(capsys, "diff", str(a), str(a)) == "no difference\n"
    assert "no such file" in command(capsys, "diff", str(a), str(tmp_path / "gone"), code=2)


@pytest.mark.parametrize(("prefer", "splits"), [("newest", 2), ("first", 4), ("fastest", 4)])
def test_merge_keeps_one_entry_a_workload_and_says_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prefer: str, splits: int
) -> None:
    quick = entry(8)
    quick["measured"] = {"time_us": 1.0}
    slow = entry(8, splits=2)
    slow["measured"] = {"time_us": 2.0}
    a = raw(tmp_path / "a.json", quick, entry(16))
    b = raw(tmp_path / "b.json", slow, entry(32), provenance=FRESH | {"date": "2026-12-01T00:00:00", "torch": "9.9"})
    out = command(capsys, "merge", str(a), str(b), "--to", str(tmp_path / "out"), "--prefer", prefer)
    loser, winner = (a, b) if splits == 2 else (b, a)
    assert f"conflict  batch=8 kv_len=4096 heads=16 bf16: {winner}, not {loser}" in out
    merged = load_table(tmp_path / "out" / NAME)
    assert [each["workload"]["batch"] for each in merged.entries] == [8, 16, 32]
    assert merged.entries[0]["config"]["num_splits"] == splits
    versions = {e["workload"]["batch"]: e.get("provenance", merged.provenance).get("torch") for e in merged.entries}
    assert versions == {8: "9.9" if splits == 2 else None, 16: None, 32: "9.9"}


def test_merge_writes_nothing_of_what_does_not_belong_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = raw(tmp_path / "a.json", entry(8))
    b = raw(tmp_path / "b.json", entry(16), device=H200 | {"sm_count": 66})
    err = command(capsys, "merge", str(a), str(b), "--to", str(tmp_path / "out.json"), code=2)
    assert "device.sm_count is 66, not 132" in err
    (tmp_path / "c.json").write_text("[]")
    command(capsys, "merge", str(a), str(tmp_path / "c.json"), "--to", str(tmp_path / "out.json"), code=2)
    assert "expected newest, first, fastest" in command(capsys, "merge", str(a), "--to", "x", "--prefer", "x", code=2)
    assert not (tmp_path / "out.json").exists()


# -- revalidate, warmup ------------------------------------------------------------------------------------------------
def test_revalidate_needs_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    path = raw(tmp_path / NAME, entry(8), provenance=FRESH | {"triton": "3.5.9"})
    assert "GPU 0 is not here" in command(capsys, "revalidate", str(path), code=3)


def test_revalidate_with_nothing_to_measure_needs_no_gpu_and_names_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(capsys, "revalidate", str(raw(tmp_path / "fresh.json", entry(8)))).startswith("nothing is stale")
    wrong = entry(8)
    wrong["workload"] = {**wrong["workload"], "heads": 7, "h_kv": 2}
    bad = raw(tmp_path / "bad.json", entry(8), wrong, provenance=FRESH | {"triton": "3.5.9"})
    no_config, damaged = raw(tmp_path / "no-config.json", entry(8) | {"config": 5}), tmp_path / "damaged.json"
    damaged.write_text("{")
    only = raw(tmp_path / "only.json", wrong, provenance=FRESH | {"triton": "3.5.9"})
    before = {path: path.read_bytes() for path in (bad, no_config, damaged, only)}
    out = fails(capsys, "revalidate", str(damaged), str(only), str(no_config), str(tmp_path / "fresh.json"))
    assert f"left      {damaged}: not valid JSON" in out
    assert f"left      {no_config}: entries[0].config: " in out
    assert f"left      {only} entries[0] (" in out
    assert "heads=7: must be a multiple of h_kv (2)" in out
    assert "3 left" in out
    assert [each["fault"] for each in json.loads(fails(capsys, "revalidate", str(only), "--json"))] == [True]
    assert {path: path.read_bytes() for path in before} == before


def test_a_file_named_twice_is_used_once(tmp_path: Path) -> None:
    from kerneltune.cli.export import table_files

    path = raw(tmp_path / "x" / NAME, entry(8))
    (tmp_path / "link.json").symlink_to(path)
    assert table_files([path, tmp_path / "x", tmp_path / "link.json", tmp_path / "x" / ".." / "x" / NAME]) == [path]


def test_warmup_fills_tritons_cache_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = entry(2, kv_len=64)
    path = tmp_path / NAME
    write_table(path, make_table("mla-decode", H200, FRESH, [small]))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    first = json.loads(command(capsys, "warmup", "--table", str(path), "--target", "sm_90", "--json"))
    binaries = len(list((tmp_path / "cache").rglob("*.cubin")))
    assert first["binaries"] == binaries > 1  # the split kernel, and the combine kernel of 4 splits
    assert first["configs"] == 1
    assert first["failed"] == []
    again = json.loads(command(capsys, "warmup", "--table", str(path), "--target", "sm_90", "--json"))
    assert again["binaries"] == 0
    assert again["compile_s"] < first["compile_s"]
    assert "no table for" in command(capsys, "warmup", "--table", str(path), "--target", "gfx942", code=2)


def test_warmup_passes_over_what_a_launch_passes_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that is not there kept every other table from being compiled."""
    path = raw(tmp_path / NAME, entry(2, kv_len=64))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("KERNELTUNE_TABLES", f"{tmp_path / 'gone'}:{path}")
    with pytest.raises(SystemExit) as left:
        main(["warmup", "--target", "sm_90"])
    captured = capsys.readouterr()
    assert left.value.code == 0
    assert "compiled  0 " not in captured.out
    assert f"warning: table left out: {tmp_path / 'gone'}: cannot be read: No such file" in captured.err
    assert "gone: no such file" in command(capsys, "warmup", "--table", str(tmp_path / "gone"), code=2)


def test_warmup_compiles_the_default_where_a_config_cannot_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a launch does."""
    bad = entry(2, kv_len=64)
    bad["config"] = {"BLOCK_Q": 16}
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    path = raw(tmp_path / NAME, bad)
    out = command(capsys, "warmup", "--table", str(path), "--target", "sm_90")
    assert "compiled  0 " not in out


def test_the_commands_say_what_they_do() -> None:
    for name in ("check", "diff", "merge", "revalidate", "warmup"):
        asked = [sys.executable, "-m", "kerneltune", name, "--help"]
        done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
        assert "Example: kerneltune" in done.stdout


# -- lookup: relatives, staleness, what the config can do --------------------------------------------------------------
ASKED = "batch=8,kv_len=4096,heads=16"


def test_lookup_says_that_a_relative_s_table_serves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = raw(tmp_path / NAME, entry(8))
    for name, served in (("NVIDIA H200 NVL:132:sm_90", True), ("NVIDIA H100 PCIe:114:sm_90", False)):
        out = command(capsys, "lookup", "mla-decode", ASKED, "--table", str(path), "--device", name)
        assert ("  relative  of NVIDIA H200: also sm_90 with 132 SMs" in out) == served
        assert ("  differs   device: NVIDIA H200 (sm_90, 132 SMs) there, NVIDIA H100 PCIe" in out) != served


def test_lookup_follows_and_names_the_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = FRESH | {"triton": "3.5.9"}
    path = raw(tmp_path / NAME, entry(8), provenance=old)
    given = ["lookup", "mla-decode", ASKED, "--table", str(path), "--target", "sm_90"]
    assert "  stale     measured with triton 3.5.9, here is " in command(capsys, *given)
    assert "(policy: warn)" in command(capsys, *given)
    strict = command(capsys, *given, "--stale", "compiler=strict")
    assert "no entry fits" in strict
    assert f"  left out  batch=8 kv_len=4096 heads=16 bf16 in {path}: measured with triton 3.5.9" in strict
    assert f"  to renew  kerneltune revalidate {path}" in strict
    answer = json.loads(command(capsys, *given, "--stale", "strict", "--json"))
    assert answer["match"] is None
    assert answer["policy"] == {"compiler": "strict", "source": "strict"}
    assert [each["path"] for each in answer["left_out"]] == [str(path)]
    assert "expected strict, warn, ignore" in command(capsys, *given, "--stale", "perhaps", code=2)


def test_lookup_says_when_the_launch_would_refuse_the_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = entry(8)
    bad["config"] = bad["config"] | {"BLOCK_N": 256, "num_stages": 4}
    path = raw(tmp_path / NAME, bad)
    out = command(capsys, "lookup", "mla-decode", ASKED, "--table", str(path), "--target", "sm_90")
    assert "  but       it cannot run here, so the kernel takes its default config: shared memory" in out
