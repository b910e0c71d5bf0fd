"""What a kernel's running time is made of, before anything is measured: the arithmetic that its estimates share.

An estimate orders the configs of a space, so that a search starts with those that occupancy and the roofline favour.
It decides nothing else: no table, no report and no launch uses it. The constants are properties of the hardware, taken
from public microbenchmarks and rounded, not fitted to any tuning record.
"""

from __future__ import annotations

from kerneltune.kernels.device import Device

LATENCY_US = 1.6  # from asking for a tile in device memory to having it, on a busy GPU (0.6 to 0.8 when idle)
L2_PER_DRAM = 2.2  # bandwidth of the last-level cache over that of device memory
REGISTERS_PER_SM = 65536
REGISTERS_PER_THREAD = 255
THREADS_PER_SM = 2048
RESERVED_SHARED_BYTES = 1024  # the system's share of a block's shared memory
WGMMA_EFFICIENCY = 0.8  # of the matrix ceiling: Hopper's warpgroup instructions; the older ones reach about half
MMA_EFFICIENCY = 0.45
_SHARPNESS = 4


def combined(*times_us: float) -> float:
    """The time of things that overlap: a little more than the longest (the 4-norm)."""
    return float(sum(time**_SHARPNESS for time in times_us) ** (1 / _SHARPNESS))


def blocks_per_sm(device: Device, shared_bytes: float, registers: float, num_warps: int) -> int:
    """How many blocks an SM holds at once, at least 1."""
    threads = num_warps * device.warp_size
    by_shared = (device.shared_memory_per_block + RESERVED_SHARED_BYTES) // (shared_bytes + RESERVED_SHARED_BYTES)
    by_registers = REGISTERS_PER_SM // (min(registers, REGISTERS_PER_THREAD) * threads)
    return max(1, int(min(by_shared, by_registers, THREADS_PER_SM // threads)))


def spilling(registers: float) -> float:
    """How much longer the arithmetic takes where a thread wants more registers than there are."""
    return 1 + max(0.0, registers - REGISTERS_PER_THREAD) / 64


def waves(blocks: float, slots: int) -> float:
    """How often the GPU is filled: whole waves while they are few, half a wave of tail when they are many."""
    ratio = blocks / slots
    return float(max(1, -(-blocks // slots))) if ratio < 6 else ratio + 0.5
