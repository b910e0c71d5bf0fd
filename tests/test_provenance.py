"""A comment, a docstring or code that is not reached changes no hash; a constant in a helper does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kerneltune.kernels.source_hash import VARIANTS, reached, variant_hash, variant_of

KERNEL = '''"""What it is."""

import triton  # the compiler
import triton.language as tl

from pack import sizes
from pack.helper import scale, unused


@triton.jit
def kernel(x_ptr, n):
    """Doc
    of two lines."""
    text = f"a{n!r}b"  # not "a # comment"
    tl.store(x_ptr, scale(n) + sizes.WIDTH)


def make(x: unused, n: int) -> str:
    return kernel, n


def other():
    return unused(1)
'''
HELPER = '''"""Helpers."""

LIMIT = 64  # keys
FREE = 1


def scale(n):
    return n * LIMIT


def unused(n):
    return n * FREE
'''
SIZES = "WIDTH = 8\nHEIGHT = 9\n"


def hash_of(folder: Path, kernel: str = KERNEL, helper: str = HELPER, sizes: str = SIZES) -> str:
    """As a process sees it that starts with these files: modules are read once in each."""
    pack = folder / "pack"
    pack.mkdir(exist_ok=True)
    for name, text in (("__init__", ""), ("kernel", kernel), ("helper", helper), ("sizes", sizes)):
        (pack / f"{name}.py").write_text(text)
    code = f"""import sys; sys.path.insert(0, {str(folder)!r})
from kerneltune.kernels.source_hash import source_hash
print(source_hash(("pack.kernel:make",)), any(name.startswith(("pack", "torch", "triton")) for name in sys.modules))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    digest, imported = done.stdout.split()
    assert imported == "False"  # neither the hashed code nor a GPU's is imported
    return digest


@pytest.mark.parametrize(
    "changed",
    [
        {"kernel": KERNEL.replace("# the compiler", "").replace("of two lines", "that says more")},
        {"kernel": KERNEL.replace("\n\n\n", "\n\n")},
        {"helper": HELPER.replace("# keys", "# tokens").replace("Helpers.", "Some helpers.")},
        {"helper": HELPER.replace("FREE = 1", "FREE = 2")},
        {"kernel": KERNEL.replace("unused(1)", "unused(2)")},
        {"sizes": SIZES.replace("9", "10")},
    ],
)
def test_what_does_not_count(tmp_path: Path, changed: dict[str, str]) -> None:
    assert hash_of(tmp_path, **changed) == hash_of(tmp_path)


@pytest.mark.parametrize(
    "changed",
    [
        {"helper": HELPER.replace("64", "128")},
        {"helper": HELPER.replace("n * LIMIT", "n + LIMIT")},
        {"sizes": SIZES.replace("8", "16")},
        {"kernel": KERNEL.replace("a{n!r}b", "a{n!r}c")},
        {"kernel": KERNEL.replace("return kernel, n", "return kernel, n + 1")},
        {"kernel": KERNEL.replace("@triton.jit", "@triton.jit(noinline=True)")},
    ],
)
def test_what_counts(tmp_path: Path, changed: dict[str, str]) -> None:
    assert hash_of(tmp_path, **changed) != hash_of(tmp_path)


@pytest.mark.parametrize(
    ("kernel", "variant", "place"),
    [
        ("mla-decode", "split_kv", "kerneltune.kernels.mla_decode.triton_split_kv:load_pages"),
        ("mla-decode", "split_kv", "kerneltune.kernels.mla_decode.combine:TILE"),
        ("mla-decode", "split_kv", "kerneltune.kernels.mla_decode.config:block_width"),
        ("mla-decode", "hopper", "kerneltune.kernels.mla_decode.hopper_load:prefetch_l2"),
        ("mla-decode", "hopper", "kerneltune.kernels.mla_decode.hopper_common:GROWTH"),
        ("mla-decode", "hopper", "kerneltune.kernels.mla_decode.combine_pieces:USUAL_SMS"),
        ("moe", "grouped_gemm", "kerneltune.kernels.moe.align:local_expert"),
        ("moe", "grouped_gemm", "kerneltune.kernels.moe.grouped_gemm:_multiply"),
        ("moe", "grouped_gemm", "kerneltune.kernels.moe.launch:SUM_BLOCK"),
    ],
)
def test_our_kernels_reach_their_helpers_and_constants(kernel: str, variant: str, place: str) -> None:
    assert place in reached(VARIANTS[kernel][variant])


def test_a_variant_does_not_go_stale_with_another() -> None:
    split_kv, hopper = (set(reached(roots)) for roots in VARIANTS["mla-decode"].values())
    assert not any(place.partition(":")[0].endswith(("hopper", "hopper_load", "combine_pieces")) for place in split_kv)
    assert "kerneltune.kernels.mla_decode.combine:combine_kernel" not in hopper


def test_a_variant_that_is_not_here_has_no_hash() -> None:
    assert variant_of("moe", {"gemm1": {}}) == "grouped_gemm"
    assert variant_of("moe", {"variant": "later"}) == "later"
    assert variant_hash("moe", "later") is None
    with pytest.raises(ValueError, match=r"kerneltune\.kernels\.moe\.launch defines no nothing"):
        reached(("kerneltune.kernels.moe.launch:nothing",))
