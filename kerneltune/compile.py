"""Compile one config without a GPU, and say what it would use: registers, spills, shared memory.

Triton asks its driver only for the target, the device number and the stream while it compiles, so a stub that answers
these replaces the GPU. Launches are bound to inputs on torch's `meta` device and given to `warmup` as they are: a meta
tensor has a dtype, a storage offset and a storage size but no data, so Triton specialises on exactly what the launch
will have (dtypes, 16-byte alignment of pointers, values that are 1 or divisible by 16, options) and files the binary
under the same key in its cache. The GPU process then finds it there and compiles nothing; tests/test_compile.py
compares the keys, and a test on the GPU shows that a run after a compile adds no file to the cache.

`compile_part` works in the calling process. `CompilePool` runs it in child processes, because a compiler may abort,
hang or leak.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kerneltune import compile_cache
from kerneltune.child import Child, ChildDied, ChildStartError, ChildTimeout, one_line
from kerneltune.errors import UserError
from kerneltune.kernels.device import Device

if TYPE_CHECKING:
    from kerneltune.kernels.tunable import KernelCall, Params, Tunable, Workload

JOB_TIMEOUT_S = 120.0
JOBS_PER_CHILD = 200  # LLVM's and MLIR's contexts grow; a fresh child costs about 3 s
TMEM_COLUMNS = 512  # tensor memory of one SM of sm_100, in columns (PTX ISA, tcgen05.alloc)
CPUS_KEPT_FREE = 2  # for the measuring process and this one


@dataclass(frozen=True)
class Compiled:
    """What the compiler said of one part under one set of parameters; the worst of its kernels."""

    outcome: str  # "ok", "compile_error", "infeasible"
    reason: str = ""  # one line unless ok
    registers: int | None = None  # a thread (AMD: VGPRs)
    spills: int | None = None  # bytes of local memory a thread (AMD: of the private segment)
    shared_bytes: int | None = None  # a block
    compile_s: float = 0.0


def resolve_tunable(kernel: str) -> Tunable:
    """A kernel by its registered name ("moe"), or any object by its import path ("package.module:NAME")."""
    if ":" in kernel:
        import importlib

        module, _, attribute = kernel.partition(":")
        return cast("Tunable", getattr(importlib.import_module(module), attribute))
    from kerneltune.registry import load_tunable

    return load_tunable(kernel)


def whole_config(tunable: Tunable, part: str, params: Params, workload: Workload, device: Device) -> dict[str, Any]:
    """The default config with one part replaced, and the shared parameters made equal in the other parts.

    Another part that these parameters make too large for the device gets a shallower pipeline: it only has to run.
    """
    from kerneltune.kernels.tunable import join_parts, part_params

    base = tunable.default_config(workload, device)
    shared = {name: params[name] for name in tunable.shared}
    by_part = {other: part_params(tunable, base, other) | shared for other in tunable.parts}
    for other, values in by_part.items():
        for stages in range(int(values.get("num_stages", 1)) - 1, 0, -1):
            if tunable.is_valid(other, values, workload, device) is None:
                break
            values["num_stages"] = stages
    by_part[part] = dict(params)
    return join_parts(tunable, by_part)


def compile_part(kernel: Tunable | str, part: str, params: Params, workload: Workload, device: Device) -> Compiled:
    """Compile, in this process and without a GPU, every kernel that a whole launch with these parameters needs.

    The other parts have their default parameters. Resources are those of `part`; an empty `part` means that `params` is
    a whole config, and resources are the worst of all parts. Never raises for what a config or a compiler can do.
    """
    from kerneltune.kernels.tunable import part_params

    start = time.perf_counter()
    tunable = resolve_tunable(kernel) if isinstance(kernel, str) else kernel

    def done(outcome: str, reason: str = "", **resources: int | None) -> Compiled:
        return Compiled(outcome, reason, compile_s=time.perf_counter() - start, **resources)

    parts = (part,) if part else tunable.parts
    config = whole_config(tunable, part, params, workload, device) if part else dict(params)
    for name in parts:
        invalid = tunable.is_valid(name, part_params(tunable, config, name), workload, device)
        if invalid:
            return done("infeasible", invalid)
    try:
        with stub_driver(device):
            problem = tunable.make_problem(workload, device="meta")
            calls = tunable.launch(problem, config, part if part and len(tunable.parts) > 1 else None).calls
            used = [compile_call(call, device) for call in calls]
            # The gate runs the whole operation, and on small problems; what that adds is small helper kernels.
            gated = [problem, *(edge for _, edge in tunable.edge_problems(workload, "meta"))]
            for call in (call for each in gated for call in tunable.launch(each, config).calls):
                compile_call(call, device, resources=False)
    except _Infeasible as error:
        return done("infeasible", str(error))
    except Exception as error:  # whatever Triton, LLVM or ptxas make of a config
        return done(*classify(error))
    return done("ok", registers=_worst(used, 0), spills=_worst(used, 1), shared_bytes=_worst(used, 2))


class _Infeasible(Exception):
    """It compiled, but needs more of something than the device has."""


def compile_call(call: KernelCall, device: Device, resources: bool = True) -> tuple[int | None, int | None, int]:
    """Compile one launch; (registers, spilled bytes, shared bytes)."""
    kernel = call.fn.warmup(*call.args, grid=call.grid, **call.options)
    metadata = kernel.metadata
    if metadata.shared > device.shared_memory_per_block:
        raise _Infeasible(f"shared memory: needs {metadata.shared} B, device has {device.shared_memory_per_block} B")
    if (getattr(metadata, "tmem_size", None) or 0) > TMEM_COLUMNS:
        raise _Infeasible(f"tensor memory: needs {metadata.tmem_size} columns, device has {TMEM_COLUMNS}")
    if not resources:
        return (None, None, metadata.shared)
    if device.backend == "cuda":
        return (*_nvidia_usage(kernel.asm["cubin"]), metadata.shared)
    return (*_amd_usage(kernel.asm["amdgcn"]), metadata.shared)


def _worst(used: list[tuple[int | None, int | None, int]], column: int) -> int | None:
    return max((row[column] or 0 for row in used if row[column] is not None), default=None)


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory) a thread, as cuobjdump reads them in a binary."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if not found:
        raise RuntimeError(f"cuobjdump -res-usage printed no resources: {text[-200:]!r}")
    return max(int(row[0]) for row in found), max(max(int(row[1]), int(row[2])) for row in found)


def _amd_usage(assembly: str) -> tuple[int | None, int | None]:
    """(VGPRs, bytes of private segment) a thread, from the metadata at the end of the assembly."""
    found = [re.search(rf"\.{name}:\s*(\d+)", assembly) for name in ("vgpr_count", "private_segment_fixed_size")]
    registers, private = (int(match[1]) if match else None for match in found)
    return registers, private


def classify(error: Exception, otherwise: str = "compile_error") -> tuple[str, str]:
    """(outcome, one-line reason) of what Triton, LLVM, ptxas or a launch raise: too large, or `otherwise`."""
    if type(error).__name__ == "OutOfResources":
        resource, needs, has = (getattr(error, name, "?") for name in ("name", "required", "limit"))
        return "infeasible", f"{resource}: needs {needs}, device has {has}"
    match = re.search(r"uses too much shared data \((0x[0-9a-f]+|\d+) bytes, (0x[0-9a-f]+|\d+) max", str(error))
    if match:
        needs, has = (int(value, 0) for value in match.groups())
        return "infeasible", f"shared memory: needs {needs} B, device has {has} B"
    if type(error).__name__ in COMPILER_ERRORS:
        otherwise = "compile_error"
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    return otherwise, one_line(cause)


COMPILER_ERRORS = ("CompilationError", "CompileTimeAssertionFailure", "UnsupportedLanguageConstruct", "PTXASError")


class _StubDriver:
    """What Triton asks of a driver before there is anything to run: 3.6 to 3.9 use the first three."""

    _numbers: dict[str, int] = {}  # noqa: RUF012 (process-wide on purpose)

    def __init__(self, device: Device) -> None:
        from triton.backends.compiler import GPUTarget

        arch: int | str = int(device.arch.removeprefix("sm_")) if device.backend == "cuda" else device.arch
        self._target = GPUTarget(device.backend, arch, device.warp_size)
        # a JITFunction keeps what it compiled by device number: one number for each architecture
        self._number = self._numbers.setdefault(device.arch, 1000 + len(self._numbers))

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_capability(self, device: int) -> tuple[int, int]:
        return divmod(self._target.arch, 10)


@contextlib.contextmanager
def stub_driver(device: Device) -> Iterator[None]:
    """Make Triton compile for `device` inside the block; nothing can be launched there.

    Raises:
        RuntimeError: Triton's interpreter is on; it replaces the compiler when triton is imported.
    """
    import triton
    from triton.runtime import driver

    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: nothing is compiled in this process")
    before = driver._active
    driver.set_active(_StubDriver(device))
    try:
        yield
    finally:
        driver._active = before


class CompileHandler:
    """The child's side of `CompilePool`: holds the tunable, answers (part, params, workload) with a `Compiled`."""

    def __init__(self, kernel: str, device: Device) -> None:
        import torch

        torch.set_num_threads(1)
        self._tunable = resolve_tunable(kernel)
        self._device = device
        with torch.device("meta"):  # the first tensor there imports for a second: better before the first job
            torch.empty(2).add(1)

    def __call__(self, job: tuple[str, dict[str, Any], dict[str, Any]]) -> Compiled:
        part, params, workload = job
        try:
            return compile_part(self._tunable, part, params, workload, self._device)
        except Exception as error:  # a bug in a tunable's own Python: reported, not fatal
            return Compiled("compile_error", one_line(error))


# A GPU in reach would only cost memory; more threads than one a child would starve the measuring process.
CHILD_ENV: dict[str, str | None] = {
    "TRITON_INTERPRET": None,
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class CompilePool:
    """Compiles ahead on spare CPUs, in children that may die: `submit`, then `result`, in any order.

    Jobs with equal contents are compiled once, whatever their keys. A job that takes longer than `timeout_s`, or whose
    child dies, has outcome "compile_error". Usable as a context manager; threads and children go with `close` or with
    this process.
    """

    def __init__(
        self,
        kernel: str,
        device: Device,
        workers: int | None = None,
        timeout_s: float = JOB_TIMEOUT_S,
        jobs_per_child: int = JOBS_PER_CHILD,
        handler: str = "kerneltune.compile:CompileHandler",
        environment: Mapping[str, str | None] | None = None,
    ) -> None:
        """Args:
        kernel: a registered name or "package.module:NAME".
        workers: child processes; default: all CPUs of this process but two. All start with the first job or with
            `start`, since importing torch takes each of them seconds.
        handler: what answers (part, params, workload) in a child with a `Compiled`.
        environment: where the children's Triton keeps its cache; default: kerneltune's own.
        """
        cache = compile_cache.environment() if environment is None else environment
        self._make_child: Callable[[], Child] = lambda: Child(
            handler, kernel, device, env={**CHILD_ENV, **cache}, nice=5
        )
        self._timeout_s = timeout_s
        self._jobs_per_child = jobs_per_child
        self._jobs: queue.SimpleQueue[tuple[str, Any, Future[Compiled]] | None] = queue.SimpleQueue()
        self._by_job: dict[str, Future[Compiled]] = {}
        self._by_key: dict[Hashable, Future[Compiled]] = {}
        self._children: set[Child] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._begun = threading.Event()
        count = workers or max(1, len(os.sched_getaffinity(0)) - CPUS_KEPT_FREE)
        self._threads = [threading.Thread(target=self._work, daemon=True, name=f"compile-{i}") for i in range(count)]
        for thread in self._threads:
            thread.start()

    def start(self) -> None:
        """Start the children now; else the first job does."""
        self._begun.set()

    def submit(self, key: Hashable, part: str, params: Params, workload: Workload) -> None:
        """Queue one job under a key of the caller's; a key that is already known is left alone."""
        job = (part, dict(params), dict(workload))
        name = json.dumps(job, sort_keys=True, default=str)
        with self._lock:
            if key in self._by_key:
                return
            future = self._by_job.get(name)
            if future is None or future.cancelled():
                future = self._by_job[name] = Future()
                self._jobs.put((name, job, future))
                self._begun.set()
            self._by_key[key] = future

    def ready(self, key: Hashable) -> bool:
        """Whether `result(key)` would return at once."""
        return self._by_key[key].done()

    @property
    def idle(self) -> int:
        """How many children have nothing to do."""
        with self._lock:
            unfinished = sum(not future.done() for future in self._by_job.values())
        return max(len(self._threads) - unfinished, 0)

    def result(self, key: Hashable) -> Compiled:
        """Wait for one job.

        Raises:
            KeyError: never submitted, or discarded.
            UserError: the kernel cannot be imported in a child.
        """
        return self._by_key[key].result()

    def discard(self, keys: Iterable[Hashable]) -> None:
        """Forget keys; a job that no key asks for and that has not begun is not compiled."""
        with self._lock:
            dropped = {id(future): future for key in keys if (future := self._by_key.pop(key, None)) is not None}
            wanted = {id(future) for future in self._by_key.values()}
            for number, future in dropped.items():
                if number not in wanted:
                    future.cancel()

    def close(self) -> None:
        """Kill the children and end; jobs not done are cancelled."""
        with self._lock:
            self._closed = True
            children = list(self._children)
        for future in self._by_job.values():
            future.cancel()
        for _ in self._threads:
            self._jobs.put(None)
        self._begun.set()
        for child in children:
            child.kill()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _work(self) -> None:
        """One thread drives one child at a time."""
        child: Child | None = None
        done = 0
        self._begun.wait()
        try:
            with contextlib.suppress(ChildDied):  # closed before it began
                child = self._start()
            while (job := self._jobs.get()) is not None:
                _, message, future = job
                if not future.set_running_or_notify_cancel():
                    continue
                for last_try in (False, True):
                    if child is not None and (done >= self._jobs_per_child or not child.alive):
                        self._end(child)
                        child = None
                    try:
                        if child is None:
                            child, done = self._start(), 0
                        future.set_result(child.request(message, self._timeout_s))
                        done += 1
                    except ChildDied as error:
                        # No compiler sends itself SIGKILL; somebody else did (the system, short of memory, say).
                        if "SIGKILL" in str(error) and not last_try:
                            continue
                        future.set_result(Compiled("compile_error", f"compiler died: {error}"))
                    except ChildTimeout:
                        reason = f"compiler gave no result in {self._timeout_s:g} s"
                        future.set_result(Compiled("compile_error", reason, compile_s=self._timeout_s))
                    except ChildStartError as error:
                        future.set_exception(UserError(f"a compile process cannot load the kernel: {error}"))
                    except BaseException as error:
                        future.set_exception(error)
                    break
        finally:
            if child is not None:
                self._end(child)

    def _start(self) -> Child:
        with self._lock:
            if self._closed:
                raise ChildDied("the pool was closed")
            child = self._make_child()
            self._children.add(child)
            return child

    def _end(self, child: Child) -> None:
        with self._lock:
            self._children.discard(child)
        child.close()
