"""A live search without a GPU: real compile children, a real gating process, times by a formula."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kerneltune import tables
from kerneltune.compile import CompilePool, resolve_tunable
from kerneltune.device import target
from kerneltune.kernels.table_format import KEYS, Keys
from kerneltune.measure.worker import GpuWorker
from kerneltune.tuning.backends import LiveBackend, Work
from kerneltune.tuning.seconds import Seconds

CEILINGS = {"device": "NVIDIA H200", "date": "2026-11-30", "dram_read_gbps": 4500.0, "dram_copy_gbps": 4200.0,
            "tflops": {"fp16": 780.0, "bf16": 780.0}, "launch_us": 4.0}  # fmt: skip
Formula = Callable[[Mapping[str, Any]], float]


class FormulaWorker(GpuWorker):
    """Gates for real, in a process of its own; what passes has a time by formula. Looks for survivors first."""

    def __init__(self, kernel: str, formula: Formula, pool: CompilePool, trial_timeout_s: float) -> None:
        super().__init__(kernel, None, trial_timeout_s=trial_timeout_s)
        self._formula, self._pool = formula, pool
        self.timings = 0
        self.survivors: list[int] = []  # processes of the search that should be dead when a timing begins

    def trial(self, workload: Mapping[str, Any], part: str, config: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        return self._timed(super().trial(workload, part, config, **more | {"samples": 0}), config)

    def _time_in_turns(
        self, workload: Any, part: str, configs: Sequence[Mapping[str, Any]], replies: list[dict[str, Any]], *_: Any
    ) -> None:
        for config, reply in zip(configs, replies, strict=True):
            self._timed(reply, config)

    def _timed(self, reply: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        if reply["outcome"] != "ok":
            return reply
        with self._pool._lock:  # a compile child is started and noted under it
            wanted = {self.pid, *(child.pid for child in self._pool._children)}
            self.survivors += [pid for pid in child_processes() if pid not in wanted]
        self.timings += 1
        time_us = self._formula(config)
        reply |= {"time_us": time_us, "p20_us": time_us * 0.999, "p80_us": time_us * 1.001, "samples": 15}
        return reply


class CpuBackend(LiveBackend):
    """LiveBackend on a toy for an H200 that is not here."""

    def __init__(
        self,
        kernel: str,
        points: Sequence[Mapping[str, Any]],
        formula: Formula,
        *,
        job_timeout_s: float = 60.0,
        trial_timeout_s: float = 30.0,
    ) -> None:
        self.kernel, self._given, self._seed = "toy", [dict(point) for point in points], 0
        self._device = target("sm_90")
        self.device = self._device.to_dict()
        self._tunable = resolve_tunable(kernel)
        self.parts, self.shared = self._tunable.parts, self._tunable.shared
        self.varying_keys = (*self._tunable.scaled_keys, *self._tunable.input_keys)
        self.kernel_hash, self.versions, self.ceilings = {"only": "0" * 12}, {"triton": "0"}, dict(CEILINGS)
        self.seconds = Seconds()
        self._pool = CompilePool(kernel, self._device, workers=1, timeout_s=job_timeout_s)
        self.worker = FormulaWorker(kernel, formula, self._pool, trial_timeout_s)
        self._worker = self.worker

    def points(self, workload: Mapping[str, Any], part: str) -> list[dict[str, Any]]:
        return self._given

    def default_config(self, workload: Mapping[str, Any]) -> dict[str, Any]:
        return self._given[0]

    def incumbents(self, workload: Mapping[str, Any]) -> list[dict[str, Any]]:
        return []

    def admit(self, workload: Mapping[str, Any], configs: Sequence[Mapping[str, Any]]) -> None:
        return None

    def work(self, workload: Mapping[str, Any], part: str) -> Work:
        return Work(flops=1000, bytes=1000, compute="fp16")

    def conditions(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._pool.close()
        self._worker.close()


def toy_tables(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Let the toy have a table (its dtype stands for an input class); the winners that would go into it, in order."""
    winners: list[dict[str, Any]] = []
    monkeypatch.setitem(KEYS, "toy", Keys(("k",), ("rows",), "dtype", "fp16"))
    monkeypatch.setattr(tables, "add_entry", lambda *arguments: winners.append(arguments[-1]))
    monkeypatch.setattr(tables, "add_entries", lambda *arguments: None)
    return winners


def child_processes() -> list[int]:
    """The processes that this one started and that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == os.getpid() and state not in "ZX":
            found.append(int(path.parent.name))
    return found
