"""Searches as `kerneltune search` leaves them, with made-up times of the right size: what the report's tests read."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

from kerneltune.kernels.tunable import Cost
from kerneltune.records import OUTCOMES, Line, Note, RecordWriter, Session, Trial
from kerneltune.roofline.model import Ceilings, place

H200 = {
    "name": "NVIDIA H200",
    "arch": "sm_90",
    "sm_count": 132,
    "shared_memory_per_block": 232448,
    "l2_bytes": 62914560,
    "memory_bytes": 150754820096,
    "warp_size": 32,
}
CEILINGS = Ceilings(
    device="NVIDIA H200",
    date="2026-01-02T03:04:05Z",
    dram_read_gbps=4412.7,
    dram_copy_gbps=3987.1,
    tflops={"bf16": 741.3, "fp16": 739.8},
    launch_us=4.2,
    versions={"triton": "3.9.0"},
)
VERSIONS = {"triton": "3.9.0", "torch": "2.13.0", "driver": "570.1", "python": "3.11.7", "kerneltune": "0.1.0"}
REASONS = {
    "infeasible": "shared memory: needs 294912 B, device has 232448 B",
    "compile_error": "CompilationError: num_warps 32 is too many",
    "wrong": "request 3: relative error 0.41 above 0.01",
    "nondeterministic": "output differs between two runs in 12 of 65536 elements",
    "crashed": "an illegal memory access was encountered",
    "timed_out": "no answer in 30 s",
    "suspect": "1.31 of the read ceiling: faster than this GPU can read",
}
PARTS = {"mla-decode": ("decode",), "moe": ("gemm1", "gemm2")}


def session(kernel: str, source: str = "live", **fields: Any) -> Session:
    """Who measured the sample."""
    given: dict[str, Any] = {
        "id": f"s-{kernel}",
        "kernel": kernel,
        "device": H200,
        "source": source,
        "kernel_hash": {"split_kv": "0123abcd"},
        "versions": VERSIONS,
        "ceilings": CEILINGS.to_dict(),
        "seed": 7,
        "sampler": "default",
        "command": f"kerneltune search {kernel} --seed 7",
        "date": "2026-01-02T03:14:15Z",
    }
    return Session(**(given | fields))


def mla_workload(batch: int, kv_len: int, heads: int) -> dict[str, Any]:
    """A workload of DeepSeek-V3's attention."""
    sizes = {"heads": heads, "h_kv": 1, "s_q": 1, "causal": False, "page_size": 64}
    widths = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    return {
        "dtype": "bf16",
        "kv_dtype": "bf16",
        **sizes,
        **widths,
        "batch": batch,
        "kv_len": kv_len,
        "lengths": "equal",
    }


def moe_workload(tokens: int, experts: int, width: int, hidden: int, top_k: int) -> dict[str, Any]:
    """A workload of one fused MoE layer."""
    sizes = {"E": experts, "global_E": experts, "N": width, "K": hidden, "top_k": top_k}
    kind = {"dtype": "bf16", "w_dtype": "bf16", "group": "none"}
    return {**kind, **sizes, "activation": "silu", "bias": False, "tokens": tokens, "routing": "uniform"}


def workloads(kernel: str) -> list[dict[str, Any]]:
    """Ten workloads of two models."""
    if kernel == "mla-decode":
        sizes = [(1, 2048), (1, 32768), (8, 8192), (32, 8192), (128, 4096)]
        return [mla_workload(batch, kv_len, heads) for heads in (16, 128) for batch, kv_len in sizes]
    models = [(256, 256, 7168, 8), (8, 7168, 4096, 2)]
    return [moe_workload(tokens, *model) for model in models for tokens in (1, 8, 64, 1024, 4096)]


def cost(kernel: str, workload: dict[str, Any]) -> Cost:
    """Compulsory work of a sample workload."""
    if kernel == "mla-decode":
        keys, heads = workload["batch"] * workload["kv_len"], workload["heads"]
        return Cost(2 * keys * heads * (576 + 512), keys * 576 * 2, workload["batch"] * heads * 512 * 2, "bf16")
    tokens, experts = workload["tokens"], workload["E"]
    active = experts * (1 - (1 - workload["top_k"] / experts) ** tokens)
    weights = workload["N"] * workload["K"] * 3
    flops = 2 * weights * tokens * workload["top_k"]
    return Cost(flops, int(2 * active * weights + 2 * tokens * workload["K"]), 2 * tokens * workload["K"], "bf16")


def write_search(
    folder: Path,
    kernel: str,
    *,
    trials: int = 60,
    seed: int = 1,
    table: bool = True,
    finals: bool = True,
    source: str = "live",
) -> list[dict[str, Any]]:
    """Write one search of `workloads(kernel)`, `trials` configs a part; the third workload gains nothing.

    Returns the entries of its table.
    """
    rng = random.Random(seed)
    entries = []
    with _writer(folder / "records" / f"{kernel}.jsonl") as writer:
        writer.append(session(kernel, source))
        for position, workload in enumerate(workloads(kernel)):
            work = cost(kernel, workload)
            floor_us = max(work.bytes / CEILINGS.dram_read_gbps / 1e3, work.flops / CEILINGS.tflops["bf16"] / 1e6)
            best_us = CEILINGS.launch_us + 2.5 + floor_us * rng.uniform(1.05, 1.6)
            for part in PARTS[kernel]:
                for index in range(trials):
                    writer.append(_tried(kernel, workload, part, index, best_us / len(PARTS[kernel]), rng))
            if finals:
                gain = 1.0 if position == 2 else rng.uniform(1.02, 1.5)
                entries.append(_finals(writer, kernel, workload, work, best_us, gain, source != "live"))
    if table and entries:
        write_table(folder / "tables" / f"{kernel}.json", kernel, entries)
    return entries


def write_table(path: Path, kernel: str, entries: list[dict[str, Any]], **fields: Any) -> None:
    """A table in the outline that the lookup reads."""
    provenance: dict[str, Any] = {"triton": "3.9.0", "torch": "2.13.0", "driver": "570.1"}
    provenance |= {"kernel_hash": {"split_kv": "0123abcd"}}
    provenance |= {"ceilings": CEILINGS.to_dict(), "date": "2026-01-02", "command": f"kerneltune search {kernel}"}
    table = {"schema": 1, "kernel": kernel, "device": H200, "provenance": provenance, "entries": entries} | fields
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table))


def final(workload: dict[str, Any], config: dict[str, Any], reason: str, time_us: float, spread_us: float) -> Trial:
    """One re-timed config of mla-decode."""
    return Trial(
        session="s-mla-decode",
        workload=workload,
        part="",
        config=config,
        stage="final",
        index=0,
        outcome="ok",
        reason=reason,
        time_us=time_us,
        p20_us=time_us - spread_us,
        p80_us=time_us + spread_us,
        samples=200,
    )


def searched(workload: dict[str, Any], number: int, time_us: float) -> Trial:
    """One trial of mla-decode that passed, with config `number`."""
    return Trial(
        session="s-mla-decode",
        workload=workload,
        part="decode",
        config={"num_splits": number},
        stage="search",
        index=number,
        outcome="ok",
        time_us=time_us,
        samples=20,
    )


def failed(workload: dict[str, Any], number: int, outcome: str) -> Trial:
    """One trial of mla-decode that failed, with config `number`."""
    return Trial(
        session="s-mla-decode",
        workload=workload,
        part="decode",
        config={"num_splits": number},
        stage="search",
        index=number,
        outcome=outcome,
        reason=REASONS[outcome],
    )


def _tried(kernel: str, workload: dict[str, Any], part: str, index: int, best_us: float, rng: random.Random) -> Trial:
    outcome = (
        OUTCOMES[index % len(OUTCOMES)] if index < len(OUTCOMES) else rng.choices(("ok", "compile_error"), (9, 1))[0]
    )
    time_us = best_us * (1 + rng.expovariate(1.5)) if outcome == "ok" else None
    return Trial(
        session=f"s-{kernel}",
        workload=workload,
        part=part,
        config={"BLOCK_N": 16 << index % 4, "num_warps": 1 << index % 3, "num_splits": index},
        stage="search",
        index=index,
        outcome=outcome,
        reason=REASONS.get(outcome, ""),
        time_us=time_us,
        samples=20 if time_us else 0,
    )


def _finals(
    writer: RecordWriter, kernel: str, workload: dict[str, Any], work: Cost, best_us: float, gain: float, replay: bool
) -> dict[str, Any]:
    default, tuned = {"BLOCK_N": 32, "num_warps": 4}, {"BLOCK_N": 64, "num_warps": 8}
    for index, (config, time_us) in enumerate(
        ((default, best_us * gain), (tuned, best_us * (1.0 if gain > 1.0 else 1.04)))
    ):
        placed = dataclasses.asdict(place(work, time_us, CEILINGS))
        del placed["floor_us"]
        trial = Trial(
            session=f"s-{kernel}",
            workload=workload,
            part="",
            config=config,
            stage="final",
            index=index,
            outcome="ok",
            reason="default" if config is default else "",
            time_us=time_us,
            p20_us=None if replay else time_us * 0.997,
            p80_us=None if replay else time_us * 1.004,
            samples=200,
            launch_us=CEILINGS.launch_us,
            composed=replay and kernel == "moe",
            **placed,
        )
        writer.append(trial)
    placed = dataclasses.asdict(place(work, best_us, CEILINGS))
    measured = {"time_us": best_us, "p20_us": best_us * 0.997, "p80_us": best_us * 1.004, "default_us": best_us * gain}
    measured["launch_us"] = CEILINGS.launch_us
    if replay:
        del measured["p20_us"], measured["p80_us"]
    measured |= {key: placed[key] for key in ("gbps", "tflops", "roofline", "bound")} | {"inputs": "uniform"}
    config = tuned if gain > 1.0 else default
    return {"workload": workload, "config": config, "measured": measured, "loss": {}}


class _FastWriter(RecordWriter):
    """A RecordWriter without the sync to disk of each line: thousands of lines a test."""

    def append(self, line: Line | Note) -> None:
        """Write one line; the file is flushed when closed."""
        from kerneltune.records import _encoder

        self._file.write(_encoder.encode(line) + b"\n")


_writer = _FastWriter
