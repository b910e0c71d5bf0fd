"""From two snapshots of a GPU to warnings: with made-up snapshots, and with an NVML of our own making."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kerneltune.measure.conditions import Snapshot, freaks, other_processes, read_nvml, slowed_by, warnings

BEFORE = Snapshot(
    at_s=100.0,
    sm_mhz=1980.0,
    memory_mhz=3201.0,
    temperature_c=45.0,
    power_w=400.0,
    power_limit_w=700.0,
    slowed_s={"power": 10.0, "thermal": 0.0},
    others=0,
    probes_us={"read": 120.0, "matmul": 200.0},
)
AFTER = replace(BEFORE, at_s=160.0, temperature_c=61.0)


def test_a_quiet_gpu_gives_no_warning() -> None:
    assert warnings(BEFORE, AFTER) == []
    small = replace(AFTER, sm_mhz=1935.0, probes_us={"read": 121.0, "matmul": 215.0}, slowed_s={"power": 10.5})
    assert warnings(BEFORE, small) == []


@pytest.mark.parametrize(
    ("after", "says"),
    [
        ({"sm_mhz": 1500.0}, "the SM clock went from 1980 to 1500 MHz; times may not repeat"),
        ({"memory_mhz": 2619.0}, "the memory clock went from 3201 to 2619 MHz; times may not repeat"),
        ({"slowed_by": ("thermal (hardware)",)}, "the GPU held its clocks down (thermal (hardware)) at 61 C"),
        (
            {"slowed_s": {"power": 40.0, "thermal": 0.0}},
            "the GPU was slowed down for 50% of the time (power limit)",
        ),
        ({"slowed_s": {"power": 10.0, "thermal": 6.0}}, "the GPU was slowed down for 10% of the time (thermal limit)"),
        ({"others": 1}, "1 other process on this GPU; times may be too long (run on an idle GPU)"),
        (
            {"probes_us": {"read": 132.0, "matmul": 200.0}},
            "reading memory became 10% slower from start to end; times may not repeat",
        ),
        (
            {"probes_us": {"read": 120.0, "matmul": 150.0}},
            "multiplying matrices became 25% faster from start to end; times may not repeat",
        ),
    ],
)
def test_each_disturbance_has_its_line(after: dict[str, Any], says: str) -> None:
    assert warnings(BEFORE, replace(AFTER, **after)) == [says]


def test_a_cause_is_told_once() -> None:
    after = replace(AFTER, slowed_by=("power cap",), slowed_s={"power": 40.0, "thermal": 0.0})
    assert len(warnings(BEFORE, after)) == 1


def test_what_was_wrong_at_the_start_only_counts_too() -> None:
    assert warnings(replace(BEFORE, others=2), AFTER)[0].startswith("2 other processes")


def test_what_nobody_tells_gives_no_warning() -> None:
    assert warnings(Snapshot(), Snapshot()) == []
    assert warnings(Snapshot(), AFTER) == []
    assert warnings(BEFORE, Snapshot()) == []


def test_freaks_are_far_from_the_rest() -> None:
    steady = [100.0 + i % 5 for i in range(20)]
    assert freaks(steady) == 0
    assert freaks([*steady, 180.0]) == 1
    assert freaks([*steady, 60.0, 500.0]) == 2
    assert freaks([100.0] * 10 + [109.0]) == 0  # without any spread, a tenth of the median is still allowed
    assert freaks([100.0, 140.0, 180.0, 220.0, 300.0]) == 0  # wide, but no reading stands apart
    assert freaks([7.0]) == 0
    assert warnings(BEFORE, AFTER, 3, 200) == [
        "3 of 200 readings are far from the rest; medians stand, but something disturbed the GPU"
    ]


def test_a_snapshot_survives_the_records() -> None:
    import msgspec

    text = msgspec.json.encode(replace(AFTER, slowed_by=("power cap",)).to_dict())
    assert Snapshot.from_dict(msgspec.json.decode(text) | {"later": 1}) == replace(AFTER, slowed_by=("power cap",))


def test_reasons_that_are_no_fault_are_left_out() -> None:
    assert slowed_by(0x1 | 0x2) == ()
    assert slowed_by(0x1 | 0x4 | 0x40) == ("power cap", "thermal (hardware)")


def test_other_processes_are_counted_inside_and_outside_a_container() -> None:
    ours = os.getpid()
    assert other_processes([]) == 0
    assert other_processes([ours]) == 0
    assert other_processes([ours, os.getppid(), 999_999_999]) == 1
    assert other_processes([999_999_998]) == 0  # this process by its number outside
    assert other_processes([999_999_998, 999_999_999]) == 1


class NVMLError(Exception):
    pass


def fake_nvml(**missing: Exception) -> Any:
    """An NVML of one GPU that answers everything but what is in `missing`."""
    answers: dict[str, Any] = {
        "nvmlInit": None, "nvmlShutdown": None, "nvmlDeviceGetHandleByUUID": "gpu", "nvmlDeviceGetHandleByIndex": "gpu",
        "nvmlDeviceGetClockInfo": 1980, "nvmlDeviceGetCurrentClocksThrottleReasons": 0x44,
        "nvmlDeviceGetTemperature": 50, "nvmlDeviceGetPowerUsage": 400_000, "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        "nvmlDeviceGetViolationStatus": SimpleNamespace(violationTime=2_500_000_000),
        "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=999_999_999)],
    }  # fmt: skip

    def call(name: str) -> Any:
        def answer(*_: Any) -> Any:
            if name in missing:
                raise missing[name]
            return answers[name]

        return answer

    constants = dict.fromkeys(("NVML_CLOCK_SM", "NVML_CLOCK_MEM", "NVML_TEMPERATURE_GPU"), 0)
    constants |= {"NVML_PERF_POLICY_POWER": 0, "NVML_PERF_POLICY_THERMAL": 1}
    return SimpleNamespace(NVMLError=NVMLError, **constants, **{name: call(name) for name in answers})


@pytest.fixture
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="1"))


def test_nvml_is_read(monkeypatch: pytest.MonkeyPatch, no_gpu_needed: None) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    found = Snapshot(**read_nvml(0))
    assert (found.sm_mhz, found.power_w, found.others) == (1980.0, 400.0, 1)
    assert found.slowed_by == ("power cap", "thermal (hardware)")
    assert found.slowed_s == {"power": 2.5, "thermal": 2.5}


def test_what_nvml_refuses_is_left_out(monkeypatch: pytest.MonkeyPatch, no_gpu_needed: None) -> None:
    refuse = fake_nvml(nvmlDeviceGetViolationStatus=NVMLError(), nvmlDeviceGetComputeRunningProcesses=NVMLError())
    monkeypatch.setitem(sys.modules, "pynvml", refuse)
    found = Snapshot(**read_nvml(0))
    assert (found.slowed_s, found.others, found.temperature_c) == ({}, None, 50.0)


def test_no_nvml_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_nvml(0) == {}
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(nvmlInit=NVMLError()))
    assert read_nvml(0) == {}
