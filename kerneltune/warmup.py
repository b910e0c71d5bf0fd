"""Compile what a server will launch before it does: every config of tables, into Triton's own cache.

A launch finds its binary in that cache by the kernel's source, the argument types, the constants, and by which sizes
and addresses are multiples of 16. So each entry is compiled for its own workload and for others that it serves (each
scaled key halved and doubled: the combine kernel and the alignment of tokens depend on them), for the default config
where the entry's cannot run there, and for each kind of caller that the kernel knows (`call_variants`).
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kerneltune.compile import Compiled, CompileHandler, CompilePool, classify, compile_call, stub_driver
from kerneltune.kernels.device import Device
from kerneltune.kernels.table_format import KEYS, Table, split_recorded
from kerneltune.kernels.tables import BOUND


@dataclass(frozen=True)
class Warmed:
    """What was compiled."""

    configs: int  # distinct, of all entries
    binaries: int  # new in the cache
    failed: tuple[str, ...]  # one line each
    wall_s: float
    compile_s: float  # summed over the processes: what servers would wait for, one after another


class WarmupHandler(CompileHandler):
    """The child's side: compiles all that a launch of a whole config on a workload needs."""

    def __call__(self, job: tuple[str, dict[str, Any], dict[str, Any]]) -> Compiled:
        _, config, workload = job
        begin = time.perf_counter()
        try:
            with stub_driver(self._device):
                for call in launches(self._tunable, config, workload, self._device):
                    compile_call(call, self._device, resources=False)
        except Exception as error:  # whatever Triton, LLVM or ptxas make of a config
            return Compiled(*classify(error), compile_s=time.perf_counter() - begin)
        return Compiled("ok", compile_s=time.perf_counter() - begin)


def launches(tunable: Any, config: Mapping[str, Any], workload: Mapping[str, Any], device: Device) -> Iterator[Any]:
    """The kernel calls of one config around one workload, on inputs without data."""
    from kerneltune.kernels.tunable import part_params

    for near in around(tunable, workload):
        runs = all(tunable.is_valid(p, part_params(tunable, config, p), near, device) is None for p in tunable.parts)
        used = config if runs else tunable.default_config(near, device)
        for problem in tunable.call_variants(tunable.make_problem(near, device="meta")):
            yield from tunable.launch(problem, used).calls


def around(tunable: Any, workload: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The workload, and those at the edge of what its entry serves."""
    scales = list(itertools.product((1, 1 / BOUND, BOUND), repeat=len(tunable.scaled_keys)))
    for factors in scales:
        sizes = {
            name: max(int(workload[name] * factor), 1)
            for name, factor in zip(tunable.scaled_keys, factors, strict=True)
        }
        yield dict(tunable.complete_workload({**workload, **sizes}))


def warm_up(tables: Sequence[Table], device: Device, workers: int | None = None) -> Warmed:
    """Compile every entry of these tables for `device`, in parallel child processes, into Triton's own cache.

    Recorded inputs do not matter to a compile: the usual class stands in for them.
    """
    begin = time.monotonic()
    before = _binaries()
    configs: set[str] = set()
    failed: list[str] = []
    spent: list[float] = []
    for kernel in dict.fromkeys(table.kernel for table in tables):
        keys = KEYS[kernel]
        entries = [(table, entry) for table in tables if table.kernel == kernel for entry in table.entries]
        with CompilePool(
            kernel, device, workers=workers, handler="kerneltune.warmup:WarmupHandler", environment={}
        ) as pool:
            for number, (_, entry) in enumerate(entries):
                workload = dict(entry["workload"])
                if split_recorded(str(workload[keys.input])) is not None:
                    workload[keys.input] = keys.usual_input
                pool.submit(number, "", entry["config"], workload)
                configs.add(f"{kernel} {sorted(entry['config'].items())}")
            for number, (table, entry) in enumerate(entries):
                done = pool.result(number)
                spent.append(done.compile_s)
                if done.outcome != "ok":
                    failed.append(f"{table.path}: {entry['config']}: {done.outcome}: {done.reason}")
    new = len(_binaries() - before)
    return Warmed(len(configs), new, tuple(failed), time.monotonic() - begin, sum(spent))


def cache_folder() -> Path:
    """Where Triton keeps its binaries: TRITON_CACHE_DIR, else its default."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    return Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")


def _binaries() -> set[str]:
    return {str(path) for ending in ("cubin", "hsaco") for path in cache_folder().glob(f"*/*.{ending}")}
