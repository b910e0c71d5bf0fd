"""Measuring on the GPU: one timing protocol, the correctness gate before it, and the killable process that runs both."""
