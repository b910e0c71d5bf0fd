"""Number formats in which weights and caches are served: what each code means, exact encoders and decoders in torch.

`quantise` and `dequantise` are references: naive, the same on every device, written from the formats' definitions. A
kernel must agree with `dequantise` to the bit before its own arithmetic begins. Codes are data (`E2M1`, `E3M3`), so
that a kernel's table and this one cannot differ.

Sources: OCP Microscaling Formats v1.0 (e2m1, e8m0, the shared exponent of MXFP4); OCP 8-bit Floating Point v1.0
(e4m3); NVFP4 as NVIDIA describes it (e2m1, an e4m3 scale for each 16 values, one float32 scale for the tensor);
RaZeR, arXiv 2501.04052 (the code of -0 names one more value for each 16, chosen by two bits of an E3M3 scale byte).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lower three bits; the fourth is the sign
E2M1_MAX = 6.0
MINUS_ZERO = 8  # the code that RaZeR uses for another value
RAZER_VALUES = (5.0, -5.0, 8.0, -8.0)  # by the two selector bits
E3M3 = tuple(  # by the lower six bits: bias 3, subnormals; the last code is not a number
    (mantissa / 8 * 2.0**-2) if exponent == 0 else ((1 + mantissa / 8) * 2.0 ** (exponent - 3))
    for exponent in range(8)
    for mantissa in range(8)
)[:-1]
E3M3_MAX = E3M3[-1]
E4M3_MAX = 448.0
E8M0_BIAS = 127
SMALLEST = 2.0**-126  # stands for the largest magnitude of a block of zeros

# Format -> the groups that share a scale: (rows, columns) of the last two dimensions, 0 for all of them.
GROUPS = {
    "fp8_e4m3": {"tensor": (0, 0), "channel": (1, 0), "128x128": (128, 128), "1x128": (1, 128)},
    "mxfp4": {"32": (1, 32)},
    "nvfp4": {"16": (1, 16)},
    "razer": {"16": (1, 16)},
    "int8": {"channel": (1, 0), "32": (1, 32)},
    "int4": {"32": (1, 32), "128": (1, 128)},
}
FP4 = ("mxfp4", "nvfp4", "razer", "int4")  # two codes a byte


@dataclass(frozen=True)
class Quantised:
    """A tensor [..., rows, columns] in one of the formats."""

    format: str
    group: str
    codes: torch.Tensor  # [..., rows, columns] float8_e4m3fn or int8; [..., rows, columns / 2] uint8, low nibble first
    scales: torch.Tensor  # [..., row groups, column groups]: float32; mxfp4 uint8 e8m0; nvfp4 e4m3fn; razer uint8
    tensor_scale: torch.Tensor | None = None  # nvfp4, razer: [] float32

    @property
    def bits(self) -> float:
        """Bits a value, scales included."""
        values = self.codes.numel() * (2 if self.format in FP4 else 1)
        stored = self.codes.numel() * self.codes.element_size() + self.scales.numel() * self.scales.element_size()
        return 8 * stored / values


def quantise(x: torch.Tensor, format: str, group: str, tensor_scale: float | None = None) -> Quantised:
    """The nearest that the format can hold, ties to the even code; scales from the largest magnitude of each group.

    Args:
        x: [..., rows, columns], finite, any float dtype; columns a multiple of the group's, and even.
        tensor_scale: of nvfp4 and razer, where it must not depend on x (a cache that grows); None: from x.

    Raises:
        ValueError: no such format or group, or sizes that the group does not divide.
    """
    tile = _tile(x, format, group)
    x = x.float()
    if format in ("nvfp4", "razer"):
        return _two_level(x, format, group, tile, tensor_scale)
    largest = _largest(x, tile)
    if format == "mxfp4":
        # The shared exponent is that of the largest magnitude less the 2 of e2m1's own largest power.
        exponent = torch.floor(torch.log2(largest.clamp(min=SMALLEST))) - 2
        exponent = _exact_floor_log2(largest.clamp(min=SMALLEST), exponent + 2) - 2
        stored = (exponent.clamp(-E8M0_BIAS, E8M0_BIAS) + E8M0_BIAS).to(torch.uint8)
        codes = e2m1_codes(x / _spread(e8m0_values(stored), x, tile))
        return Quantised(format, group, pack(codes), stored)
    top = {"fp8_e4m3": E4M3_MAX, "int8": 127.0, "int4": 7.0}[format]
    scales = torch.where(largest > 0, largest / top, 1.0)
    scaled = x / _spread(scales, x, tile)
    if format == "fp8_e4m3":
        return Quantised(format, group, scaled.clamp(-top, top).to(torch.float8_e4m3fn), scales)
    whole = scaled.round().clamp(-top, top).to(torch.int8)
    return Quantised(format, group, whole if format == "int8" else pack(whole.view(torch.uint8) & 15), scales)


def dequantise(q: Quantised) -> torch.Tensor:
    """[..., rows, columns] float32: exactly what the codes and scales say."""
    if q.format == "fp8_e4m3" or q.format == "int8":
        values, scales = q.codes.float(), q.scales
    elif q.format == "int4":
        codes = unpack(q.codes).to(torch.int16)
        values, scales = torch.where(codes > 7, codes - 16, codes).float(), q.scales
    elif q.format == "mxfp4":
        values, scales = e2m1_values(unpack(q.codes)), e8m0_values(q.scales)
    elif q.format == "nvfp4":
        assert q.tensor_scale is not None
        values, scales = e2m1_values(unpack(q.codes)), q.scales.float() * q.tensor_scale
    else:
        assert q.tensor_scale is not None
        table = q.codes.new_tensor(E3M3, dtype=torch.float32)
        codes, tile = unpack(q.codes), GROUPS["razer"][q.group]
        special = q.codes.new_tensor(RAZER_VALUES, dtype=torch.float32)[(q.scales >> 6).long()]
        values = e2m1_values(codes)
        values = torch.where(codes == MINUS_ZERO, _spread(special, values, tile), values)
        scales = table[(q.scales & 63).long()] * q.tensor_scale
    return values * _spread(scales, values, GROUPS[q.format][q.group])


def e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    """The four-bit code nearest to each value, ties to the even code, saturated beyond 6: uint8; 0 has code 0."""
    magnitude = x.abs()
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for number, (low, high) in enumerate(itertools.pairwise(E2M1)):
        middle = (low + high) / 2
        above = magnitude >= middle if number % 2 else magnitude > middle
        code += above.to(torch.uint8)
    return code | ((x < 0) & (code > 0)).to(torch.uint8) << 3


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of four-bit codes (uint8 0 to 15); that of -0 is 0."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float32, device=codes.device)
    return table[codes.long()] + 0.0


def e8m0_values(stored: torch.Tensor) -> torch.Tensor:
    """2^(stored - 127) of uint8 exponents, as float32; 255 is not a number."""
    value = torch.ldexp(torch.ones_like(stored, dtype=torch.float32), stored.to(torch.int32) - E8M0_BIAS)
    return torch.where(stored == 255, float("nan"), value)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """[..., n] codes below 16 -> [..., n / 2] bytes; the even index is the low nibble."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack`."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def _two_level(x: torch.Tensor, format: str, group: str, tile: tuple[int, int], given: float | None) -> Quantised:
    """NVFP4 and RaZeR: a float32 scale that brings the largest block scale to the top of its format."""
    largest = _largest(x, tile)
    top = E4M3_MAX if format == "nvfp4" else E3M3_MAX
    whole = largest.amax()
    tensor_scale = torch.where(whole > 0, whole / (E2M1_MAX * top), 1.0)
    if given is not None:
        tensor_scale = torch.full_like(tensor_scale, given)
    wanted = largest / E2M1_MAX / tensor_scale
    if format == "nvfp4":
        stored = wanted.clamp(max=top).to(torch.float8_e4m3fn)
        scale = _spread(stored.float() * tensor_scale, x, tile)
        codes = e2m1_codes(torch.where(scale > 0, x / scale.clamp(min=SMALLEST), 0.0))
        return Quantised(format, group, pack(codes), stored, tensor_scale)
    table = torch.tensor(E3M3, dtype=torch.float32, device=x.device)
    best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # error, codes, scale bytes
    for number, special in enumerate(RAZER_VALUES):
        # A value beyond e2m1's own lets the largest of the block be it, with a finer scale for the others.
        stored = _e3m3_codes(wanted * (E2M1_MAX / max(E2M1_MAX, abs(special))))
        scale = _spread(table[stored.long()] * tensor_scale, x, tile)
        scaled = torch.where(scale > 0, x / scale.clamp(min=SMALLEST), 0.0)
        plain = e2m1_codes(scaled)
        nearer = (scaled - special).abs() < (scaled - e2m1_values(plain)).abs()
        codes = torch.where(nearer, MINUS_ZERO, plain)
        error = _sum(((torch.where(nearer, special, e2m1_values(plain)) - scaled) * scale) ** 2, tile)
        mine = error, codes, stored | number << 6
        if best is None:
            best = mine
            continue
        better = error < best[0]
        best = (
            torch.where(better, error, best[0]),
            torch.where(_spread(better, x, tile), codes, best[1]),
            torch.where(better, mine[2], best[2]),
        )
    assert best is not None
    return Quantised(format, group, pack(best[1]), best[2], tensor_scale)


def _e3m3_codes(x: torch.Tensor) -> torch.Tensor:
    """The code nearest to each value from 0, ties to the even code: uint8."""
    table = torch.tensor(E3M3, dtype=torch.float64, device=x.device)
    middles = (table[1:] + table[:-1]) / 2
    value = x.double()
    code = torch.bucketize(value, middles)  # ties to the lower code
    tie = (code < len(middles)) & (value == middles[code.clamp(max=len(middles) - 1)])
    return (code + (tie & (code % 2 == 1))).to(torch.uint8)


def _exact_floor_log2(x: torch.Tensor, near: torch.Tensor) -> torch.Tensor:
    """floor(log2(x)), where log2 may be off by a rounding at a power of two."""
    near = torch.where(torch.ldexp(torch.ones_like(x), near.to(torch.int32)) > x, near - 1, near)
    return torch.where(torch.ldexp(torch.ones_like(x), near.to(torch.int32) + 1) <= x, near + 1, near)


def _tile(x: torch.Tensor, format: str, group: str) -> tuple[int, int]:
    groups = GROUPS.get(format)
    if groups is None:
        raise ValueError(f"format {format!r}: expected one of {', '.join(GROUPS)}")
    if group not in groups:
        raise ValueError(f"group {group!r} of {format}: expected one of {', '.join(groups)}")
    rows, columns = groups[group]
    if x.ndim < 2 or x.shape[-1] % (columns or 1) or (format in FP4 and x.shape[-1] % 2):
        raise ValueError(
            f"{format} in groups of {group}: the columns of {list(x.shape)} are no multiple of the group's"
        )
    return rows, columns


def _blocks(x: torch.Tensor, tile: tuple[int, int]) -> tuple[int, int, int, int]:
    """(row groups, rows of one, column groups, columns of one); the last row group may be cut off."""
    rows, columns = x.shape[-2:]
    height, width = tile[0] or rows, tile[1] or columns
    return -(-rows // height), height, columns // width, width


def _largest(x: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    return _grouped(x.abs(), tile).amax((-3, -1))


def _sum(x: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    return _grouped(x, tile).sum((-3, -1))


def _grouped(x: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    row_groups, height, column_groups, width = _blocks(x, tile)
    padded = torch.nn.functional.pad(x, (0, 0, 0, row_groups * height - x.shape[-2]))
    return padded.reshape(*x.shape[:-2], row_groups, height, column_groups, width)


def _spread(scales: torch.Tensor, x: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """Each group's number at each of its values, like x."""
    _, height, _, width = _blocks(x, tile)
    return scales.repeat_interleave(height, -2)[..., : x.shape[-2], :].repeat_interleave(width, -1)
