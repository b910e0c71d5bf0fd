"""Routing and lengths from a file: formats, faults, drawing, and that costs count what the drawn inputs touch."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kerneltune.kernels.mla_decode.tunable import TUNABLE as MLA
from kerneltune.kernels.mla_decode.tunable import draw_lengths
from kerneltune.kernels.moe.routing import draw_topk_ids
from kerneltune.kernels.moe.tunable import TUNABLE as MOE
from kerneltune.kernels.table_format import class_name
from kerneltune.measure import gate
from kerneltune.registry import load_tunable

IDS = [[0, 1], [1, 2], [5, 0], [3, -1], [-1, -1], [4, 5], [2, 3]]
LENGTHS = [7, 4000, 1, 900, 65, 8192]
SMALL: dict[str, Any] = {"dtype": "fp16", "E": 6, "N": 32, "K": 64, "top_k": 2, "tokens": 5}


def save(path: Path, content: Any) -> str:
    """A file of the format that its suffix names."""
    if path.suffix == ".npy":
        np.save(path, content)
    elif path.suffix == ".pt":
        torch.save(content, path)
    else:
        path.write_text(json.dumps(content))
    return str(path)


def routing(path: str, **sizes: Any) -> str:
    return str(MOE.complete_workload({**SMALL, **sizes, "routing": path})["routing"])


def windows(values: list[Any], count: int) -> list[list[Any]]:
    """Every run of `count` values, starting over at the end."""
    return [[values[(start + i) % len(values)] for i in range(count)] for start in range(len(values))]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("ids.json", IDS),
        ("ids.json", {"model": "m", "topk_ids": IDS}),
        ("ids.npy", np.array(IDS, dtype=np.int16)),
        ("IDS.PT", torch.tensor(IDS)),
        ("ids.pt", {"topk_ids": torch.tensor(IDS, dtype=torch.int32)}),
    ],
)
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str, content: Any) -> None:
    path = tmp_path / name
    if name == "IDS.PT":
        torch.save(content, path)
    else:
        save(path, content)
    value = routing(str(path))
    assert value == f"{path}@{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}"
    assert routing(value) == value
    drawn = draw_topk_ids(value, 7, 6, 2, seed=0)
    assert (drawn.dtype, tuple(drawn.shape)) == (torch.int32, (7, 2))
    assert drawn.tolist() in windows(IDS, 7)


@pytest.mark.parametrize("content", [LENGTHS, {"lengths": LENGTHS}, np.array(LENGTHS, dtype=np.uint32)])
def test_lengths_in_every_format(tmp_path: Path, content: Any) -> None:
    path = save(tmp_path / ("l.npy" if isinstance(content, np.ndarray) else "l.json"), content)
    workload = MLA.complete_workload({"batch": 6, "kv_len": 10000, "lengths": path})
    assert draw_lengths(workload, 0) in windows(LENGTHS, 6)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("ids.json", [[0, 1, 2]], "rows of 3 ids: expected 2 (top_k)"),
        ("ids.json", [[0, 1], [6, 1]], "row 1: id 6: expected 0 to 5, or -1 (not local)"),
        ("ids.json", [[0, -2]], "row 0: id -2: expected 0 to 5"),
        ("ids.json", [[0, 1.0]], "row 0: expected integers, found 1.0"),
        ("ids.json", [[0, True]], "row 0: expected integers, found True"),
        ("ids.json", [[0, 1], [2]], "row 1 has 1 numbers: expected 2, as the first"),
        ("ids.json", [[0, 1], 2], "the list: expected integers, found [0, 1]"),
        ("ids.json", [[0, 1 << 70]], "row 0: expected numbers below 2^62"),
        ("ids.json", [0, 1], "expected rows of 2 ids (top_k), a row a token, found shape [2]"),
        ("ids.json", [], "found shape [0]"),
        ("ids.json", {"ids": IDS}, "expected topk_ids in it, found ids"),
        ("ids.json", "none", "expected integers, found str"),
        ("ids.npy", np.array(IDS, dtype=np.float32), "expected integers, found float32"),
        ("ids.npy", np.zeros((0, 2), dtype=np.int32), "found shape [0, 2]"),
        ("ids.pt", torch.tensor(IDS).float(), "expected integers, found float32"),
        ("ids.pt", torch.ones(3, 2, dtype=torch.bool), "expected integers, found bool"),
        ("ids.csv", IDS, "a file of format .csv: expected .json, .npy, .pt"),
    ],
)
def test_bad_routing_files_are_one_line(tmp_path: Path, name: str, content: Any, says: str) -> None:
    path = save(tmp_path / name, content)
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        routing(path)
    assert str(caught.value).startswith(f"routing={path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([5, 0], "length 0 at place 1: expected at least 1"),
        ([5, -3], "length -3 at place 1"),
        ([], "expected a list of lengths, one a request, found shape [0]"),
        ([[1, 2]], "found shape [1, 2]"),
        ([1.5], "expected integers, found 1.5"),
    ],
)
def test_bad_lengths_files_are_one_line(tmp_path: Path, content: Any, says: str) -> None:
    path = save(tmp_path / "l.json", content)
    with pytest.raises(ValueError, match=re.escape(f"lengths={path}: ") + ".*" + re.escape(says)):
        MLA.complete_workload({"lengths": path})


@pytest.mark.parametrize("name", ["cut.json", "cut.npy", "cut.pt"])
def test_damaged_and_hostile_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for data in (b"", b"\x80\x04cos\nsystem\n", b"[[1, 2], [3,"):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=f"not a sound {path.suffix} file") as caught:
            routing(str(path))
        assert "\n" not in str(caught.value)


def test_a_pickle_that_would_run_code_is_not_run(tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    torch.save(Touch(), tmp_path / "ids.pt")
    np.save(tmp_path / "ids.npy", np.array([Touch()], dtype=object))
    for name in ("ids.pt", "ids.npy"):
        with pytest.raises(ValueError, match="not a sound"):
            routing(str(tmp_path / name))
    assert not (tmp_path / "ran").exists()


def test_neither_a_class_nor_a_file(tmp_path: Path) -> None:
    for value in (str(tmp_path / "none.json"), str(tmp_path), "", 3):
        with pytest.raises(ValueError, match="no such class and no such file, expected uniform, zipf, dirichlet or a"):
            MOE.complete_workload({"routing": value})


def test_a_changed_file_is_another_workload_and_never_drawn_for_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "ids.json"
    old = routing(save(path, IDS))
    assert draw_topk_ids(old, 3, 6, 2, 0).shape == (3, 2)
    new = routing(save(path, IDS[::-1]))
    assert new != old
    assert MOE.complete_workload({**SMALL, "routing": old})["routing"] == old  # a name: replays need no file
    with pytest.raises(ValueError, match=f"the file has changed, its content is now @{new[-8:]}"):
        draw_topk_ids(old, 3, 6, 2, 0)
    path.unlink()
    with pytest.raises(ValueError, match="there is no such file here"):
        MOE.make_problem({**SMALL, "routing": new}, "cpu")


def test_drawing_is_a_window_decided_by_the_seed(tmp_path: Path) -> None:
    value = routing(save(tmp_path / "ids.json", IDS))
    drawn = [draw_topk_ids(value, 4, 6, 2, seed).tolist() for seed in range(60)]
    assert drawn == [draw_topk_ids(value, 4, 6, 2, seed).tolist() for seed in range(60)]
    assert all(each in windows(IDS, 4) for each in drawn)
    assert len({str(each) for each in drawn}) == len(IDS)  # every start comes up
    long = draw_topk_ids(value, 20, 6, 2, 1).tolist()
    assert long in windows(IDS, 20)
    before = draw_topk_ids(value, 4, 6, 2, 0)
    before.fill_(9)  # a caller's own copy
    assert draw_topk_ids(value, 4, 6, 2, 0).tolist() == drawn[0]


def test_lengths_are_cut_to_kv_len_and_not_under_s_q(tmp_path: Path) -> None:
    path = save(tmp_path / "l.json", LENGTHS)
    workload = MLA.complete_workload({"batch": 6, "kv_len": 900, "s_q": 2, "lengths": path})
    lengths = draw_lengths(workload, 3)
    assert sorted(lengths) == [2, 7, 65, 900, 900, 900]
    assert lengths == draw_lengths(workload, 3)
    assert len({str(draw_lengths(workload, seed)) for seed in range(40)}) > 3


@pytest.mark.parametrize("E", [6, 3])
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_moe_cost_counts_what_is_touched(tmp_path: Path, E: int, seed: int) -> None:
    """Counted by hand from the problem that would be timed, id by id."""
    sizes = {**SMALL, "E": E, "global_E": 6, "routing": save(tmp_path / "ids.json", IDS)}
    ids = MOE.make_problem(sizes, "cpu", seed).inputs["topk_ids"].tolist()
    local = [[expert for expert in row if 0 <= expert < E] for row in ids]
    rows, tokens = sum(map(len, local)), sum(1 for row in local if row)
    experts = len({expert for row in local for expert in row})
    gemm1, gemm2 = (MOE.cost(sizes, part, seed) for part in ("gemm1", "gemm2"))
    assert gemm1.flops == 2 * rows * 2 * 32 * 64
    assert gemm1.bytes_read == 2 * (experts * 2 * 32 * 64 + tokens * 64)
    assert gemm1.bytes_written == 2 * rows * 32
    assert gemm2.flops == 2 * rows * 32 * 64
    assert gemm2.bytes_read == 2 * (experts * 32 * 64 + rows * 32)
    assert gemm2.bytes_written == 2 * rows * 64


def test_mla_cost_counts_the_pages_that_the_problem_owns(tmp_path: Path) -> None:
    path = save(tmp_path / "l.json", LENGTHS)
    workload = MLA.complete_workload({"dtype": "fp16", "heads": 2, "batch": 4, "kv_len": 1000, "lengths": path})
    problem = MLA.make_problem(workload, "cpu", seed=2)
    lengths = problem.inputs["cache_seqlens"].tolist()
    entries = [
        page
        for row, n in zip(problem.inputs["block_table"].tolist(), lengths, strict=True)
        for page in row[: -(-n // 64)]
    ]
    assert len(set(entries)) == len(entries)
    cost = MLA.cost(workload, seed=2)
    assert cost.bytes_read == 2 * 576 * (sum(lengths) + 4 * 2) + 4 * (len(set(entries)) + 4)
    assert cost.flops == 2 * 2 * sum(lengths) * (576 + 512)


def test_the_gate_passes_on_all_tokens_to_one_expert(tmp_path: Path, device: str) -> None:
    """The recorded rows themselves are run and judged, and the edges beside them."""
    workload = {**SMALL, "tokens": 40, "routing": save(tmp_path / "hot.json", [[3, -1]] * 11)}
    moe = load_tunable("moe")
    cases = gate.make_cases(moe, workload, device)
    assert (cases[0].problem.inputs["topk_ids"] == torch.tensor([3, -1], device=device)).all()
    part = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "GROUP_M": 1, "num_warps": 4, "num_stages": 2}
    verdict = gate.check(moe, cases, {"gemm1": part, "gemm2": part})
    assert verdict.ok, verdict.reason
    launch = MOE.launch(cases[0].problem, {"gemm1": part, "gemm2": part})
    launch.run()
    launch.outputs["out"][7] = 0
    assert not gate.judge(moe, cases[0], launch).ok


def test_class_names_hold_no_folders() -> None:
    assert class_name("uniform") == "uniform"
    assert class_name("/data/day 1/ids.v2.json@1a2b3c4d") == "ids.v2@1a2b3c4d"
    assert class_name("../x/my ids,=.npy@1a2b3c4d") == "my-ids--@1a2b3c4d"
    assert class_name("ids@1a2b3c4d") == "ids@1a2b3c4d"
    assert len(class_name("a" * 250 + ".json@1a2b3c4d")) == 109
