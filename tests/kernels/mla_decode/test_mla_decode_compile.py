"""The default configs compile for GPUs that are not here, and `shared_bytes` says what the compiler says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
TILE = {"BLOCK_H": 16, "BLOCK_N": 32, "num_splits": 1, "num_warps": 4, "num_stages": 3}


def compile_in_child(arch: str, configs: list[tuple[int, dict[str, int] | None]], cache: Path) -> list[dict]:
    """Compile for `arch` in a process that does not interpret; one result for each (heads, config or None)."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CHILD, arch, json.dumps(configs)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr
    return [json.loads(line) for line in child.stdout.splitlines()]


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
