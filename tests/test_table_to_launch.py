"""A table that a search wrote is what the kernels launch: looked at in the launch itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kerneltune import tables
from kerneltune.kernels import tables as launch_tables
from kerneltune.kernels.mla_decode import mla_decode
from kerneltune.kernels.mla_decode import op as mla_op
from kerneltune.kernels.moe import fused_moe
from kerneltune.kernels.staleness import triton_version
from kerneltune.kernels.tunable import KernelCall
from kerneltune.registry import load_tunable


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[KernelCall]:
    """Every launch made during the test, in order."""
    calls: list[KernelCall] = []
    original: Callable[[KernelCall], Any] = KernelCall.__call__

    def spy(call: KernelCall) -> Any:
        calls.append(call)
        return original(call)

    monkeypatch.setattr(KernelCall, "__call__", spy)
    return calls


@pytest.fixture(autouse=True)
def own_config_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("KERNELTUNE_TABLES", raising=False)
    launch_tables.forget()
    yield
    launch_tables.forget()


def install(tmp_path: Path, kernel: str, device: Any, workload: dict[str, Any], config: dict[str, Any]) -> None:
    measured = {"time_us": 1.0, "inputs": "equal"}
    entry = tables.make_entry(workload, config, measured)
    path = tables.add_entry(tmp_path / "out" / "tables", kernel, device.to_dict(), {"triton": triton_version()}, entry)
    tables.install(path)


def run_mla(device: str, batch: int, kv_pages: int) -> None:
    q = torch.randn(batch, 1, 4, 576, device=device, dtype=torch.float16)
    kv = torch.randn(batch * kv_pages, 16, 1, 576, device=device, dtype=torch.float16)
    table = torch.arange(batch * kv_pages, device=device, dtype=torch.int32).reshape(batch, kv_pages)
    lengths = torch.full((batch,), kv_pages * 16, device=device, dtype=torch.int32)
    mla_decode(q, kv, table, lengths, softmax_scale=0.1)


def test_mla_decode_launches_the_installed_entry_and_the_default_without_it(
    tmp_path: Path, device: str, launched: list[KernelCall]
) -> None:
    workload = load_tunable("mla-decode").complete_workload(
        {"dtype": "fp16", "heads": 4, "page_size": 16, "batch": 2, "kv_len": 64}
    )
    config = {"BLOCK_H": 16, "BLOCK_N": 16, "num_splits": 3, "num_warps": 4, "num_stages": 1}
    run_mla(device, 2, 4)
    before = {name: launched[0].options[name] for name in ("BLOCK_N", "num_stages")}
    assert before != {"BLOCK_N": 16, "num_stages": 1}
    launched.clear()
    install(tmp_path, "mla-decode", mla_op.device_of(torch.device(device)), workload, config)
    launch_tables.forget()
    run_mla(device, 2, 4)
    split = launched[0]
    assert {name: split.options[name] for name in ("BLOCK_H", "BLOCK_N", "num_warps", "num_stages")} == {
        "BLOCK_H": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 1}  # fmt: skip
    assert len(launched) == 2  # three splits need the combine
    launched.clear()
    run_mla(device, 2, 16)  # four times as long: outside the bound, so the default
    assert launched[0].options["BLOCK_N"] != 16


def test_fused_moe_launches_the_installed_entry(tmp_path: Path, device: str, launched: list[KernelCall]) -> None:
    from kerneltune.kernels.moe import op as moe_op

    sizes: dict[str, Any] = {"dtype": "fp16", "E": 4, "N": 32, "K": 64, "top_k": 2, "tokens": 5}
    workload = load_tunable("moe").complete_workload(sizes)
    gemm = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 32, "GROUP_M": 1, "num_warps": 2, "num_stages": 1}
    config = {"gemm1": gemm, "gemm2": gemm | {"BLOCK_N": 32}}
    install(tmp_path, "moe", moe_op._device(torch.device(device)), workload, config)
    launch_tables.forget()
    hidden = torch.randn(5, 64, device=device, dtype=torch.float16)
    w1 = torch.randn(4, 64, 64, device=device, dtype=torch.float16) / 8
    w2 = torch.randn(4, 64, 32, device=device, dtype=torch.float16) / 6
    ids = torch.randint(0, 4, (5, 2), device=device, dtype=torch.int32)
    fused_moe(hidden, w1, w2, torch.full((5, 2), 0.5, device=device), ids)
    gemms = [call for call in launched if "BLOCK_K" in call.options]
    assert [(call.options["BLOCK_N"], call.options["num_warps"]) for call in gemms] == [(16, 2), (32, 2)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "workload"),
    [("mla-decode", "batch=8,kv_len=2048"), ("moe", "E=8,global_E=8,N=512,K=1024,top_k=2,tokens=64")],
)
def test_a_search_on_this_gpu_is_picked_up_at_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launched: list[KernelCall], kernel: str, workload: str
) -> None:
    command = [sys.executable, "-m", "kerneltune", "search", kernel, "--workload", workload, "--trials", "12",
               "--out", str(tmp_path / "out"), "--json"]  # fmt: skip
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    winner = json.loads(found.stdout)["winners"][0]
    launch_tables.forget()
    tunable = load_tunable(kernel)
    problem = tunable.make_problem(tunable.complete_workload(winner["workload"]), "cuda")
    launched.clear()
    if kernel == "mla-decode":
        inputs = problem.inputs
        mla_decode(inputs["q"], inputs["kv_cache"], inputs["block_table"], inputs["cache_seqlens"], softmax_scale=0.1,
                   max_kv_len=2048)  # fmt: skip
        wanted = winner["config"]
        assert {name: launched[0].options[name] for name in ("BLOCK_H", "BLOCK_N", "num_warps", "num_stages")} == {
            name: wanted[name] for name in ("BLOCK_H", "BLOCK_N", "num_warps", "num_stages")
        }
        assert len(launched) == (1 if wanted["num_splits"] == 1 else 2)
    else:
        inputs = problem.inputs
        fused_moe(inputs["hidden"], inputs["w1"], inputs["w2"], inputs["topk_weights"], inputs["topk_ids"])
        gemms = [call for call in launched if "BLOCK_K" in call.options]
        for call, part in zip(gemms, ("gemm1", "gemm2"), strict=True):
            assert {name: call.options[name] for name in winner["config"][part]} == winner["config"][part]


@pytest.mark.parametrize("change", [{"BLOCK_N": -16}, {"num_warps": "4"}, {"extra": 1}])
def test_an_entry_that_cannot_run_is_a_miss_with_one_warning(
    tmp_path: Path, device: str, launched: list[KernelCall], change: dict[str, Any]
) -> None:
    workload = load_tunable("mla-decode").complete_workload(
        {"dtype": "fp16", "heads": 4, "page_size": 16, "batch": 2, "kv_len": 48}
    )
    config = {"BLOCK_H": 16, "BLOCK_N": 16, "num_splits": 3, "num_warps": 4, "num_stages": 1} | change
    install(tmp_path, "mla-decode", mla_op.device_of(torch.device(device)), workload, config)
    launch_tables.forget()
    launch_tables._said.clear()
    with pytest.warns(UserWarning, match="cannot run here") as caught:
        run_mla(device, 2, 3)
    assert len(caught) == 1
    run_mla(device, 2, 3)
    assert launched[0].options["num_stages"] != 1
