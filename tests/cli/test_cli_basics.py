"""The command line as a whole: quick to answer, one line and an exit code for every failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kerneltune import cli
from kerneltune.cli import COMMANDS, main
from kerneltune.errors import NO_GPU, UserError

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "triton", "optuna", "pandas", "matplotlib", "numpy", "pyarrow", "scipy")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, as a user starts it."""
    return subprocess.run(
        [sys.executable, "-m", "kerneltune", *arguments],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "110", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_help_is_quick_and_names_every_command() -> None:
    best = 10.0
    for _ in range(5):  # the best of several: the machine may be busy
        started = time.perf_counter()
        done = run("--help")
        best = min(best, time.perf_counter() - started)
        if best < 0.5:
            break
    assert done.returncode == 0
    assert all(f" {name} " in done.stdout for name in COMMANDS)
    assert best < 0.5


@pytest.mark.parametrize("arguments", [["--help"], *[[name, "--help"] for name in COMMANDS]])
def test_help_loads_nothing_heavy_and_has_an_example(arguments: list[str]) -> None:
    code = (
        "import sys, json, atexit\n"
        f"atexit.register(lambda: print(json.dumps([m for m in {HEAVY} if m in sys.modules])))\n"
        f"from kerneltune.cli import main\nmain({arguments!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
    assert "Example: kerneltune" in done.stdout


def test_no_arguments_is_help() -> None:
    done = run()
    assert done.returncode == 0
    assert "Usage: kerneltune" in done.stdout


def test_version() -> None:
    assert run("--version").stdout == "kerneltune 0.1.0\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serch"], "error: No such command 'serch'"),
        (["spaces", "--taget", "sm_90"], "error: No such option: --taget"),
        (["spaces", "--tp", "many"], "error: Invalid value for '--tp'"),
        (["lookup", "moe"], "error: Missing argument 'WORKLOAD'"),
        (["spaces", "mle"], "error: unknown kernel 'mle': expected one of mla-decode, moe"),
        (["spaces", "moe", "--target", "sm_1"], "error: unknown target 'sm_1'"),
        (["spaces", "moe", "--target", "sm_90", "--workload", "tokens=-1"], "error: tokens=-1: expected a positive"),
        (["spaces", "moe", "--target", "sm_90", "--workload", "token=1"], "error: unknown workload key 'token'"),
        (["spaces", "moe", "--target", "sm_90", "--space", "gone.toml"], "error: no kernel and no file 'gone.toml'"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(arguments: list[str], says: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
    assert len(lines) == 1
    assert lines[0].lower().startswith(says.lower())  # Typer's versions differ in case


def test_debug_adds_the_traceback() -> None:
    done = run("spaces", "mle", "--debug")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: unknown kernel 'mle'")


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (UserError("no GPU here", NO_GPU), 3, "error: no GPU here\n"),
        (UserError("two\nlines"), 2, "error: two lines\n"),
        (UserError("stopped; 3 trials kept", 130), 130, "stopped; 3 trials kept\n"),
        (ValueError("heads=0: expected a positive integer"), 2, "error: heads=0: expected a positive integer\n"),
        (PermissionError(13, "Permission denied", "/x"), 2, "error: [Errno 13] Permission denied: '/x'\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (KeyError("x"), 70, "error: KeyError: 'x' (this is a fault of kerneltune; --debug prints where)\n"),
    ],
)
def test_what_a_command_raises_is_one_line_and_a_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], raised: BaseException, code: int, line: str
) -> None:
    def fail(name: str) -> None:
        raise raised

    monkeypatch.setattr("kerneltune.space.load_space", fail)
    with pytest.raises(SystemExit) as left:
        main(["spaces", "moe"])
    assert left.value.code == code
    captured = capsys.readouterr()
    assert captured.err == line
    assert captured.out == ""


def test_a_reader_that_stops_early_is_no_fault() -> None:
    command = f"{sys.executable} -m kerneltune spaces mla-decode --target sm_90 --ladder full --json | head -c 10"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith('[{"kernel"')
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_every_command_has_its_file() -> None:
    files = {path.stem for path in Path(cli.__file__).parent.glob("*.py")}
    assert {name.replace("import", "import_") for name in COMMANDS} <= files


def test_an_interrupt_during_the_imports_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kerneltune.__main__ import main as command

    class Interrupted:
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "kerneltune.cli", Interrupted())
    with pytest.raises(SystemExit) as left:
        command()
    assert left.value.code == 130
    assert capsys.readouterr().err == "error: interrupted\n"
