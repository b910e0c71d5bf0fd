"""MLA decode as the tuner sees it: workloads, problems with known answers, how to judge a result, what it costs.

Problems have q and KV ~ N(0, 1) and softmax_scale = 1 / sqrt(d_qk), so that scores ~ N(0, 1). Every key then carries a
weight of about 1 / length: the log-sum-exp, which float32 gives to some 1e-6, shows a single missing key. (With a
larger scale a few keys take all the weight, and most could be left out unseen.) The output alone would not do: the
mean of V, tilted towards q, is what a wrong kernel approaches too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from kerneltune.kernels import inputs as recordings
from kerneltune.kernels.device import Device
from kerneltune.kernels.launch_plan import allocate
from kerneltune.kernels.mla_decode import config as configs
from kerneltune.kernels.mla_decode.estimate import estimate_us
from kerneltune.kernels.mla_decode.op import MAX_HEADS, MAX_PAGE_SIZE, MAX_S_Q, decode_calls, scratch_layout
from kerneltune.kernels.mla_decode.reference import mla_decode_reference
from kerneltune.kernels.source_hash import VARIANTS
from kerneltune.kernels.tunable import Config, Cost, Launch, Params, Problem, Scalar, Verdict, Workload

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LATER_KV_DTYPES = ("fp8_e4m3", "fp8_ds656", "mxfp4", "nvfp4")
DEFAULTS: dict[str, Scalar] = {  # DeepSeek-V3 on one of 8 GPUs
    "dtype": "bf16",
    "kv_dtype": "",  # as dtype
    "heads": 16,
    "h_kv": 1,
    "s_q": 1,
    "causal": False,
    "page_size": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "batch": 128,
    "kv_len": 4096,
    "lengths": "equal",
}
LENGTHS = ("equal", "spread")
LIMITS = {  # largest value of each size
    "heads": MAX_HEADS,
    "h_kv": MAX_HEADS,
    "s_q": MAX_S_Q,
    "page_size": MAX_PAGE_SIZE,
    "kv_lora_rank": 1024,
    "qk_rope_head_dim": 128,
    "batch": 1 << 16,
    "kv_len": 1 << 24,
}
UNUSED_PAGE = 2147480000  # in table entries that must not be read: any address made of it faults

# Relative Frobenius error of a request's output. The rounding of P and of the result to bf16 (2^-9 each at most) gives
# 1.8e-3 to 1.9e-3, by FlashMLA as well as by ours; fp16 rounds 8 times finer.
OUT_TOLERANCE = {"bf16": 5e-3, "fp16": 8e-4}
# Largest error of one element, in units of the request's root mean square: an element of 5 rms is off by 1e-2 rms just
# by rounding to bf16, so ten times the tolerance above leaves room for that and none for a wrong column.
WORST_ELEMENT = 10.0
# Absolute error of one lse. float32 sums of 576 products and of the weights give 1e-6 to 3e-6 at an lse of 5 to 12; one
# key of 4096 missing changes it by about 2.4e-4.
LSE_TOLERANCE = 1e-5
# Absolute value of the mean error over the lse of a request, where rounding cancels and a missing key does not.
LSE_MEAN_TOLERANCE = 3e-6


class MlaDecode:
    """Implements `kernels.tunable.Tunable`."""

    name = "mla-decode"
    parts = ("decode",)
    shared: tuple[str, ...] = ()
    optional: Mapping[str, Scalar] = configs.OPTIONAL
    exact_keys = tuple(DEFAULTS)[:9]
    scaled_keys = ("batch", "kv_len")
    input_keys = ("lengths",)
    variants = VARIANTS["mla-decode"]
    deterministic = True  # splits are merged in their order, nothing is atomic

    def complete_workload(self, given: Workload) -> dict[str, Scalar]:
        """All keys in canonical order; ValueError naming the key and what was expected."""
        unknown = sorted(set(given) - set(DEFAULTS))
        if unknown:
            raise ValueError(f"mla-decode has no workload key {unknown[0]!r}: expected one of {', '.join(DEFAULTS)}")
        workload = {**DEFAULTS, **given}
        workload["kv_dtype"] = workload["kv_dtype"] or workload["dtype"]
        if workload["dtype"] not in DTYPES:
            raise ValueError(f"dtype={workload['dtype']}: expected one of {', '.join(DTYPES)}")
        if workload["kv_dtype"] in LATER_KV_DTYPES:
            raise ValueError(f"kv_dtype={workload['kv_dtype']}: not supported yet, only the same as dtype")
        if workload["kv_dtype"] != workload["dtype"]:
            raise ValueError(f"kv_dtype={workload['kv_dtype']}: must be the same as dtype ({workload['dtype']})")
        for key, most in LIMITS.items():
            size = workload[key]
            if type(size) is not int or not 1 <= size <= most:
                raise ValueError(f"{key}={size}: expected a whole number from 1 to {most}")
        if workload["heads"] % workload["h_kv"]:  # type: ignore[operator]
            raise ValueError(f"heads={workload['heads']}: must be a multiple of h_kv ({workload['h_kv']})")
        if workload["causal"] not in (False, True):
            raise ValueError(f"causal={workload['causal']}: expected true or false")
        workload["causal"] = bool(workload["causal"])
        workload["lengths"] = recordings.complete("lengths", workload["lengths"], LENGTHS, "lengths", _check_lengths)
        return workload

    def default_config(self, workload: Workload, device: Device) -> Config:
        """A decent config for any GPU, always valid there."""
        return configs.default_config(workload, device).to_dict()

    def is_valid(self, part: str, params: Params, workload: Workload, device: Device) -> str | None:
        """None, or the reason why these parameters cannot run."""
        try:
            config = configs.Config.from_dict(params)
        except ValueError as error:
            return str(error)
        return configs.is_valid(config, workload, device)

    def refuses(self, config: Config, workload: Workload, device: Device) -> str | None:
        """None, or why a launch with this config raises."""
        return self.is_valid("decode", config, workload, device)

    def estimate(
        self, part: str, params: Params, workload: Workload, device: Device, ceilings: Mapping[str, Any]
    ) -> float:
        """Microseconds that these parameters should take."""
        config = configs.Config.from_dict(params)
        tflops = ceilings["tflops"][workload["dtype"]]
        return estimate_us(config, workload, device, ceilings["dram_read_gbps"], tflops)

    def make_problem(self, workload: Workload, device: torch.device | str, seed: int = 0) -> Problem:
        """q and KV ~ N(0, 1) in randomly permuted pages; all that must not be read is NaN or a huge page index."""
        return _problem(workload, draw_lengths(workload, seed), device, seed)

    def edge_problems(
        self, workload: Workload, device: torch.device | str, seed: int = 0
    ) -> Iterator[tuple[str, Problem]]:
        """Other lengths with the same exact keys, so the same compile."""
        s_q, page = int(workload["s_q"]), int(workload["page_size"])
        around = [n + d for n in (16, 32, 64, 128, page) for d in (-1, 0, 1)]
        cases = {
            "all empty": [0, 0],
            "lengths around tiles and pages": [0, 1, s_q - 1, s_q, *around],
            "one long among short": [1, 2, 4321, 0, 3],
        }
        for label, lengths in cases.items():
            yield label, _problem(workload, lengths, device, seed)

    def edge_workloads(self, workload: Workload) -> Iterator[tuple[str, dict[str, Scalar]]]:
        """One head; a number of rows that no tile divides, with a causal window and pages that no tile divides."""
        small = {**self.complete_workload(workload), "batch": 3, "kv_len": 300, "lengths": "spread"}
        groups = int(small["h_kv"])
        yield "1 head", {**small, "heads": groups, "s_q": 1, "causal": False}
        odd = {"heads": 7 * groups, "s_q": 2, "causal": True, "page_size": 17}
        if odd["heads"] <= MAX_HEADS:
            yield "7 heads, s_q=2 causal, page_size=17", {**small, **odd}

    def call_variants(self, problem: Problem) -> Iterator[Problem]:
        """Only the problem itself."""
        yield problem

    def launch(self, problem: Problem, config: Config, part: str | None = None) -> Launch:
        """Bind the decode to new outputs and scratch."""
        inputs, rank = problem.inputs, int(problem.workload["kv_lora_rank"])
        q = inputs["q"]
        params = configs.Config.from_dict(config)
        out = torch.empty(*q.shape[:3], rank, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
        batch, s_q, heads = q.shape[:3]
        scratch = allocate(scratch_layout(params, batch, s_q, heads, rank, q.device), q.device)
        calls = decode_calls(
            *(q, inputs["kv_cache"], inputs["block_table"], inputs["cache_seqlens"], out, lse, scratch, params),
            softmax_scale=problem.extra["softmax_scale"],
            causal=bool(problem.workload["causal"]),
        )
        return Launch(calls, {"out": out, "lse": lse}, scratch)

    def reference(self, problem: Problem) -> dict[str, torch.Tensor]:
        """out and lse in float64."""
        inputs = problem.inputs
        out, lse = mla_decode_reference(
            *(inputs["q"], inputs["kv_cache"], inputs["block_table"], problem.extra["lengths"]),
            softmax_scale=problem.extra["softmax_scale"],
            causal=bool(problem.workload["causal"]),
            kv_lora_rank=int(problem.workload["kv_lora_rank"]),
        )
        return {"out": out, "lse": lse}

    def compare(
        self, outputs: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], problem: Problem
    ) -> Verdict:
        """Judge each request on its own: one short request must not hide behind long ones, nor the other way round."""
        out, lse = outputs["out"].double().flatten(1), outputs["lse"].double().flatten(1)  # [batch, ...]
        want, want_lse = reference["out"].double().flatten(1), reference["lse"].double().flatten(1)
        tolerance = OUT_TOLERANCE[str(problem.workload["dtype"])]
        finite = want_lse.isfinite()
        same_kind = (torch.where(finite, 0.0, lse) == torch.where(finite, 0.0, want_lse)) & (lse.isfinite() == finite)
        lse_off = torch.where(finite, lse - want_lse, 0.0)
        # A request that sees nothing has norm 0 and must be 0 to the last bit, hence 0 / tiny.
        norm = want.norm(dim=1).clamp(min=1e-300)
        error = (out - want).norm(dim=1) / norm
        worst = (out - want).abs().amax(1) / (norm / want.shape[1] ** 0.5)
        checks = (
            ("infinite lse in other places: relative", (~same_kind).any(1).double(), 0.0),
            ("out: relative", error, tolerance),
            ("out: worst element, in units of the rms, has", worst, WORST_ELEMENT * tolerance),
            ("lse: absolute", lse_off.abs().amax(1), LSE_TOLERANCE),
            ("lse: mean", lse_off.sum(1).abs() / finite.sum(1).clamp(min=1), LSE_MEAN_TOLERANCE),
        )
        largest = float(error.nan_to_num(nan=float("inf")).max())
        for what, values, bound in checks:
            bad = ~(values <= bound)  # a NaN is bad
            if bad.any():
                at = int(bad.nonzero()[0])
                length = problem.extra["lengths"][at]
                reason = f"{what} error {float(values[at]):.2e} of request {at} (length {length}), allowed {bound:.1e}"
                return Verdict(False, largest, reason)
        return Verdict(True, largest, "")

    def cost(self, workload: Workload, part: str | None = None, seed: int = 0) -> Cost:
        """FLOPs of the visible keys; the KV below each length once, q, the table's used entries, and the outputs.

        Problems give every request pages of its own, so the unique pages are those of all lengths added up; requests
        that share a prefix have no generator yet.
        """
        heads, s_q, h_kv = int(workload["heads"]), int(workload["s_q"]), int(workload["h_kv"])
        rank, rope, page = (int(workload[key]) for key in ("kv_lora_rank", "qk_rope_head_dim", "page_size"))
        lengths = draw_lengths(workload, seed)
        visible = sum(visible_keys(length, s_q, bool(workload["causal"])) for length in lengths)
        rows = len(lengths) * s_q * heads
        element = 2  # bytes of bf16 and fp16
        return Cost(
            flops=2 * heads * visible * (rank + rope + rank),
            bytes_read=element * (rank + rope) * (rows + h_kv * sum(lengths))
            + 4 * (sum(-(-length // page) for length in lengths) + len(lengths)),
            bytes_written=rows * (element * rank + 4),
            compute=str(workload["dtype"]),
        )


def visible_keys(length: int, s_q: int, causal: bool) -> int:
    """(query, key) pairs of one request and head: with `causal`, query i of s_q sees length - s_q + 1 + i keys."""
    if not causal:
        return s_q * length
    return sum(max(0, length - s_q + 1 + i) for i in range(s_q))


def draw_lengths(workload: Workload, seed: int) -> list[int]:
    """Cached tokens of each request; "spread" is FlashMLA's max(Normal(kv_len, kv_len / 2), s_q).

    From a file: consecutive lengths from a random one on, so that a batch stays together. `kv_len` is then the longest
    that may occur, as it is for a lookup at launch: what was longer is cut to it; and none is under s_q.
    """
    batch, kv_len, s_q = int(workload["batch"]), int(workload["kv_len"]), int(workload["s_q"])
    if workload["lengths"] == "equal":
        return [kv_len] * batch
    if workload["lengths"] not in LENGTHS:
        found = recordings.recorded("lengths", str(workload["lengths"]), "lengths", _check_lengths)
        return [min(max(length, s_q), kv_len) for length in recordings.window(found, batch, seed).tolist()]
    normal = torch.randn(batch, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return [max(round(kv_len + kv_len / 2 * z), s_q) for z in normal.tolist()]


def _check_lengths(lengths: torch.Tensor) -> None:
    if lengths.ndim != 1 or not len(lengths):
        raise ValueError(f"expected a list of lengths, one a request, found shape {list(lengths.shape)}")
    if int(lengths.min()) < 1:
        at = int((lengths < 1).nonzero()[0])
        raise ValueError(f"length {int(lengths[at])} at place {at}: expected at least 1")


def _problem(workload: Workload, lengths: Sequence[int], device: torch.device | str, seed: int) -> Problem:
    """Tensors for these lengths: page numbers drawn on the CPU, values on the device."""
    heads, h_kv, s_q, page_size = (int(workload[key]) for key in ("heads", "h_kv", "s_q", "page_size"))
    d_qk = int(workload["kv_lora_rank"]) + int(workload["qk_rope_head_dim"])
    batch, dtype, device = len(lengths), DTYPES[str(workload["dtype"])], torch.device(device)
    pages = [-(-length // page_size) for length in lengths]
    num_pages = sum(pages) + 3  # three that no request owns
    width = max(pages) + 1  # so that even the longest request has an unused entry
    extra = {"lengths": list(lengths), "softmax_scale": d_qk**-0.5}
    if device.type == "meta":
        inputs = {
            "q": torch.empty(batch, s_q, heads, d_qk, dtype=dtype, device=device),
            "kv_cache": torch.empty(num_pages, page_size, h_kv, d_qk, dtype=dtype, device=device),
            "block_table": torch.empty(batch, width, dtype=torch.int32, device=device),
            "cache_seqlens": torch.empty(batch, dtype=torch.int32, device=device),
        }
        return Problem(workload, inputs, extra)

    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    block_table = torch.full((batch, width), UNUSED_PAGE, dtype=torch.int32)
    unread = []  # tokens that no request may read
    start = 0
    for request, (length, count) in enumerate(zip(lengths, pages, strict=True)):
        block_table[request, :count] = order[start : start + count]
        start += count
        if length % page_size:
            last = int(order[start - 1]) * page_size
            unread.append(torch.arange(last + length % page_size, last + page_size))
    unread.append((order[start:, None].long() * page_size + torch.arange(page_size)).flatten())

    generator = torch.Generator(device=device).manual_seed(seed)
    q = torch.empty(batch, s_q, heads, d_qk, dtype=dtype, device=device).normal_(generator=generator)
    kv_cache = torch.empty(num_pages, page_size, h_kv, d_qk, dtype=dtype, device=device).normal_(generator=generator)
    kv_cache.view(num_pages * page_size, h_kv, d_qk)[torch.cat(unread).to(device)] = float("nan")
    inputs = {
        "q": q,
        "kv_cache": kv_cache,
        "block_table": block_table.to(device),
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device=device),
    }
    return Problem(workload, inputs, extra)


TUNABLE = MlaDecode()
