"""The default configs compile for GPUs that are not here, and `shared_bytes` says what the compiler says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kerneltune.device import target
from kerneltune.registry import load_tunable
from kerneltune.space import load_space

CHILD = """
import dataclasses, json, sys
from kerneltune.compile import compile_part
from kerneltune.device import target
from kerneltune.kernels.mla_decode.config import Config, shared_bytes
from kerneltune.kernels.mla_decode.tunable import TUNABLE

arch, configs = sys.argv[1], json.loads(sys.argv[2])
for heads, config in configs:
    workload, device = TUNABLE.complete_workload({"heads": heads}), target(arch)
    config = config or TUNABLE.default_config(workload, device)
    compiled = compile_part(TUNABLE, "decode", config, workload, device)
    estimate = shared_bytes(Config(**config), workload, device)
    print(json.dumps({"config": config, "estimate": estimate, **dataclasses.asdict(compiled)}))
"""
PTX_CHILD = """
import sys
from kerneltune.compile import stub_driver
from kerneltune.device import target
from kerneltune.kernels.mla_decode.config import default_config
from kerneltune.kernels.mla_decode.tunable import TUNABLE

workload, device = TUNABLE.complete_workload({"heads": 128}), target("sm_90")
config = default_config(workload, device, portable=True).to_dict()
with stub_driver(device):
    call = TUNABLE.launch(TUNABLE.make_problem(workload, "meta"), config).calls[0]
    print(call.fn.warmup(*call.args, grid=call.grid, **call.options).asm["ptx"])
"""
TILE = {"BLOCK_H": 16, "BLOCK_N": 32, "num_splits": 1, "num_warps": 4, "num_stages": 3}


def compile_in_child(arch: str, configs: list[tuple[int, dict[str, int] | None]], cache: Path) -> list[dict]:
    """Compile for `arch` in a process that does not interpret; one result for each (heads, config or None)."""
    printed = run_child([CHILD, arch, json.dumps(configs)], cache)
    return [json.loads(line) for line in printed.splitlines()]


def run_child(arguments: list[str], cache: Path) -> str:
    """Run Python code in a process that does not interpret Triton; what it prints."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", *arguments]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr
    return child.stdout


@pytest.mark.parametrize("arch", ["sm_90", "sm_80", "sm_100", "gfx942", "gfx950"])
def test_defaults_compile(arch: str, tmp_path: Path) -> None:
    for result in compile_in_child(arch, [(16, None), (128, None)], tmp_path):
        assert result["outcome"] == "ok", result
        assert result["estimate"] <= result["shared_bytes"]
        if arch in ("sm_90", "sm_80"):
            assert result["estimate"] == result["shared_bytes"]
            assert result["spills"] < 256, "what does not fit in registers must be little, and outside the loop"


def test_shared_memory_is_what_the_compiler_says(tmp_path: Path) -> None:
    configs = [
        TILE,
        {**TILE, "BLOCK_N": 64, "num_stages": 2, "num_warps": 8},
        {**TILE, "BLOCK_H": 64, "num_warps": 8},
        {**TILE, "BLOCK_H": 16, "BLOCK_N": 16, "num_stages": 4},
    ]
    for result in compile_in_child("sm_90", [(128, config) for config in configs], tmp_path):
        assert result["outcome"] == "ok", result
        assert result["estimate"] == result["shared_bytes"], result["config"]


def test_warp_groups_share_the_matrix_work_on_hopper(tmp_path: Path) -> None:
    """A tile of 64 x 64 scores is 36 instructions a warp group and its half of the result 4: nothing is done twice."""
    ptx = run_child([PTX_CHILD], tmp_path)
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n32k16") == 36
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n256k16") == 4


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_points_of_the_space_compile_for_amd_and_hardly_spill(arch: str, tmp_path: Path) -> None:
    tunable, space, device = load_tunable("mla-decode"), load_space("mla-decode"), target(arch)
    configs: list[tuple[int, dict[str, int] | None]] = []
    for heads in (16, 128):
        points = space.points(tunable, "decode", tunable.complete_workload({"heads": heads}), device)
        one_split = [point for point in points if point["num_splits"] == 1]
        assert one_split
        configs += [(heads, one_split[len(one_split) * i // 4]) for i in range(4)]
    for result in compile_in_child(arch, configs, tmp_path):
        assert result["outcome"] == "ok", result
        assert result["spills"] <= 300, result
