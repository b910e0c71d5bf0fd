"""Tokens of the latent cache in bytes: sizes, layout, accuracy, and appending to pages."""

from __future__ import annotations

import pytest
import torch

from kerneltune.kernels.mla_decode.cache_formats import LATENT, TOKEN_BYTES, WIDTH, append, pack_tokens, unpack_tokens

# Relative Frobenius error on N(0, 1): e4m3 keeps 4 bits of each value, 32 or 16 values of e2m1 share a scale.
ERRORS = {"fp8_e4m3": 0.03, "fp8_ds656": 0.03, "mxfp4": 0.13, "nvfp4": 0.105}


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kv_dtype", list(TOKEN_BYTES))
def test_a_token_has_its_bytes_and_comes_back(kv_dtype: str) -> None:
    kv = tokens(3, 5)
    scale = 0.01
    packed = pack_tokens(kv, kv_dtype, scale)
    assert packed.shape == (3, 5, TOKEN_BYTES[kv_dtype])
    assert packed.dtype == torch.uint8
    back = unpack_tokens(packed, kv_dtype, scale)
    assert float((back - kv).norm() / kv.norm()) < ERRORS[kv_dtype]
    # each token on its own: what is packed beside it changes nothing
    assert torch.equal(pack_tokens(kv[1, 2], kv_dtype, scale), packed[1, 2])
    assert torch.equal(unpack_tokens(pack_tokens(back, kv_dtype, scale), kv_dtype, scale), back)


def test_ds656_is_laid_out_as_deepseek_does() -> None:
    """Written from the description: 512 e4m3, four float32 powers of two, 64 bf16."""
    kv = tokens(7, seed=3) * 30
    packed = pack_tokens(kv, "fp8_ds656")
    for row in range(7):
        scales = packed[row, 512:528].clone().view(torch.float32)
        for block in range(4):
            values = kv[row, 128 * block : 128 * (block + 1)]
            scale = float(scales[block])
            assert torch.log2(scales[block]) == torch.log2(scales[block]).round()
            assert scale / 2 < float(values.abs().max()) / 448 <= scale
            codes = packed[row, 128 * block : 128 * (block + 1)].view(torch.float8_e4m3fn)
            assert torch.equal(codes.float(), (values / scale).to(torch.float8_e4m3fn).float())
        assert torch.equal(packed[row, 528:].clone().view(torch.bfloat16), kv[row, LATENT:].to(torch.bfloat16))
    assert float(pack_tokens(torch.zeros(1, WIDTH), "fp8_ds656")[0, 512:516].clone().view(torch.float32)) == 2.0**-13


def test_mxfp4_has_its_codes_first_and_the_even_value_low() -> None:
    kv = torch.zeros(1, WIDTH)
    kv[0, 0], kv[0, 1], kv[0, 575] = 6.0, -1.0, 4.0
    packed = pack_tokens(kv, "mxfp4")[0]
    assert packed[0] == 7 | (10 << 4)  # 6 is code 7, -1 is 2 with the sign
    assert packed[287] == 6 << 4
    assert packed[288] == 127
    assert packed[305] == 127


@pytest.mark.parametrize("kv_dtype", ["bf16", *TOKEN_BYTES])
def test_append_writes_its_slots_and_nothing_else(kv_dtype: str, device: str) -> None:
    kv = tokens(6, seed=1)
    new = kv.to(torch.bfloat16) if kv_dtype == "bf16" else pack_tokens(kv, kv_dtype)
    new = new.to(device)
    cache = torch.zeros(4, 8, 1, new.shape[-1], dtype=new.dtype, device=device)
    slots = torch.tensor([31, 0, -1, 9, -5, 8], device=device)
    append(cache, new, slots)
    flat = cache.view(32, -1)
    written = {31: 0, 0: 1, 9: 3, 8: 5}
    for slot in range(32):
        want = new[written[slot]] if slot in written else torch.zeros_like(flat[slot])
        assert torch.equal(flat[slot], want), slot
    append(cache, new[:0], slots[:0])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="a token has 576 values: got 512"):
        pack_tokens(torch.zeros(1, 512), "mxfp4")
    with pytest.raises(ValueError, match="kv_dtype 'fp7'"):
        pack_tokens(tokens(1), "fp7")
    with pytest.raises(ValueError, match="has 306 bytes: got 324"):
        unpack_tokens(torch.zeros(1, 324, dtype=torch.uint8), "mxfp4")
    with pytest.raises(ValueError, match=r"tokens must be \[count, 306\] torch.uint8"):
        append(torch.zeros(1, 1, 1, 306, dtype=torch.uint8), torch.zeros(1, 324, dtype=torch.uint8), torch.zeros(1))
