"""The fused mixture of experts as the tuner sees it: workloads, problems, launches, what is right and what it costs.

Parts: gemm1 (gate/up and SiLU) and gemm2 (down). They share BLOCK_M, because one alignment serves both.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from kerneltune.kernels.device import Device
from kerneltune.kernels.launch_plan import allocate
from kerneltune.kernels.moe import config as configs
from kerneltune.kernels.moe.estimate import grouped_gemm_us
from kerneltune.kernels.moe.launch import Scratch, make_calls, scratch_layout
from kerneltune.kernels.moe.reference import fused_moe_reference
from kerneltune.kernels.moe.routing import complete_routing, draw_topk_ids, draw_topk_weights
from kerneltune.kernels.source_hash import VARIANTS
from kerneltune.kernels.tunable import Config, Cost, Launch, Params, Problem, Scalar, Verdict, Workload

# Relative error of one token's output. Correct kernels round intermediate, partials and out to the dtype and accumulate
# in float32: that costs the worst token 2.6e-3 (K 1024) to 4.5e-3 (K 96) in bf16, an eighth of it in fp16. The cheapest
# mistakes cost more: a token's least choice dropped 4e-2, one of 7168 columns of K not read 4e-2 for the worst token.
TOLERANCE = {"bf16": 8e-3, "fp16": 1e-3}
EDGE_TOKENS = 33  # of the edge problems that are about routing: more than one block of 16 rows, and an odd count
EDGE_EXPERTS = 8  # of the edge workloads
EDGE_ROWS = 129  # tokens there: one row more than a block of 128
WEIGHT_SEED = 20  # weights do not vary with a problem's seed: all problems of one model share them

# DeepSeek-V3 on each GPU of eight, tensor parallel.
DEFAULTS: dict[str, Scalar] = {
    "dtype": "bf16",
    "w_dtype": "bf16",
    "group": "none",
    "E": 256,
    "global_E": 256,
    "N": 256,
    "K": 7168,
    "top_k": 8,
    "activation": "silu",
    "bias": False,
    "tokens": 64,
    "routing": "uniform",
}
CHOICES: dict[str, tuple[Scalar, ...]] = {
    "dtype": tuple(configs.DTYPES.values()),
    "w_dtype": tuple(configs.DTYPES.values()),
    "group": ("none",),
    "activation": configs.ACTIVATIONS,
    "bias": (False,),
}
EXACT_KEYS = tuple(key for key in DEFAULTS if key not in ("tokens", "routing"))


class MoeTunable:
    """See kernels/tunable.py for what each method promises."""

    name = "moe"
    parts = configs.PARTS
    shared = ("BLOCK_M",)
    exact_keys = EXACT_KEYS
    scaled_keys = ("tokens",)
    input_keys = ("routing",)
    optional: Mapping[str, Scalar] = {}
    variants = VARIANTS["moe"]
    deterministic = True  # aligned in a fixed order, choices added in theirs, nothing is atomic

    def complete_workload(self, given: Workload) -> dict[str, Scalar]:
        unknown = [key for key in given if key not in DEFAULTS]
        if unknown:
            raise ValueError(f"unknown workload key {unknown[0]!r}: expected one of {', '.join(DEFAULTS)}")
        workload = {**DEFAULTS, **given}
        workload["w_dtype"] = given.get("w_dtype", workload["dtype"])
        workload["global_E"] = given.get("global_E", workload["E"])
        for key, value in workload.items():
            if key in CHOICES:
                if value not in CHOICES[key] or isinstance(value, bool) != isinstance(CHOICES[key][0], bool):
                    raise ValueError(
                        f"{key}={value}: not supported yet, expected {' or '.join(map(str, CHOICES[key]))}"
                    )
            elif key != "routing" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{key}={value}: expected a positive integer")
        if workload["w_dtype"] != workload["dtype"]:
            raise ValueError(f"w_dtype={workload['w_dtype']}: not supported yet, expected dtype, {workload['dtype']}")
        if _int(workload, "E") > _int(workload, "global_E"):
            raise ValueError(f"E={workload['E']}: expected at most global_E, {workload['global_E']}")
        if _int(workload, "top_k") > _int(workload, "global_E"):
            raise ValueError(f"top_k={workload['top_k']}: expected at most global_E, {workload['global_E']}")
        workload["routing"] = complete_routing(workload["routing"], _int(workload, "global_E"), _int(workload, "top_k"))
        return workload

    def default_config(self, workload: Workload, device: Device) -> Config:
        return configs.default_config(self.complete_workload(workload), device)

    def is_valid(self, part: str, params: Params, workload: Workload, device: Device) -> str | None:
        return configs.is_valid(part, params, self.complete_workload(workload), device)

    def refuses(self, config: Config, workload: Workload, device: Device) -> str | None:
        """None, or why a launch with this whole config raises."""
        try:
            configs.checked_config(config, self.complete_workload(workload), device)
        except (TypeError, ValueError) as error:
            return str(error)
        return None

    def estimate(
        self, part: str, params: Params, workload: Workload, device: Device, ceilings: Mapping[str, Any]
    ) -> float:
        N, K = _int(workload, "N"), _int(workload, "K")
        block_n = int(params["BLOCK_N"])
        columns, depth, tile_columns = (2 * N, K, 2 * block_n) if part == "gemm1" else (K, N, block_n)
        return grouped_gemm_us(
            params,
            tile_columns=tile_columns,
            columns=columns,
            depth=depth,
            rows=_int(workload, "tokens") * _int(workload, "top_k") * _int(workload, "E") / _int(workload, "global_E"),
            experts=_int(workload, "E"),
            weight_bytes=configs.ELEMENT_BYTES,
            device=device,
            read_gbps=ceilings["dram_read_gbps"],
            tflops=ceilings["tflops"][workload["dtype"]],
        )

    def make_problem(self, workload: Workload, device: torch.device | str, seed: int = 0) -> Problem:
        workload = self.complete_workload(workload)
        return _problem(workload, device, seed, _draw(workload, seed))

    def edge_problems(
        self, workload: Workload, device: torch.device | str, seed: int = 0
    ) -> Iterator[tuple[str, Problem]]:
        workload = self.complete_workload(workload)
        E, global_E, top_k = (_int(workload, key) for key in ("E", "global_E", "top_k"))
        for tokens in (1, EDGE_TOKENS, 129):
            yield f"tokens={tokens}", self.make_problem({**workload, "tokens": tokens}, device, seed)

        few: dict[str, Scalar] = {**workload, "tokens": EDGE_TOKENS}
        if global_E > 1:
            without_first = 1 + draw_topk_ids("uniform", EDGE_TOKENS, global_E - 1, min(top_k, global_E - 1), seed)
            columns = torch.arange(top_k) % without_first.shape[1]  # an expert twice where there are too few
            yield "expert 0 without tokens", _problem(few, device, seed, without_first[:, columns].contiguous())
        yield (
            "all tokens to one expert",
            _problem(few, device, seed, torch.full((EDGE_TOKENS, top_k), E - 1, dtype=torch.int32)),
        )
        ids = _draw(few, seed)
        ids.view(-1)[::3] = -1
        ids[EDGE_TOKENS // 2] = -1
        yield "ids of -1", _problem(few, device, seed, ids)

    def edge_workloads(self, workload: Workload) -> Iterator[tuple[str, dict[str, Scalar]]]:
        """Depths of both products that no BLOCK_K divides, odd (no asynchronous copies) and even."""
        workload = self.complete_workload(workload)
        # Few experts, so that each gets rows enough for the tallest BLOCK_M of a search.
        has_map = _int(workload, "global_E") > _int(workload, "E")
        small = {
            **workload,
            "E": EDGE_EXPERTS,
            "global_E": EDGE_EXPERTS * (2 if has_map else 1),
            "top_k": min(_int(workload, "top_k"), EDGE_EXPERTS),
            "tokens": EDGE_ROWS,
            "routing": "uniform",
        }
        for K, N in ((511, 97), (520, 104)):
            yield f"K={K} N={N}", {**small, "K": K, "N": N}

    def call_variants(self, problem: Problem) -> Iterator[Problem]:
        """int32 ids, as the engines have them, and torch.topk's int64."""
        yield problem
        yield replace(problem, inputs=problem.inputs | {"topk_ids": problem.inputs["topk_ids"].long()}, extra={})

    def launch(self, problem: Problem, config: Config, part: str | None = None) -> Launch:
        gemms = configs.parse_config(config)
        out = torch.empty_like(problem.inputs["hidden"])
        scratch, fresh = _scratch(problem, gemms["gemm1"].BLOCK_M)
        inputs = problem.inputs
        calls = make_calls(
            inputs["hidden"],
            inputs["w1"],
            inputs["w2"],
            inputs["topk_weights"],
            inputs["topk_ids"],
            inputs.get("expert_map"),
            gemms,
            out,
            scratch,
        )
        whole = Launch([call for step in calls.values() for call in step], {"out": out}, dict(vars(scratch)))
        if part is None:
            return whole
        if fresh and not out.is_meta:
            whole.run()  # a GEMM alone would take its expert ids from memory that was never written
        name = "intermediate" if part == "gemm1" else "partials"
        return Launch(calls[part], {name: getattr(scratch, name)})

    def reference(self, problem: Problem) -> dict[str, torch.Tensor]:
        return {"out": fused_moe_reference(**problem.inputs)}

    def compare(
        self, outputs: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], problem: Problem
    ) -> Verdict:
        expected = reference["out"].double()
        difference = (outputs["out"].double() - expected).norm(dim=1)
        norm = expected.norm(dim=1)
        # A token without a local expert is exactly zero; NaN is as wrong as can be.
        errors = torch.where(norm > 0, difference / norm, torch.where(difference == 0, 0.0, float("inf")))
        errors = errors.nan_to_num(nan=float("inf"), posinf=float("inf"))
        error, token = (value.item() for value in errors.max(dim=0))
        dtype = str(problem.workload["dtype"])
        if error <= TOLERANCE[dtype]:
            return Verdict(True, error, "")
        return Verdict(
            False, error, f"token {token}: relative error {error:.2e}, tolerance {TOLERANCE[dtype]:.0e} ({dtype})"
        )

    def cost(self, workload: Workload, part: str | None = None, seed: int = 0) -> Cost:
        """Bytes: the weights of the experts hit, hidden and out once; intermediate and partials written and read once.

        Only what the drawn ids touch: experts that no token chose count nothing, nor do choices without a local expert
        (an id of -1, or of another GPU), nor in gemm1 tokens that have no other.
        No kernel of this plan avoids the latter, though L2 may hold small ones. Ids and router weights do not count."""
        workload = self.complete_workload(workload)
        rows, tokens, experts = _count_routing(tuple(workload.items()), seed)
        N, K = _int(workload, "N"), _int(workload, "K")
        size = configs.ELEMENT_BYTES
        read = {"gemm1": experts * 2 * N * K + tokens * K, "gemm2": experts * N * K + rows * N}
        written = {"gemm1": rows * N, "gemm2": rows * K}
        flops = {"gemm1": 2 * rows * 2 * N * K, "gemm2": 2 * rows * N * K}
        if part is not None:
            counts = flops[part], read[part], written[part]
        else:
            summed = rows * K, _int(workload, "tokens") * K  # what the last step reads and writes
            counts = sum(flops.values()), sum(read.values()) + summed[0], sum(written.values()) + summed[1]
        return Cost(counts[0], counts[1] * size, counts[2] * size, compute=str(workload["dtype"]))


def _int(workload: Workload, key: str) -> int:
    return int(workload[key])


def _draw(workload: Workload, seed: int) -> torch.Tensor:
    tokens, experts, top_k = (_int(workload, key) for key in ("tokens", "global_E", "top_k"))
    return draw_topk_ids(str(workload["routing"]), tokens, experts, top_k, seed)


@functools.lru_cache(maxsize=64)
def _count_routing(workload_items: tuple[tuple[str, Scalar], ...], seed: int) -> tuple[int, int, int]:
    """(choices with a local expert, tokens with such a choice, local experts hit)."""
    workload = dict(workload_items)
    ids = _draw(workload, seed)
    local = (ids >= 0) & (ids < _int(workload, "E"))
    return int(local.sum()), int(local.any(dim=1).sum()), len(ids[local].unique())


def _problem(workload: Workload, device: torch.device | str, seed: int, topk_ids: torch.Tensor) -> Problem:
    """Inputs for given ids. The first E of global_E experts are local."""
    tokens, K, E, global_E = (_int(workload, key) for key in ("tokens", "K", "E", "global_E"))
    device = torch.device(device)
    dtype = {name: dtype for dtype, name in configs.DTYPES.items()}[str(workload["dtype"])]
    hidden = torch.empty((tokens, K), dtype=dtype, device=device)
    if not hidden.is_meta:
        hidden.normal_(generator=torch.Generator(device).manual_seed(seed))
    w1, w2 = _weights(E, _int(workload, "N"), K, dtype, device)
    inputs = {
        "hidden": hidden,
        "w1": w1,
        "w2": w2,
        "topk_weights": draw_topk_weights(tokens, topk_ids.shape[1], seed).to(device),
        "topk_ids": topk_ids.to(device),
    }
    if global_E > E:
        local = torch.arange(global_E, dtype=torch.int32)
        inputs["expert_map"] = torch.where(local < E, local, -1).to(device)
    return Problem(dict(workload), inputs)


_last_weights: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}


def _weights(E: int, N: int, K: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """w1 [E, 2N, K] and w2 [E, K, N], N(0, 1 / fan-in).

    The last pair is kept: every problem of a model (2.8 GB for DeepSeek-V3 at TP 8) then shares one.
    """
    key = (E, N, K, dtype, device)
    if key not in _last_weights:
        _last_weights.clear()  # first, so that two pairs never lie in memory for our sake
        w1 = torch.empty((E, 2 * N, K), dtype=dtype, device=device)
        w2 = torch.empty((E, K, N), dtype=dtype, device=device)
        if device.type != "meta":
            generator = torch.Generator(device).manual_seed(WEIGHT_SEED)
            w1.normal_(0.0, K**-0.5, generator=generator)
            w2.normal_(0.0, N**-0.5, generator=generator)
        _last_weights[key] = (w1, w2)
    return _last_weights[key]


def _scratch(problem: Problem, block_m: int) -> tuple[Scratch, bool]:
    """The problem's scratch for this BLOCK_M, and whether it is new: a part reads what a whole run left there."""
    kept = problem.extra.get("scratch")
    if kept is None or kept[0] != block_m:
        hidden, w1 = problem.inputs["hidden"], problem.inputs["w1"]
        (tokens, top_k), (E, rows, K) = problem.inputs["topk_ids"].shape, w1.shape
        layout = scratch_layout(tokens, top_k, E, rows // 2, K, hidden.dtype, block_m)
        kept = (block_m, Scratch(**allocate(layout, hidden.device)))
        problem.extra["scratch"] = kept
        return kept[1], True
    return kept[1], False


TUNABLE = MoeTunable()
