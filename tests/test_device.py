"""Device records: targets that are not here, names as folders, versions without importing torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kerneltune import device
from kerneltune.errors import UserError


def test_targets_agree_with_their_key() -> None:
    for arch, record in device.TARGETS.items():
        assert record.arch == arch
        assert record.backend == ("hip" if arch.startswith("gfx") else "cuda")
        assert record.warp_size == (64 if arch.startswith("gfx") else 32)
        assert 65536 <= record.shared_memory_per_block < 2**18
        assert record.l2_bytes < record.memory_bytes


def test_h200_is_as_read_from_one() -> None:
    h200 = device.target("sm_90")
    assert (h200.name, h200.sm_count, h200.shared_memory_per_block) == ("NVIDIA H200", 132, 232448)
    assert (h200.l2_bytes, h200.memory_bytes) == (62914560, 150754820096)


def test_unknown_target_lists_the_known() -> None:
    with pytest.raises(UserError, match=r"unknown target 'sm_33'.*sm_90 \(NVIDIA H200\)") as caught:
        device.target("sm_33")
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("NVIDIA H200", "nvidia-h200"), ("NVIDIA GeForce RTX 5090", "nvidia-geforce-rtx-5090"), ("  A/B (c)", "a-b-c")],
)
def test_slug(name: str, expected: str) -> None:
    assert device.slug(name) == expected


def test_versions_need_no_torch() -> None:
    code = (
        "import sys; from kerneltune.device import versions; v = versions();"
        "assert 'torch' not in sys.modules and 'triton' not in sys.modules;"
        "assert {'python', 'kerneltune', 'triton', 'torch'} <= set(v), v;"
        "assert all(isinstance(x, str) and x for x in v.values()), v"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_detect_without_a_gpu_is_none() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert device.detect() is None


@pytest.mark.gpu
def test_detect_on_a_gpu() -> None:
    found = device.detect(0)
    assert found is not None
    assert found.sm_count > 0
    assert found.shared_memory_per_block > 0
    assert "driver" in device.versions(0)
    with pytest.raises(UserError, match="GPU 99 is not there"):
        device.detect(99)
