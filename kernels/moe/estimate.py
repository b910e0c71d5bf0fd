"""How long one grouped GEMM of the fused MoE should take: occupancy, latency, bandwidth, matrix rate of its tiles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kerneltune.kernels.device import Device
from kerneltune.kernels.estimate import (
    L2_PER_DRAM,
    LATENCY_US,
    MMA_EFFICIENCY,
    WGMMA_EFFICIENCY,
    blocks_per_sm,
    combined,
    spilling,
    waves,
)

OTHER_REGISTERS = 50  # of a thread, beside its part of the accumulator
STEP_US = 0.1  # of one step along K, one block alone
REREAD = 0.3  # of an expert's weights, by each further block of its rows: the rest is still in the cache
GROUPED_REREAD = 0.08  # where the row blocks of an expert follow each other


def grouped_gemm_us(
    params: Mapping[str, Any],
    *,
    tile_columns: int,
    columns: int,
    depth: int,
    rows: float,
    experts: int,
    weight_bytes: float,
    device: Device,
    read_gbps: float,
    tflops: float,
) -> float:
    """Microseconds of one grouped GEMM, launch cost left out.

    Args:
        params: BLOCK_M, BLOCK_K, GROUP_M, num_warps, num_stages.
        tile_columns: rows of weights in a tile; columns: of an expert's result, in the same unit.
        rows: tokens x top_k that meet these experts, spread evenly.
        weight_bytes: of an element, activations alike.
    """
    block_m, block_k = params["BLOCK_M"], params["BLOCK_K"]
    warps, stages = params["num_warps"], params["num_stages"]
    sm_flops_per_us = tflops * 1e6 / device.sm_count
    l2_per_sm = L2_PER_DRAM * read_gbps * 1e3 / device.sm_count
    mean_rows = rows / experts
    active = experts * (1 - math.exp(-mean_rows))
    partly_filled = 0.5 * active if mean_rows > block_m / 2 else 0.0
    row_blocks = max(active, partly_filled + rows / block_m)
    blocks = row_blocks * -(-columns // tile_columns)
    steps = -(-depth // block_k)

    wgmma = block_m >= 64 and warps % 4 == 0
    tile_bytes = (block_m + tile_columns) * block_k * weight_bytes
    tile_flops = 2 * block_m * tile_columns * block_k
    threads = device.warp_size * warps
    operands = 0.0 if wgmma else (block_m + tile_columns) * block_k / threads / 8
    registers = block_m * tile_columns / threads + operands + OTHER_REGISTERS
    shared = tile_bytes * max(stages - (0 if wgmma else 1), 1)
    slots = device.sm_count * blocks_per_sm(device, shared, registers, warps)
    resident = min(blocks, slots)
    per_sm = max(1.0, resident / device.sm_count)
    busy_sms = min(1.0, resident / device.sm_count)

    efficiency = WGMMA_EFFICIENCY if wgmma else MMA_EFFICIENCY
    efficiency *= min(1.0, 0.5 + tile_columns / 256) * min(1.0, 0.6 + block_m / 160)
    matrix = tile_flops / (sm_flops_per_us * efficiency) * spilling(registers)
    cache = tile_bytes * per_sm * busy_sms / l2_per_sm
    latency = (LATENCY_US + tile_bytes * per_sm / l2_per_sm) / max(stages - 1, 0.5)
    step_us = combined(cache, latency, matrix * per_sm, matrix + STEP_US * spilling(registers))

    again = (row_blocks / active - 1) * (REREAD if params["GROUP_M"] == 1 else GROUPED_REREAD)
    dram = active * columns * depth * weight_bytes * (1 + again) / (read_gbps * 1e3)
    turns = waves(blocks, slots)
    return combined(turns * steps * step_us, dram) + turns * LATENCY_US
