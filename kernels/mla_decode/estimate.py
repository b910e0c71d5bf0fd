"""How long one MLA decode launch should take: occupancy, latency, bandwidth and matrix rate of its tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kerneltune.kernels.device import Device
from kerneltune.kernels.estimate import (
    LATENCY_US,
    MMA_EFFICIENCY,
    WGMMA_EFFICIENCY,
    blocks_per_sm,
    combined,
    spilling,
    waves,
)
from kerneltune.kernels.mla_decode.config import HOPPER_TILE, Config, hopper_groups, shared_bytes

ELEMENT_BYTES = 2
OTHER_REGISTERS = 70  # of a thread, beside its part of the output tile
SHARED_READS = (
    2.5  # blocks of one request that read the same keys at once share them through the cache, at most so many
)
SOFTMAX_US = 0.4  # of one tile, one block alone: two reductions and the waits between the two products
SHARED_COPY_RATIO = 12  # shared memory's bandwidth over an SM's share of device memory's
COMBINE_US = 3.5  # to launch and run an empty merge
MERGE_US = 0.02  # to merge one more split
HOPPER_EFFICIENCY = 0.75  # of the matrix rate, in the loop over tiles
HOPPER_START_US = 10.0  # the first tile, with cold instructions, and the last output
SPREAD_MEAN = 0.75  # lengths spread over kv_len / 2 ... kv_len


def estimate_us(config: Config, workload: Mapping[str, Any], device: Device, read_gbps: float, tflops: float) -> float:
    """Microseconds of split kernel and combine, launch cost left out.

    Args:
        read_gbps, tflops: the ceilings of the device.
    """
    if config.variant == "hopper":
        return _hopper_us(config, workload, device, read_gbps, tflops)
    sm_bytes_per_us = read_gbps * 1e3 / device.sm_count
    sm_flops_per_us = tflops * 1e6 / device.sm_count
    latent = workload["kv_lora_rank"]
    width = latent + workload["qk_rope_head_dim"]
    rows = workload["s_q"] * workload["heads"] // workload["h_kv"]
    row_tiles = -(-rows // config.BLOCK_H)
    requests = workload["batch"] * workload["h_kv"]
    key_tiles = -(-workload["kv_len"] // config.BLOCK_N)
    tiles = -(-key_tiles // config.num_splits)
    blocks = row_tiles * requests * -(-key_tiles // tiles)

    accumulator = config.BLOCK_H * latent / (device.warp_size * config.num_warps)
    registers = accumulator + OTHER_REGISTERS
    slots = device.sm_count * blocks_per_sm(device, shared_bytes(config, workload, device), registers, config.num_warps)
    resident = min(blocks, slots)
    per_sm = max(1.0, resident / device.sm_count)
    busy_sms = min(1.0, resident / device.sm_count)

    tile_bytes = config.BLOCK_N * width * ELEMENT_BYTES
    tile_flops = 2 * config.BLOCK_H * config.BLOCK_N * (width + latent)
    wide = config.BLOCK_H >= 64
    efficiency = WGMMA_EFFICIENCY if wide else MMA_EFFICIENCY
    if config.BLOCK_N < 32:
        efficiency *= 0.6
    if wide and config.num_warps < 8:
        efficiency *= 0.7  # 64 rows give two warpgroups a half of the output each
    matrix = tile_flops / (sm_flops_per_us * efficiency) * spilling(registers)

    bandwidth = tile_bytes * per_sm * busy_sms / sm_bytes_per_us / min(row_tiles, SHARED_READS)
    in_flight = max(config.num_stages - 1, 0.5)
    latency = (LATENCY_US + tile_bytes * per_sm / (3 * sm_bytes_per_us)) / in_flight
    copies = tile_bytes / (SHARED_COPY_RATIO * sm_bytes_per_us) * 8 / config.num_warps
    alone = matrix + (SOFTMAX_US + copies) * spilling(registers)
    if config.num_stages == 1:
        alone += latency
    tile_us = combined(bandwidth, latency, matrix * per_sm, alone)

    if workload["lengths"] == "equal":
        turns = waves(blocks, slots)
    else:  # a block of the longest request, and what the others keep the GPU busy with
        turns = combined(1.0, SPREAD_MEAN * blocks / slots + 0.5)
    total = turns * (tiles * tile_us + 2 * LATENCY_US)
    if config.num_splits > 1:
        partial_bytes = requests * rows * config.num_splits * latent * 4 * 2
        total += COMBINE_US + MERGE_US * config.num_splits + partial_bytes / (read_gbps * 1e3)
    return total


def _hopper_us(config: Config, workload: Mapping[str, Any], device: Device, read_gbps: float, tflops: float) -> float:
    """Microseconds of the persistent variant: the longest share of the tiles, each bound by matrix rate or memory."""
    rows = workload["s_q"] * workload["heads"]
    groups, row_tiles = hopper_groups(rows, device)
    width = workload["kv_lora_rank"] + workload["qk_rope_head_dim"]
    tiles = workload["batch"] * (-(-workload["kv_len"] // HOPPER_TILE) + config.piece_cost)
    flops = 2 * HOPPER_TILE * HOPPER_TILE * (width + workload["kv_lora_rank"])
    matrix = flops * device.sm_count / (tflops * 1e6 * HOPPER_EFFICIENCY)
    memory = HOPPER_TILE * width * ELEMENT_BYTES * min(groups, tiles) / (read_gbps * 1e3)
    parts = 2 * min(groups, tiles) * row_tiles * HOPPER_TILE * workload["kv_lora_rank"] * 4
    return -(-tiles // groups) * combined(matrix, memory) + HOPPER_START_US + COMBINE_US + parts / (read_gbps * 1e3)
