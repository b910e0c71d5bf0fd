"""The cache of compiled kernels: shared by the processes of a search, the user's own choice respected, bounded."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kerneltune import compile_cache
from kerneltune.child import Child


def entry(folder: Path, name: str, age_s: float, size: int = 1000) -> Path:
    """One compiled kernel, last used so long ago."""
    (folder / name).mkdir(parents=True)
    for file in ("kernel.cubin", "kernel.json"):
        (folder / name / file).write_bytes(b"x" * (size // 2))
        os.utime(folder / name / file, (time.time() - age_s,) * 2)
    os.utime(folder / name, (time.time() - age_s,) * 2)
    return folder / name


def bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_what_was_not_used_for_the_longest_goes_first(tmp_path: Path) -> None:
    kept = [entry(tmp_path, f"new{i}", 600 + i, 100_000) for i in range(3)]
    gone = [entry(tmp_path, f"old{i}", 6000 + i, 100_000) for i in range(4)]
    assert compile_cache.prune(tmp_path, cap_bytes=330_000) >= 400_000
    assert all(path.exists() for path in kept)
    assert not any(path.exists() for path in gone)
    assert bytes_in(tmp_path) <= 330_000
    assert compile_cache.prune(tmp_path, cap_bytes=330_000) == 0


def test_what_is_in_use_this_minute_stays_whatever_the_cap(tmp_path: Path) -> None:
    young, old = entry(tmp_path, "young", 20), entry(tmp_path, "old", 300)
    read = entry(tmp_path, "made long ago, read now", 4000)
    os.utime(read / "kernel.cubin", (time.time(), time.time() - 4000))
    compile_cache.prune(tmp_path, cap_bytes=0)
    assert young.exists()
    assert read.exists()
    assert not old.exists()


def test_a_cache_that_is_not_there_is_no_fault(tmp_path: Path) -> None:
    assert compile_cache.prune(tmp_path / "none", cap_bytes=0) == 0


def test_the_users_own_cache_is_used_and_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    old = entry(tmp_path, "old", 9000)
    assert compile_cache.environment() == {}
    assert compile_cache.prune(cap_bytes=0) == 0
    assert old.exists()


def test_children_are_given_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    child = Child("test_compile_cache:Environment", env=compile_cache.environment())
    assert child.request("TRITON_CACHE_DIR", 30) == str(compile_cache.folder())
    child.close()
    assert str(compile_cache.folder()).startswith(str(tmp_path))
    old = entry(compile_cache.folder(), "old", 9000)
    assert compile_cache.prune(cap_bytes=0) > 0
    assert not old.exists()


class Environment:
    def __call__(self, name: str) -> str | None:
        return os.environ.get(name)
