"""Two GPUs, of which torch's current one is not the tensors': config, plan and launch are the tensors' GPU's.

The driver is stood in for, so this shows which GPU is asked about and made current, not that a launch works there.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kerneltune.device import TARGETS
from kerneltune.kernels import device as devices
from kerneltune.kernels import table_files, tables
from kerneltune.kernels.mla_decode import op as mla
from kerneltune.kernels.moe import op as moe
from kerneltune.registry import load_tunable
from kerneltune.tables import make_entry, make_table

HERE = [TARGETS["sm_90"], TARGETS["sm_100"]]
EXACT = (torch.bfloat16, 16, 1, 1, False, 64, 512, 64)


class OnSecond(torch.Tensor):
    """A tensor that says it lies on GPU 1."""

    def get_device(self) -> int:
        return 1


@pytest.fixture
def current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Two GPUs with a table each; what torch's current one is, the first."""
    now = [0]

    def properties(index: int) -> Any:
        gpu = HERE[index]
        return SimpleNamespace(
            name=gpu.name,
            major=int(gpu.arch[3:-1]),
            minor=int(gpu.arch[-1]),
            multi_processor_count=gpu.sm_count,
            shared_memory_per_block_optin=gpu.shared_memory_per_block,
            L2_cache_size=gpu.l2_bytes,
            total_memory=gpu.memory_bytes,
            warp_size=gpu.warp_size,
        )

    @contextlib.contextmanager
    def switched(index: int) -> Iterator[None]:
        before, now[0] = now[0], index
        yield
        now[0] = before

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "device", switched)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("KERNELTUNE_TABLES", str(tmp_path))
    monkeypatch.setattr(table_files, "_shipped", lambda: ())
    for kernel in ("mla-decode", "moe"):
        for number, gpu in enumerate(HERE, 1):
            if kernel == "mla-decode":
                config: dict[str, Any] = {"BLOCK_H": 16, "BLOCK_N": 64, "num_splits": number}
                config |= {"num_warps": 4, "num_stages": 2}
            else:
                part = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 64, "GROUP_M": number, "num_warps": 4, "num_stages": 2}
                config = {"gemm1": part, "gemm2": part}
            workload = load_tunable(kernel).complete_workload({})
            table = make_table(kernel, gpu.to_dict(), {}, [make_entry(workload, config, {})])
            (tmp_path / f"{kernel}.{gpu.arch}.json").write_text(json.dumps(table))
    devices.current_device.cache_clear()
    tables.forget()
    yield now
    devices.current_device.cache_clear()
    tables.forget()


@pytest.mark.parametrize("index", [0, 1])
def test_the_table_is_that_of_the_tensors_gpu(current: list[int], index: int) -> None:
    place = torch.device("cuda", index)
    size = load_tunable("mla-decode").complete_workload({})
    assert mla._config_for(EXACT, size["batch"], size["kv_len"], None, place, None, None).num_splits == index + 1
    workload = {name: value for name, value in load_tunable("moe").complete_workload({}).items() if name != "routing"}
    found = moe._tuned_config(tuple(workload.items()), moe._device(place), None)
    group = found["gemm1"].GROUP_M
    assert group == index + 1


def test_a_call_makes_the_tensors_gpu_current_and_gives_it_back(
    current: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    for op in (mla, moe):
        monkeypatch.setattr(op, "_check", lambda *_: None)
        monkeypatch.setattr(op, "_first", lambda *_: seen.append(current[0]))
    tensor = torch.empty(1, 1, 16, 576).as_subclass(OnSecond)
    mla.decode(tensor, tensor, tensor, tensor, 1.0, False, 512, 0.0)
    moe.fused_moe(tensor, tensor, tensor, tensor, tensor)
    assert seen == [1, 1]
    assert current == [0]
