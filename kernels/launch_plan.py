"""The launches of one shape, made again at other addresses for a fraction of the host time of a Triton launch.

Triton's own launch looks at each argument on every call, to find the binary that was specialised for it. For one shape
nothing changes between calls but the addresses, so a plan keeps the binaries that the first call found, and hands them
the new addresses, also within TMA descriptors. It is only used where Triton would find the same binaries: every address
a multiple of 16 bytes (that is all that Triton's choice depends on), on the device of the first call, with no profiler
hooked into launches.

Scratch between the launches is one allocation a call from torch's caching allocator, so calls that overlap on several
streams or threads never share one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from kerneltune.kernels.tunable import KernelCall

ALIGNMENT = 256  # bytes, of each scratch tensor within the workspace
SPECIALISED = 16  # bytes: Triton compiles one binary for pointers that are multiples of this, another for the rest

PLAIN = (torch.Tensor, int, float, str, type(None))  # bool is an int

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # scratch tensors: shape and dtype by name


def allocate(layout: Layout, device: torch.device | str) -> dict[str, torch.Tensor]:
    """Each scratch tensor on its own, in no particular state."""
    return {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in layout.items()}


def carve(layout: Layout, device: torch.device) -> tuple[dict[str, torch.Tensor], tuple[int, ...], torch.Tensor]:
    """The scratch tensors as parts of one workspace: by name, their offsets in bytes, the workspace."""
    offsets, total = [], 0
    for shape, dtype in layout.values():
        offsets.append(total)
        total += -(-_count(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    workspace = torch.empty(total, dtype=torch.uint8, device=device)
    parts = {
        name: workspace[offset : offset + _count(shape) * dtype.itemsize].view(dtype).view(shape)
        for (name, (shape, dtype)), offset in zip(layout.items(), offsets, strict=True)
    }
    return parts, tuple(offsets), workspace


@dataclass(frozen=True)
class _Address:
    """What a descriptor's base is asked for when it is encoded."""

    pointer: int

    def data_ptr(self) -> int:
        return self.pointer


@dataclass(frozen=True)
class _Bound:
    """One compiled kernel with its grid and arguments; those at `slots` are addresses, filled in by role, and those at
    `descriptors` TMA descriptors of such."""

    run: Any
    head: tuple[Any, ...]  # the grid
    function: Any
    metadata: Any
    arguments: tuple[Any, ...]  # in the kernel's order, constexprs included
    slots: tuple[tuple[int, int], ...]  # (position in arguments, role)
    descriptors: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Plan:
    """What one call launches; roles are the tensors of the op in a fixed order, scratch last."""

    bound: tuple[_Bound, ...]
    device: int
    workspace_bytes: int
    offsets: tuple[int, ...]  # of each scratch tensor in the workspace
    stream: Any  # device index -> its current stream

    def launch(self, pointers: list[int], workspace: torch.Tensor | None) -> bool:
        """Enqueue on the current stream, in order; False, with nothing done, where Triton's own way is needed.

        Args:
            pointers: addresses of the op's tensors, by role; extended by the scratch's.
            workspace: at least `workspace_bytes`, not used by any other call that may run at the same time.
        """
        if workspace is not None:
            base = workspace.data_ptr()
            pointers += [base + offset for offset in self.offsets]
        together = 0
        for pointer in pointers:
            together |= pointer
        if together % SPECIALISED or _hooked():
            return False
        stream = self.stream(self.device)
        for bound in self.bound:
            arguments = list(bound.arguments)
            for position, role in bound.slots:
                arguments[position] = pointers[role]
            for position, role in bound.descriptors:
                arguments[position] = _at(bound.arguments[position], pointers[role])
            bound.run(*bound.head, stream, bound.function, bound.metadata, None, None, None, *arguments)
        return True


def launch_first(
    calls: Sequence[KernelCall], tensors: Sequence[torch.Tensor], offsets: tuple[int, ...], workspace_bytes: int
) -> Plan | None:
    """Make the calls Triton's own way, and the plan for the next ones; None where there can be none.

    Args:
        tensors: by role, scratch last; each tensor among the calls' arguments is one of them.
        offsets, workspace_bytes: of the scratch, as `carve` gave them.
    """
    compiled = [call() for call in calls]
    device = tensors[0].get_device()
    if device < 0 or torch.version.hip:  # the interpreter; AMD, where it was not tried
        return None
    if any(tensor.data_ptr() % SPECIALISED for tensor in tensors):  # these are the binaries of other addresses
        return None
    if len({id(tensor) for tensor in tensors}) < len(tensors):  # one tensor in two roles: the next call may bring two
        return None
    values = [value for call in calls for value in (*call.args, *call.options.values())]
    if not all(isinstance(value, (*PLAIN, TensorDescriptor)) for value in values):
        return None  # who knows what it holds
    bound = tuple(_bind(call, kernel, tensors) for call, kernel in zip(calls, compiled, strict=True))
    return Plan(bound, device, workspace_bytes, offsets, driver.active.get_current_stream)


def _bind(call: KernelCall, kernel: Any, tensors: Sequence[torch.Tensor]) -> _Bound:
    names = call.fn.arg_names
    arguments = [*call.args, *(call.options[name] for name in names[len(call.args) :])]
    roles = {id(tensor): role for role, tensor in reversed(list(enumerate(tensors)))}
    slots = tuple(
        (position, roles[id(value)]) for position, value in enumerate(arguments) if isinstance(value, torch.Tensor)
    )
    descriptors = tuple(
        (position, roles[id(value.base)])
        for position, value in enumerate(arguments)
        if isinstance(value, TensorDescriptor)
    )
    for position, _ in slots:
        arguments[position] = 0  # a plan keeps no tensor alive
    for position, _ in descriptors:
        arguments[position] = _at(arguments[position], 0)
    grid = (*call.grid, 1, 1)[:3]
    return _Bound(kernel.run, grid, kernel.function, kernel.packed_metadata, tuple(arguments), slots, descriptors)


def _at(descriptor: TensorDescriptor, pointer: int) -> TensorDescriptor:
    """The same descriptor at another address, unchecked."""
    moved = copy.copy(descriptor)
    moved.base = _Address(pointer)
    return moved


def _hooked() -> bool:
    """Whether a profiler wants to see each launch: then it is made Triton's own way."""
    runtime = triton.knobs.runtime
    return bool(
        getattr(runtime.launch_enter_hook, "calls", runtime.launch_enter_hook)
        or getattr(runtime.launch_exit_hook, "calls", runtime.launch_exit_hook)
    )


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
