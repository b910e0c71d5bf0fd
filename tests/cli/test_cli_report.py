"""`kerneltune report` as a user runs it: streams, exit codes, files."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import report_sample as sample

from kerneltune.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `kerneltune report ARGUMENTS`."""
    with pytest.raises(SystemExit) as stopped:
        main(["report", *map(str, arguments)])
    printed = capsys.readouterr()
    return int(stopped.value.code or 0), printed.out, printed.err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished search."""
    sample.write_search(tmp_path / "search", "mla-decode")
    return tmp_path / "search"


def test_text_to_stdout_and_nothing_to_stderr(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, folder)
    assert (code, err) == (0, "")
    assert out.startswith("mla-decode  NVIDIA H200\n")


def test_formats(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(json.loads(run(capsys, folder, "--json")[1])["rows"]) == 10
    assert run(capsys, folder, "--json")[1] == run(capsys, folder, "--format", "json")[1]
    assert len(list(csv.DictReader(io.StringIO(run(capsys, folder, "--format", "csv")[1])))) == 10
    assert run(capsys, folder, "--format", "markdown")[1].startswith("### mla-decode on NVIDIA H200\n")
    code, out, err = run(capsys, folder, "--format", "html5")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1


def test_plots(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, folder, "--plots", tmp_path / "new" / "plots", "--json")
    assert code == 0
    json.loads(out)
    assert err.count("wrote ") == 4
    assert (tmp_path / "new" / "plots" / "roofline.png").stat().st_size > 20_000


def test_the_last_search_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder.parent)
    target = Path("kerneltune-results") / "nvidia-h200" / "mla-decode"
    target.parent.mkdir(parents=True)
    folder.rename(target)
    code, out, _ = run(capsys)
    assert code == 0
    assert "kerneltune search mla-decode --seed 7" in out


def test_bad_input_is_one_line_and_exit_2(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty" / "records").mkdir(parents=True)
    (tmp_path / "session-only" / "records").mkdir(parents=True)
    (tmp_path / "session-only" / "records" / "a.jsonl").write_bytes(b"")
    for arguments in (
        [tmp_path / "nowhere"],
        [tmp_path / "empty"],
        [tmp_path / "session-only"],
        [folder, "--kernel", "moe"],
    ):
        code, out, err = run(capsys, *arguments)
        assert (code, out) == (2, ""), arguments
        assert err.startswith("error: ")
        assert err.count("\n") == 1


def test_a_damaged_table_is_a_warning_on_stderr(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "tables" / "broken.json").write_text("{")
    code, out, err = run(capsys, folder, "--json")
    assert code == 0
    assert len(json.loads(out)["rows"]) == 10
    assert err.startswith("warning: ")


def test_text_needs_neither_torch_nor_pandas(folder: Path) -> None:
    """A report of 20,000 trials takes under 2 s only without them."""
    heavy = ("torch", "triton", "optuna", "pandas", "matplotlib")
    code = (
        "import sys\nfrom kerneltune.cli import main\n"
        f"try: main(['report', {str(folder)!r}])\n"
        f"except SystemExit as e: print([m for m in {heavy} if m in sys.modules], e.code, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"COLUMNS": "20"}
    )
    assert done.stderr.strip() == "[] 0"
    assert "batch=128 kv_len=4096 heads=128 bf16" in done.stdout
