"""Our MLA decode beside FlashMLA and FlashAttention-3 on one Hopper GPU, in one protocol.

The peers are no part of this repository. Their libraries come out of public wheels, into a folder that git ignores
(`--peers-dir`, default .peers-mla); a peer that is not there is left out, and its published figure below stands for it:

    flashmla_sgl.so        flash_mla/_C_legacy.abi3.so of sgl-flash-mla 1.0.0
    fa3.so or fa3.so.xz    vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so of vllm 0.20.2

Every call is captured in a CUDA graph. Its time is the median of single replays, each after a read of 512 MiB that
evicts the L2 (a read, so that no dirty lines are written back meanwhile). The candidates of a case are timed in turn,
in two rounds of opposite order, each after a pause, since a card that has just run a matrix-bound kernel clocks lower.
Ratios are of times net of an empty graph. Lengths of "var" are FlashMLA's: Normal(s, s / 2), seed 0, at least s_q.

    python benchmarks/mla_peers.py --csv results/nvidia-h200/peers/mla_decode.csv
"""

from __future__ import annotations

import argparse
import csv
import lzma
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kerneltune.kernels.mla_decode import mla_decode

LATENT, ROPE, PAGE = 512, 64, 64
WIDTH = LATENT + ROPE
SCALE = WIDTH**-0.5
READ_GBPS, MATRIX_TFLOPS = 4548, 778  # ceilings of the card that the published figures are of
FLUSH_BYTES = 512 << 20
PAUSE_S = 0.25
REPLAYS = 15
Run = Callable[[], torch.Tensor]

# Published figures of the peers on an H200, microseconds: FlashMLA, FA3, FlashInfer fa3, TileLang paged, vLLM's Triton,
# SGLang's Triton (2026-11-30, driver 580.159.04, torch 2.11.0, the same protocol; nan: not measured).
PEERS = ("flashmla", "fa3", "flashinfer", "tilelang", "triton_vllm", "triton_sglang")
NAN = math.nan
PUBLISHED = {
    "b128 s4096 h128 q1": (237.3, 267.4, 262.5, 328.1, 2497.6, 2147.9),
    "b128 s4096 h128 q2": (437.6, 509.3, 490.7, NAN, 5029.4, 4229.9),
    "b128 s8192 h128 q1": (456.4, 494.5, 504.1, 626.7, 4876.4, 4241.4),
    "b64 s16384 h128 q1": (449.6, 471.6, 553.1, 620.0, 4727.8, 4123.1),
    "b16 s8192 h128 q1": (76.0, 78.9, 78.4, 117.6, 606.1, 493.2),
    "b1 s8192 h128 q1": (33.5, 27.6, 27.8, 25.5, 69.5, 51.7),
    "b128 s4096 h64 q1": (158.1, 167.3, 155.8, 176.7, 1281.9, 1088.7),
    "b128 s4096 h16 q1": (155.4, 158.1, 150.1, 158.4, 351.8, 303.1),
    "b128 s8192 h16 q1": (293.1, 294.6, 287.6, 301.0, 688.2, 581.2),
    "b8 s4096 h16 q1": (31.3, 28.1, 25.8, 23.6, 67.9, 38.5),
    "b1 s32768 h16 q1": (54.0, 33.1, 51.1, 34.2, 80.9, 69.3),
    "b1 s131072 h16 q1": (81.0, 61.1, 76.1, 62.0, 157.2, 150.9),
    "b128 s4096 h128 q1 var": (251.4, 357.5, 386.1, NAN, 2919.4, 2748.4),
    "b128 s4096 h16 q1 var": (163.1, 223.8, 213.9, NAN, 428.4, 442.1),
    "b128 s8192 h128 q1 var": (448.5, 659.1, 717.9, NAN, NAN, NAN),
    "b128 s16384 h128 q1 var": (856.8, 1282.5, 1391.6, NAN, NAN, NAN),
    "b128 s32768 h128 q1 var": (1679.8, 2536.7, 2763.0, NAN, NAN, NAN),
    "b128 s4096 h128 q2 var": (434.2, 584.2, 574.5, NAN, NAN, NAN),
    "b128 s8192 h128 q2 var": (821.0, 1102.6, 1124.7, NAN, NAN, NAN),
    "b128 s16384 h128 q2 var": (1607.6, 2157.4, 2226.5, NAN, NAN, NAN),
    "b128 s32768 h128 q2 var": (3437.0, 4374.6, 4441.8, NAN, NAN, NAN),
    "b128 s4096 h16 q2": (153.6, 158.8, 148.1, NAN, 665.9, NAN),
    "b32 s4096 h128 q1": (75.8, 82.6, 79.0, NAN, 601.5, NAN),
    "b4 s8192 h128 q1": (46.8, 39.0, 33.2, NAN, 166.2, NAN),
}


class MissingPeer(Exception):
    """A peer's library is not in the folder."""


@dataclass(frozen=True)
class Data:
    """One case with a random page permutation; q and KV ~ N(0, 1), bf16."""

    name: str
    lengths: list[int]
    s_q: int
    heads: int
    q: torch.Tensor  # [batch, s_q, heads, 576]
    kv_cache: torch.Tensor  # [num_pages, 64, 1, 576]
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor

    @property
    def causal(self) -> bool:
        return self.s_q > 1

    @property
    def floor_us(self) -> float:
        """The larger of bytes over the read rate and FLOPs over the matrix rate, as FlashMLA counts both."""
        tokens, rows = sum(self.lengths), len(self.lengths) * self.s_q * self.heads
        read = 2 * (tokens * WIDTH + rows * (WIDTH + LATENT))
        flops = 2 * tokens * self.s_q * self.heads * (WIDTH + LATENT)
        return max(read / READ_GBPS * 1e-3, flops / MATRIX_TFLOPS * 1e-6)


def make_data(name: str, seed: int = 0) -> Data:
    """The case called `name`, "b128 s4096 h128 q1 var"."""
    sizes = {part[0]: int(part[1:]) for part in name.split() if part[1:].isdigit()}
    batch, s_k, heads, s_q = (sizes[key] for key in "bshq")
    draw = random.Random(seed)
    lengths = [s_k] * batch
    if name.endswith("var"):
        lengths = [int(max(draw.normalvariate(s_k, s_k / 2), s_q)) for _ in range(batch)]
    width = -(-max(lengths) // 256) * 256 // PAGE
    generator = torch.Generator("cuda").manual_seed(seed + 1)
    table = torch.randperm(batch * width, device="cuda", generator=generator).to(torch.int32).view(batch, width)
    q = torch.empty(batch, s_q, heads, WIDTH, device="cuda", dtype=torch.bfloat16).normal_(generator=generator)
    kv_cache = torch.empty(batch * width, PAGE, 1, WIDTH, device="cuda", dtype=torch.bfloat16)
    kv_cache.normal_(generator=generator)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return Data(name, lengths, s_q, heads, q, kv_cache, table, seqlens)


def worst_error(data: Data, out: torch.Tensor) -> float:
    """The largest relative Frobenius error of five requests, against float64."""
    lengths = data.lengths
    picked = {0, len(lengths) - 1, lengths.index(max(lengths)), lengths.index(min(lengths)), len(lengths) // 2}
    worst = 0.0
    for i in sorted(picked):
        length = lengths[i]
        keys = data.kv_cache[data.block_table[i, : -(-length // PAGE)].long()].double().view(-1, WIDTH)[:length]
        scores = torch.einsum("qhd,nd->qhn", data.q[i].double(), keys) * SCALE
        if data.causal:
            last = torch.arange(data.s_q, device="cuda")[:, None] + length - data.s_q
            hidden = torch.arange(length, device="cuda")[None] > last
            scores.masked_fill_(hidden[:, None], float("-inf"))
        want = scores.softmax(-1) @ keys[:, :LATENT]
        got = out.view(len(lengths), data.s_q, data.heads, LATENT)[i].double()
        worst = max(worst, float((got - want).norm() / want.norm()))
    return worst


def ours(data: Data, folder: Path) -> Run:
    """`mla_decode` as a user calls it: by the tuned table where there is one, else the default."""
    hint = "spread" if data.name.endswith("var") else "equal"

    def run() -> torch.Tensor:
        tensors = (data.q, data.kv_cache, data.block_table, data.cache_seqlens)
        longest = max(data.lengths)
        return mla_decode(*tensors, softmax_scale=SCALE, causal=data.causal, max_kv_len=longest, lengths=hint)[0]

    return run


def flashmla(data: Data, folder: Path) -> Run:
    """FlashMLA's dense decode; its schedule is made once, outside of what is timed."""
    _load(folder, "flashmla_sgl.so")
    op = torch.ops.flash_mla_legacy
    schedule: list[torch.Tensor | None] = [None, None]

    def run() -> torch.Tensor:
        out, _, schedule[0], schedule[1] = op.dense_decode_fwd(
            *(data.q, data.kv_cache, LATENT, data.cache_seqlens, data.block_table, SCALE, data.causal, *schedule)
        )
        return out

    return run


def fa3(data: Data, folder: Path) -> Run:
    """FlashAttention-3 with the latent part of q apart (vLLM's FLASH_ATTN_MLA); its schedule is made once."""
    _load(folder, "fa3.so")
    op = torch.ops._vllm_fa3_C
    batch, longest = len(data.lengths), max(data.lengths)
    flat = data.q.view(batch * data.s_q, data.heads, WIDTH)
    q_latent, q_rope = flat[..., :LATENT], flat[..., LATENT:].contiguous()
    k, v = data.kv_cache[..., LATENT:], data.kv_cache[..., :LATENT]
    starts = torch.arange(0, (batch + 1) * data.s_q, data.s_q, dtype=torch.int32, device="cuda")
    out = torch.full((batch * data.s_q, data.heads, LATENT), math.nan, device="cuda", dtype=torch.bfloat16)
    schedule = op.get_scheduler_metadata(
        *(batch, data.s_q, longest, data.heads, 1, ROPE, LATENT, torch.bfloat16, data.cache_seqlens, starts),
        *(None, None, None, None, PAGE, 0, True, -1, -1, False, 0, None, 0),
    )

    def run() -> torch.Tensor:
        op.fwd(
            *(q_rope, k, v, None, None, q_latent, out, starts, None, None, None, data.cache_seqlens, data.s_q),
            *(longest, data.block_table, None, None, None, None, None, None, None, None, SCALE, True, -1, -1, 0.0),
            *(True, schedule, 0, None, 0, None, 1, 0, None),
        )
        return out

    return run


CANDIDATES: dict[str, Callable[[Data, Path], Run]] = {"ours": ours, "flashmla": flashmla, "fa3": fa3}


def _load(folder: Path, name: str) -> None:
    path = folder / name
    packed = folder / f"{name}.xz"
    if not path.exists() and packed.exists():
        path = Path(tempfile.gettempdir()) / name
        if not path.exists():
            path.write_bytes(lzma.decompress(packed.read_bytes()))
    if not path.exists():
        raise MissingPeer(f"{folder / name} is not there")
    torch.ops.load_library(str(path))


def capture(run: Run) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """The call as a graph, and the tensor that holds its result."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


def time_us(replay: Callable[[], None], flush: torch.Tensor) -> float:
    """Median of single replays with a cold L2, after a pause."""
    scratch = torch.empty((), device="cuda")
    time.sleep(PAUSE_S)
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPLAYS)]
    for _ in range(5):
        torch.amax(flush, 0, out=scratch)
        replay()
    for start, end in pairs:
        torch.amax(flush, 0, out=scratch)
        start.record()
        replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) * 1e3 for start, end in pairs)


def measure(data: Data, folder: Path, flush: torch.Tensor) -> dict[str, float]:
    """Microseconds of each candidate that is there, itself checked."""
    graphs = {}
    runs = []  # kept: a graph reads the tensors that its call made, a peer's schedule for one
    for name, make in CANDIDATES.items():
        try:
            runs.append(make(data, folder))
        except MissingPeer as missing:
            print(f"{data.name}: {name} left out: {missing}", file=sys.stderr)
            continue
        graph, out = capture(runs[-1])
        graph.replay()
        error = worst_error(data, out)
        if not error < 5e-3:
            raise SystemExit(f"{data.name}: {name} is wrong: relative error {error:.1e}")
        graphs[name] = graph, error
    order = list(graphs)
    rounds = [{name: time_us(graphs[name][0].replay, flush) for name in each} for each in (order, order[::-1])]
    times = {name: statistics.mean(each[name] for each in rounds) for name in order}
    print(data.name, {name: (round(us, 1), f"{graphs[name][1]:.2e}") for name, us in times.items()}, flush=True)
    return times


def row(data: Data, times: dict[str, float], empty_us: float) -> dict[str, str | float]:
    """One line of the table: where a peer was not run, its published figure stands for it."""
    peers = dict(zip(PEERS, PUBLISHED[data.name], strict=True)) | {k: v for k, v in times.items() if k != "ours"}
    known = {name: us for name, us in peers.items() if not math.isnan(us)}
    best = min(known, key=lambda name: known[name])
    net = times["ours"] - empty_us
    return {
        "case": data.name,
        "ours_us": round(times["ours"], 1),
        "best_peer": best,
        "best_peer_us": round(known[best], 1),
        "floor_us": round(data.floor_us, 1),
        "empty_graph_us": round(empty_us, 1),
        "ratio_net": round((known[best] - empty_us) / net, 3),
        "floor_share_net": round(data.floor_us / net, 3),
        **{f"{name}_us": round(known[name], 1) if name in known else "" for name in PEERS},
        "measured_here": " ".join(name for name in times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-dir", type=Path, default=Path(".peers-mla"))
    parser.add_argument("--cases", help="names, comma separated; default all", default=",".join(PUBLISHED))
    parser.add_argument("--csv", type=Path, help="write the table there")
    given = parser.parse_args()
    flush = torch.zeros(FLUSH_BYTES // 4, device="cuda")
    spot = torch.empty(1, device="cuda")
    empty, _ = capture(lambda: spot.zero_())
    empty_us = time_us(empty.replay, flush)
    rows = []
    for name in given.cases.split(","):
        data = make_data(name)
        rows.append(row(data, measure(data, given.peers_dir, flush), empty_us))
        del data
        torch.cuda.empty_cache()
    ratios = [float(each["ratio_net"]) for each in rows]
    print(f"geometric mean of best peer / ours, net: {statistics.geometric_mean(ratios):.3f}, least {min(ratios):.3f}")
    if given.csv:
        given.csv.parent.mkdir(parents=True, exist_ok=True)
        with given.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
