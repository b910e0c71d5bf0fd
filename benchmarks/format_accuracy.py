"""What each number format costs in accuracy: a layer with quantised weights against the float64 layer.

Runs on the CPU. Weights and activations are normal numbers, the weights scaled by one over the root of their depth, as
models have them at the start; trained weights have heavier tails, so these are comparisons of formats, not of models.

    python benchmarks/format_accuracy.py
"""

from __future__ import annotations

import torch

from kerneltune.kernels.formats import GROUPS, Quantised, dequantise, quantise
from kerneltune.kernels.moe.reference import fused_moe_reference

E, N, K, TOP_K, TOKENS, SEED = 16, 512, 2048, 4, 64, 0
# Activations of both GEMMs in fp8: by token beside weights by channel, by 128 columns beside blocks.
ACTIVATIONS = {"tensor": "tensor", "channel": "channel", "128x128": "1x128"}


def rounded(x: torch.Tensor, group: str) -> torch.Tensor:
    """x as fp8 activations with dynamic scales."""
    return dequantise(quantise(x.float(), "fp8_e4m3", group)).double()


def fp8_layer(
    hidden: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, group: str
) -> torch.Tensor:
    """The layer with fp8 activations before each GEMM; w1 and w2 are dequantised weights."""
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    x = rounded(hidden, group)
    for expert in range(len(w1)):
        token, choice = torch.nonzero(ids == expert, as_tuple=True)
        if not len(token):
            continue
        gate, up = (x[token] @ w1[expert].double().T).chunk(2, -1)
        between = rounded(torch.nn.functional.silu(gate) * up, group)
        out.index_add_(0, token, (between @ w2[expert].double().T) * weights[token, choice].double()[:, None])
    return out


def main() -> None:
    generator = torch.Generator().manual_seed(SEED)
    hidden = torch.randn(TOKENS, K, generator=generator)
    w1 = torch.randn(E, 2 * N, K, generator=generator) / K**0.5
    w2 = torch.randn(E, K, N, generator=generator) / N**0.5
    weights, ids = torch.randn(TOKENS, E, generator=generator).softmax(-1).topk(TOP_K)
    exact = fused_moe_reference(hidden, w1, w2, weights, ids)

    def error(out: torch.Tensor) -> str:
        each = (out - exact).norm(dim=1) / exact.norm(dim=1)
        return f"{float(each.mean()):.2%} | {float(each.max()):.2%}"

    print("| weights | scale for | activations | bits a weight | error, mean of the tokens | worst token |")
    print("| --- | --- | --- | ---: | ---: | ---: |")
    low = fused_moe_reference(hidden.bfloat16(), w1.bfloat16(), w2.bfloat16(), weights, ids)
    print(f"| bf16 | | bf16 | 16 | {error(low)} |")
    for format, groups in GROUPS.items():
        for group in groups:
            if group == "1x128":  # of activations
                continue
            first: Quantised = quantise(w1, format, group)
            held = dequantise(first), dequantise(quantise(w2, format, group))
            out = fused_moe_reference(hidden, *held, weights, ids)
            print(f"| {format} | {group} | float | {first.bits:.3g} | {error(out)} |")
            if format == "fp8_e4m3":
                out = fp8_layer(hidden, *held, weights, ids, ACTIVATIONS[group])
                print(f"| {format} | {group} | fp8_e4m3, {ACTIVATIONS[group]} | {first.bits:.3g} | {error(out)} |")


if __name__ == "__main__":
    main()
