"""Tokens of the latent cache in the formats that are served: packed to bytes, read back, and appended to pages.

Torch references, which a kernel that reads such a cache is to agree with; none of ours does yet. A token is 512 latent
values followed by 64 rotary ones.

| kv_dtype | bytes a token | layout |
| --- | ---: | --- |
| fp8_e4m3 | 576 | every value over one scale for the whole cache |
| fp8_ds656 | 656 | 512 e4m3, four float32 scales (one for each 128, powers of two), 64 bf16 rotary (DeepSeek-V3.2) |
| mxfp4 | 306 | 288 of two e2m1 each, the even value low, then 18 e8m0 |
| nvfp4 | 324 | 288 of two e2m1 each, then 36 e4m3, all over one scale for the whole cache |
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kerneltune.kernels.formats import E4M3_MAX, Quantised, dequantise, quantise

WIDTH, LATENT = 576, 512
TOKEN_BYTES = {"fp8_e4m3": 576, "fp8_ds656": 656, "mxfp4": 306, "nvfp4": 324}
DS_BLOCK = 128  # latent values that share a scale in fp8_ds656
DS_SMALLEST = 1e-4  # its scales are at least this


def pack_tokens(kv: torch.Tensor, kv_dtype: str, scale: float = 1.0) -> torch.Tensor:
    """[..., 576] values, finite, any float dtype -> [..., bytes] uint8.

    Args:
        scale: what fp8_e4m3 and nvfp4 divide by: fixed for a cache, since tokens come one by one.

    Raises:
        ValueError: another width, or no such format.
    """
    if kv.shape[-1] != WIDTH:
        raise ValueError(f"a token has {WIDTH} values: got {kv.shape[-1]}")
    kv = kv.float()
    if kv_dtype == "fp8_e4m3":
        return _as_bytes((kv / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn))
    if kv_dtype == "fp8_ds656":
        blocks = kv[..., :LATENT].unflatten(-1, (-1, DS_BLOCK))
        least = (blocks.abs().amax(-1) / E4M3_MAX).clamp(min=DS_SMALLEST)
        scales = torch.exp2(torch.log2(least).ceil())  # [..., 4]
        latent = (blocks / scales[..., None]).to(torch.float8_e4m3fn).flatten(-2)
        rotary = kv[..., LATENT:].to(torch.bfloat16)
        return torch.cat([_as_bytes(latent), _as_bytes(scales), _as_bytes(rotary)], -1)
    if kv_dtype in ("mxfp4", "nvfp4"):
        rows = kv.reshape(-1, WIDTH)
        given = scale if kv_dtype == "nvfp4" else None
        q = quantise(rows, kv_dtype, "32" if kv_dtype == "mxfp4" else "16", given)
        return torch.cat([q.codes, _as_bytes(q.scales)], -1).view(*kv.shape[:-1], -1)
    raise ValueError(f"kv_dtype {kv_dtype!r}: expected one of {', '.join(TOKEN_BYTES)}")


def unpack_tokens(packed: torch.Tensor, kv_dtype: str, scale: float = 1.0) -> torch.Tensor:
    """The inverse of `pack_tokens`: [..., bytes] uint8 -> [..., 576] float32, exactly what the bytes say."""
    if packed.shape[-1] != TOKEN_BYTES[kv_dtype]:
        raise ValueError(f"a token of {kv_dtype} has {TOKEN_BYTES[kv_dtype]} bytes: got {packed.shape[-1]}")
    if kv_dtype == "fp8_e4m3":
        return packed.view(torch.float8_e4m3fn).float() * scale
    if kv_dtype == "fp8_ds656":
        latent, scales, rotary = packed.split([LATENT, 4 * LATENT // DS_BLOCK, 2 * (WIDTH - LATENT)], -1)
        blocks = latent.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (-1, DS_BLOCK))
        values = (blocks * scales.contiguous().view(torch.float32)[..., None]).flatten(-2)
        return torch.cat([values, rotary.contiguous().view(torch.bfloat16).float()], -1)
    codes, scales = packed.split([WIDTH // 2, TOKEN_BYTES[kv_dtype] - WIDTH // 2], -1)
    if kv_dtype == "mxfp4":
        return dequantise(Quantised("mxfp4", "32", codes[..., None, :], scales[..., None, :]))[..., 0, :]
    stored = scales.contiguous().view(torch.float8_e4m3fn)[..., None, :]
    whole = torch.tensor(scale, dtype=torch.float32, device=packed.device)
    return dequantise(Quantised("nvfp4", "16", codes[..., None, :], stored, whole))[..., 0, :]


def append(kv_cache: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor) -> None:
    """Write tokens into a paged cache, in place; no synchronisation.

    Args:
        kv_cache: [num_pages, page_size, 1, width] contiguous: values, or the bytes of `pack_tokens`.
        tokens: [count, width] like kv_cache.
        slots: [count] int64: page * page_size + place in the page; below 0: not written.

    Raises:
        ValueError: shapes or dtypes differ, or kv_cache is not contiguous.
    """
    width = kv_cache.shape[-1]
    if tokens.shape[-1] != width or tokens.dtype != kv_cache.dtype or not kv_cache.is_contiguous():
        raise ValueError(
            f"tokens must be [count, {width}] {kv_cache.dtype} beside a contiguous cache: "
            f"got {list(tokens.shape)} {tokens.dtype}"
        )
    if len(slots):
        append_kernel[(len(slots),)](
            *(tokens.contiguous(), kv_cache, slots, width),
            BLOCK=triton.next_power_of_2(width),
            num_warps=4,
        )


@triton.jit
def append_kernel(tokens_ptr, kv_cache_ptr, slots_ptr, width, BLOCK: tl.constexpr):
    """One program copies one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    if slot >= 0:
        mask = offs < width
        tl.store(kv_cache_ptr + slot * width + offs, tl.load(tokens_ptr + token * width + offs, mask), mask)


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)
