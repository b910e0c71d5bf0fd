"""Tune MLA decode and fused MoE kernels on your GPU, judge them by its roofline, ship the table."""

__version__ = "0.1.0"
