"""Tables on a GPU: renewed, measured for CI, and compiled before the first request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kerneltune import tables
from kerneltune.device import detect
from kerneltune.provenance import kernel_hash
from kerneltune.registry import load_tunable

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[1]
SIZES: dict[str, dict[str, Any]] = {
    "mla-decode": {"batch": 4, "kv_len": 1024},
    "moe": {"tokens": 16, "E": 8, "global_E": 8, "N": 256, "K": 512, "top_k": 2},
}
SLOW = {"BLOCK_H": 16, "BLOCK_N": 16, "num_splits": 1, "num_warps": 1, "num_stages": 1}


def command(*arguments: object, code: int = 0, **environment: str) -> str:
    given = [sys.executable, "-m", "kerneltune", *map(str, arguments)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        given, capture_output=True, text=True, timeout=240, env=os.environ | {"PYTHONPATH": path} | environment
    )
    assert done.returncode == code, done.stderr[-2000:] + done.stdout[-2000:]
    return done.stdout


def table(path: Path, kernel: str, config: Any = None, **provenance: Any) -> Path:
    tunable, device = load_tunable(kernel), detect()
    assert device is not None
    workload = tunable.complete_workload(SIZES[kernel])
    made = tables.make_entry(workload, config or dict(tunable.default_config(workload, device)), {"time_us": 1.0})
    import triton

    own = {"triton": triton.__version__, "kernel_hash": kernel_hash(tunable), "date": "2026-01-01"} | provenance
    tables.write_table(path, tables.make_table(kernel, device.to_dict(), own, [made]))
    return path


@pytest.mark.parametrize("kernel", SIZES)
def test_revalidate_renews_a_stale_entry_and_nothing_else(tmp_path: Path, kernel: str) -> None:
    path = table(tmp_path / "t.json", kernel, triton="3.5.9")
    (done,) = json.loads(command("revalidate", path, "--json"))
    assert done["outcome"] == "kept"
    assert "measured with triton 3.5.9" in done["why"][0]
    assert done["time_us"] > 1.0
    renewed = path.read_bytes()
    assert json.loads(command("revalidate", path, "--json")) == []
    assert path.read_bytes() == renewed
    assert command("check", path).splitlines()[-1].startswith("0 faults")


def test_check_measures_and_fails_on_what_is_slower_than_the_default(tmp_path: Path) -> None:
    good = table(tmp_path / "good" / "t.json", "mla-decode")
    assert "correct" in command("check", good, "--measure")
    slow = table(tmp_path / "slow" / "t.json", "mla-decode", SLOW)
    assert "slower than the default: " in command("check", slow, "--measure", code=1)
    (done,) = json.loads(command("revalidate", slow, "--all", "--json"))
    assert done["outcome"] == "default"
    assert "0 faults" in command("check", slow, "--measure")


FIRST_CALL = """
import sys, time, torch
sys.path.insert(0, {tests!r})
from kerneltune.registry import load_tunable
from kerneltune.kernels.mla_decode import mla_decode
from kerneltune.kernels.moe import fused_moe
kernel, sizes = {kernel!r}, {sizes!r}
tunable = load_tunable(kernel)
inputs = tunable.make_problem(tunable.complete_workload(sizes), "cuda").inputs
torch.cuda.synchronize()
begin = time.monotonic()
if kernel == "moe":
    for ids in (inputs["topk_ids"], inputs["topk_ids"].long()):
        fused_moe(inputs["hidden"], inputs["w1"], inputs["w2"], inputs["topk_weights"], ids, table={table!r})
else:
    mla_decode(inputs["q"], inputs["kv_cache"], inputs["block_table"], inputs["cache_seqlens"], softmax_scale=0.1,
               table={table!r})
torch.cuda.synchronize()
print(time.monotonic() - begin)
"""


@pytest.mark.parametrize("kernel", SIZES)
def test_after_a_warmup_a_first_request_compiles_nothing(tmp_path: Path, kernel: str) -> None:
    path = table(tmp_path / "t.json", kernel)
    cache = tmp_path / "cache"
    report = json.loads(command("warmup", "--table", path, "--json", TRITON_CACHE_DIR=str(cache)))
    assert report["binaries"] >= 1
    before = {file.name: file.parent.name for file in cache.rglob("*.cubin")}
    for scale in (1, 2):  # what the entry serves, too
        name = "batch" if kernel == "mla-decode" else "tokens"
        sizes = SIZES[kernel] | {name: SIZES[kernel][name] * scale}
        code = FIRST_CALL.format(tests=str(ROOT), kernel=kernel, sizes=sizes, table=str(path))
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
            env={"PYTHONPATH": str(ROOT)} | os.environ | {"TRITON_CACHE_DIR": str(cache)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        assert {file.name: file.parent.name for file in cache.rglob("*.cubin")} == before
    assert torch.cuda.is_available()
