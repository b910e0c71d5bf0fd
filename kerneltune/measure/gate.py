"""Is a config's result right? Asked before any of its times counts.

Each launch runs on poisoned outputs and scratch (NaN; a sentinel in integers), so that an element nobody wrote cannot
pass for a right one left by the config before. It must agree with the reference on the workload itself and on small
edge problems that need no other compile, leave its inputs as they were, and leave alone the memory of the references.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kerneltune.kernels.tunable import Config, Launch, Problem, Tunable, Verdict, Workload

INT_SENTINEL = -77  # as an index it is wrong without faulting at once; fits every signed width
BYTE_SENTINEL = 0x7F  # NaN in every 8-bit float format


@dataclass
class Case:
    """One problem with what its outputs must hold, and checksums of everything that no launch may change."""

    label: str  # "" for the workload itself, else the edge: "tokens=1"
    problem: Problem
    reference: dict[str, torch.Tensor]
    checksums: dict[str, int]


class MemoryChanged(Exception):
    """A launch wrote to memory that is not its own: cases must be made anew. The message names the memory."""


def make_case(tunable: Tunable, problem: Problem, label: str = "") -> Case:
    """Compute a problem's reference (once) and the checksums of its inputs."""
    reference = dict(tunable.reference(problem))
    return Case(label, problem, reference, _checksums(problem.inputs, reference, {}))


def make_cases(tunable: Tunable, workload: Workload, device: torch.device | str, seed: int = 0) -> list[Case]:
    """The workload first, then its edge problems."""
    cases = [make_case(tunable, tunable.make_problem(workload, device, seed))]
    cases += [make_case(tunable, problem, label) for label, problem in tunable.edge_problems(workload, device, seed)]
    return cases


def check(tunable: Tunable, cases: Sequence[Case], config: Config) -> Verdict:
    """Run a whole config on each case; the first failure, else the worst error of all.

    Raises:
        MemoryChanged: it wrote where it must not, in any case's memory.
    """
    worst = Verdict(True, 0.0, "")
    for case in cases:
        launch = tunable.launch(case.problem, config)
        run_poisoned(launch)
        verdict = judge(tunable, case, launch)
        if not verdict.ok or verdict.error > worst.error:
            worst = verdict
        if not verdict.ok:
            break
    require_unchanged(cases)
    return worst


def judge(tunable: Tunable, case: Case, launch: Launch) -> Verdict:
    """Compare what a launch has left in its outputs with the case's reference; a failure names the case."""
    _synchronize(launch)
    verdict = tunable.compare(launch.outputs, case.reference, case.problem)
    if verdict.ok or not case.label:
        return verdict
    return Verdict(False, verdict.error, f"{case.label}: {verdict.reason}")


def require_unchanged(cases: Iterable[Case]) -> None:
    """Raise MemoryChanged if an input or a reference has changed."""
    seen: dict[int, int] = {}
    for case in cases:
        for name, now in _checksums(case.problem.inputs, case.reference, seen).items():
            if now != case.checksums[name]:
                raise MemoryChanged(f"{case.label + ': ' if case.label else ''}the launch changed {name}")


def run_poisoned(launch: Launch) -> None:
    """Fill outputs and scratch with poison, then run."""
    for tensor in (*launch.scratch.values(), *launch.outputs.values()):
        poison(tensor)
    launch.run()


def deterministic(launch: Launch, runs: int) -> str:
    """Run several times on poisoned memory: "" if all outputs are the same to the bit, else which one was not."""
    first: dict[str, torch.Tensor] = {}
    for number in range(runs):
        run_poisoned(launch)
        _synchronize(launch)
        for name, tensor in launch.outputs.items():
            bits = _bits(tensor)
            if name not in first:
                first[name] = bits.clone()
            elif not torch.equal(bits, first[name]):
                return f"{name} differs between two launches on the same inputs (run {number + 1} of {runs})"
    return ""


def poison(tensor: torch.Tensor) -> None:
    """Overwrite with values that no right result has: NaN, or a sentinel in integers."""
    if tensor.dtype.is_floating_point and tensor.itemsize > 1:
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    elif tensor.itemsize == 1 and tensor.dtype != torch.int8:
        tensor.view(torch.uint8).fill_(BYTE_SENTINEL)
    elif tensor.dtype.is_signed:
        tensor.fill_(INT_SENTINEL)
    else:
        tensor.view(_SIGNED[tensor.itemsize]).fill_(INT_SENTINEL)


_SIGNED = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _checksums(
    inputs: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], seen: dict[int, int]
) -> dict[str, int]:
    """One checksum a tensor, over the whole storage behind it: bytes outside a view count too. Waits for the device.

    `seen` holds the sums of this pass by address: cases may share tensors (an expert's weights).
    """
    named = {f"input {name!r}": tensor for name, tensor in inputs.items()}
    named |= {f"memory that is not its own (the reference {name!r})": tensor for name, tensor in reference.items()}
    sums = {}
    for name, tensor in named.items():
        address = tensor.untyped_storage().data_ptr()
        if address not in seen:
            seen[address] = _storage_sum(tensor)
        sums[name] = seen[address]
    return sums


def _storage_sum(tensor: torch.Tensor) -> int:
    """The storage's 8-byte words and last odd bytes added up, modulo 2^64."""
    storage = tensor.untyped_storage()
    data = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    whole = data.numel() // 8 * 8
    return int(data[:whole].view(torch.int64).sum() + data[whole:].sum(dtype=torch.int64))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _synchronize(launch: Launch) -> None:
    if any(tensor.is_cuda for tensor in launch.outputs.values()):
        torch.cuda.synchronize()
