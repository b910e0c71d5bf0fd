"""A small tunable of its own: out[r] = sum over k of x[r, k] * w[k], with defects to order, for tests of the tool.

`w` has `k` elements of which a launch reads whole blocks under a mask. Parameters: BLOCK_K; `defect` makes one mistake,
so that the gate, the compile pool and the worker can be shown to notice it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from kerneltune.kernels.device import Device
from kerneltune.kernels.tunable import Config, Cost, KernelCall, Launch, Params, Problem, Scalar, Verdict, Workload

TOLERANCE = 1e-3  # fp16 output of an fp32 sum
DEFECTS = (
    "none",
    "untouched",  # does not write the last row
    "no_tail",  # skips what does not fill a block
    "writes_input",
    "out_of_bounds",
    "spin",  # runs for `spin_ms`, then is right
    "big_shared",  # stages more in shared memory than any device has
    "compile_abort",
    "compile_hang",
    "compile_raise",
    "compile_sleep",  # takes a second, then is right
    "host_exit",
    "host_hang",
    "host_raise",
    "host_kill",  # the process sends itself SIGKILL
    "host_sleep",  # takes a second to be launched, then is right
    "returns_at_once",  # launches nothing
    "edge_511",  # wrong for k = 511 only
    "raise_511",
    "edge_hang",  # hangs for k = 511 only
    "out_of_memory",
    "absent_blocks",  # leaves the last rows of an odd number alone, as a kernel of BLOCK_M = 2 without a mask would
    "flaky",  # each launch differs in the last bits of fp32
)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@triton.jit(do_not_specialize=["rows", "k", "stride_x"])  # edge problems then need no other compile
def dot_rows(
    x_ptr,
    w_ptr,
    out_ptr,
    nonce_ptr,
    rows,
    k,
    stride_x,
    BLOCK_K: tl.constexpr,
    DEFECT: tl.constexpr,
    SPIN_NS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    acc = tl.zeros([BLOCK_K], dtype=tl.float32)
    end = k
    if DEFECT == "no_tail":
        end = (k // BLOCK_K) * BLOCK_K
    for start in range(0, end, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        mask_k = offs_k < end
        x = tl.load(x_ptr + row * stride_x + offs_k, mask=mask_k, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + offs_k, mask=mask_k, other=0.0).to(tl.float32)
        acc += x * w
    total = tl.sum(acc, axis=0)
    if DEFECT == "big_shared":
        tile = tl.load(x_ptr + tl.arange(0, 128)[:, None] * stride_x + tl.arange(0, 1024)[None, :])  # [128, 1024]
        total += tl.sum(tl.dot(tile, tl.trans(tile)))
    if DEFECT == "edge_511" and k == 511:
        total += 100.0
    if DEFECT == "flaky":
        total += tl.atomic_add(nonce_ptr, 1.0) * 1e-5
    if DEFECT == "writes_input":
        tl.store(x_ptr + row * stride_x, 0.5)
    if DEFECT == "out_of_bounds":
        tl.store(x_ptr + (row + 1) * (1 << 44), total)
    if SPIN_NS > 0:
        begin = tl.extra.cuda.globaltimer()
        while tl.extra.cuda.globaltimer() - begin < SPIN_NS:
            pass
    if DEFECT == "untouched":
        tl.store(out_ptr + row, total, mask=row < rows - 1)
    elif DEFECT == "absent_blocks":
        tl.store(out_ptr + row, total, mask=row < rows // 2 * 2)
    else:
        tl.store(out_ptr + row, total)


class Toy:
    """See the module's docstring."""

    name = "toy"
    parts: tuple[str, ...] = ("dot",)
    optional: Mapping[str, int] = {}
    shared: tuple[str, ...] = ()
    exact_keys = ("k", "dtype")
    scaled_keys = ("rows",)
    input_keys = ()
    variants: Mapping[str, tuple[str, ...]] = {"only": ("toy:dot_rows",)}
    deterministic = True

    def complete_workload(self, given: Workload) -> dict[str, Scalar]:
        return {"k": 96, "dtype": "fp16", "rows": 8, **given}

    def default_config(self, workload: Workload, device: Device) -> Config:
        return {"BLOCK_K": 32, "num_warps": 4, "defect": "none"}

    def is_valid(self, part: str, params: Params, workload: Workload, device: Device) -> str | None:
        if params["defect"] not in DEFECTS:
            return f"defect: {params['defect']!r} is not one of {', '.join(DEFECTS)}"
        return None

    def make_problem(self, workload: Workload, device: torch.device | str, seed: int = 0) -> Problem:
        rows, k, dtype = int(workload["rows"]), int(workload["k"]), DTYPES[str(workload["dtype"])]
        if str(device) == "meta":
            x, w = torch.empty(rows, k, dtype=dtype, device="meta"), torch.empty(k, dtype=dtype, device="meta")
        else:
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(rows, k, generator=generator).to(dtype).to(device)
            w = torch.randn(k, generator=generator).to(dtype).to(device)
        return Problem(workload, {"x": x, "w": w})

    def edge_problems(
        self, workload: Workload, device: torch.device | str, seed: int = 0
    ) -> Iterator[tuple[str, Problem]]:
        for rows, k in ((1, 1), (3, 95)):
            yield f"rows={rows} k={k}", self.make_problem(dict(workload) | {"rows": rows, "k": k}, device, seed)

    def edge_workloads(self, workload: Workload) -> Iterator[tuple[str, dict[str, Scalar]]]:
        yield "k=511", {"k": 511, "dtype": workload["dtype"], "rows": 5}

    def call_variants(self, problem: Problem) -> Iterator[Problem]:
        yield problem

    def launch(self, problem: Problem, config: Config, part: str | None = None) -> Launch:
        x, w = problem.inputs["x"], problem.inputs["w"]
        defect, meta = str(config["defect"]), x.device.type == "meta"
        _host_defect(defect, meta)
        if defect == "edge_hang" and x.shape[1] == 511 and not meta:
            time.sleep(600)
        if defect == "raise_511" and x.shape[1] == 511 and not meta:
            raise RuntimeError("made to fail")
        out = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
        nonce = problem.extra.get("nonce")
        if nonce is None:
            nonce = problem.extra["nonce"] = torch.zeros(1, dtype=torch.float32, device=x.device)
        options = {
            "BLOCK_K": config["BLOCK_K"],
            "DEFECT": defect,
            "SPIN_NS": int(config.get("spin_ms", 0)) * 1_000_000,
            "num_warps": config["num_warps"],
        }
        args = (x, w, out, nonce, x.shape[0], x.shape[1], x.stride(0))
        calls = [KernelCall(dot_rows, (x.shape[0],), args, options)]
        return Launch([] if defect == "returns_at_once" and not meta else calls, {"out": out})

    def reference(self, problem: Problem) -> dict[str, torch.Tensor]:
        return {"out": problem.inputs["x"].double() @ problem.inputs["w"].double()}

    def compare(
        self, outputs: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], problem: Problem
    ) -> Verdict:
        scale = (problem.inputs["x"].double().abs() @ problem.inputs["w"].double().abs()).clamp_min(1e-6)
        errors = (outputs["out"].double() - reference["out"]).abs() / scale
        error = float(errors.nan_to_num(nan=float("inf")).max())
        if error <= TOLERANCE:
            return Verdict(True, error, "")
        row = int(errors.nan_to_num(nan=float("inf")).argmax())
        return Verdict(False, error, f"row {row}: relative error {error:.2g} is above {TOLERANCE:g}")

    def cost(self, workload: Workload, part: str | None = None, seed: int = 0) -> Cost:
        rows, k, size = int(workload["rows"]), int(workload["k"]), DTYPES[str(workload["dtype"])].itemsize
        return Cost(2 * rows * k, (rows * k + k) * size, rows * size, str(workload["dtype"]))


def _host_defect(defect: str, meta: bool) -> None:
    if meta and defect == "compile_abort":
        os.kill(os.getpid(), signal.SIGABRT)
    if meta and defect == "compile_hang":
        time.sleep(600)
    if meta and defect == "compile_sleep":
        time.sleep(1.0)
    if meta and defect == "compile_raise":
        raise RuntimeError("PassManager::run failed\nsecond line")
    if not meta and defect == "host_exit":
        os._exit(7)
    if not meta and defect == "host_hang":
        time.sleep(600)
    if not meta and defect == "host_kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if not meta and defect == "host_sleep":
        time.sleep(1.0)
    if not meta and defect == "out_of_memory":
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")
    if not meta and defect == "host_raise":
        raise RuntimeError("made to fail")


TOY: Any = Toy()


class LooseToy(Toy):
    """Declares that it reduces in no fixed order."""

    name = "loose-toy"
    deterministic = False


LOOSE: Any = LooseToy()


class EmptyToy(Toy):
    """Compiles to nothing, at once, or fails: for thousands of jobs."""

    name = "empty-toy"

    def edge_problems(
        self, workload: Workload, device: torch.device | str, seed: int = 0
    ) -> Iterator[tuple[str, Problem]]:
        return iter(())

    def call_variants(self, problem: Problem) -> Iterator[Problem]:
        yield problem

    def launch(self, problem: Problem, config: Config, part: str | None = None) -> Launch:
        _host_defect(str(config["defect"]), problem.inputs["x"].is_meta)
        return Launch([], {})


EMPTY: Any = EmptyToy()


class TwoToys(Toy):
    """The toy as an operation of two parts that share BLOCK_K: out2 = out * 2 through the same kernel."""

    name = "two-toys"
    parts = ("first", "second")
    optional: Mapping[str, int] = {}
    shared = ("BLOCK_K",)

    def default_config(self, workload: Workload, device: Device) -> Config:
        return {part: dict(super(TwoToys, self).default_config(workload, device)) for part in self.parts}

    def call_variants(self, problem: Problem) -> Iterator[Problem]:
        yield problem

    def launch(self, problem: Problem, config: Config, part: str | None = None) -> Launch:
        wide = problem.extra.setdefault(
            "wide",
            torch.empty(
                problem.inputs["x"].shape[0], dtype=problem.inputs["x"].dtype, device=problem.inputs["x"].device
            ),
        )
        first = super().launch(problem, config["first"])
        first.calls[0] = KernelCall(
            first.calls[0].fn,
            first.calls[0].grid,
            (*first.calls[0].args[:2], wide, *first.calls[0].args[3:]),
            first.calls[0].options,
        )
        two = problem.extra.setdefault("two", torch.full((1,), 2.0, dtype=wide.dtype, device=wide.device))
        second = super().launch(Problem(problem.workload, {"x": wide.view(-1, 1), "w": two}), config["second"])
        if part == "first":
            return Launch(first.calls, {"wide": wide})
        if part == "second":
            return second
        return Launch(first.calls + second.calls, second.outputs, {"wide": wide})

    def reference(self, problem: Problem) -> dict[str, torch.Tensor]:
        return {"out": 2 * super().reference(problem)["out"]}

    def compare(
        self, outputs: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], problem: Problem
    ) -> Verdict:
        halved = {"out": outputs["out"].double() / 2}
        return super().compare(halved, {"out": reference["out"] / 2}, problem)


TWO: Any = TwoToys()
