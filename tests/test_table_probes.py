"""Acceptance probes of tables, by number: 5, 6, 7, 8, 11 and 12 (1 to 4, 9 and 10 are in test_probes.py)."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kerneltune import tables
from kerneltune.cli import main
from kerneltune.device import target
from kerneltune.kernels import table_files
from kerneltune.kernels import tables as launch_tables
from kerneltune.kernels.source_hash import variant_hash
from kerneltune.kernels.staleness import triton_version
from kerneltune.recordings import find_recordings
from kerneltune.registry import load_tunable
from kerneltune.tuning.backends import ReplayBackend
from kerneltune.tuning.options import Options
from kerneltune.tuning.progress import Silent
from kerneltune.tuning.session import run

ROOT = Path(__file__).parents[1]
ENGINES = Path(__file__).parent / "data" / "engine_tables"
H200 = target("sm_90")
FRESH = {
    "triton": triton_version(),
    "kernel_hash": {"grouped_gemm": variant_hash("moe", "grouped_gemm")},
    "date": "2026-12-01",
}
NAME = "moe.bf16.nvidia-h200.json"


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("KERNELTUNE_STALE", "")
    monkeypatch.delenv("KERNELTUNE_TABLES", raising=False)
    monkeypatch.setattr(table_files, "_shipped", lambda: ())
    yield
    launch_tables.forget()
    launch_tables._said.clear()


def command(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(arguments)
    captured = capsys.readouterr()
    assert left.value.code == code, captured.err
    return captured.err if code > 1 else captured.out


def workload(**given: Any) -> dict[str, Any]:
    return dict(load_tunable("moe").complete_workload(given))


def config(warps: int = 4) -> dict[str, Any]:
    part = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128, "GROUP_M": 1, "num_warps": warps, "num_stages": 3}
    return {"gemm1": part, "gemm2": part}


def write(path: Path, *entries: dict[str, Any], device: Any = None, **provenance: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    device = (device or H200).to_dict()
    path.write_text(json.dumps(tables.make_table("moe", device, FRESH | provenance, list(entries))))
    return path


def entry(warps: int = 4, loss: dict[str, float] | None = None, **given: Any) -> dict[str, Any]:
    figures = {"time_us": 10.0, "default_us": 12.0, "bound": "memory", "roofline": 0.5}
    return tables.make_entry(workload(**given), config(warps), figures, loss)


# -- 5: a partial table ------------------------------------------------------------------------------------------------
def test_5_sizes_that_were_not_tuned_are_never_served_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = {"tokens=1": 0.0, "tokens=8": 0.034, "tokens=4096": 0.41}
    entries = [
        entry(tokens=1, loss=losses),
        *(entry(tokens=n) for n in (2, 4)),
        entry(tokens=8, loss={"tokens=4": 0.02}),
    ]
    path = write(tmp_path / "out" / "tables" / NAME, *entries)
    asked = {name: value for name, value in workload(tokens=4096).items() if name != "routing"}
    with pytest.warns(UserWarning, match="no tuned config for tokens=4096 .*the default is used"):
        assert launch_tables.resolve("moe", asked, H200, path) is None
    shown = command(capsys, "lookup", "moe", "tokens=4096", "--table", str(path), "--target", "sm_90")
    assert "no entry fits; the kernel takes its default config" in shown
    assert "differs   tokens: 8 there, 4096 asked for, more than a factor of 2 apart" in shown
    assert "to tune   kerneltune search moe --workload tokens=4096," in shown
    assert "measured loss" not in shown  # the nearest entry, tokens=8, was not measured there
    report = command(capsys, "report", str(tmp_path / "out"))
    assert re.search(r"served +moe: tokens 1-16; else the default", report)
    assert "at most 3.4 % lost by an entry's config on the nearest other workload (tokens=1's on tokens=8)" in report
    assert "of all entries: 3.4, 2.0 %" in report
    gap = "the default is used, a config of the table was measured to lose: tokens=4096 (tokens=1's config: 41.0 %)"
    assert f"moe: {gap}" in report
    near = command(capsys, "lookup", "moe", "tokens=6", "--table", str(path), "--target", "sm_90")
    assert "tokens=8 E=256 N=256 K=7168 top_k=8 bf16 (nearest, sizes a factor of 1.33 away, measured loss 2.0 %" in near


def test_5_the_nearest_entry_s_loss_at_the_very_size_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / NAME, entry(tokens=8, loss={"tokens=8": 0.0, "tokens=4096": 0.41}))
    given = ["lookup", "moe", "tokens=4096", "--table", str(path)]
    shown = command(capsys, *given, "--target", "sm_90")
    assert "  differs   tokens: 8 there, 4096 asked for" in shown
    assert "  loss      measured loss 41.0 % at tokens=4096\n" in shown
    answer = json.loads(command(capsys, *given, "--target", "sm_90", "--json"))
    assert (answer["nearest"]["loss"], answer["nearest"]["device"], answer["loss"]) == (0.41, "", None)
    pcie = command(capsys, *given, "--device", "NVIDIA H100 PCIe:114:sm_90")
    assert "  loss      measured loss 41.0 % at tokens=4096 on NVIDIA H200, not here\n" in pcie
    for other in ("tokens=4096,K=6144", "tokens=4096,routing=zipf"):  # measured, but not for this problem
        assert "measured loss" not in command(capsys, *given[:2], other, *given[3:], "--target", "sm_90")


# -- 6: another compiler -----------------------------------------------------------------------------------------------
def test_6_another_compiler_follows_the_policy_and_one_command_renews(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = entry(tokens=64) | {"provenance": FRESH}
    path = write(tmp_path / "out" / "tables" / NAME, entry(tokens=8), fresh, triton="3.5.9")
    reason = f"measured with triton 3.5.9, here is {triton_version()}"
    for policy, used, warned in (("warn", True, 1), ("strict", False, 1), ("ignore", True, 0), ("", True, 1)):
        monkeypatch.setenv("KERNELTUNE_STALE", policy)
        launch_tables._said.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for tokens in (7, 8, 9):
                assert (launch_tables.resolve("moe", workload(tokens=tokens), H200, path) is not None) == used
        assert len(caught) == warned
        for each in caught:
            assert reason in str(each.message)
            assert f"kerneltune revalidate {path}" in str(each.message)
    monkeypatch.setenv("KERNELTUNE_STALE", "")
    given = ["lookup", "moe", "tokens=8", "--table", str(path), "--target", "sm_90"]
    assert f"stale     {reason} (policy: warn)" in command(capsys, *given)
    assert f"{reason}" in command(capsys, *given, "--stale", "strict")
    report = command(capsys, "report", str(tmp_path / "out"))
    assert f"{NAME}: 1 of 2 entries, compiler: {reason} (to renew: kerneltune revalidate {path})" in report
    from kerneltune.tuning.revalidate import stale_entries

    (only,) = stale_entries(tables.load_table(path), everything=False)
    assert only.entry["workload"]["tokens"] == 8


# -- 7: another source -------------------------------------------------------------------------------------------------
def test_7_a_constant_in_a_helper_makes_entries_stale_and_a_comment_does_not(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for name in ("kerneltune", "kernels", "search_spaces"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    path = write(tmp_path / NAME, entry(tokens=8))
    helper = copy / "kernels" / "moe" / "align.py"
    original = helper.read_text()
    environment = os.environ | {"PYTHONPATH": str(copy), "CUDA_VISIBLE_DEVICES": ""}

    def answer() -> tuple[bool, list[str]]:
        base = [sys.executable, "-m", "kerneltune"]
        asked = [*base, "lookup", "moe", "tokens=8", "--table", str(path), "--target", "sm_90", "--json"]
        found = subprocess.run(asked, cwd=copy, env=environment, capture_output=True, text=True, check=True)
        checked = subprocess.run(
            [*base, "check", str(path), "--json"], cwd=copy, env=environment, capture_output=True, text=True
        )
        faults = [each["what"] for each in json.loads(checked.stdout) if each["fault"]]
        assert checked.returncode == (1 if faults else 0)
        return json.loads(found.stdout)["match"] is not None, faults

    assert answer() == (True, [])
    helper.write_text(
        original.replace("# pairs read at a time", "# ids read at once").replace("no atomics", "nothing atomic")
    )
    assert answer() == (True, [])
    helper.write_text(original.replace("CHUNK = 1024", "CHUNK = 2048"))
    used, (fault,) = answer()
    assert not used
    assert fault.startswith("source changed: measured with source ")
    assert f"kerneltune revalidate {path}" in fault


# -- 8: the key --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kernel", "first", "second"),
    [
        ("moe", {"K": 7168}, {"K": 6144}),
        ("moe", {"top_k": 8}, {"top_k": 6}),
        ("mla-decode", {"page_size": 64}, {"page_size": 32}),
        ("mla-decode", {"dtype": "bf16"}, {"dtype": "fp16"}),
        ("mla-decode", {"kv_lora_rank": 512}, {"kv_lora_rank": 256}),
        ("mla-decode", {"s_q": 1}, {"s_q": 2}),
    ],
)
def test_8_what_changes_the_best_config_is_a_key(
    tmp_path: Path, kernel: str, first: dict[str, Any], second: dict[str, Any]
) -> None:
    tunable = load_tunable(kernel)
    one, other = (dict(tunable.complete_workload(given)) for given in (first, second))

    def found() -> list[Any]:
        places = [tmp_path / "tables"]
        matches = [launch_tables.find(kernel, each, H200, tables=places, only=True) for each in (one, other)]
        return [None if match is None else match.config for match in matches]

    def tune(sizes: dict[str, Any], number: int) -> None:
        made = tables.make_entry(sizes, {"number": number}, {"time_us": 1.0})
        tables.add_entry(tmp_path / "tables", kernel, H200.to_dict(), {}, made)

    tune(one, 1)
    assert found() == [{"number": 1}, None]
    tune(other, 2)
    assert found() == [{"number": 1}, {"number": 2}]
    tune(one, 3)
    assert found() == [{"number": 3}, {"number": 2}]


def test_8_h200_and_h200_nvl_are_told_apart_and_the_rule_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / NAME, entry(tokens=8))
    given = ["lookup", "moe", "tokens=8", "--table", str(path), "--device"]
    assert "relative" not in command(capsys, *given, "NVIDIA H200:132:sm_90")
    nvl = command(capsys, *given, "NVIDIA H200 NVL:132:sm_90")
    assert "relative  of NVIDIA H200: also sm_90 with 132 SMs" in nvl
    other = command(capsys, *given, "NVIDIA H100 PCIe:114:sm_90")
    assert "a relative has the same architecture and SM count, and is no MIG slice" in other


def test_8_what_a_relative_s_table_measured_was_measured_on_the_relative(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / NAME, entry(tokens=8, loss={"tokens=8": 0.0, "tokens=16": 0.02}))
    for tokens, told in ((8, "(exact, measured loss 0.0 % "), (12, "measured loss 2.0 % at tokens=16 ")):
        given = ["lookup", "moe", f"tokens={tokens}", "--table", str(path), "--device"]
        shown = command(capsys, *given, "NVIDIA H100 80GB HBM3:132:sm_90")
        assert f"{told}on NVIDIA H200, not here)" in shown
        assert re.search(r"  measured  10.0 us, default 12.0 us.* on NVIDIA H200, not here\n", shown)
        answer = json.loads(command(capsys, *given, "NVIDIA H100 80GB HBM3:132:sm_90", "--json"))
        assert answer["loss"]["on"] == "NVIDIA H200"
        assert "not here" not in command(capsys, *given, "NVIDIA H200:132:sm_90")


# -- 11: engines -------------------------------------------------------------------------------------------------------
def test_11_exported_names_and_fields_are_the_loaders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = [entry(tokens=1), entry(tokens=64, warps=8), entry(tokens=8, E=8, global_E=8, N=7168, K=4096, top_k=2)]
    path = write(tmp_path / NAME, *made, triton="3.6.0")
    command(capsys, "export", str(path), "--format", "vllm", "--to", "vllm")
    command(capsys, "export", str(path), "--format", "sglang", "--to", "sglang")
    assert sorted(os.listdir("vllm")) == [
        "E=256,N=256,device_name=NVIDIA_H200.json",
        "E=8,N=7168,device_name=NVIDIA_H200.json",
    ]
    shipped = {path.name for path in ENGINES.glob("*.json")}
    assert "E=8,N=7168,device_name=NVIDIA_H200.json" in shipped  # byte for byte what vLLM itself ships
    folder = Path("sglang/configs/triton_3_6_0")
    assert sorted(os.listdir(folder)) == [
        "E=256,N=256,device_name=NVIDIA_H200.json",
        "E=256,N=256,device_name=NVIDIA_H200_down.json",
        "E=8,N=7168,device_name=NVIDIA_H200.json",
        "E=8,N=7168,device_name=NVIDIA_H200_down.json",
    ]
    fields = {"BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages"}
    for file in [*Path("vllm").glob("*.json"), *folder.glob("*.json")]:
        content = json.loads(file.read_text())
        assert all(key.isdecimal() for key in content)
        assert all(set(row) == fields for row in content.values())
    up = json.loads((folder / "E=256,N=256,device_name=NVIDIA_H200.json").read_text())
    down = json.loads((folder / "E=256,N=256,device_name=NVIDIA_H200_down.json").read_text())
    assert (up["1"]["BLOCK_SIZE_N"], down["1"]["BLOCK_SIZE_N"]) == (64, 32)  # gate and up, of 32 columns each
    assert list(up) == ["1", "64"]


@pytest.mark.parametrize(
    ("device", "vllm", "sglang"),
    [
        ("NVIDIA H200 NVL", "NVIDIA_H200", "NVIDIA_H200_NVL"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA_H100_80GB_HBM3", "NVIDIA_H100_80GB_HBM3"),
        ("AMD Instinct MI300X/OAM", "AMD_Instinct_MI300X_OAM", "AMD_Instinct_MI300X/OAM"),
    ],
)
def test_11_device_names_are_folded_as_each_loader_does(device: str, vllm: str, sglang: str) -> None:
    from kerneltune.engines import file_name

    assert file_name("vllm", 8, 16, device) == f"E=8,N=16,device_name={vllm}.json"
    assert file_name("sglang", 8, 16, device, down=True) == f"E=8,N=16,device_name={sglang}_down.json"


def test_11_an_imported_vllm_file_is_what_a_search_tries_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = ENGINES / "E=8,N=7168,device_name=NVIDIA_H200.json"
    out = tmp_path / "out"
    written = json.loads(
        command(capsys, "import", str(file), "--model", "mixtral-8x7b", "--tp", "2", "--out", str(out), "--json")
    )
    assert written[0]["entries"] == 18
    rows = {int(tokens): row for tokens, row in json.loads(file.read_text()).items()}
    recordings = [r for r in find_recordings([ROOT / "results"], "moe") if r.workload["E"] == 8]
    backend = ReplayBackend([next(r for r in recordings if r.workload["tokens"] == 256)])
    (asked,) = backend.workloads
    recorded = {json.dumps(point, sort_keys=True) for point in backend.points(asked, "gemm2")}
    found = run(backend, [asked], Options(out, trials=12, command="test"), Silent())
    assert found.measured
    trials = [json.loads(line) for line in (out / "records" / "moe.jsonl").read_text().splitlines()]
    tried = [t["config"] for t in trials if t["kind"] == "trial" and t["stage"] == "search" and t["part"] == "gemm2"]
    assert tried[0] == backend.default_config(asked)["gemm2"]
    near = sorted((n for n in rows if 128 <= n <= 512), key=lambda n: abs(n / 256 - 1))
    wanted = []
    for tokens in (256, *(n for n in near if n != 256)):
        row = rows[tokens]
        ours = {"BLOCK_M": row["BLOCK_SIZE_M"], "BLOCK_N": row["BLOCK_SIZE_N"], "BLOCK_K": row["BLOCK_SIZE_K"]}
        ours |= {"GROUP_M": row["GROUP_SIZE_M"], "num_warps": row["num_warps"], "num_stages": row["num_stages"]}
        if json.dumps(ours, sort_keys=True) in recorded and ours not in wanted and ours != tried[0]:
            wanted.append(ours)
    assert wanted, "the file holds nothing that was recorded: choose another"
    assert tried[1 : 1 + len(wanted)] == wanted


def test_11_a_search_says_how_many_imported_configs_it_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr("kerneltune.tuning.imports.MOST", 1)
    monkeypatch.setattr(Silent, "note", lambda _, text: notes.append(text))
    file = ENGINES / "E=8,N=7168,device_name=NVIDIA_H200.json"
    command(capsys, "import", str(file), "--model", "mixtral-8x7b", "--tp", "2", "--out", str(tmp_path / "out"))
    recordings = [r for r in find_recordings([ROOT / "results"], "moe") if r.workload["E"] == 8]
    backend = ReplayBackend([next(r for r in recordings if r.workload["tokens"] == 256)])
    run(backend, list(backend.workloads), Options(tmp_path / "out", trials=2, command="test"), Silent())
    (note,) = [text for text in notes if "imported" in text]
    assert re.search(r"tokens=256 E=8 .*: starts from 1 imported configs, \d more are left out", note)


def test_11_a_file_that_says_its_triton_and_a_format_is_a_start_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = ENGINES / "E=32,N=2048,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
    shown = command(
        capsys, "import", str(file), "--workload", "K=7168,top_k=8,global_E=256", "--out", str(tmp_path / "out")
    )
    assert "18 configs" in shown
    assert "tuned for fp8_w8a8" in shown
    (written,) = (tmp_path / "out" / "imports").glob("*.json")
    table = tables.load_table(written)
    assert table.provenance["triton"] == "3.4.0"
    assert all(each["measured"] == {} for each in table.entries)
    pair = sorted((ENGINES / "sglang" / "triton_3_7_1").glob("*.json"))
    command(capsys, "import", *map(str, pair), "--model", "deepseek-v3", "--tp", "4", "--out", str(tmp_path / "two"))
    (written,) = (tmp_path / "two" / "imports").glob("*.json")
    two = tables.load_table(written)
    assert two.provenance["triton"] == "3.7.1"  # SGLang's folder says it
    down = json.loads(pair[1].read_text())["512"] if "_down" in pair[1].name else json.loads(pair[0].read_text())["512"]
    near = [each["config"]["gemm2"] for each in two.entries if each["workload"]["tokens"] == 512]
    assert [(params["BLOCK_N"], params["BLOCK_K"]) for params in near] == [(down["BLOCK_SIZE_N"], down["BLOCK_SIZE_K"])]


BAD = {
    "E=8,N=16,device_name=X.json": [
        ("[]", "expected an object"), ("{", "not valid JSON"), ('{"a": {}}', "'a': expected a number of tokens"),
        ('{"1": 3}', "1: expected parameters"),
        ('{"1": {"BLOCK_SIZE_M": "16"}}', "1.BLOCK_SIZE_M: expected a whole number"),
        ('{"triton_version": 3}', "triton_version: expected a text"), ("{}", "no token counts in it"),
    ],
    "E=8,N=16.json": [("{}", "not named as vLLM or SGLang name MoE tables")],
    "table.json": [("{}", "schema: expected 1")],
}  # fmt: skip


@pytest.mark.parametrize(("name", "text", "says"), [(name, *each) for name, several in BAD.items() for each in several])
def test_11_what_is_no_engine_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, says: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    sizes = ["--workload", "K=64,top_k=2"]
    assert says in command(capsys, "import", str(path), *sizes, "--out", str(tmp_path / "out"), code=2)
    assert not (tmp_path / "out").exists()
    good = ENGINES / "E=8,N=7168,device_name=NVIDIA_H200.json"
    assert "does not say K and top_k" in command(capsys, "import", str(good), "--out", "out", code=2)
    wrong = ["--model", "deepseek-v3", "--tp", "8", "--out", "out"]
    assert "E=8, but deepseek-v3 at this parallelism has E=256" in command(capsys, "import", str(good), *wrong, code=2)


# -- 12: two writers ---------------------------------------------------------------------------------------------------
def _tune(path: str, routing: str, count: int) -> None:
    for tokens in range(1, count + 1):
        made = tables.make_entry(workload(tokens=tokens, routing=routing), config(), {"time_us": float(tokens)})
        tables.write_table(Path(path), tables.make_table("moe", H200.to_dict(), {"command": routing}, [made]))


def test_12_two_writers_lose_nothing_and_input_classes_stay_apart(tmp_path: Path) -> None:
    path = tmp_path / NAME
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_tune, args=(str(path), routing, 20)) for routing in ("uniform", "zipf")]
    for writer in writers:
        writer.start()
    reads = 0
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            tables.load_table(path)  # raises on half a file
            reads += 1
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert reads > 10
    found = {(e["workload"]["routing"], e["workload"]["tokens"]) for e in tables.load_table(path).entries}
    assert found == {(routing, tokens) for routing in ("uniform", "zipf") for tokens in range(1, 21)}
    match = launch_tables.find("moe", workload(tokens=7, routing="zipf"), H200, tables=[path], only=True)
    assert match is not None
    assert match.entry["workload"]["routing"] == "zipf"


def test_12_writers_killed_at_any_moment_leave_a_whole_table(tmp_path: Path) -> None:
    path = tmp_path / NAME
    _tune(str(path), "uniform", 1)
    context = multiprocessing.get_context("fork")
    for turn in range(15):
        writer = context.Process(target=_tune, args=(str(path), "zipf", 1000))
        writer.start()
        time.sleep(0.01 + 0.013 * turn)
        writer.kill()
        writer.join()
        routings = [each["workload"]["routing"] for each in tables.load_table(path).entries]
        assert routings.count("uniform") == 1
    _tune(str(path), "dirichlet", 1)  # no lock is left, and what the killed began is swept up
    assert not list(tmp_path.glob(".*.tmp"))
