"""The number formats: every code, every tie, against torch's own types and against searches of all values."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kerneltune.kernels import formats
from kerneltune.kernels.formats import E2M1, E3M3, GROUPS, RAZER_VALUES, dequantise, quantise

ALL = [(format, group) for format, groups in GROUPS.items() for group in groups]


def sample(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_code_tables() -> None:
    values = formats.e2m1_values(torch.arange(16, dtype=torch.uint8)).tolist()
    assert values[:8] == list(E2M1)
    assert values[8:] == [0.0 if v == 0 else -v for v in E2M1]
    # one sign bit, two of the exponent (bias 1), one of the mantissa
    for code in range(1, 8):
        exponent, mantissa = code >> 1, code & 1
        assert E2M1[code] == (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))
    assert len(E3M3) == 63
    assert (max(E3M3), min(v for v in E3M3 if v)) == (28.0, 2.0**-5)  # as the paper gives them
    assert list(E3M3) == sorted(E3M3)
    stored = torch.arange(255, dtype=torch.uint8)
    assert torch.equal(formats.e8m0_values(stored), stored.view(torch.float8_e8m0fnu).float())


@given(st.floats(-8, 8, width=32))
@settings(max_examples=300)
def test_e2m1_is_the_nearest_with_ties_to_even(x: float) -> None:
    code = int(formats.e2m1_codes(torch.tensor([x]))[0])
    value = float(formats.e2m1_values(torch.tensor([code], dtype=torch.uint8))[0])
    distances = {number: abs(abs(x) - candidate) for number, candidate in enumerate(E2M1)}
    nearest = [number for number, distance in distances.items() if distance == min(distances.values())]
    wanted = nearest[0] if len(nearest) == 1 else next(number for number in nearest if number % 2 == 0)
    assert code & 7 == wanted
    assert value == (E2M1[wanted] if x > 0 or wanted == 0 else -E2M1[wanted])


def test_e2m1_ties() -> None:
    middles = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(E2M1)])
    assert formats.e2m1_values(formats.e2m1_codes(middles)).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert formats.e2m1_codes(torch.tensor([-0.0, -0.1, 1e9, -1e9])).tolist() == [0, 0, 7, 15]


@pytest.mark.parametrize(("format", "group"), ALL)
def test_what_the_format_holds_comes_back_to_the_bit(format: str, group: str) -> None:
    once = quantise(sample(3, 256, 256), format, group)
    values = dequantise(once)
    again = quantise(values, format, group)
    if format == "razer":  # blocks of which another special value gives the same values may change it
        assert (dequantise(again) - values).abs().max() <= 0.08 * values.abs().max()
    else:
        torch.testing.assert_close(dequantise(again), values, rtol=2e-7, atol=0)
    assert torch.equal(dequantise(quantise(torch.zeros(2, 128, 128), format, group)), torch.zeros(2, 128, 128))


@pytest.mark.parametrize(("format", "group"), ALL)
def test_no_other_code_is_nearer(format: str, group: str) -> None:
    """Given the scales, every value is the nearest of all that the format has there."""
    x = sample(1, 128, 128, seed=3)
    q = quantise(x, format, group)
    values, tile = dequantise(q), GROUPS[format][group]
    whole = torch.ones(()) if q.tensor_scale is None else q.tensor_scale
    scale = {
        "mxfp4": lambda: formats.e8m0_values(q.scales),
        "nvfp4": lambda: q.scales.float() * whole,
        "razer": lambda: torch.tensor(E3M3)[(q.scales & 63).long()] * whole,
    }.get(format, lambda: q.scales)()
    scale = formats._spread(scale, x, tile)
    if format == "fp8_e4m3":
        candidates = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        candidates = candidates[~candidates.isnan()]
    elif format == "int8":
        candidates = torch.arange(-127, 128).float()
    elif format == "int4":
        candidates = torch.arange(-7, 8).float()
    else:
        candidates = torch.tensor([*E2M1, *(-v for v in E2M1)])
    nearest = (x[..., None] - candidates * scale[..., None]).abs().amin(-1)
    if format == "razer":
        special = torch.tensor(RAZER_VALUES)[(q.scales >> 6).long()]
        nearest = torch.minimum(nearest, (x - formats._spread(special, x, tile) * scale).abs())
    slack = 1e-6 * x.abs() + 1e-7
    assert ((values - x).abs() <= nearest + slack).all()


def test_razer_chooses_the_special_value_of_least_error() -> None:
    """Against every selector and every scale that the encoder may take for it."""
    x = sample(1, 64, 64, seed=5)
    q = quantise(x, "razer", "16")
    assert q.tensor_scale is not None
    blocks = x.reshape(-1, 16)
    chosen = (dequantise(q) - x).square().reshape(-1, 16).sum(-1)
    table, scales = torch.tensor(E3M3), q.scales.flatten()
    for special in RAZER_VALUES:
        wanted = blocks.abs().amax(-1) / 6.0 / q.tensor_scale * (6.0 / max(6.0, abs(special)))
        scale = table[(wanted[:, None] - table).abs().argmin(-1)] * q.tensor_scale
        values = torch.tensor([*E2M1, *(-v for v in E2M1), special]) * scale[:, None]  # [blocks, 17]
        nearest = (blocks[..., None] - values[:, None]).abs().amin(-1)
        assert (chosen <= nearest.square().sum(-1) * (1 + 1e-5) + 1e-9).all()
    assert sorted((scales >> 6).unique().tolist()) == [0, 1, 2, 3]


# Relative Frobenius error on N(0, 1), by format: what 16-value blocks of e2m1 and the like must reach and cannot beat.
ERRORS = {
    ("fp8_e4m3", "tensor"): (0.020, 0.030),
    ("fp8_e4m3", "128x128"): (0.020, 0.030),
    ("mxfp4", "32"): (0.10, 0.13),
    ("nvfp4", "16"): (0.085, 0.105),
    ("razer", "16"): (0.070, 0.095),
    ("int8", "channel"): (0.006, 0.013),
    ("int4", "32"): (0.07, 0.11),
}


@pytest.mark.parametrize(("format", "group"), list(ERRORS))
def test_error_is_that_of_the_format(format: str, group: str) -> None:
    x = sample(2, 512, 512, seed=7)
    error = float((dequantise(quantise(x, format, group)) - x).norm() / x.norm())
    low, high = ERRORS[format, group]
    assert low < error < high


def test_razer_is_better_than_nvfp4_and_as_small() -> None:
    x = sample(1, 1024, 512, seed=9)
    razer, nvfp4 = quantise(x, "razer", "16"), quantise(x, "nvfp4", "16")
    assert razer.bits == nvfp4.bits == 4.5
    assert (dequantise(razer) - x).norm() < 0.95 * (dequantise(nvfp4) - x).norm()
    assert quantise(x, "mxfp4", "32").bits == 4.25


@pytest.mark.parametrize("power", [-140, -126, -20, 0, 100])
def test_magnitudes_at_the_ends_of_float32(power: int) -> None:
    x = sample(1, 128, 128, seed=1) * 2.0**power
    for format, group in ALL:
        assert dequantise(quantise(x, format, group)).isfinite().all(), (format, group)


def test_a_power_of_two_is_its_own_shared_exponent() -> None:
    for power in range(-20, 20):
        x = torch.zeros(1, 32)
        x[0, 0] = 2.0**power
        assert float(dequantise(quantise(x, "mxfp4", "32"))[0, 0]) == 2.0**power


def test_rows_need_not_fill_a_block() -> None:
    x = sample(5, 200, 256)
    q = quantise(x, "fp8_e4m3", "128x128")
    assert q.scales.shape == (5, 2, 2)
    assert float((dequantise(q) - x).norm() / x.norm()) < 0.03


def test_packing_is_its_own_inverse_low_nibble_first() -> None:
    codes = torch.randint(0, 16, (3, 8), dtype=torch.uint8)
    assert torch.equal(formats.unpack(formats.pack(codes)), codes)
    assert formats.pack(torch.tensor([1, 2], dtype=torch.uint8)).tolist() == [0x21]


@pytest.mark.parametrize(
    ("format", "group", "shape", "said"),
    [
        ("fp4", "32", (1, 32), "format 'fp4': expected one of fp8_e4m3"),
        ("mxfp4", "16", (1, 32), "group '16' of mxfp4: expected one of 32"),
        ("mxfp4", "32", (1, 40), "no multiple"),
        ("nvfp4", "16", (32,), "no multiple"),
    ],
)
def test_what_cannot_be_quantised(format: str, group: str, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        quantise(torch.zeros(shape), format, group)
