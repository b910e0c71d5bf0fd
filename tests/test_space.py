"""Space files: what they declare, which points are feasible and why others are not, and every fault in one line."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kerneltune.device import target
from kerneltune.errors import UserError
from kerneltune.kernels.device import Device
from kerneltune.registry import load_tunable
from kerneltune.space import Space, load_space
from kerneltune.workloads import model_workload

H200, A100, MI300X = target("sm_90"), target("sm_80"), target("gfx942")
WORKLOAD = {"batch": 8, "kv_len": 4096, "heads": 16, "h_kv": 1, "s_q": 1}


class Toy:
    """A kernel of two parameters whose tiles may hold 4096 elements."""

    name = "mla-decode"
    parts = ("decode",)
    optional: Mapping[str, int] = {}

    def default_config(self, workload: Mapping[str, Any], device: Device) -> dict[str, Any]:
        return {"BLOCK_N": 16, "num_warps": 4}

    def is_valid(self, part: str, params: Mapping[str, Any], workload: Mapping[str, Any], device: Device) -> str | None:
        if params["BLOCK_N"] > 64:
            return f"shared memory: needs {params['BLOCK_N']} B, device has 64 B"
        return "num_warps 16: at most 8" if params["num_warps"] > 8 else None


TOY: Any = Toy()
TEXT = """
kernel = "mla-decode"
[parameters]
BLOCK_N = [16, 64, 128]
num_warps = [4, 8, 16]
[[where]]
rule = "BLOCK_N <= kv_len and (BLOCK_N > 16 or num_warps == 4)"
why = "many warps on a small tile"
[arch.sm_80.parameters]
num_warps = [4]
[arch.sm_8.parameters]
num_warps = [8]
BLOCK_N = [32]
[arch.gfx942.parameters]
BLOCK_N = [16]
[ladder.standard]
batch = [1, 8]
kv_len = [100, 200, 300]
where = "batch * kv_len < 2000"
"""


def test_points_in_file_order_and_rejections_by_rule() -> None:
    space = Space.from_text(TEXT)
    points = space.points(TOY, "decode", WORKLOAD, H200)
    assert points == [
        {"BLOCK_N": 16, "num_warps": 4},
        {"BLOCK_N": 64, "num_warps": 4},
        {"BLOCK_N": 64, "num_warps": 8},
    ]
    survey = space.survey(TOY, "decode", WORKLOAD, H200)
    assert (survey.total, survey.feasible) == (9, 3)
    assert survey.rejected == {"shared memory": 3, "many warps on a small tile": 2, "num_warps": 1}
    assert list(survey.rejected.values()) == [3, 2, 1]


def test_a_rule_sees_workload_and_device() -> None:
    text = TEXT.replace("BLOCK_N <= kv_len", "num_warps * warp_size <= 512 and BLOCK_N <= kv_len")
    assert Space.from_text(text).survey(TOY, "decode", WORKLOAD, H200).rejected["many warps on a small tile"] == 2
    on_amd = Space.from_text(text).points(TOY, "decode", WORKLOAD, MI300X)  # 64 threads a warp
    assert on_amd == [{"BLOCK_N": 16, "num_warps": 4}]
    short = Space.from_text(TEXT).points(TOY, "decode", {**WORKLOAD, "kv_len": 20}, H200)
    assert short == [{"BLOCK_N": 16, "num_warps": 4}]


def test_overrides_by_architecture_longest_prefix_last() -> None:
    space = Space.from_text(TEXT)
    assert space.parameters("sm_90") == {"BLOCK_N": [16, 64, 128], "num_warps": [4, 8, 16]}
    assert space.parameters("sm_80") == {"BLOCK_N": [32], "num_warps": [4]}
    assert space.parameters("sm_89") == {"BLOCK_N": [32], "num_warps": [8]}
    assert space.parameters("gfx942")["BLOCK_N"] == [16]
    assert space.points(TOY, "decode", WORKLOAD, A100) == [{"BLOCK_N": 32, "num_warps": 4}]


def test_ladder_leaves_out_what_its_rule_says() -> None:
    space = Space.from_text(TEXT)
    steps = [(step["batch"], step["kv_len"]) for step in space.ladder("standard")]
    assert steps == [(1, 100), (1, 200), (1, 300), (8, 100), (8, 200)]
    with pytest.raises(UserError, match=r"no ladder 'standart': did you mean 'standard'\?"):
        space.ladder("standart")


def test_a_space_comes_back_from_its_text() -> None:
    shipped = load_space("moe")
    again = Space.from_text(shipped.text, shipped.path)
    assert again == shipped


FAULTS = [
    ("kernel = ", "kernel = = ", "not valid TOML: .*line 2"),
    ('"mla-decode"', '"mla-decod"', "kernel: unknown kernel 'mla-decod': did you mean 'mla-decode'"),
    ('"mla-decode"', "3", "kernel: unknown kernel 3: expected one of mla-decode, moe"),
    ('kernel = "mla-decode"', "", "kernel: unknown kernel None"),
    ("[parameters]", "[parameter]", "unknown key parameter: did you mean 'parameters'"),
    ("[16, 64, 128]", "[]", r"parameters.BLOCK_N: expected a list of values, got \[\]"),
    ("[16, 64, 128]", "16", "parameters.BLOCK_N: expected a list of values, got 16"),
    ("[16, 64, 128]", "[16, 64, 16]", "parameters.BLOCK_N: 16 is there twice"),
    ("[16, 64, 128]", "[16, true]", "parameters.BLOCK_N: expected values of one type, got 16 and True"),
    ("[16, 64, 128]", '[16, "64"]', "parameters.BLOCK_N: expected values of one type, got 16 and '64'"),
    ("[16, 64, 128]", "[16, [64]]", r"parameters.BLOCK_N: expected whole numbers, strings or booleans, got \[64\]"),
    ("[16, 64, 128]", "[16.5]", "parameters.BLOCK_N: expected whole numbers, strings or booleans, got 16.5"),
    ("[16, 64, 128]", "{a = 1}", "parameters.BLOCK_N: expected a list of values"),
    ("[16, 64, 128]", f"{list(range(1000))}\nmore = {list(range(1000))}", "at most 1000000 combinations, got 3000000"),
    ("BLOCK_N = [16,", "kv_len = [16,", "parameters.kv_len: this name means something else in rules"),
    ("BLOCK_N = [16,", "max = [16,", "parameters.max: this name means something else in rules"),
    ("rule = ", "rul = ", r"unknown key where\[1\].rul: did you mean 'rule'"),
    ("BLOCK_N <= kv_len", "BLOCK_N <= kv_lenn", r"where\[1\].rule: unknown name 'kv_lenn' .*did you mean 'kv_len'"),
    ("BLOCK_N <= kv_len", "BLOCK_N <= kv_len.x", r"where\[1\].rule: .*Attribute is not allowed"),
    ('why = "many warps on a small tile"', "", r"where\[1\].why: expected the reason in words, got None"),
    ("[[where]]", "[where]", "where: expected .*where.* tables with rule and why"),
    ("arch.sm_80.parameters", "arch.h100.parameters", "arch.h100: expected an architecture or the start of one"),
    ("arch.sm_80.parameters", "arch.sm_80.values", "unknown key arch.sm_80.values"),
    (
        "num_warps = [4]",
        "num_warp = [4]",
        "arch.sm_80.parameters.num_warp: unknown parameter: did you mean 'num_warps'",
    ),
    ("num_warps = [4]", "num_warps = ['a']", "arch.sm_80.parameters.num_warps: expected values like 4, got 'a'"),
    ("num_warps = [4]", "num_warps = []", "arch.sm_80.parameters.num_warps: expected a list"),
    ("batch = [1, 8]", "batches = [1, 8]", "unknown key ladder.standard.batches: did you mean 'batch'"),
    ("batch = [1, 8]", "", "ladder.standard.batch: expected a list of different positive whole numbers, got None"),
    ("batch = [1, 8]", "batch = [0]", "ladder.standard.batch: expected a list of different positive"),
    ("batch = [1, 8]", "batch = [true]", "ladder.standard.batch: expected a list of different positive"),
    ("batch = [1, 8]", "batch = [8, 8]", "ladder.standard.batch: expected a list of different positive"),
    ("< 2000", "< 2", "ladder.standard.where: expected at least one workload"),
    ("batch * kv_len <", "batch * heads <", "ladder.standard.where: unknown name 'heads'"),
    ("[ladder.standard]", "[ladder]", "ladder.batch: expected a table"),
]


@pytest.mark.parametrize(("old", "new", "says"), FAULTS)
def test_every_fault_is_one_line_naming_file_and_key(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = tmp_path / "own.toml"
    assert old in TEXT
    path.write_text(TEXT.replace(old, new, 1))
    with pytest.raises(UserError, match=says) as caught:
        load_space(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no kernel and no file 'mle': did you mean 'moe'"):
        load_space("mle")
    (tmp_path / "latin.toml").write_bytes(b'kernel = "\xe9"')
    with pytest.raises(UserError, match="not UTF-8"):
        load_space(tmp_path / "latin.toml")
    (tmp_path / "deep.toml").write_text("a = " + "[" * 100_000)
    with pytest.raises(UserError, match="not valid TOML"):
        load_space(tmp_path / "deep.toml")
    (tmp_path / "large.toml").write_text("#" * (1 << 20) + "\n")
    with pytest.raises(UserError, match="at most 1048576 bytes"):
        load_space(tmp_path / "large.toml")


def test_parameters_must_be_the_kernels() -> None:
    extra = Space.from_text(TEXT.replace("num_warps = [4, 8, 16]", "num_warps = [4]\nnum_stage = [2]"), "own.toml")
    with pytest.raises(UserError, match=r"own.toml: parameters.num_stage: mla-decode has no such parameter"):
        extra.points(TOY, "decode", WORKLOAD, H200)
    text = "\n".join(line for line in TEXT.splitlines() if "num_warps = " not in line).replace("num_warps == 4", "True")
    with pytest.raises(
        UserError, match=r"own.toml: parameters.num_warps is missing; mla-decode needs BLOCK_N, num_warps"
    ):
        Space.from_text(text, "own.toml").points(TOY, "decode", WORKLOAD, H200)


def test_a_rule_that_cannot_be_evaluated_names_file_and_rule() -> None:
    text = TEXT.replace("BLOCK_N <= kv_len", "BLOCK_N <= kv_len // (heads - 16)")
    with pytest.raises(UserError, match=r"own.toml: where\[1\].rule: .*cannot be evaluated: .*zero"):
        Space.from_text(text, "own.toml").points(TOY, "decode", WORKLOAD, H200)


SHIPPED = [
    ("mla-decode", {"batch": 1, "kv_len": 8192}, 1),
    ("mla-decode", {"batch": 128, "kv_len": 4096}, 8),
    ("mla-decode", {"batch": 8, "kv_len": 32768}, 8),
    ("moe", {"tokens": 1}, 8),
    ("moe", {"tokens": 1024}, 8),
    ("moe", {"tokens": 4096}, 1),
]


@pytest.mark.parametrize(("kernel", "sizes", "tp"), SHIPPED)
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100", "gfx942", "gfx950"])
def test_shipped_spaces_hold_points_and_the_tile_of_the_default(
    kernel: str, sizes: dict[str, int], tp: int, arch: str
) -> None:
    tunable, space, device = load_tunable(kernel), load_space(kernel), target(arch)
    workload = tunable.complete_workload({**model_workload(kernel, "deepseek-v3", tp), **sizes})
    default = tunable.default_config(workload, device)
    for part in tunable.parts:
        points = space.points(tunable, part, workload, device)
        assert 24 <= len(points) <= (400 if arch == "sm_90" else 500)
        assert all(tunable.is_valid(part, point, workload, device) is None for point in points)
        assert len({tuple(point.values()) for point in points}) == len(points)
        if arch == "sm_90":  # num_splits has too many good values to list
            tile = {**(default if len(tunable.parts) == 1 else default[part])}
            tile.pop("num_splits", None)
            assert any(tile.items() <= point.items() for point in points)


@pytest.mark.parametrize(
    ("heads", "batch", "kv_len", "best"),
    [  # fastest (second: 1.014) of a prototype on an H200: BLOCK_H, BLOCK_N, num_splits, num_warps, num_stages
        (128, 1, 8192, (16, 64, 32, 4, 3)),
        (16, 1, 32768, (16, 64, 128, 4, 3)),
        (16, 128, 4096, (16, 64, 2, 4, 2)),
        (128, 128, 4096, (64, 64, 1, 8, 2)),
    ],
)
def test_the_mla_space_keeps_what_was_best(heads: int, batch: int, kv_len: int, best: tuple[int, ...]) -> None:
    tunable, space = load_tunable("mla-decode"), load_space("mla-decode")
    workload = tunable.complete_workload({"heads": heads, "batch": batch, "kv_len": kv_len})
    assert best in [tuple(point.values()) for point in space.points(tunable, "decode", workload, H200)]


@pytest.mark.parametrize(
    ("model", "tp", "tokens", "part", "best"),
    [  # of vLLM's kernel in bf16, which counts the columns of gate and up together; GROUP_M to the nearest value here
        ("deepseek-v3", 8, 64, "gemm1", (16, 16, 128, 1, 4, 3)),
        ("deepseek-v3", 8, 64, "gemm2", (16, 64, 128, 1, 4, 2)),
        ("deepseek-v3", 8, 1024, "gemm1", (64, 128, 64, 16, 8, 4)),
        ("deepseek-v3", 8, 1024, "gemm2", (64, 128, 64, 1, 4, 2)),
        ("mixtral-8x7b", 2, 64, "gemm1", (32, 64, 128, 1, 4, 5)),
        ("mixtral-8x7b", 2, 64, "gemm2", (32, 64, 128, 1, 4, 3)),
        ("mixtral-8x7b", 2, 1024, "gemm1", (128, 128, 64, 16, 8, 4)),
        ("mixtral-8x7b", 2, 4096, "gemm2", (128, 256, 64, 16, 8, 3)),
        ("qwen3-235b-a22b", 4, 1, "gemm1", (16, 32, 128, 1, 4, 5)),
        ("qwen3-235b-a22b", 4, 1, "gemm2", (16, 64, 64, 1, 4, 3)),
    ],
)
def test_the_moe_space_keeps_what_was_best(model: str, tp: int, tokens: int, part: str, best: tuple[int, ...]) -> None:
    tunable, space = load_tunable("moe"), load_space("moe")
    workload = tunable.complete_workload({**model_workload("moe", model, tp), "tokens": tokens})
    assert best in [tuple(point.values()) for point in space.points(tunable, part, workload, H200)]


def test_enumerating_is_fast() -> None:
    text = """
kernel = "moe"
[parameters]
BLOCK_M = [16, 32, 64, 128, 256]
BLOCK_N = [32, 64, 128, 256]
BLOCK_K = [64, 128, 256]
GROUP_M = [1, 16, 32, 64]
num_warps = [4, 8]
num_stages = [2, 3, 4, 5]
[[where]]
rule = "BLOCK_M <= max(16, 4 * cdiv(tokens * top_k, global_E))"
why = "tall"
[[where]]
rule = "BLOCK_M * BLOCK_N * num_stages < 10000000"
why = "large"
"""
    tunable, space = load_tunable("moe"), Space.from_text(text)
    workload = tunable.complete_workload({"tokens": 4096})
    started = time.perf_counter()
    totals = [space.survey(tunable, part, workload, H200).total for part in tunable.parts]
    assert time.perf_counter() - started < 0.3
    assert totals == [1920, 1920]
