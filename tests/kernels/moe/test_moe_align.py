"""The alignment against a naive one in Python."""

from __future__ import annotations

import pytest
import torch
import triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kerneltune.kernels.moe.align import CHUNK, align_kernel, max_blocks

SENTINEL = -77


def naive(ids: list[int], expert_map: list[int] | None, E: int, block_m: int) -> tuple[list[int], list[int]]:
    """(pairs in expert order, each run padded with len(ids) to whole blocks; the expert of each block)."""
    known = len(expert_map) if expert_map is not None else E
    local = [-1 if not 0 <= i < known else (expert_map[i] if expert_map is not None else i) for i in ids]
    rows: list[int] = []
    experts: list[int] = []
    for expert in range(E):
        run = [pair for pair, own in enumerate(local) if own == expert]
        run += [len(ids)] * (-len(run) % block_m)
        rows += run
        experts += [expert] * (len(run) // block_m)
    return rows, experts


def align(
    ids: list[int], expert_map: list[int] | None, E: int, block_m: int, device: str, dtype: torch.dtype = torch.int32
) -> tuple[list[int], list[int]]:
    """The kernel's answer; asserts that nothing beyond the rows in use was written."""
    blocks = max_blocks(len(ids), E, block_m)
    topk_ids = torch.tensor(ids, dtype=dtype, device=device)
    mapping = topk_ids if expert_map is None else torch.tensor(expert_map, dtype=torch.int32, device=device)
    rows, experts, total = (
        torch.full((size,), SENTINEL, dtype=torch.int32, device=device) for size in (blocks * block_m, blocks, 1)
    )
    align_kernel[(E,)](
        topk_ids,
        mapping,
        rows,
        experts,
        total,
        len(ids),
        block_m,
        E=E,
        GLOBAL_E=E if expert_map is None else len(expert_map),
        HAS_MAP=expert_map is not None,
        E_POW2=triton.next_power_of_2(E),
        CHUNK=CHUNK,
    )
    used = int(total.item())
    assert (rows[used:] == SENTINEL).all()
    assert (experts[used // block_m :] == SENTINEL).all()
    return rows[:used].tolist(), experts[: used // block_m].tolist()


@st.composite
def routings(draw: st.DrawFn) -> tuple[list[int], list[int] | None, int, int]:
    E = draw(st.integers(1, 9))
    mapped = draw(st.booleans())
    global_E = E + draw(st.integers(0, 5)) if mapped else E
    expert_map = draw(st.permutations([*range(E), *[-1] * (global_E - E)])) if mapped else None
    ids = draw(st.lists(st.integers(-2, global_E), min_size=1, max_size=80))
    return ids, expert_map, E, draw(st.sampled_from([16, 32, 64]))


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(routing=routings())
def test_any_routing(routing: tuple[list[int], list[int] | None, int, int], device: str) -> None:
    assert align(*routing, device) == naive(*routing)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_more_pairs_than_one_chunk(dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(-1, 5, (2 * CHUNK + 123,), generator=generator).tolist()
    assert align(ids, None, 5, 16, device, dtype) == naive(ids, None, 5, 16)


def test_one_expert_with_more_blocks_than_a_chunk_of_them(device: str) -> None:
    ids = [0] * (CHUNK * 16 + 1)
    assert align(ids, None, 2, 16, device) == naive(ids, None, 2, 16)


@pytest.mark.parametrize("n_pairs", [1, 2, 15, 16, 17, 100])
@pytest.mark.parametrize("block_m", [16, 32])
def test_worst_case_of_blocks_is_reached_and_not_passed(n_pairs: int, block_m: int) -> None:
    """All ways to hand out pairs to three experts: the largest number of blocks is the bound."""
    most = 0
    for first in range(n_pairs + 1):
        for second in range(n_pairs + 1 - first):
            counts = (first, second, n_pairs - first - second)
            most = max(most, sum(-(-count // block_m) for count in counts))
    assert most <= max_blocks(n_pairs, 3, block_m) <= most + 1
