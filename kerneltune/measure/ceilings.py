"""Measure what this GPU can do: DRAM read and copy rates, tensor-core rates, the cost of an empty graph.

None of it from a datasheet. The read rate is the best of several reading kernels (4.4 to 4.55 TB/s on an H200,
depending on the kernel). Launches are not captured: a copy in a CUDA graph is a memcpy node and reaches two thirds of
the rate. The tensor-core rate is cold: single products after short pauses; back to back the board meets its power limit
and the rate falls by 13 %. Takes about 5 s; needs up to 4 GiB of free memory.
"""

from __future__ import annotations

import datetime
import statistics
import time

import torch
import triton
import triton.language as tl

from kerneltune import device as devices
from kerneltune.kernels.device import current_device
from kerneltune.measure import timing
from kerneltune.roofline.model import Ceilings

READ_BYTES = 4 << 30  # 70 x the L2 of an H200
COPY_BYTES = 2 << 30
MATMUL_SIZE = 8192
MATMUL_SAMPLES = 10
MATMUL_PAUSE_S = 0.05
SAMPLES = 11
# (BLOCK, num_warps, programs per SM): the best differs from GPU to GPU and from day to day
READ_CONFIGS = ((1024, 4, 16), (2048, 4, 16), (4096, 4, 8), (8192, 4, 4), (8192, 8, 2), (8192, 8, 4))


@triton.jit
def read_sum(x_ptr, out_ptr, num_blocks, BLOCK: tl.constexpr):
    """out[program] = sum of every `num_programs`-th block of x; x: int32, a multiple of BLOCK long."""
    pid = tl.program_id(0)
    acc = tl.zeros([BLOCK], dtype=tl.int32)
    for block in range(pid, num_blocks, tl.num_programs(0)):
        acc += tl.load(x_ptr + tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(out_ptr + pid, tl.sum(acc, axis=0))


def measure_ceilings(device_index: int = 0) -> Ceilings:
    """Measure GPU `device_index`; it must be idle otherwise.

    Raises:
        RuntimeError: no GPU; or a reading kernel gave a wrong sum.
    """
    torch.cuda.set_device(device_index)
    described = current_device(device_index)
    flush = timing.Flush(described.l2_bytes)
    timing.warm_clocks()
    return Ceilings(
        device=described.name,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        dram_read_gbps=round(read_gbps(described.sm_count, flush), 1),
        dram_copy_gbps=round(copy_gbps(flush), 1),
        tflops={name: round(matmul_tflops(dtype, flush), 1) for name, dtype in _DTYPES.items()},
        launch_us=round(timing.empty_graph_us(flush), 2),
        versions=devices.versions(device_index),
    )


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def read_gbps(sm_count: int, flush: timing.Flush) -> float:
    """The best rate at which any of the reading kernels (or torch's amax) reads DRAM, in GB/s."""
    size = _fitting_bytes(READ_BYTES, copies=1)
    x = torch.randint(-(2**31), 2**31 - 1, (size // 4,), dtype=torch.int32, device="cuda")
    out = torch.empty(sm_count * max(per_sm for _, _, per_sm in READ_CONFIGS), dtype=torch.int32, device="cuda")
    expected = int(x.sum(dtype=torch.int64)) % 2**32
    best = 0.0
    for block, num_warps, per_sm in READ_CONFIGS:
        grid = (sm_count * per_sm,)

        def read(grid: tuple[int] = grid, block: int = block, num_warps: int = num_warps) -> None:
            read_sum[grid](x, out, x.numel() // block, BLOCK=block, num_warps=num_warps)

        read()
        if int(out[: grid[0]].sum(dtype=torch.int64)) % 2**32 != expected:
            raise RuntimeError(f"the reading kernel (BLOCK={block}, num_warps={num_warps}) gave a wrong sum")
        best = max(best, size / timing.time_calls(read, flush=flush, samples=SAMPLES).time_us / 1e3)
    sink = torch.empty((), dtype=torch.int32, device="cuda")
    amax = timing.time_calls(lambda: torch.amax(x, 0, out=sink), flush=flush, samples=SAMPLES)
    return max(best, size / amax.time_us / 1e3)


def copy_gbps(flush: timing.Flush) -> float:
    """The rate of torch's copy from one buffer to another, bytes read and written together, in GB/s."""
    size = _fitting_bytes(COPY_BYTES, copies=2)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = timing.time_calls(lambda: target.copy_(source), flush=flush, samples=SAMPLES)
    return 2 * size / copy.time_us / 1e3


def matmul_tflops(dtype: torch.dtype, flush: timing.Flush) -> float:
    """The rate of a large square matrix product of random data, each after a pause, in TFLOP/s."""
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=dtype) for _ in range(2))
    c = torch.empty_like(a)
    times_us = []
    for _ in range(MATMUL_SAMPLES):
        time.sleep(MATMUL_PAUSE_S)
        times_us.append(
            timing.time_calls(lambda: torch.matmul(a, b, out=c), flush=flush, samples=1, warm_s=0.0).time_us
        )
    return 2 * MATMUL_SIZE**3 / statistics.median(times_us) / 1e6


def _fitting_bytes(wanted: int, copies: int) -> int:
    """`wanted`, or the largest half, quarter, ... of it that leaves memory to spare."""
    free, _ = torch.cuda.mem_get_info()
    while wanted * copies * 1.25 > free:
        wanted //= 2
    return wanted
