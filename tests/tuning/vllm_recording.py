"""vLLM's fused MoE kernel, brute-forced by others on an H200, as recordings (tests/data/README.md)."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from proto import CEILINGS, DEVICE

from kerneltune.kernels.device import Device
from kerneltune.kernels.moe.estimate import grouped_gemm_us
from kerneltune.recordings import Recording, point_key
from kerneltune.records import Trial

DATA = Path(__file__).parents[1] / "data" / "vllm_moe_h200.csv"
PARAMETERS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
EXPERTS, N, K, TOP_K = 256, 256, 7168, 8
FP8_TFLOPS = 1513.0
LAUNCH_US = 3.0
DEFAULTS = {64: (16, 128, 128, 32, 4, 3), 1024: (64, 128, 128, 32, 4, 3)}  # vLLM's own, without a tuned file


def vllm_recording(tokens: int) -> Recording:
    """Both GEMMs at 64 or 1024 tokens; a config of each, sharing BLOCK_SIZE_M, makes a whole."""
    workload = {"dtype": "fp8_e4m3", "E": EXPERTS, "N": N, "K": K, "top_k": TOP_K, "tokens": tokens}
    trials: list[Trial] = []
    estimates = {}
    with DATA.open() as file:
        rows = list(csv.DictReader(file))
    for part, columns, depth in (("gemm1", 2 * N, K), ("gemm2", K, N)):
        for row in rows:
            config = {name: int(row[name]) for name in PARAMETERS}
            us = row[f"m{tokens}_{part}_us"]
            figures: dict[str, Any] = {"outcome": "compile_error", "reason": "it did not compile"}
            if us:
                figures = {"outcome": "ok", "time_us": float(us), "samples": 9, "gate_s": 0.0, "timing_s": 0.017}
            trials.append(
                Trial(
                    session="vllm",
                    workload=workload,
                    part=part,
                    config=config,
                    stage="record",
                    index=len(trials),
                    launch_us=LAUNCH_US,
                    flops=2 * tokens * TOP_K * columns * depth,
                    bytes=EXPERTS * columns * depth,
                    **figures,
                )
            )
            estimates[point_key(part, config)] = grouped_gemm_us(
                {name.replace("_SIZE", ""): value for name, value in config.items()},
                tile_columns=config["BLOCK_SIZE_N"],
                columns=columns,
                depth=depth,
                rows=tokens * TOP_K,
                experts=EXPERTS,
                weight_bytes=1,
                device=Device(**DEVICE),
                read_gbps=CEILINGS["dram_read_gbps"],
                tflops=FP8_TFLOPS,
            )
    default = dict(zip(PARAMETERS, DEFAULTS[tokens], strict=True))
    return Recording(
        kernel="vllm-fused-moe",
        workload=workload,
        parts=("gemm1", "gemm2"),
        shared=("BLOCK_SIZE_M",),
        device=dict(DEVICE),
        ceilings={**CEILINGS, "tflops": {"fp8_e4m3": FP8_TFLOPS}},
        default_config={"gemm1": default, "gemm2": default},
        whole={"flops": 6 * tokens * TOP_K * N * K, "bytes": 3 * EXPERTS * N * K, "compute": "fp8_e4m3"},
        rest_us={},
        launch_us=LAUNCH_US,
        space="",
        kernel_hash={"vllm": "vllm"},
        versions={"triton": "3.6.0"},
        date="2026-11-30",
        command="vLLM's kernel, by a script of its own",
        trials=tuple(trials),
        estimates_us=estimates,
    )
