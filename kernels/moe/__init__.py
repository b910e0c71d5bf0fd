"""Fused mixture of experts: align tokens by expert, gate/up GEMM with SiLU, down GEMM, weighted sum over top_k."""

from kerneltune.kernels.moe.op import fused_moe

__all__ = ["fused_moe"]
