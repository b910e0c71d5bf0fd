"""`kerneltune simulate` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

RECORDINGS = Path(__file__).parents[2] / "results" / "nvidia-h200" / "recordings"
SMALL = RECORDINGS / "mla-decode-bf16-heads128-s-q1-batch128-kv-len4096-equal.parquet"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "kerneltune", "simulate", *arguments], capture_output=True, text=True)


def test_json_and_pictures(tmp_path: Path) -> None:
    done = run(
        *(str(SMALL), "--seeds", "2", "--sampler", "default", "--sampler", "random", "--jobs", "1"),
        *("--json", "--plots", str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [each["sampler"] for each in found] == ["default", "random"]
    assert set(found[0]) >= {"recording", "points", "sampler", "after", "score"}
    assert found[0]["after"]["32"] >= found[1]["after"]["32"]
    assert {path.name for path in tmp_path.iterdir()} == {"samplers.png", "samplers.svg"}


def test_text_names_the_recording() -> None:
    done = run(str(SMALL), "--seeds", "1", "--jobs", "1")
    assert done.returncode == 0, done.stderr
    assert "mla-decode batch=128 kv_len=4096 heads=128 bf16" in done.stdout


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "no.parquet").write_text("no")
    for arguments in (
        ["--sampler", "annealing"],
        ["--prior", "all"],
        [str(tmp_path / "absent")],
        [str(tmp_path / "no.parquet")],
        ["--seeds", "0"],
    ):
        done = run(*arguments)
        assert done.returncode == 2, arguments
        assert done.stderr.strip().count("\n") == 0, done.stderr
