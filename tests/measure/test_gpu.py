"""On a GPU: times that make sense, and a process that survives what kernels can do. Run: pytest -m gpu tests/measure"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from toy import TOY

from kerneltune.measure.worker import GpuWorker

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


def test_cold_is_slower_than_warm() -> None:
    """16 MiB stay in the L2 between replays unless it is flushed: reading them from DRAM takes 3.7 us more."""
    from kerneltune.kernels.device import current_device
    from kerneltune.measure import timing

    class Warm(timing.Flush):
        """Evicts nothing."""

        def __call__(self) -> None:
            torch.mul(source, 2, out=result)

    source = torch.randn(8 << 20, device="cuda", dtype=torch.bfloat16)
    result = torch.empty_like(source)
    l2_bytes = current_device(0).l2_bytes
    cold, warm = (
        timing.time_launch(lambda: torch.mul(source, 2, out=result), flush=flush, samples=40).time_us
        for flush in (timing.Flush(l2_bytes), Warm(l2_bytes))
    )
    assert cold > warm + 1.0
