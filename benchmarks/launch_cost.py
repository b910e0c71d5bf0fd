"""Host time of a call, against bare Triton launches of the same kernels; needs a GPU.

    python benchmarks/launch_cost.py

`bare` is what a hand-written caller does who keeps every argument as a constant: `kernel[grid](*args, **constants)` for
each kernel of the operation, into outputs and scratch that are already there. `op` is the public call, which allocates
its outputs and scratch, looks up the config and launches. Both are enqueued CALLS times between two synchronisations
(the GPU is never waited for inside); medians of ROUNDS turns, alternating. The problems are small, so that the GPU
keeps up. `lookup`: finding the plan of a shape, with the config that was chosen for it, by its key.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch

from kerneltune.device import versions
from kerneltune.kernels import launch_plan
from kerneltune.kernels.mla_decode import op as mla_op
from kerneltune.kernels.moe import op as moe_op
from kerneltune.kernels.tunable import KernelCall
from kerneltune.registry import load_tunable

CALLS = 50
ROUNDS = 200
CASES = {
    "mla_decode, 2 kernels": ("mla-decode", {"batch": 1, "kv_len": 512}),
    "mla_decode, 1 kernel": ("mla-decode", {"batch": 16, "kv_len": 64}),
    "fused_moe, 3 kernels": ("moe", {"tokens": 1, "E": 8, "global_E": 8, "N": 256, "K": 512, "top_k": 2}),
    "fused_moe, 4 kernels": ("moe", {"tokens": 64, "E": 8, "global_E": 8, "N": 256, "K": 512, "top_k": 2}),
}


def public_call(kernel: str, inputs: dict[str, Any]) -> Callable[[], Any]:
    """The op on these inputs."""
    if kernel == "moe":
        names = ("hidden", "w1", "w2", "topk_weights", "topk_ids")
        tensors = [inputs[name] for name in names]
        return lambda: moe_op.fused_moe(*tensors)
    tensors = [inputs[name] for name in ("q", "kv_cache", "block_table", "cache_seqlens")]
    return lambda: mla_op.mla_decode(*tensors, softmax_scale=0.1)


def observed(call: Callable[[], Any], owner: Any, name: str) -> tuple[Any, ...]:
    """The arguments of the first call of `owner.name` that `call` makes."""
    original, seen = getattr(owner, name), []

    def spy(*args: Any, **options: Any) -> Any:
        seen.append(args)
        return original(*args, **options)

    setattr(owner, name, spy)
    try:
        call()
    finally:
        setattr(owner, name, original)
    return tuple(seen[0])


def host_us(call: Callable[[], Any], calls: int = CALLS) -> float:
    """Microseconds of the host for each call."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    took = time.perf_counter() - begin
    torch.cuda.synchronize()
    return 1e6 * took / calls


def measure(kernel: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Medians of one case."""
    tunable = load_tunable(kernel)
    problem = tunable.make_problem(tunable.complete_workload(sizes), "cuda")
    op = mla_op if kernel == "mla-decode" else moe_op
    call = public_call(kernel, problem.inputs)
    op._plans.clear()
    calls: tuple[KernelCall, ...] = tuple(observed(call, launch_plan, "launch_first")[0])
    ((key, _),) = op._plans.items()

    def bare() -> None:
        for each in calls:
            each.fn[each.grid](*each.args, **each.options)

    for each in (call, bare):
        host_us(each, 500)
    turns: dict[str, list[float]] = {"bare": [], "op": []}
    for _ in range(ROUNDS):
        turns["bare"].append(host_us(bare))
        turns["op"].append(host_us(call))
    lookup = statistics.median(host_us(lambda: op._plans.get(key), 1000) for _ in range(20))
    nothing = statistics.median(host_us(lambda: None, 1000) for _ in range(20))
    figures = {name: round(statistics.median(values), 2) for name, values in turns.items()}
    return figures | {
        "kernels": len(calls),
        "ratio": round(figures["op"] / figures["bare"], 3),
        "lookup": round(lookup - nothing, 3),
    }


def main() -> None:
    """Print one JSON object: microseconds by case."""
    rows = {}
    for name, (kernel, sizes) in CASES.items():
        rows[name] = measure(kernel, sizes)
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name(),
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "versions": versions(0),
                "command": "python " + " ".join(sys.argv),
                "cases": rows,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
