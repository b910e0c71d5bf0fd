"""Kept ceilings: fresh, of this device and this driver, or none."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path

import pytest

from kerneltune.roofline import ceilings as kept
from kerneltune.roofline.model import Ceilings

NOW = datetime.datetime(2026, 12, 1, tzinfo=datetime.UTC)
H200 = Ceilings(
    device="NVIDIA H200",
    date="2026-11-30T12:00:00+00:00",
    dram_read_gbps=4548.0,
    dram_copy_gbps=4289.0,
    tflops={"bf16": 778.0, "fp16": 780.0},
    launch_us=4.2,
    versions={"driver": "580.159.04", "torch": "2.11.0"},
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_what_is_stored_is_found_again(tmp_path: Path) -> None:
    path = kept.store(H200)
    assert path.is_relative_to(tmp_path)
    assert path.name == "nvidia-h200--580-159-04.json"
    assert kept.load(path) == H200
    assert kept.cached("NVIDIA H200", H200.versions, NOW) == H200


def test_another_driver_device_or_week_is_a_miss() -> None:
    kept.store(H200)
    assert kept.cached("NVIDIA H200", {"driver": "590.1"}, NOW) is None
    assert kept.cached("NVIDIA H100", H200.versions, NOW) is None
    assert kept.cached("NVIDIA H200", H200.versions, NOW + datetime.timedelta(days=8)) is None
    assert kept.cached("NVIDIA H200", H200.versions, NOW - datetime.timedelta(days=2)) is None  # from the future


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"device": 3}', "{"])
def test_a_damaged_file_is_a_miss_and_named(text: str) -> None:
    path = kept.store(H200)
    path.write_text(text)
    assert kept.cached("NVIDIA H200", H200.versions, NOW) is None
    with pytest.raises(ValueError, match="not a file of measured ceilings"):
        kept.load(path)


def test_rates_must_be_positive(tmp_path: Path) -> None:
    path = kept.store(replace(H200, dram_read_gbps=0.0), tmp_path / "other.json")
    with pytest.raises(ValueError, match="not a positive number"):
        kept.load(path)
    assert [file.name for file in tmp_path.iterdir()] == ["other.json"]
