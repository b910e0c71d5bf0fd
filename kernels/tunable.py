"""The contract between a kernel and whatever tunes it: problem in, launches and their reference out.

A kernel package offers one object with this shape (`kernels/mla_decode/tunable.py`, `kernels/moe/tunable.py`); the
tuner knows nothing else of it. A `part` is a piece of the operation whose parameters are searched on their own: MLA
decode has one, the fused MoE has one for each GEMM. A config of a kernel with one part is flat
(`{"BLOCK_H": 16, ...}`), otherwise it holds one set of parameters for each part (`{"gemm1": {...}, "gemm2": {...}}`).

Everything that depends on random data (sequence lengths, routing) is drawn on the CPU from a seed, so that costs and
lengths are known without a GPU and are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from kerneltune.kernels.device import Device

Scalar = int | float | str | bool
Params = Mapping[str, Scalar]
Workload = Mapping[str, Scalar]
Config = Mapping[str, Any]


@dataclass(frozen=True)
class KernelCall:
    """One Triton launch, not yet made. `args` are positional, `options` hold constexprs, num_warps, num_stages."""

    fn: Any  # triton.runtime.JITFunction
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: Mapping[str, Any]

    def __call__(self) -> Any:
        """Enqueue on the current stream; Triton's compiled kernel (None from its interpreter)."""
        return self.fn[self.grid](*self.args, **self.options)


@dataclass
class Problem:
    """The inputs of one workload. On the `meta` device they have shapes and strides only, enough to compile."""

    workload: Workload
    inputs: dict[str, torch.Tensor]  # must be unchanged by every launch
    extra: dict[str, Any] = field(default_factory=dict)  # host-side values a launch or the reference needs


@dataclass
class Launch:
    """A bound launch: `run` enqueues its calls; it allocates nothing and never synchronises, so a graph can hold it."""

    calls: list[KernelCall]
    outputs: dict[str, torch.Tensor]  # each element is written by `run`
    scratch: dict[str, torch.Tensor] = field(default_factory=dict)  # may hold anything before `run`

    def run(self) -> None:
        """Enqueue every call, in order, on the current stream."""
        for call in self.calls:
            call()


@dataclass(frozen=True)
class Cost:
    """Useful work of one launch: exact FLOPs, and the bytes that its algorithm must move.

    Bytes: each input byte that is needed and each output byte once; an intermediate that the algorithm keeps in memory
    between its launches counts as written once and read once.
    """

    flops: int
    bytes_read: int
    bytes_written: int
    compute: str  # which tensor-core ceiling applies: "bf16", "fp16", "fp8"

    @property
    def bytes(self) -> int:
        """Read and written together."""
        return self.bytes_read + self.bytes_written


@dataclass(frozen=True)
class Verdict:
    """What a comparison with the reference said. `error` is the worst relative error of any request (or token)."""

    ok: bool
    error: float
    reason: str  # "" if ok, else one line with the size, the place and the tolerance


class Tunable(Protocol):
    """What the tuner needs of a kernel. All methods are pure but `launch`, which allocates outputs and scratch."""

    name: str  # "mla-decode"
    parts: tuple[str, ...]  # ("decode",) or ("gemm1", "gemm2")
    shared: tuple[str, ...]  # parameters that must be equal in all parts of a config
    optional: Mapping[str, Scalar]  # parameters that a config need not name, with what it then means
    exact_keys: tuple[str, ...]  # workload keys that a table matches exactly
    scaled_keys: tuple[str, ...]  # matched to the nearest entry in log space
    input_keys: tuple[str, ...]  # the input class: "lengths", "routing"
    variants: Mapping[str, tuple[str, ...]]  # variant -> "module:name" of what makes its launches (source_hash.py)
    deterministic: bool  # every config reduces in a fixed order, so that equal inputs must give equal bits

    def complete_workload(self, given: Workload) -> dict[str, Scalar]:
        """All keys in canonical order, defaults filled in. ValueError (one line) on an unknown key or bad value."""
        ...

    def default_config(self, workload: Workload, device: Device) -> Config:
        """A decent config for any GPU, always valid there."""
        ...

    def is_valid(self, part: str, params: Params, workload: Workload, device: Device) -> str | None:
        """None, or the reason why these parameters cannot run: "shared memory: needs N B, device has M B"."""
        ...

    def refuses(self, config: Config, workload: Workload, device: Device) -> str | None:
        """None, or why a launch with this whole config raises: the very check of the public call, which allows more
        than `is_valid` where parameters can run but are no good."""
        ...

    def estimate(
        self, part: str, params: Params, workload: Workload, device: Device, ceilings: Mapping[str, Any]
    ) -> float:
        """Microseconds that valid parameters should take, by occupancy and roofline: only the order matters.

        `ceilings`: `roofline.model.Ceilings.to_dict()` of the device.
        """
        ...

    def make_problem(self, workload: Workload, device: torch.device | str, seed: int = 0) -> Problem:
        """Random N(0, 1)-like inputs; on device "meta" no data. Bytes that must not be read are NaN."""
        ...

    def edge_problems(
        self, workload: Workload, device: torch.device | str, seed: int = 0
    ) -> Iterator[tuple[str, Problem]]:
        """Small labelled problems that need no other compile: length 0 and 1, an empty expert, odd token counts."""
        ...

    def edge_workloads(self, workload: Workload) -> Iterator[tuple[str, dict[str, Scalar]]]:
        """Small labelled workloads of other exact keys, off every tile: "K=511 N=97". They do need another compile, so
        only the default and the finalists are vetted on them. They depend on the exact keys of `workload` alone."""
        ...

    def call_variants(self, problem: Problem) -> Iterator[Problem]:
        """The problem, and the same one as other callers pose it, for whom other binaries serve: int64 ids, say."""
        ...

    def launch(self, problem: Problem, config: Config, part: str | None = None) -> Launch:
        """Bind a whole config; with `part`, `run` makes only that part's launches (its inputs must have been made by a
        run of the whole)."""
        ...

    def reference(self, problem: Problem) -> dict[str, torch.Tensor]:
        """What `outputs` must hold, in float64 (float32 where float64 would not fit), by naive torch."""
        ...

    def compare(
        self, outputs: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], problem: Problem
    ) -> Verdict:
        """Judge per request / token under the kernel's named tolerance."""
        ...

    def cost(self, workload: Workload, part: str | None = None, seed: int = 0) -> Cost:
        """Counted work of the whole operation or of one part, for the lengths and the routing of that seed."""
        ...


def part_params(tunable: Tunable, config: Config, part: str) -> dict[str, Scalar]:
    """The parameters of one part of a config."""
    return dict(config if len(tunable.parts) == 1 else config[part])


def join_parts(tunable: Tunable, by_part: Mapping[str, Params]) -> dict[str, Any]:
    """The config made of one set of parameters for each part: the inverse of `part_params`."""
    if len(tunable.parts) == 1:
        return dict(by_part[tunable.parts[0]])
    return {part: dict(by_part[part]) for part in tunable.parts}
