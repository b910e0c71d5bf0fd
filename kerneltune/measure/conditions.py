"""Under which conditions a GPU measured: clocks, throttling, heat, other processes, and whether it drifted.

`read` takes a snapshot while the GPU is at work, since an idle one lowers its clocks. A search takes one before and one
after each workload; `warnings` says what between the two makes times doubtful. Everything is read, nothing is ever set.
What NVML does not tell (no library, no driver, a virtual machine) is None or empty, and then nothing is said of it.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kerneltune.measure.timing import Flush

SM_CLOCK_CHANGE = 0.05  # of the SM clock; memory clocks have a few steps, so any change counts
# A GPU's own read of its DRAM repeats within 0.3 %; a product of matrices runs at the power limit and varies by more.
DRIFT = {"read": 0.03, "matmul": 0.10}
THROTTLED = 0.05  # of the time between the snapshots
FREAK_SPREADS = 5.0  # times the p20-p80 spread away from the median,
FREAK_SHARE = 0.10  # and this share of the median
FREAKS_AS_USUAL = 0.01  # of the readings: an H200 that does nothing else has up to 0.6 %
PROBE_SIZE = 4096  # of the matrix product
PROBE_SAMPLES = 9
LOAD_FLUSHES = 250  # of 0.12 ms on an H200: the GPU is at work while NVML answers

# NVML's names of the reasons why a clock is lower than it might be, by bit (nvml.h, nvmlClocksEventReason*). An idle
# GPU and a clock chosen by its owner are no reasons to doubt a time.
REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}


@dataclass(frozen=True)
class Snapshot:
    """One moment of a GPU."""

    at_s: float = 0.0  # of a clock that only moves forward
    sm_mhz: float | None = None
    memory_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    slowed_by: tuple[str, ...] = ()  # at this moment
    slowed_s: dict[str, float] = field(default_factory=dict)  # "power", "thermal": seconds so far, as NVML counts them
    others: int | None = None  # compute processes on the GPU that are not this search's
    probes_us: dict[str, float] = field(default_factory=dict)  # "read", "matmul": fixed work, timed now

    def to_dict(self) -> dict[str, Any]:
        """As records keep it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Snapshot:
        """The inverse; unknown fields are left out."""
        known = {name: data[name] for name in (f.name for f in fields(cls)) if name in data}
        return cls(**known | {"slowed_by": tuple(known.get("slowed_by", ()))})


def warnings(before: Snapshot, after: Snapshot, freak_readings: int = 0, samples: int = 0) -> list[str]:
    """What happened between two snapshots that makes times doubtful, one line each; [] if nothing did."""
    return [
        *_clock_changes(before, after),
        *_throttling(before, after),
        *_company(before, after),
        *_drift(before, after),
        *_freaks(freak_readings, samples),
    ]


def freaks(samples_us: Sequence[float]) -> int:
    """Readings that are far from the rest: by five times the p20-p80 spread and by a tenth of the median."""
    from kerneltune.measure.timing import quantile

    middle = statistics.median(samples_us)
    spread = quantile(samples_us, 0.8) - quantile(samples_us, 0.2)
    far = max(FREAK_SPREADS * spread, FREAK_SHARE * middle)
    return sum(abs(sample - middle) > far for sample in samples_us)


def _clock_changes(before: Snapshot, after: Snapshot) -> list[str]:
    found = []
    for name, first, last, most in (
        ("SM", before.sm_mhz, after.sm_mhz, SM_CLOCK_CHANGE),
        ("memory", before.memory_mhz, after.memory_mhz, 0.0),
    ):
        if first and last and abs(last - first) / first > most:
            found.append(f"the {name} clock went from {first:.0f} to {last:.0f} MHz; times may not repeat")
    return found


def _throttling(before: Snapshot, after: Snapshot) -> list[str]:
    elapsed = after.at_s - before.at_s
    found = []
    for name in after.slowed_s:
        slowed = after.slowed_s[name] - before.slowed_s.get(name, after.slowed_s[name])
        if elapsed > 0 and slowed / elapsed > THROTTLED:
            found.append(f"the GPU was slowed down for {min(slowed / elapsed, 1.0):.0%} of the time ({name} limit)")
    now = dict.fromkeys((*before.slowed_by, *after.slowed_by))
    if reasons := [reason for reason in now if not _counted(reason, found, after)]:
        heat = f" at {after.temperature_c:.0f} C" if after.temperature_c is not None else ""
        found.append(f"the GPU held its clocks down ({', '.join(reasons)}){heat}")
    return found


def _counted(reason: str, found: Sequence[str], after: Snapshot) -> bool:
    """Whether the counters tell more than this flag: of power they do, since a moment at the limit is nothing."""
    if reason == "power cap" and "power" in after.slowed_s:
        return True
    return any(name in reason and any(name in text for text in found) for name in after.slowed_s)


def _company(before: Snapshot, after: Snapshot) -> list[str]:
    most = max(before.others or 0, after.others or 0)
    if not most:
        return []
    return [f"{most} other process{'es' if most > 1 else ''} on this GPU; times may be too long (run on an idle GPU)"]


def _drift(before: Snapshot, after: Snapshot) -> list[str]:
    found = []
    for name, most in DRIFT.items():
        first, last = before.probes_us.get(name), after.probes_us.get(name)
        if first and last and abs(last / first - 1) > most:
            what = {"read": "reading memory", "matmul": "multiplying matrices"}[name]
            how = "slower" if last > first else "faster"
            found.append(f"{what} became {abs(last / first - 1):.0%} {how} from start to end; times may not repeat")
    return found


def _freaks(count: int, samples: int) -> list[str]:
    if count <= FREAKS_AS_USUAL * samples:
        return []
    return [f"{count} of {samples} readings are far from the rest; medians stand, but something disturbed the GPU"]


def read(index: int, flush: Flush) -> Snapshot:
    """A snapshot of torch's GPU `index`, taken at work; about 0.1 s. Must be called in the process that measures."""
    import torch

    probes = {"read": _median_us(flush, flush), "matmul": _matmul_us(flush)}
    for _ in range(LOAD_FLUSHES):
        flush()
    told = read_nvml(index)
    torch.cuda.synchronize()
    return Snapshot(at_s=time.monotonic(), probes_us=probes, **told)


def read_nvml(index: int) -> dict[str, Any]:
    """The fields of a snapshot that NVML knows; {} where it cannot be asked."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library or no driver: an AMD GPU, say
        return {}
    readers: dict[str, Callable[[Any], Any]] = {
        "sm_mhz": lambda h: float(pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_SM)),
        "memory_mhz": lambda h: float(pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_MEM)),
        "slowed_by": lambda h: slowed_by(_reasons(pynvml)(h)),
        "temperature_c": lambda h: float(pynvml.nvmlDeviceGetTemperature(h, pynvml.NVML_TEMPERATURE_GPU)),
        "power_w": lambda h: round(pynvml.nvmlDeviceGetPowerUsage(h) / 1000, 1),
        "power_limit_w": lambda h: round(pynvml.nvmlDeviceGetEnforcedPowerLimit(h) / 1000, 1),
        "slowed_s": lambda h: {
            "power": pynvml.nvmlDeviceGetViolationStatus(h, pynvml.NVML_PERF_POLICY_POWER).violationTime / 1e9,
            "thermal": pynvml.nvmlDeviceGetViolationStatus(h, pynvml.NVML_PERF_POLICY_THERMAL).violationTime / 1e9,
        },
        "others": lambda h: other_processes([p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(h)]),
    }
    found: dict[str, Any] = {}
    try:
        handle = _nvml_handle(index)
        for name, ask in readers.items():
            # A virtual machine may not be told everything, and versions of the binding differ in what they have.
            with contextlib.suppress(pynvml.NVMLError, AttributeError, TypeError):
                found[name] = ask(handle)
    except pynvml.NVMLError:
        pass
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return found


def _reasons(pynvml: Any) -> Callable[[Any], int]:
    """The call that newer bindings know by another name."""
    old: Callable[[Any], int] | None = getattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None)
    return old or pynvml.nvmlDeviceGetCurrentClocksEventReasons


def slowed_by(bits: int) -> tuple[str, ...]:
    """The reasons among NVML's bits that lower a clock against its owner's will."""
    return tuple(text for bit, text in REASONS.items() if bits & bit)


def other_processes(pids: Sequence[int]) -> int:
    """How many of the processes on the GPU are neither this one nor its parent.

    In a container NVML may name processes by their numbers outside; then one of them is taken for this process.
    """
    ours = {os.getpid(), os.getppid()}
    distinct = set(pids)
    return len(distinct - ours) if distinct & ours else max(0, len(distinct) - 1)


def _nvml_handle(index: int) -> Any:
    """NVML's handle of torch's GPU `index`: by UUID, since CUDA_VISIBLE_DEVICES renumbers torch's."""
    import pynvml
    import torch

    uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
    if uuid:
        with contextlib.suppress(pynvml.NVMLError):
            return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def _matmul_us(flush: Flush) -> float:
    import torch

    a = torch.ones(PROBE_SIZE, PROBE_SIZE, device="cuda", dtype=torch.float16)
    c = torch.empty_like(a)
    return _median_us(lambda: torch.matmul(a, a, out=c), flush)


def _median_us(call: Callable[[], object], flush: Flush) -> float:
    from kerneltune.measure.timing import time_calls

    return round(time_calls(call, flush=flush, samples=PROBE_SAMPLES).time_us, 2)
