"""The parameters of one MLA decode launch: what they mean, which can run, and a decent choice for any GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from kerneltune.kernels.device import Device

WARP_COUNTS = (1, 2, 4, 8, 16)
SCRATCH_SHARE = 4  # partial results may take 1/4 of the device's memory
# What a config need not name, and what it then means.
OPTIONAL: dict[str, int | str] = {"variant": "split_kv", "piece_cost": 0}


@dataclass(frozen=True)
class Config:
    """One point of the search space."""

    BLOCK_H: int  # query rows (heads x s_q of one KV head) of a tile
    BLOCK_N: int  # keys of a tile
    num_splits: int  # parts that each request's keys are divided into; 1: no combine launch
    num_warps: int  # hopper: of one of its two warpgroups
    num_stages: int  # depth of the software pipeline over tiles of keys
    variant: str = "split_kv"  # or "hopper"
    piece_cost: int = 0  # hopper: tiles of keys that it costs to start on a request, when work is divided

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Config:
        """The inverse of `to_dict`.

        Raises:
            ValueError: a key is missing or unknown, or a value of the wrong type.
        """
        names = [field.name for field in fields(cls)]
        needed = [name for name in names if name not in OPTIONAL]
        whole = {**OPTIONAL, **config}
        if sorted(whole) != sorted(names) or any(type(whole[name]) is not int for name in names if name != "variant"):
            raise ValueError(
                f"config of mla-decode must hold the integers {', '.join(needed)} "
                f"(and may hold variant and piece_cost): got {dict(config)}"
            )
        if whole["variant"] not in ("split_kv", "hopper"):
            raise ValueError(f"variant of mla-decode must be split_kv or hopper: got {whole['variant']!r}")
        return cls(**whole)

    def to_dict(self) -> dict[str, int | str]:
        """As tables and records store it: without what need not be named."""
        return {name: value for name, value in asdict(self).items() if value != OPTIONAL.get(name)}


# Tiles to choose from, the best first, by the least number of rows that they are meant for. Measured on an H200, bf16:
# 128 heads want 64 rows (32 rows: 3 % slower at batch 128), 16 heads want 64 keys (32 keys: 4 % slower) and, with one
# block on an SM, 8 warps and two tiles in flight: 151 us at batch 128 x 4096 against 158 with 4 warps and two blocks,
# 24 us at 1 x 32768 against 30.
TILES = {
    33: (Config(64, 64, 1, 8, 2), Config(64, 32, 1, 8, 2), Config(32, 64, 1, 4, 2), Config(32, 32, 1, 4, 2)),
    17: (Config(32, 64, 1, 4, 2), Config(32, 32, 1, 4, 2)),
    1: (
        Config(16, 64, 1, 8, 3),
        Config(16, 64, 1, 4, 2),
        Config(16, 32, 1, 4, 3),
        Config(16, 32, 1, 4, 2),
        Config(16, 16, 1, 4, 1),
    ),
}
MAX_SPLITS = 128
KEYS_PER_SPLIT = 128  # a shorter split costs more to start and to merge than it saves
# Costs in the time of one tile of keys, fitted to 864 measured configs of 4 workloads on an H200.
START_COST = 4.0  # to start a program and fill its pipeline
COMBINE_COST = 2.0  # to launch the combine
MERGE_COST = 1 / 64  # to merge one more split


# What hopper.py is written for. Shared memory: Q, two stages of KV, and the numbers that go between the warpgroups.
HOPPER_TILE = 64
HOPPER_PAGES = (16, 32, 64, 128)
HOPPER_SHARED_BYTES = 227_488
HOPPER = Config(HOPPER_TILE, HOPPER_TILE, 1, 4, 2, "hopper", 4)
MAX_HOPPER_BATCH = 4096  # each program adds up the lengths of all requests


def default_config(workload: Mapping[str, Any], device: Device, portable: bool = False) -> Config:
    """A decent config for any GPU, always valid there: the variant made for it, or else the largest tile that fits,
    split to fill the GPU evenly (and always so if `portable`)."""
    rows = workload["s_q"] * workload["heads"] // workload["h_kv"]
    if not portable and is_valid(HOPPER, workload, device) is None and _suits_hopper(rows, workload, device):
        return HOPPER
    for least_rows, tiles in TILES.items():
        for tile in tiles if rows >= least_rows else ():
            if is_valid(tile, workload, device) is None and _suits(tile, workload, device):
                return replace(tile, num_splits=_default_splits(tile, rows, workload, device))
    return TILES[1][-1]


def _suits_hopper(rows: int, workload: Mapping[str, Any], device: Device) -> bool:
    """Whether the variant is faster here than the portable one, by 24 workloads on an H200 (docs/mla.md): from 32 rows
    on, or with lengths that differ, which it divides evenly; if there are two tiles of keys for each group."""
    groups, _ = hopper_groups(rows, device)
    differ = workload.get("lengths", "equal") != "equal" and workload["batch"] >= 32
    return (rows >= 32 or differ) and workload["batch"] * workload["kv_len"] >= 2 * HOPPER_TILE * groups


def _suits(tile: Config, workload: Mapping[str, Any], device: Device) -> bool:
    """Whether this tile is a good default here, by what off-GPU compiles show."""
    if device.backend == "hip":  # 64 keys, or a third stage, need more than the 64 KB of a gfx942
        return tile.BLOCK_H <= 32 and tile.BLOCK_N <= 32 and tile.num_stages <= 2
    if device.arch == "sm_100" and tile.BLOCK_H >= 64:  # P and Q pass through buffers of their own: 287 KB for 64 x 64
        return tile.BLOCK_N <= 32
    if tile.BLOCK_H == 16:  # a page index and a 64-bit address for each key: 64 keys spill 240 B in the loop
        return tile.BLOCK_N <= 32 or workload["page_size"] % tile.BLOCK_N == 0
    return True


def _default_splits(tile: Config, rows: int, workload: Mapping[str, Any], device: Device) -> int:
    """The number of splits that a simple model of waves over the GPU gives the least time."""
    programs = -(-rows // tile.BLOCK_H) * workload["batch"] * workload["h_kv"]
    # 1 KB of an SM's shared memory is the system's, once for each block; a block of 4 warps with 255 registers a
    # thread takes half of an SM's register file.
    by_shared = (device.shared_memory_per_block + 1024) // (shared_bytes(tile, workload, device) + 1024)
    slots = device.sm_count * max(1, min(by_shared, 8 // tile.num_warps))
    key_tiles = -(-workload["kv_len"] // tile.BLOCK_N)

    def cost(splits: int) -> float:
        waves = -(-programs * splits // slots)
        combine = COMBINE_COST + MERGE_COST * splits if splits > 1 else 0.0
        return waves * (-(-key_tiles // splits) + START_COST) + combine

    most = max(1, min(MAX_SPLITS, workload["kv_len"] // KEYS_PER_SPLIT))
    fitting = [n for n in range(1, most + 1) if is_valid(replace(tile, num_splits=n), workload, device) is None]
    return min(fitting, key=cost)


def is_valid(config: Config, workload: Mapping[str, Any], device: Device) -> str | None:
    """None, or why this config cannot run: the one statement of the constraints, for the space and for the launcher."""
    if config.variant == "hopper":
        return _hopper_is_valid(config, workload, device)
    if config.piece_cost:
        return f"piece_cost {config.piece_cost}: only variant hopper has one"
    for name in ("BLOCK_H", "BLOCK_N"):
        size = getattr(config, name)
        if size < 16 or size & (size - 1):
            return f"{name} {size}: must be a power of two, at least 16"
    if config.num_warps not in WARP_COUNTS:
        return f"num_warps {config.num_warps}: must be one of {', '.join(map(str, WARP_COUNTS))}"
    if config.num_warps * device.warp_size > 1024:
        return f"num_warps {config.num_warps}: {device.arch} runs at most {1024 // device.warp_size} in a block"
    if config.num_stages < 1 or config.num_splits < 1:
        return f"num_stages {config.num_stages} and num_splits {config.num_splits}: must be at least 1"
    needed = shared_bytes(config, workload, device)
    if needed > device.shared_memory_per_block:
        return f"shared memory: needs {needed} B, device has {device.shared_memory_per_block} B"
    scratch = scratch_bytes(config, workload)
    if scratch > device.memory_bytes // SCRATCH_SHARE:
        return f"scratch: num_splits {config.num_splits} needs {scratch} B of {device.memory_bytes} B of device memory"
    return None


def _hopper_is_valid(config: Config, workload: Mapping[str, Any], device: Device) -> str | None:
    fixed = {"BLOCK_H": HOPPER_TILE, "BLOCK_N": HOPPER_TILE, "num_splits": 1, "num_warps": 4, "num_stages": 2}
    sizes = {"h_kv": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    if device.arch != "sm_90":
        return f"variant hopper: for sm_90, the device is {device.arch}"
    for name, value in fixed.items():
        if getattr(config, name) != value:
            return f"{name} {getattr(config, name)}: variant hopper has {value}"
    for name, value in sizes.items():
        if workload[name] != value:
            return f"{name} {workload[name]}: variant hopper is for {value}"
    if workload["page_size"] not in HOPPER_PAGES:
        return f"page_size {workload['page_size']}: variant hopper takes {', '.join(map(str, HOPPER_PAGES))}"
    if workload["batch"] > MAX_HOPPER_BATCH:
        return f"batch {workload['batch']}: variant hopper takes at most {MAX_HOPPER_BATCH}"
    if not 1 <= config.piece_cost <= 64:  # nothing at all for an empty request would leave it to no one
        return f"piece_cost {config.piece_cost}: must be 1 to 64"
    if device.shared_memory_per_block < HOPPER_SHARED_BYTES:
        return f"shared memory: needs {HOPPER_SHARED_BYTES} B, device has {device.shared_memory_per_block} B"
    return None


def hopper_groups(rows: int, device: Device) -> tuple[int, int]:
    """(groups, row_tiles): the programs of hopper.py, one on each SM; the row tiles of a group share its keys."""
    row_tiles = -(-rows // HOPPER_TILE)
    return max(1, device.sm_count // row_tiles), row_tiles


def scratch_bytes(config: Config, workload: Mapping[str, Any]) -> int:
    """Device memory that the partial results take: float32, one row of output and one lse for each split."""
    if config.num_splits == 1:
        return 0
    rows = workload["batch"] * workload["s_q"] * workload["heads"]
    return 4 * rows * config.num_splits * (workload["kv_lora_rank"] + 1)


def shared_bytes(config: Config, workload: Mapping[str, Any], device: Device) -> int:
    """Shared memory that the main kernel needs: Q, P, the buffers of the pipeline; or the result on its way out.

    With two or more stages, this is what Triton 3.6 and 3.9 report on NVIDIA (64 rows on sm_100 aside), except where
    they add up to 2 KB of their own. Elsewhere they need more, never less, and the compiler has the last word. The
    tests compare.
    """
    if config.variant == "hopper":
        return HOPPER_SHARED_BYTES
    element = 2  # bytes of bf16 and fp16
    latent, rope = block_width(workload["kv_lora_rank"]), block_width(workload["qk_rope_head_dim"])
    q = config.BLOCK_H * (latent + rope) * element
    kv = config.BLOCK_N * (latent + rope) * element
    if device.backend == "hip":  # Q stays in registers, and some of the KV may
        return config.BLOCK_N * latent * element
    if device.arch == "sm_100" and config.BLOCK_H >= 64:
        return kv
    p = config.BLOCK_H * config.BLOCK_N * element
    if not _hopper_matrix_unit(config, device):
        in_registers = config.num_stages == 1 or config.BLOCK_H == config.BLOCK_N == 16
        return q + max(1, config.num_stages - 1) * kv + (0 if in_registers else p)
    # Hopper's matrix unit reads a buffer while the next is filled; with warps side by side P changes hands.
    pipeline = (
        q + config.num_stages * kv + (p if config.num_warps * 16 > config.BLOCK_H and config.num_stages > 1 else 0)
    )
    return max(pipeline, config.BLOCK_H * latent * 4)


def _hopper_matrix_unit(config: Config, device: Device) -> bool:
    return device.arch == "sm_90" and config.BLOCK_H >= 64 and config.num_warps % 4 == 0


def block_width(width: int) -> int:
    """The block that holds `width` columns: a power of two, and at least the 16 of a matrix instruction."""
    return max(16, 1 << (width - 1).bit_length())
