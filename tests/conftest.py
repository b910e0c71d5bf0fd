"""Without a GPU, Triton kernels run in Triton's CPU interpreter; tests marked `gpu` are skipped and say why."""

from __future__ import annotations

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, so before any test module


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs a GPU that torch sees; run `pytest -m gpu` on one")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def device() -> str:
    """Where in-process kernels run: the GPU, or the CPU interpreter."""
    return "cuda" if HAS_GPU else "cpu"
