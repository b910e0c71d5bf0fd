"""Tables as searches write them: merged, whole at every moment, installed, and explained."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kerneltune
from kerneltune import tables
from kerneltune.device import target
from kerneltune.errors import UserError
from kerneltune.kernels import table_files
from kerneltune.kernels import tables as launch_tables
from kerneltune.registry import load_tunable
from kerneltune.tables import add_entry, install, load_table, make_entry, make_table, table_file_name, write_table

H200 = target("sm_90")
DEVICE = H200.to_dict()
PROVENANCE = {
    "triton": "3.6.0",
    "torch": "2.11.0",
    "kernel_hash": {"split_kv": "abc"},
    "date": "2026-12-01",
    "command": "x",
}


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("KERNELTUNE_TABLES", raising=False)
    monkeypatch.setattr(table_files, "_shipped", lambda: ())
    launch_tables.forget()
    yield
    launch_tables.forget()


def entry(tokens: int, block: int = 16, **given: Any) -> dict[str, Any]:
    workload = load_tunable("moe").complete_workload({"tokens": tokens, **given})
    part = {"BLOCK_M": block, "BLOCK_N": 32, "BLOCK_K": 64, "GROUP_M": 1, "num_warps": 4, "num_stages": 3}
    measured = {"time_us": 10.5, "default_us": None, "roofline": 0.9, "bound": "memory"}
    return make_entry(workload, {"gemm1": part, "gemm2": part}, measured)


def table(*entries: dict[str, Any], **provenance: str) -> dict[str, Any]:
    return make_table("moe", DEVICE, {**PROVENANCE, **provenance}, entries)


def tokens(path: Path) -> list[int]:
    return [each["workload"]["tokens"] for each in load_table(path).entries]


def test_file_name_says_kernel_dtype_and_device() -> None:
    assert table_file_name("mla-decode", "bf16", "NVIDIA H200") == "mla-decode.bf16.nvidia-h200.json"


def test_merging_replaces_the_same_workload_and_keeps_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "t.json"
    write_table(path, table(entry(64), entry(1)))
    write_table(path, table(entry(1, 32), entry(8), entry(64, routing="zipf")))
    read = load_table(path)
    found = [(e["workload"]["tokens"], e["workload"]["routing"], e["config"]["gemm1"]["BLOCK_M"]) for e in read.entries]
    assert found == [(1, "uniform", 32), (8, "uniform", 16), (64, "uniform", 16), (64, "zipf", 16)]
    assert (read.kernel, read.device, read.provenance) == ("moe", DEVICE, PROVENANCE)


def test_an_entry_a_line_so_that_a_diff_shows_what_changed(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write_table(path, table(entry(1), entry(8), entry(64)))
    before = path.read_text().splitlines()
    write_table(path, table(entry(8, 128)))
    after = path.read_text().splitlines()
    assert len(before) == len(after)
    assert [old != new for old, new in zip(before, after, strict=True)].count(True) == 1
    assert json.loads(path.read_text())["entries"][1]["config"]["gemm1"]["BLOCK_M"] == 128


def test_the_same_table_again_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write_table(path, table(entry(1)))
    before = path.stat().st_mtime_ns, path.stat().st_ino
    write_table(path, table(entry(1)))
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before
    assert [file.name for file in tmp_path.iterdir() if not file.name.endswith(".lock")] == ["t.json"]


def test_entries_measured_with_other_software_keep_their_provenance(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write_table(path, table(entry(1), entry(8)))
    write_table(path, table(entry(8), triton="3.9.0"))
    read = load_table(path)
    assert read.provenance["triton"] == "3.9.0"
    assert [each.get("provenance", {}).get("triton") for each in read.entries] == ["3.6.0", None]
    write_table(path, table(entry(64), triton="3.6.0"))
    assert [each.get("provenance", {}).get("triton") for each in load_table(path).entries] == [None, "3.9.0", None]
    # A later day is no other software, but it is not the day of the entries that do not say their own.
    write_table(path, table(entry(64), date="2027-01-01"))
    found = load_table(path).entries
    assert [each.get("provenance", {}).get("triton") for each in found] == ["3.6.0", "3.9.0", None]
    assert found[0]["provenance"]["date"] != "2027-01-01"


def test_what_a_launch_would_refuse_is_never_written(tmp_path: Path) -> None:
    bad = entry(1)
    bad["config"]["gemm1"] = {"BLOCK_M": 1.5}
    with pytest.raises(ValueError, match=r"entries\[0\].config.gemm1.BLOCK_M"):
        write_table(tmp_path / "t.json", table(bad))
    bad = entry(1)
    bad["measured"]["time_us"] = float("nan")
    with pytest.raises(ValueError, match="JSON compliant"):
        write_table(tmp_path / "t.json", table(bad))
    assert list(tmp_path.iterdir()) == []


def test_another_kernels_or_devices_table_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write_table(path, table(entry(1)))
    before = path.read_bytes()
    mla = make_entry(load_tunable("mla-decode").complete_workload({}), {"BLOCK_H": 16}, {})
    with pytest.raises(UserError, match="holds a table of moe, not of mla-decode"):
        write_table(path, make_table("mla-decode", DEVICE, {}, [mla]))
    with pytest.raises(UserError, match=r"device.sm_count is 132, not 66"):
        write_table(path, make_table("moe", {**DEVICE, "sm_count": 66}, {}, [entry(1)]))
    assert path.read_bytes() == before


def test_a_damaged_table_is_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write_table(path, table(entry(1)))
    cut = path.read_bytes()[:-30]
    path.write_bytes(cut)
    with pytest.warns(UserWarning, match="was not a sound table .*it is now t.json.damaged"):
        write_table(path, table(entry(8)))
    assert tokens(path) == [8]
    assert (tmp_path / "t.json.damaged").read_bytes() == cut


def test_reading_a_bad_table_names_file_and_field(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none.json: cannot be read: No such file"):
        load_table(tmp_path / "none.json")
    path = tmp_path / "t.json"
    path.write_text('{"schema": 9}')
    with pytest.raises(UserError, match=re.escape(f"{path}: schema: expected 1, got 9")):
        load_table(path)


def test_installed_tables_are_found_at_launch(tmp_path: Path) -> None:
    workload = entry(64)["workload"]
    assert tables.lookup("moe", workload, H200) is None
    path = add_entry(tmp_path / "out" / "tables", "moe", DEVICE, PROVENANCE, entry(64, 128))
    assert path == tmp_path / "out" / "tables" / "moe.bf16.nvidia-h200.json"
    installed = install(path)
    assert installed == tmp_path / "config" / "kerneltune" / "tables" / path.name
    match = kerneltune.lookup("moe", {"tokens": 100}, H200)
    assert match is not None
    assert match.config["gemm2"]["BLOCK_M"] == 128
    assert (match.source, match.path) == ("user", str(installed))
    assert kerneltune.load_table(installed).entries[0]["workload"] == workload


def test_the_nearest_entry_and_what_keeps_it_out(tmp_path: Path) -> None:
    path = add_entry(tmp_path, "moe", DEVICE, PROVENANCE, entry(64))
    add_entry(tmp_path, "moe", DEVICE, PROVENANCE, entry(1))
    asked = {**entry(200)["workload"], "N": 512}
    found = tables.nearest("moe", asked, target("sm_80"), [path])
    assert found is not None
    assert found.differs == (
        "device: NVIDIA H200 (sm_90, 132 SMs) there, NVIDIA A100-SXM4-80GB (sm_80, 108 SMs) here: "
        "a relative has the same architecture and SM count, and is no MIG slice",
        "N: 256 there, 512 asked for",
        "tokens: 64 there, 200 asked for, more than a factor of 2 apart",
    )
    near = tables.nearest("moe", {**entry(100)["workload"], "N": 512}, H200, [path])
    assert near is not None
    assert near.entry["workload"]["tokens"] == 64
    assert near.differs == ("N: 256 there, 512 asked for",)


def _write_many(path: str, first: int, count: int) -> None:
    for number in range(first, first + count):
        write_table(Path(path), table(entry(number)))


def test_two_writers_and_a_reader(tmp_path: Path) -> None:
    """Every entry of both writers is there in the end, and no read in between sees half a file or fewer entries."""
    path = tmp_path / "t.json"
    write_table(path, table(entry(1000)))
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(str(path), first, 25)) for first in (1, 101)]
    for writer in writers:
        writer.start()
    seen, reads, started = 1, 0, time.monotonic()
    while any(writer.is_alive() for writer in writers) and time.monotonic() - started < 60:
        read = len(load_table(path).entries)  # raises on half a file
        assert read >= seen
        seen, reads = read, reads + 1
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    assert reads > 10
    assert tokens(path) == [*range(1, 26), *range(101, 126), 1000]


def _die_while_writing(path: str) -> None:
    import os

    real = os.replace

    def die(*args: Any) -> None:
        os._exit(9)

    os.replace = die  # type: ignore[assignment]
    try:
        write_table(Path(path), table(entry(8)))
    finally:
        os.replace = real


def test_a_writer_killed_before_the_rename_leaves_the_old_table_and_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write_table(path, table(entry(1)))
    process = multiprocessing.get_context("fork").Process(target=_die_while_writing, args=(str(path),))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    assert tokens(path) == [1]
    write_table(path, table(entry(64)))
    assert tokens(path) == [1, 64]


def test_shipped_tables_are_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    on_disk = sorted((Path(kerneltune.__file__).parent / "results").glob("*/tables/*.json"))
    assert tables.shipped_tables() == on_disk
    for path in on_disk:
        assert load_table(path).entries


def test_a_dtype_cannot_lead_out_of_the_folder() -> None:
    name = tables.table_file_name("moe", "../../etc/x", "../NVIDIA H200")
    assert "/" not in name


SOME = st.fixed_dictionaries(
    {
        "tokens": st.sampled_from([1, 2, 3, 64, 200]),
        "N": st.sampled_from([256, 512]),
        "top_k": st.sampled_from([8, 4]),
    }
)
ENTRIES = st.lists(st.tuples(SOME, st.sampled_from([None, "3.5.9"]), st.sampled_from([None, "0" * 12])), max_size=4)
DEVICES = st.sampled_from([H200, target("sm_80"), dataclasses.replace(H200, name="NVIDIA H200 NVL")])


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ENTRIES, SOME, DEVICES, st.sampled_from(["", "strict", "ignore", "compiler=strict,source=warn"]))
def test_what_keeps_the_nearest_out_is_named_exactly_when_nothing_fits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    entries: list[Any],
    asked: dict[str, int],
    device: Any,
    policy: str,
) -> None:
    monkeypatch.setenv("KERNELTUNE_STALE", policy)
    made = []
    for sizes, triton, source in entries:
        mine = entry(1)
        mine["workload"] = mine["workload"] | sizes
        mine["provenance"] = ({"triton": triton} if triton else {}) | (
            {"kernel_hash": {"grouped_gemm": source}} if source else {}
        )
        made.append(mine)
    path = tmp_path / "property.json"
    path.write_text(json.dumps(tables.make_table("moe", DEVICE, {}, made)))
    workload = {**entry(1)["workload"], **asked}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        match = launch_tables.find("moe", workload, device, tables=[path])
    near = tables.nearest("moe", workload, device, [path])
    if match is None:
        assert (near is None) == (not made)
        assert near is None or near.differs
    else:
        assert near is not None
        assert near.differs == ()
