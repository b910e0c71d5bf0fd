"""Real recordings for replay tests: the CSV of a prototype measured on an H200 (tests/data/README.md)."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from typing import Any

from kerneltune.recordings import Recording
from kerneltune.records import Trial

DATA = Path(__file__).parents[1] / "data" / "mla_proto_h200.csv"
PARAMETERS = ("BLOCK_H", "BLOCK_N", "num_warps", "STAGES", "num_splits")
DEVICE: dict[str, Any] = {"name": "NVIDIA H200", "arch": "sm_90", "sm_count": 132, "shared_memory_per_block": 232448,
          "l2_bytes": 62914560, "memory_bytes": 150754820096, "warp_size": 32}  # fmt: skip
CEILINGS: dict[str, Any] = {"device": "NVIDIA H200", "date": "2026-11-30", "dram_read_gbps": 4548.0,
            "dram_copy_gbps": 4289.0, "tflops": {"bf16": 778.0}, "launch_us": 4.2}  # fmt: skip


def proto_recordings() -> list[Recording]:
    """The four recorded workloads, smallest first."""
    groups: dict[tuple[int, int, int], list[dict[str, str]]] = defaultdict(list)
    with DATA.open() as file:
        for row in csv.DictReader(file):
            groups[int(row["b"]), int(row["s_k"]), int(row["h_q"])].append(row)
    return [_recording(*key, rows) for key, rows in sorted(groups.items())]


def _recording(batch: int, kv_len: int, heads: int, rows: list[dict[str, str]]) -> Recording:
    workload = {
        "dtype": "bf16", "kv_dtype": "bf16", "heads": heads, "h_kv": 1, "s_q": 1, "causal": False, "page_size": 64,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "batch": batch, "kv_len": kv_len, "lengths": "equal",
    }  # fmt: skip
    flops = 2 * batch * heads * kv_len * (576 + 512)
    size = 2 * batch * (kv_len * 576 + heads * (576 + 512))
    trials = []
    for index, row in enumerate(rows):
        config = {name: int(row[name]) for name in PARAMETERS}
        figures: dict[str, Any] = {"outcome": "compile_error", "reason": row["err"] or "not timed"}
        if row["us"] and not row["err"]:
            us = float(row["us"])
            figures = {"outcome": "ok", "time_us": us, "p20_us": us * 0.998, "p80_us": us * 1.002, "samples": 15,
                       "error": float(row["relerr"] or 0)}  # fmt: skip
        trials.append(
            Trial(
                session="proto",
                workload=workload,
                part="decode",
                config=config,
                stage="record",
                index=index,
                flops=flops,
                bytes=size,
                launch_us=4.2,
                compile_s=float(row["compile_s"] or 0),
                gate_s=0.01,
                timing_s=0.02,
                **figures,
            )
        )
    first_ok = next(t for t in trials if t.outcome == "ok")
    return Recording(
        kernel="mla-decode", workload=workload, parts=("decode",), shared=(), device=DEVICE, ceilings=CEILINGS,
        default_config=dict(first_ok.config), whole={"flops": flops, "bytes": size, "compute": "bf16"}, rest_us={},
        launch_us=4.2, space="", kernel_hash={"only": "0" * 12}, versions={"triton": "3.6.0"},
        date="2026-11-30T00:00:00+00:00",
        command="", trials=tuple(trials),
    )  # fmt: skip
