"""On a GPU: times that make sense, and a process that survives what kernels can do. Run: pytest -m gpu tests/measure"""

from __future__ import annotations

import importlib.util
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_backend import CEILINGS, toy_tables
from toy import TOY

from kerneltune.compile import CompilePool
from kerneltune.device import detect
from kerneltune.measure.worker import GpuWorker
from kerneltune.recordings import canonical
from kerneltune.records import read_folder
from kerneltune.tuning.backends import LiveBackend, Work
from kerneltune.tuning.options import Options
from kerneltune.tuning.progress import Silent
from kerneltune.tuning.seconds import Seconds
from kerneltune.tuning.session import run

pytestmark = pytest.mark.gpu
SMALL = TOY.complete_workload({})
LARGE = TOY.complete_workload({"rows": 8192, "k": 32768})  # 512 MiB of fp16


def config(defect: str = "none", **other: Any) -> dict[str, Any]:
    return {"BLOCK_K": 4096, "num_warps": 8, "defect": defect} | other


@pytest.fixture(scope="module")
def worker() -> Iterator[GpuWorker]:
    with GpuWorker("toy:TOY", 0) as made:
        made.start()
        yield made


@pytest.fixture(scope="module")
def ceilings(worker: GpuWorker) -> dict[str, Any]:
    begin = time.monotonic()
    found = worker.ceilings()
    assert time.monotonic() - begin < 25
    return found


def test_start_says_who_measures(worker: GpuWorker) -> None:
    started = worker.start()
    assert started["device"]["name"] == torch.cuda.get_device_properties(0).name
    assert {"triton", "torch", "python"} <= set(started["versions"])
    assert 1.0 < started["launch_us"] < 20.0
    if started["device"]["arch"].startswith("sm_") and importlib.util.find_spec("pynvml"):
        assert {"sm_mhz", "temperature_c", "power_w"} <= {k for k, v in worker.conditions().items() if v}


def test_ceilings_are_plausible(ceilings: dict[str, Any]) -> None:
    read, copy = ceilings["dram_read_gbps"], ceilings["dram_copy_gbps"]
    assert 0.6 * read < copy < 1.1 * read
    assert set(ceilings["tflops"]) == {"bf16", "fp16"}
    assert all(rate > 10 for rate in ceilings["tflops"].values())
    if "H200" in ceilings["device"]:
        assert 4200 < read < 4700
        assert 650 < ceilings["tflops"]["bf16"] < 850
        assert 1.0 < ceilings["launch_us"] < 8.0


def test_known_bytes_take_a_plausible_time(worker: GpuWorker, ceilings: dict[str, Any]) -> None:
    reply = worker.trial(LARGE, "", config(), raw=True)
    assert reply["outcome"] == "ok", reply["reason"]
    assert reply["samples"] == len(reply["samples_us"]) == 15
    assert reply["p20_us"] <= reply["time_us"] <= reply["p80_us"]
    gbps = TOY.cost(LARGE).bytes / (reply["time_us"] - reply["launch_us"]) / 1e3
    assert 0.25 * ceilings["dram_read_gbps"] < gbps < 1.02 * ceilings["dram_read_gbps"]


def test_times_repeat(worker: GpuWorker) -> None:
    first, second = (worker.trial(LARGE, "", config())["time_us"] for _ in range(2))
    assert first == pytest.approx(second, rel=0.02)


def test_what_is_slower_than_asked_for_is_dropped_early(worker: GpuWorker) -> None:
    reply = worker.trial(LARGE, "", config(), stop_above_us=1.0)
    assert reply["outcome"] == "ok"
    assert 4 <= reply["samples"] < 15


def test_finals_time_in_turns(worker: GpuWorker) -> None:
    replies = worker.finals(LARGE, [config(), config("untouched"), config(BLOCK_K=512)], rounds=2, samples=5)
    assert [reply["outcome"] for reply in replies] == ["ok", "wrong", "ok"]
    assert [reply["samples"] for reply in replies] == [10, 0, 10]


def test_one_part_takes_less_than_the_whole() -> None:
    workload = TOY.complete_workload({"rows": 4096, "k": 16384})
    whole = {"first": config(), "second": config()}
    with GpuWorker("toy:TWO", 0) as worker:
        times = {part: worker.trial(workload, part, whole) for part in ("", "first", "second")}
    assert {reply["outcome"] for reply in times.values()} == {"ok"}, times
    assert times["second"]["time_us"] < times["first"]["time_us"] < times[""]["time_us"]


def test_an_illegal_address_ends_the_process_and_not_the_next_config(worker: GpuWorker) -> None:
    before = worker.restarts
    reply = worker.trial(SMALL, "", config("out_of_bounds"))
    assert reply["outcome"] == "crashed"
    assert "illegal" in reply["reason"]
    assert worker.restarts == before + 1
    assert worker.trial(SMALL, "", config())["outcome"] == "ok"
    assert worker.restarts == before + 1


def test_a_kernel_that_does_not_end_is_killed(worker: GpuWorker) -> None:
    assert worker.trial(SMALL, "", config())["outcome"] == "ok"
    begin = time.monotonic()
    reply = worker.trial(SMALL, "", config(spin_ms=20_000), timeout_s=3)
    assert reply["outcome"] == "timed_out"
    assert time.monotonic() - begin < 20
    assert worker.trial(SMALL, "", config())["outcome"] == "ok"


def test_too_much_shared_memory_is_infeasible(worker: GpuWorker) -> None:
    workload = TOY.complete_workload({"rows": 256, "k": 4096})
    reply = worker.trial(workload, "", config("big_shared", BLOCK_K=128))
    assert reply["outcome"] == "infeasible"
    assert "shared memory" in reply["reason"]
    assert worker.trial(workload, "", config())["outcome"] == "ok"


def test_the_same_bits_are_required_of_finalists(worker: GpuWorker) -> None:
    workload = TOY.complete_workload({"dtype": "fp32"})
    replies = worker.finals(workload, [config("flaky"), config()], rounds=1, samples=4)
    assert [reply["outcome"] for reply in replies] == ["nondeterministic", "ok"]


def test_out_of_memory_is_the_configs_own_fault_and_the_process_lives_on(worker: GpuWorker) -> None:
    assert worker.trial(SMALL, "", config())["outcome"] == "ok"
    before = worker.restarts
    reply = worker.trial(SMALL, "", config("out_of_memory"))
    assert (reply["outcome"], reply["reason"]) == ("crashed", "out of GPU memory")
    assert worker.trial(SMALL, "", config())["outcome"] == "ok"
    assert worker.restarts == before


def test_conditions_are_read_at_work(worker: GpuWorker) -> None:
    """Without NVML there are the probes alone, and nothing to warn of."""
    from kerneltune.measure.conditions import Snapshot, warnings

    worker.start()
    begin = time.monotonic()
    before = Snapshot.from_dict(worker.conditions())
    assert time.monotonic() - begin < 5
    after = Snapshot.from_dict(worker.conditions())
    assert set(before.probes_us) == {"read", "matmul"}
    assert all(10 < time_us < 10_000 for time_us in before.probes_us.values())
    assert after.at_s > before.at_s
    assert not any("became" in text for text in warnings(before, after)), (before, after)
    if before.sm_mhz is not None:
        assert before.sm_mhz > 500  # at work, not idle


def test_finalists_are_wrong_on_an_edge_size(worker: GpuWorker) -> None:
    configs = [config(), config("edge_511")]
    replies = worker.finals(SMALL, configs, rounds=2, samples=4, edges=lambda _: list(TOY.edge_workloads(SMALL)))
    assert [reply["outcome"] for reply in replies] == ["ok", "wrong"]
    assert replies[1]["reason"].startswith("k=511: row ")


def test_compiles_beside_do_not_change_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile children leave two CPUs to the measuring process; a time is that of a graph's replay anyway."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    device = detect()
    assert device is not None
    with GpuWorker("toy:TOY", 0) as worker, CompilePool("toy:TOY", device) as pool:
        medians: dict[bool, list[float]] = {False: [], True: []}
        blocks = itertools.count(17)
        for busy in (False, True, False, True):
            if busy:
                for _ in range(200):  # distinct jobs: the toy's shared-memory variant takes its time
                    block = next(blocks)
                    pool.submit(block, "dot", config(BLOCK_K=64, spin_ms=block), SMALL)
                while not any(pool.ready(key) for key in range(block - 199, block + 1)):
                    time.sleep(0.05)
            for _ in range(3):
                reply = worker.trial(LARGE, "", config(), samples=30)
                assert reply["outcome"] == "ok"
                medians[busy].append(reply["time_us"])
            if busy:
                assert not all(pool.ready(key) for key in range(block - 199, block + 1)), "compiles ended too soon"
                pool.discard(range(block - 199, block + 1))
    quiet, beside = (statistics.median(medians[busy]) for busy in (False, True))
    assert beside == pytest.approx(quiet, rel=0.02)


def test_gpu_memory_stays_flat_over_many_configs(worker: GpuWorker) -> None:
    assert worker.trial(LARGE, "", config())["outcome"] == "ok"
    before = torch.cuda.mem_get_info()[0]
    for index in range(120):
        defect = ("none", "untouched", "host_raise", "out_of_memory")[index % 4]
        worker.trial(LARGE, "", config(defect, BLOCK_K=512 << index % 3, num_warps=4 << index % 2), samples=5)
    assert worker.trial(LARGE, "", config())["outcome"] == "ok"
    assert before - torch.cuda.mem_get_info()[0] < 200 << 20


class GpuBackend(LiveBackend):
    """LiveBackend on the toy: its points are given, its times are real."""

    def __init__(self, points: Sequence[Mapping[str, Any]]) -> None:
        found = detect()
        assert found is not None
        self.kernel, self._given, self._seed, self._device = "toy", [dict(p) for p in points], 0, found
        self.device = found.to_dict()
        self._tunable, self.parts, self.shared = TOY, TOY.parts, TOY.shared
        self.varying_keys = TOY.scaled_keys
        self.kernel_hash, self.versions, self.ceilings = {"only": "0" * 12}, {"triton": "0"}, dict(CEILINGS)
        self.seconds = Seconds()
        self._pruned = time.monotonic()
        self._pool = CompilePool("toy:TOY", found, workers=2, timeout_s=15)
        self._worker = GpuWorker("toy:TOY", 0, trial_timeout_s=6)

    def points(self, workload: Any, part: str) -> list[dict[str, Any]]:
        return self._given

    def default_config(self, workload: Any) -> dict[str, Any]:
        return self._given[0]

    def admit(self, workload: Any, configs: Any) -> None:
        return None

    def incumbents(self, workload: Any) -> list[dict[str, Any]]:
        return []

    def work(self, workload: Any, part: str) -> Work:
        return Work(flops=1000, bytes=1000, compute="fp16")


FAULTS = {
    "out_of_bounds": "crashed",
    "out_of_memory": "crashed",
    "host_exit": "crashed",
    "compile_abort": "compile_error",
    "compile_hang": "compile_error",
    "no_tail": "wrong",
}


def test_a_search_among_faulting_kernels_finds_the_winner_of_a_clean_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probe 2 on real hardware. Points differ by whole milliseconds, so the winner does not depend on noise."""
    clean = [config(BLOCK_K=block, spin_ms=spin) for spin in (3, 2, 0, 5) for block in (64, 256)]
    slow = config(spin_ms=20_000)  # bounded, and far beyond the limit of one trial
    faulty = [config(defect, BLOCK_K=64, spin_ms=0) for defect in FAULTS]
    entries = toy_tables(monkeypatch)
    workload = TOY.complete_workload({"k": 511})
    for name, points in (("clean", clean), ("faulty", [*clean[:3], *faulty, slow, *clean[3:]])):
        backend = GpuBackend(points)
        try:
            run(backend, [workload], Options(tmp_path / name, trials=99, sampler="random", seed=2), Silent())
        finally:
            backend.close()
    trials = [t for t in read_folder(tmp_path / "faulty")[1] if t.stage == "search"]
    outcomes = {canonical(t.config): (t.outcome, t.reason) for t in trials}
    assert [outcomes[canonical(point)][0] for point in clean] == ["ok"] * len(clean), outcomes
    for point in faulty:
        assert outcomes[canonical(point)][0] == FAULTS[point["defect"]], outcomes[canonical(point)]
    assert outcomes[canonical(slow)][0] == "timed_out"
    assert [entry["config"]["spin_ms"] for entry in entries] == [0, 0]


def test_cold_is_slower_than_warm() -> None:
    """16 MiB stay in the L2 between replays unless it is flushed: reading them from DRAM takes 3.7 us more."""
    from kerneltune.kernels.device import current_device
    from kerneltune.measure import timing

    class Warm(timing.Flush):
        """Evicts nothing, but keeps the GPU as busy as a flush, so that it never waits for the host."""

        def __call__(self) -> None:
            torch.cuda._sleep(300_000)  # cycles

    source = torch.randn(8 << 20, device="cuda", dtype=torch.bfloat16)
    result = torch.empty_like(source)
    l2_bytes = current_device(0).l2_bytes
    cold, warm = (
        timing.time_launch(lambda: torch.mul(source, 2, out=result), flush=flush, samples=40).time_us
        for flush in (timing.Flush(l2_bytes), Warm(l2_bytes))
    )
    assert cold > warm + 1.0
