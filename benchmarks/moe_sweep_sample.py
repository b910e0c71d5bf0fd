"""What an exhaustive tuning script needs for one token count of a fused MoE, by a sample of its grid.

The way of vLLM's `benchmark_moe.py --tune`, on kerneltune's own kernel: configs one after the other in one process, new
random inputs and weights for each, the compile at its first call, a CUDA graph of ten calls, five warm-up replays, the
mean of twenty. One config serves both GEMMs. The grid: BLOCK_M 16 to 256, BLOCK_N 32 to 256, BLOCK_K 64 to 256, GROUP_M
1, 16, 32, 64, 4 and 8 warps, 2 to 5 stages: 1,920 configs.

    python benchmarks/moe_sweep_sample.py --tokens 64 --sample 24
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import tempfile
import time
from datetime import UTC, datetime
from typing import Any

GRID = {
    "BLOCK_M": (16, 32, 64, 128, 256),
    "BLOCK_N": (32, 64, 128, 256),
    "BLOCK_K": (64, 128, 256),
    "GROUP_M": (1, 16, 32, 64),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5),
}
CALLS, WARM_UP, REPLAYS = 10, 5, 20


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--sample", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()  # nothing is compiled already
    import torch
    import triton

    grid = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]
    chosen = random.Random(given.seed).sample(grid, given.sample)
    rows = [time_one(config, given.tokens) for config in chosen]
    mean_s = sum(row["seconds"] for row in rows) / len(rows)
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name(),
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "torch": torch.__version__,
                "triton": triton.__version__,
                "model": "deepseek-v3 --tp 8, bf16",
                "tokens": given.tokens,
                "grid": len(grid),
                "sample": len(rows),
                "ran": sum(row["outcome"] == "ok" for row in rows),
                "mean_s": round(mean_s, 3),
                "sweep_s": round(mean_s * len(grid), 1),
                "rows": rows,
            }
        )
    )


def time_one(config: dict[str, int], tokens: int) -> dict[str, Any]:
    """Seconds that one config takes of a sweep, and its time or why there is none."""
    begin = time.perf_counter()
    try:
        outcome, mean_us = "ok", measure(config, tokens)
    except Exception as error:  # too much shared memory, say
        outcome, mean_us = str(error).splitlines()[0][:120], None
    return {"config": config, "outcome": outcome, "mean_us": mean_us, "seconds": time.perf_counter() - begin}


def measure(config: dict[str, int], tokens: int) -> float:
    """Mean microseconds of one call."""
    import torch

    from kerneltune.kernels.moe import fused_moe

    experts, n, k, top_k = 256, 256, 7168, 8
    hidden = torch.randn(tokens, k, dtype=torch.bfloat16, device="cuda")
    w1 = torch.randn(experts, 2 * n, k, dtype=torch.bfloat16, device="cuda")
    w2 = torch.randn(experts, k, n, dtype=torch.bfloat16, device="cuda")
    gating = torch.randn(REPLAYS, tokens, experts, device="cuda")
    logits = torch.empty(tokens, experts, device="cuda")
    out = torch.empty_like(hidden)
    # Ours counts BLOCK_N of gemm1 in columns of the result, half as many as the rows of its weight tile.
    both = {"gemm1": {**config, "BLOCK_N": config["BLOCK_N"] // 2}, "gemm2": config}

    def run() -> None:
        weights, ids = torch.softmax(logits, dim=-1).topk(top_k)
        fused_moe(hidden, w1, w2, weights, ids, config=both, out=out)

    logits.copy_(gating[0])
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()
    for _ in range(WARM_UP):
        graph.replay()
    torch.cuda.synchronize()
    total = 0.0
    for number in range(REPLAYS):
        logits.copy_(gating[number])
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        total += start.elapsed_time(end)
    return total / (REPLAYS * CALLS) * 1000


if __name__ == "__main__":
    main()
