"""Measuring on the GPU: one timing protocol, the correctness gate before it, the killable process that runs both."""
