"""Compiling without a GPU: resources, the cache key of the later launch, and a pool whose children may fail."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kerneltune.compile import Compiled, CompilePool, classify, whole_config
from kerneltune.device import target
from kerneltune.errors import UserError
from kerneltune.kernels.tunable import Scalar

MEASURE = Path(__file__).parent / "measure"
sys.path.insert(0, str(MEASURE))

import toy  # noqa: E402
from test_child import gone_within, running  # noqa: E402

ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950")
WORKLOAD: dict[str, Scalar] = {"k": 4096, "dtype": "bf16", "rows": 8}
SMALL = {
    "mla-decode": {"batch": 2, "kv_len": 256},
    "moe": {"tokens": 8, "E": 8, "global_E": 8, "N": 64, "K": 128, "top_k": 2},
}


def params(defect: str = "none", **other: Any) -> dict[str, Any]:
    return {"BLOCK_K": 64, "num_warps": 4, "defect": defect} | other


@pytest.fixture(autouse=True)
def own_triton_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path / "triton"


@pytest.fixture
def pool() -> Iterator[CompilePool]:
    with CompilePool("toy:TOY", target("sm_90"), workers=1, timeout_s=60) as made:
        yield made


@pytest.mark.parametrize("arch", ARCHS)
def test_every_architecture_compiles(arch: str) -> None:
    with CompilePool("toy:TOY", target(arch), workers=1) as pool:
        pool.submit("job", "dot", params(), WORKLOAD)
        result = pool.result("job")
    assert result.outcome == "ok", result
    assert result.registers is not None
    assert 0 < result.registers < 256
    assert result.spills == 0
    assert result.shared_bytes is not None
    assert result.compile_s > 0


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kernel", SMALL)
def test_defaults_of_the_real_kernels_compile(kernel: str, arch: str) -> None:
    from kerneltune.kernels.tunable import part_params
    from kerneltune.registry import KERNELS, load_tunable

    if importlib.util.find_spec(KERNELS[kernel]) is None:
        pytest.skip(f"{kernel} is not in this checkout")
    tunable, device = load_tunable(kernel), target(arch)
    workload = tunable.complete_workload(SMALL[kernel])
    default = tunable.default_config(workload, device)
    with CompilePool(kernel, device, workers=1) as pool:
        for part in tunable.parts:
            pool.submit(part, part, part_params(tunable, default, part), workload)
        results = {part: pool.result(part) for part in tunable.parts}
    assert {part: result.outcome for part, result in results.items()} == dict.fromkeys(tunable.parts, "ok"), results


def test_what_does_not_fit_is_infeasible_with_both_numbers(pool: CompilePool) -> None:
    pool.submit("large", "dot", params("big_shared", BLOCK_K=128), WORKLOAD)
    result = pool.result("large")
    assert result.outcome == "infeasible"
    assert result.reason.startswith("shared memory: needs ")
    assert result.reason.endswith("device has 232448 B")


def test_what_the_kernel_rejects_is_infeasible(pool: CompilePool) -> None:
    pool.submit("unknown", "dot", params("no such defect"), WORKLOAD)
    assert pool.result("unknown").outcome == "infeasible"
    assert pool.result("unknown").reason.startswith("defect: 'no such defect'")


def test_the_pool_outlives_an_abort_a_raise_and_a_hang() -> None:
    with CompilePool("toy:TOY", target("sm_90"), workers=1, timeout_s=3) as pool:
        for defect in ("compile_abort", "compile_raise", "none", "compile_hang"):
            pool.submit(defect, "dot", params(defect), WORKLOAD)
        pool.submit("last", "dot", params(BLOCK_K=32), WORKLOAD)
        assert pool.result("compile_abort").outcome == "compile_error"
        assert pool.result("compile_abort").reason.startswith("compiler died: signal 6")
        assert pool.result("compile_raise").reason == "RuntimeError: PassManager::run failed"
        assert pool.result("none").outcome == "ok"
        assert pool.result("compile_hang").reason == "compiler gave no result in 3 s"
        assert pool.result("last").outcome == "ok"


def test_equal_jobs_are_compiled_once_and_discarded_ones_never(pool: CompilePool) -> None:
    pool.submit("a", "dot", params(), WORKLOAD)
    pool.submit("b", "dot", dict(reversed(params().items())), WORKLOAD)
    pool.submit("never", "dot", params("compile_hang"), WORKLOAD)
    pool.discard(["never"])
    assert pool.result("a") is pool.result("b")
    assert pool.ready("a")
    assert pool.ready("b")
    pool.submit("after", "dot", params(BLOCK_K=32), WORKLOAD)
    assert pool.result("after").outcome == "ok"
    with pytest.raises(KeyError):
        pool.result("never")


def test_a_kernel_that_cannot_be_imported_is_the_users_error() -> None:
    with CompilePool("no_such_module:TOY", target("sm_90"), workers=1) as pool:
        pool.submit("job", "dot", params(), WORKLOAD)
        with pytest.raises(UserError, match="cannot load the kernel: ModuleNotFoundError"):
            pool.result("job")


def test_children_are_recycled_and_gone_after_close() -> None:
    pool = CompilePool("toy:TOY", target("sm_90"), workers=1, jobs_per_child=1)
    pids = set()
    for block in (16, 32):
        pool.submit(block, "dot", params(BLOCK_K=block), WORKLOAD)
        pids |= {child.pid for child in pool._children}
        assert pool.result(block).outcome == "ok"
    pool.submit("hang", "dot", params("compile_hang"), WORKLOAD)
    while not pool._children:
        pass
    pids |= {child.pid for child in pool._children}
    pool.close()
    assert not any(running(pid) for pid in pids)
    assert gone_within(list(pids), 1)


def test_shared_parameters_are_made_equal_in_the_other_parts() -> None:
    base = toy.TWO.default_config(WORKLOAD, target("sm_90"))
    config = whole_config(toy.TWO, "second", params(BLOCK_K=128, num_warps=8), WORKLOAD, target("sm_90"))
    assert config["second"] == params(BLOCK_K=128, num_warps=8)
    assert config["first"] == params(BLOCK_K=128, num_warps=4)
    assert base["first"]["BLOCK_K"] == 32


def test_ptxas_words_for_too_much_shared_memory() -> None:
    error = RuntimeError("ptxas error   : Entry function 'f' uses too much shared data (0x40000 bytes, 0x38c00 max)")
    assert classify(error) == ("infeasible", "shared memory: needs 262144 B, device has 232448 B")


KEYS = """
import json, sys
from kerneltune.compile import resolve_tunable, stub_driver
from kerneltune.device import target
tunable = resolve_tunable(sys.argv[1])
workload = tunable.complete_workload(json.loads(sys.argv[2]))
device = target(sys.argv[3])
hashes = {}
for where in ("meta", "cpu"):
    problem = tunable.make_problem(workload, where)
    with stub_driver(device):
        calls = tunable.launch(problem, tunable.default_config(workload, device)).calls
        for call in calls:
            call.fn.device_caches.clear()
        hashes[where] = [call.fn.warmup(*call.args, grid=call.grid, **call.options).hash for call in calls]
print(json.dumps(hashes))
"""


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@pytest.mark.parametrize("kernel", ["toy:TOY", "toy:TWO", *SMALL])
def test_inputs_without_data_give_the_cache_key_of_inputs_with_data(kernel: str, arch: str) -> None:
    """Triton files a binary under the hash of its source, options, target and specialised arguments. Real tensors here
    lie on the CPU: as on a GPU, their memory is aligned to more than 16 bytes."""
    from kerneltune.registry import KERNELS

    if kernel in KERNELS and importlib.util.find_spec(KERNELS[kernel]) is None:
        pytest.skip(f"{kernel} is not in this checkout")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(MEASURE), *sys.path])
    command = [sys.executable, "-c", KEYS, kernel, json.dumps(SMALL.get(kernel, WORKLOAD)), arch]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    hashes = json.loads(done.stdout.splitlines()[-1])
    assert hashes["meta"]
    assert hashes["meta"] == hashes["cpu"]


def test_the_result_is_plain_data() -> None:
    assert Compiled("ok").reason == ""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "given"),
    [
        ("toy:TOY", WORKLOAD),
        ("mla-decode", {"batch": 4, "kv_len": 1024}),
        ("moe", {"tokens": 64, "E": 8, "global_E": 8, "N": 256, "K": 512, "top_k": 2}),
    ],
)
def test_a_run_after_a_compile_compiles_nothing(kernel: str, given: dict[str, Scalar], own_triton_cache: Path) -> None:
    """Edge problems included: compiles happen in children, ahead of time, and never while the GPU waits."""
    from kerneltune.compile import resolve_tunable
    from kerneltune.device import detect
    from kerneltune.kernels.tunable import part_params
    from kerneltune.measure.worker import GpuWorker

    tunable, device = resolve_tunable(kernel), detect()
    assert device is not None
    workload = tunable.complete_workload(given)
    config = tunable.default_config(workload, device)

    def binaries() -> set[str]:
        return {path.parent.name for path in own_triton_cache.rglob("*.cubin")}

    with CompilePool(kernel, device, workers=1) as pool:
        for part in tunable.parts:
            pool.submit(part, part, part_params(tunable, config, part), workload)
        assert [pool.result(part).outcome for part in tunable.parts] == ["ok"] * len(tunable.parts)
    before = binaries()
    assert before
    with GpuWorker(kernel) as worker:
        reply = worker.trial(workload, "", config)
        assert reply["outcome"] == "ok", reply["reason"]
        assert binaries() == before
        edges = list(tunable.edge_workloads(workload))
        with CompilePool(kernel, device, workers=1) as pool:
            for label, edge in edges:
                pool.submit(label, "", config, edge)
            assert [pool.result(label).outcome for label, _ in edges] == ["ok"] * len(edges)
        before = binaries()
        begin = time.monotonic()
        (reply,) = worker.finals(workload, [config], rounds=1, samples=4, edges=lambda _: edges)
        first_s = time.monotonic() - begin
        assert reply["outcome"] == "ok", reply["reason"]
        assert binaries() == before
        begin = time.monotonic()
        worker.finals(workload, [config], rounds=1, samples=4, edges=lambda _: edges)
        assert first_s - (time.monotonic() - begin) < 2.0  # what the edges cost, once


def test_a_compile_process_killed_from_outside_costs_no_config_its_compile() -> None:
    with CompilePool("toy:TOY", target("sm_90"), workers=1) as pool:
        pool.submit("first", "dot", params(), WORKLOAD)
        assert pool.result("first").outcome == "ok"
        pool.submit("second", "dot", params("compile_sleep", BLOCK_K=16), WORKLOAD)
        time.sleep(0.3)
        for child in list(pool._children):
            os.kill(child.pid, signal.SIGKILL)
        assert pool.result("second").outcome == "ok"


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_two_thousand_configs_of_which_500_fail_leave_the_parents_memory_flat(own_triton_cache: Path) -> None:
    """Real children, recycled many times, whose compiles are empty; the bound is 200 MiB, what is seen is under 20."""
    failed = 0
    with CompilePool("toy:EMPTY", target("sm_90"), workers=2, jobs_per_child=400) as pool:
        pool.submit("warm", "dot", params(BLOCK_K=1), WORKLOAD)
        pool.result("warm")
        before = resident_mib()
        for index in range(2000):
            defect = "compile_raise" if index % 4 == 3 else "none"
            pool.submit(index, "dot", params(defect, BLOCK_K=16 + index), WORKLOAD)
        for index in range(2000):
            failed += pool.result(index).outcome == "compile_error"
            pool.discard([index])
        assert resident_mib() - before < 50
    assert failed == 500
    assert sum(path.stat().st_size for path in own_triton_cache.rglob("*") if path.is_file()) < 2**20


def test_the_pool_says_how_many_children_are_idle() -> None:
    with CompilePool("toy:TOY", target("sm_90"), workers=2) as pool:
        assert pool.idle == 2
        pool.submit("job", "dot", {"BLOCK_K": 32, "num_warps": 4, "defect": "none"}, toy.TOY.complete_workload({}))
        assert pool.idle == 1
        pool.result("job")
        assert pool.idle == 2
