"""Child processes: replies, deaths, deadlines, and that none outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kerneltune.child import Child, ChildDied, ChildStartError, ChildTimeout, one_line


class Echo:
    """A handler with accidents to order."""

    def __init__(self, word: str = "") -> None:
        if word == "fail":
            raise ImportError("no such thing\nsecond line")

    def __call__(self, message: Any) -> Any:
        match message:
            case "abort":
                print("a last word", flush=True)
                os.abort()
            case "hang":
                time.sleep(600)
            case "pid":
                return os.getpid()
            case "env":
                return {name: os.environ.get(name) for name in ("KT_ADDED", "KT_REMOVED")}
        return message


ECHO = "test_child:Echo"


def test_replies_in_order() -> None:
    child = Child(ECHO)
    assert [child.request(number, 5) for number in range(3)] == [0, 1, 2]
    assert child.request("pid", 5) == child.pid != os.getpid()
    child.close()
    assert not child.alive


def test_environment_is_changed_in_the_child_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_REMOVED", "here")
    child = Child(ECHO, env={"KT_ADDED": "there", "KT_REMOVED": None})
    assert child.request("env", 5) == {"KT_ADDED": "there", "KT_REMOVED": None}
    assert os.environ["KT_REMOVED"] == "here"
    child.close()


def test_a_death_names_the_signal_and_the_last_words() -> None:
    child = Child(ECHO)
    with pytest.raises(ChildDied, match=r"signal 6 \(SIGABRT\): a last word"):
        child.request("abort", 5)
    child.close()


def test_a_deadline_kills_the_child() -> None:
    child = Child(ECHO)
    child.wait_started()
    begin = time.monotonic()
    with pytest.raises(ChildTimeout):
        child.request("hang", 0.3)
    assert time.monotonic() - begin < 3
    assert not child.alive
    with pytest.raises(ChildDied):
        child.request("hello", 5)
    child.close()


def test_a_handler_that_cannot_be_made() -> None:
    child = Child(ECHO, "fail")
    with pytest.raises(ChildStartError, match=r"^ImportError: no such thing$"):
        child.request("hello", 5)
    child.close()


def test_children_die_with_a_parent_killed_hard() -> None:
    """kill -9 of the parent while one child is idle and one is busy; neither runs any of its own code to notice."""
    code = (
        "import sys, threading, time; from kerneltune.child import Child\n"
        "children = [Child('test_child:Echo') for _ in range(2)]\n"
        "for child in children: child.wait_started()\n"
        "threading.Thread(target=lambda: children[1].request('hang', 600), daemon=True).start()\n"
        "print(*[child.pid for child in children], flush=True)\n"
        "time.sleep(600)\n"
    )
    env = dict(os.environ) | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert all(running(pid) for pid in pids)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert gone_within(pids, 5)


def running(pid: int) -> bool:
    """Whether a process exists and is more than an entry waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone_within(pids: list[int], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while any(running(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


class CompilationError(Exception):
    """Named as Triton's."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("first\nsecond"), "ValueError: first"),
        (ValueError(), "ValueError"),
        (CompilationError("at 1:2:\ndef f():\n    ^\nunsupported thing"), "CompilationError: unsupported thing"),
        (RuntimeError("Internal\nptxas error   : too many\nRepro"), "RuntimeError: ptxas error   : too many"),
    ],
)
def test_one_line(error: Exception, expected: str) -> None:
    assert one_line(error) == expected
    assert len(one_line(ValueError("x" * 1000))) == 300
