"""The lookup at launch: which entry serves a workload, from which place, and that no file can make it fail."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kerneltune.kernels import table_files, tables
from kerneltune.kernels.device import Device
from kerneltune.kernels.source_hash import variant_hash
from kerneltune.kernels.staleness import triton_version
from kerneltune.kernels.table_format import MAX_BYTES, TableError, parse_table
from kerneltune.kernels.tables import find, resolve

H200 = Device("NVIDIA H200", "sm_90", 132, 232448, 1, 1)
MLA: dict[str, Any] = {
    "dtype": "bf16",
    "kv_dtype": "bf16",
    "heads": 16,
    "h_kv": 1,
    "s_q": 1,
    "causal": False,
    "page_size": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "batch": 8,
    "kv_len": 4096,
    "lengths": "equal",
}
ASKED = {name: value for name, value in MLA.items() if name != "lengths"}


def entry(splits: int, loss: dict[str, Any] | None = None, **workload: Any) -> dict[str, Any]:
    config = {"BLOCK_H": 16, "BLOCK_N": 64, "num_splits": splits, "num_warps": 4, "num_stages": 2}
    return {"workload": MLA | workload, "config": config, "measured": {"time_us": 10.0}, "loss": loss or {}}


def table(*entries: dict[str, Any], **changes: Any) -> dict[str, Any]:
    device = {"name": "NVIDIA H200", "arch": "sm_90", "sm_count": 132}
    whole = {"schema": 1, "kernel": "mla-decode", "device": device, "provenance": {"triton": triton_version()}}
    return {**whole, "entries": list(entries), **changes}


def write(path: Path, content: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Only what a test writes is found; nothing was said or answered before."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("KERNELTUNE_TABLES", raising=False)
    monkeypatch.setattr(table_files, "_shipped", lambda: ())
    tables.forget()
    tables._said.clear()
    yield tmp_path
    tables.forget()
    tables._said.clear()


def splits(workload: dict[str, Any] = ASKED, device: Any = H200, **options: Any) -> int | None:
    match = find("mla-decode", workload, device, **options)
    return None if match is None else match.config["num_splits"]


def test_exact_entry_and_the_nearest_within_a_factor_of_two(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", table(entry(1, batch=1), entry(2, batch=8), entry(3, batch=16)))
    match = find("mla-decode", ASKED, H200, tables=[path])
    assert match is not None
    assert (match.config["num_splits"], match.exact, match.distance, match.path) == (2, True, 0.0, str(path))
    match = find("mla-decode", {**ASKED, "batch": 12}, H200, tables=[path])  # 16 is 0.42 away, 8 is 0.58
    assert match is not None
    assert (match.config["num_splits"], match.exact) == (3, False)
    assert match.distance == pytest.approx(0.415, abs=1e-3)
    assert splits({**ASKED, "batch": 32}, tables=[path]) == 3
    assert splits({**ASKED, "batch": 33}, tables=[path]) is None
    assert splits({**ASKED, "batch": 3}, tables=[path]) is None
    assert splits({**ASKED, "kv_len": 8192}, tables=[path]) == 2
    assert splits({**ASKED, "kv_len": 8193}, tables=[path]) is None
    assert splits({**ASKED, "batch": 0}, tables=[path]) == 1  # counts as 1


def test_each_scaled_key_has_the_bound_and_distances_add_up(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", table(entry(1, batch=16, kv_len=8192), entry(2, batch=8, kv_len=2048)))
    assert splits(tables=[path]) == 2  # 1 octave against 1 + 1
    path = write(tmp_path / "tie.json", table(entry(5, batch=16), entry(6, batch=4), entry(7, kv_len=8192)))
    assert splits(tables=[path]) == 5  # of equals, the first


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "fp16"},
        {"kv_dtype": "fp8_e4m3"},
        {"heads": 32},
        {"h_kv": 2},
        {"s_q": 2},
        {"causal": True},
        {"page_size": 1},
        {"kv_lora_rank": 256},
        {"qk_rope_head_dim": 32},
    ],
)
def test_every_exact_key_and_the_device_must_be_equal(tmp_path: Path, other: dict[str, Any]) -> None:
    path = write(tmp_path / "t.json", table(entry(4)))
    assert splits(tables=[path]) == 4
    assert splits({**ASKED, **other}, tables=[path]) is None


GIB = 2**30
OTHERS = {  # as their drivers report them
    "NVL": Device("NVIDIA H200 NVL", "sm_90", 132, 232448, 1, 140 * GIB),
    "H100": Device("NVIDIA H100 80GB HBM3", "sm_90", 132, 232448, 1, 79 * GIB),
    "H800": Device("NVIDIA H800", "sm_90", 132, 232448, 1, 79 * GIB),
    "GH200": Device("NVIDIA GH200 480GB", "sm_90", 132, 232448, 1, 94 * GIB),
    "PCIe": Device("NVIDIA H100 PCIe", "sm_90", 114, 232448, 1, 79 * GIB),
    "H20": Device("NVIDIA H20", "sm_90", 78, 232448, 1, 95 * GIB),
    "slice": Device("NVIDIA H200 MIG 3g.71gb", "sm_90", 60, 232448, 1, 70 * GIB),
    "a slice of as many": Device("NVIDIA H200 MIG 7g.141gb", "sm_90", 132, 232448, 1, 140 * GIB),
    "other": Device("NVIDIA B200", "sm_100", 148, 232448, 1, 178 * GIB),
    "fewer": Device("NVIDIA H200", "sm_90", 66, 232448, 1, 140 * GIB),
}


@pytest.mark.parametrize("which", ["NVL", "H100", "H800", "GH200"])
def test_a_relative_is_served_and_told_so_once(tmp_path: Path, which: str) -> None:
    """Same architecture and SM count; for our H200 table see DESIGN: printed, never silent."""
    path = write(tmp_path / "t.json", table(entry(4)))
    match = find("mla-decode", ASKED, OTHERS[which], tables=[tmp_path])
    assert match is not None
    assert match.config["num_splits"] == 4
    assert match.relation.startswith("also sm_90 with 132 SMs")
    with pytest.warns(UserWarning, match="the table of NVIDIA H200 is used") as caught:  # noqa: PT031
        assert resolve("mla-decode", ASKED, OTHERS[which], path) is not None
        assert resolve("mla-decode", {**ASKED, "batch": 9}, OTHERS[which], path) is not None
    assert len(caught) == 1
    assert str(path) in str(caught[0].message)
    assert "kerneltune search mla-decode --workload" in str(caught[0].message)


@pytest.mark.parametrize("which", ["PCIe", "H20", "slice", "a slice of as many", "other", "fewer"])
def test_others_are_not_served(tmp_path: Path, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "t.json", table(entry(4)))
    device = OTHERS[which]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # other GPUs' tables in a folder are nothing to warn of
        assert splits(device=device, tables=[tmp_path]) is None
    with pytest.warns(
        UserWarning, match=f"device is NVIDIA H200 with 132 SMs, not {device.name} with {device.sm_count}"
    ):
        splits(device=device, tables=[path])
    monkeypatch.setenv("KERNELTUNE_DEVICE", "NVIDIA H200")
    match = find("mla-decode", ASKED, device, tables=[path])
    assert match is not None
    assert match.relation == "KERNELTUNE_DEVICE names it"


def test_its_own_tables_come_before_those_of_relatives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write(tmp_path / "first.json", table(entry(4)))
    own = {"name": OTHERS["NVL"].name, "arch": "sm_90", "sm_count": 132}
    write(tmp_path / "env" / "own.json", table(entry(5, batch=16), device=own))
    monkeypatch.setenv("KERNELTUNE_TABLES", str(tmp_path / "env"))
    assert splits(device=OTHERS["NVL"], tables=[first]) == 5
    assert splits(tables=[first]) == 4
    assert splits({**ASKED, "batch": 2}, device=OTHERS["NVL"], tables=[first]) is None  # beyond the bound of both
    assert splits({**ASKED, "batch": 4}, device=OTHERS["NVL"], tables=[first]) == 4


def test_a_name_with_other_memory_is_a_relative(tmp_path: Path) -> None:
    """Two cards are both called NVIDIA GH200 480GB, after the CPU's memory."""
    device = {"name": "NVIDIA GH200 480GB", "arch": "sm_90", "sm_count": 132, "memory_bytes": 141 * GIB}
    path = write(tmp_path / "t.json", table(entry(4), device=device))
    match = find("mla-decode", ASKED, OTHERS["GH200"], tables=[path])
    assert match is not None
    assert match.relation == "also sm_90 with 132 SMs; memory 141 GiB there, 94 here"


# -- staleness --------------------------------------------------------------------------------------------------------
HASH = variant_hash("mla-decode", "split_kv")
COMPILER = {"triton": "3.5.9", "kernel_hash": {"split_kv": HASH}}
SOURCE = {"triton": triton_version(), "kernel_hash": {"split_kv": "0" * 12}}
FRESH = {"triton": triton_version(), "kernel_hash": {"split_kv": HASH}}


@pytest.mark.parametrize("provenance", [FRESH, {}, {"kernel_hash": {}}, {"kernel_hash": {"other": "1"}}])
def test_what_matches_or_does_not_state_it_is_used_in_silence(tmp_path: Path, provenance: dict[str, Any]) -> None:
    path = write(tmp_path / "t.json", table(entry(4), provenance=provenance))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve("mla-decode", ASKED, H200, path) is not None


@pytest.mark.parametrize(
    ("provenance", "policy", "used", "said"),
    [
        (COMPILER, None, True, "a stale table is used (measured with triton 3.5.9, here is "),
        (COMPILER, "warn", True, "a stale table is used (measured with triton 3.5.9, here is "),
        (COMPILER, "strict", False, "is stale (measured with triton 3.5.9, here is "),
        (COMPILER, "compiler=strict", False, "is stale (measured with triton 3.5.9, here is "),
        (COMPILER, "ignore", True, ""),
        (SOURCE, None, False, f"is stale (measured with source 000000000000 of split_kv, here is {HASH})"),
        (SOURCE, "strict", False, f"is stale (measured with source 000000000000 of split_kv, here is {HASH})"),
        (SOURCE, "source=warn", True, "a stale table is used (measured with source"),
        (SOURCE, "compiler=strict,source=ignore", True, ""),
        (SOURCE, "ignore", True, ""),
        ({"kernel_hash": "0" * 12}, None, False, "is stale (measured with source 000000000000 of split_kv"),
    ],
)
def test_a_stale_entry_follows_the_policy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    provenance: dict[str, Any],
    policy: str | None,
    used: bool,
    said: str,
) -> None:
    if policy is not None:
        monkeypatch.setenv("KERNELTUNE_STALE", policy)
    path = write(tmp_path / "t.json", table(entry(4), provenance=provenance))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in (8, 9, 10):
            assert (resolve("mla-decode", {**ASKED, "batch": batch}, H200, path) is not None) == used
    assert len(caught) == (1 if said else 0)
    for each in caught:
        assert said in str(each.message)
        assert f"kerneltune revalidate {path}" in str(each.message)


def test_a_bad_policy_is_said_and_the_usual_one_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELTUNE_STALE", "source=maybe")
    path = write(tmp_path / "t.json", table(entry(4), provenance=SOURCE))
    with pytest.warns(UserWarning, match="KERNELTUNE_STALE: expected strict, warn, ignore") as caught:
        assert resolve("mla-decode", ASKED, H200, path) is None
    assert len(caught) == 2


def test_an_entry_s_own_provenance_decides_and_a_fresh_neighbour_serves(tmp_path: Path) -> None:
    stale = entry(9) | {"provenance": SOURCE}
    path = write(tmp_path / "t.json", table(stale, entry(4, batch=16), provenance=FRESH))
    assert splits(tables=[path]) == 4
    answer = tables.search("mla-decode", ASKED, H200, tables=[path], only=True)
    assert [each.entry["config"]["num_splits"] for each in answer.left_out] == [9]


def test_a_variant_of_another_version_is_never_used_in_silence(tmp_path: Path) -> None:
    mine = entry(4)
    mine["config"]["variant"] = "later"
    path = write(tmp_path / "t.json", table(mine, provenance={"kernel_hash": {"later": "1" * 12}}))
    with pytest.warns(UserWarning, match="variant later is not in this version of kerneltune"):
        assert resolve("mla-decode", ASKED, H200, path) is None


def test_the_input_class_is_a_hint(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", table(entry(1, lengths="spread"), entry(2), entry(3, batch=16, lengths="spread")))
    assert splits(tables=[path]) == 2  # the usual class
    assert splits({**ASKED, "lengths": "spread"}, tables=[path]) == 1
    assert splits({**ASKED, "lengths": "equal"}, tables=[path]) == 2
    match = find("mla-decode", {**ASKED, "lengths": "other"}, H200, tables=[path])
    assert match is not None
    assert match.config["num_splits"] == 2
    assert not match.exact
    losses = [entry(1, {"inputs": {"equal": 0.02, "spread": 0.0}}, lengths="spread")]
    losses.append(entry(2, {"inputs": {"equal": 0.0, "spread": 0.3}}))
    path = write(tmp_path / "losses.json", table(*losses))
    assert splits(tables=[path]) == 1  # never more than 2 % lost
    assert splits({**ASKED, "lengths": "equal"}, tables=[path]) == 2


def test_the_first_place_with_a_match_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = write(tmp_path / "shipped" / "t.json", table(entry(4), entry(44, batch=128)))
    monkeypatch.setattr(table_files, "_shipped", lambda: (str(shipped),))
    assert splits() == 4
    write(Path(table_files.user_folder()) / "t.json", table(entry(3, batch=16)))
    assert splits() == 3  # inside the bound: the user's own comes first, though shipped is exact
    write(tmp_path / "env" / "t.json", table(entry(2)))
    named = write(tmp_path / "other.json", table(entry(22, batch=64)))
    monkeypatch.setenv("KERNELTUNE_TABLES", os.pathsep.join([str(tmp_path / "env"), str(named)]))
    assert splits() == 2
    assert splits({**ASKED, "batch": 64}) == 22
    assert splits({**ASKED, "batch": 128}) == 22
    assert splits({**ASKED, "batch": 256}) == 44
    explicit = write(tmp_path / "explicit.json", table(entry(1)))
    assert splits(tables=[explicit]) == 1
    assert splits({**ASKED, "batch": 256}, tables=[explicit]) == 44
    assert splits({**ASKED, "batch": 256}, tables=[explicit], only=True) is None
    found = resolve("mla-decode", ASKED, H200, explicit)
    assert found is not None
    assert found["num_splits"] == 1


def test_a_search_s_out_folder_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "out" / "tables" / "t.json", table(entry(9)))
    monkeypatch.setenv("KERNELTUNE_TABLES", str(tmp_path / "out"))
    assert splits() == 9


def test_the_user_folder_is_platformdirs(monkeypatch: pytest.MonkeyPatch) -> None:
    platformdirs = pytest.importorskip("platformdirs")
    for value in ("/somewhere/else", "", None):
        monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
        if value is not None:
            monkeypatch.setenv("XDG_CONFIG_HOME", value)
        assert table_files.user_folder() == os.path.join(platformdirs.user_config_dir("kerneltune"), "tables")


def test_no_match_is_said_once_with_the_command(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no tuned config") as caught:  # noqa: PT031
        assert resolve("mla-decode", ASKED, H200) is None
        assert resolve("mla-decode", ASKED, H200) is None
        assert resolve("mla-decode", {**ASKED, "batch": 16}, H200) is None  # the same exact keys
        assert resolve("mla-decode", {**ASKED, "heads": 32}, H200) is None
    assert len(caught) == 2
    message = str(caught[0].message)
    assert message.startswith("mla-decode: no tuned config for batch=8 kv_len=4096 ")
    assert "heads=16" in message
    assert "on NVIDIA H200; the default is used" in message
    assert "kerneltune search mla-decode --workload batch=8,kv_len=4096,dtype=bf16," in message
    assert "causal=false" in message


def test_answers_are_copies_and_new_files_are_seen(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", table(entry(1)))
    first = resolve("mla-decode", ASKED, H200, path)
    assert first is not None
    first["num_splits"] = 99
    again = resolve("mla-decode", ASKED, H200, path)
    assert again is not None
    assert again["num_splits"] == 1
    write(path, table(entry(128)))
    changed = resolve("mla-decode", ASKED, H200, path)
    assert changed is not None
    assert changed["num_splits"] == 128


GOOD = table(entry(1), entry(2, batch=16))


def damaged(field: str, value: Any) -> bytes:
    """A sound table with one field replaced ("entries.0.config") or removed (value ...)."""
    whole = copy.deepcopy(GOOD)
    place: Any = whole
    *path, last = [int(name) if name.isdigit() else name for name in field.split(".")]
    for name in path:
        place = place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(whole).encode()


DAMAGED = [
    (b"", "not valid JSON"),
    (json.dumps(GOOD).encode()[:-40], "not valid JSON"),
    (b"\xff\xfe{}", "not valid JSON"),
    (b"[" * 100_000, "nested more than 8 deep"),
    (b"[" * 20 + b"]" * 20, "nested more than 8 deep"),
    (b'{"schema": ' + b"9" * 5000 + b"}", "not valid JSON"),
    (b" " * (MAX_BYTES + 1), f"at most {MAX_BYTES} bytes"),
    (b"[]", "the file: expected an object, got a list"),
    (b"null", "the file: expected an object, got nothing"),
    (damaged("schema", 2), "schema: expected 1, got 2"),
    (damaged("schema", True), "schema: expected 1, got True"),
    (damaged("schema", ...), "schema: expected 1, got nothing"),
    (damaged("kernel", "conv"), "kernel: unknown kernel 'conv'"),
    (damaged("kernel", ["moe"]), "kernel: expected a text"),
    (damaged("device", None), "device: expected an object"),
    (damaged("device.name", ""), "device.name: expected a text"),
    (damaged("device.sm_count", 132.0), "device.sm_count: expected a whole number from 1, got 132.0"),
    (damaged("provenance", []), "provenance: expected an object, got a list"),
    (damaged("entries", {}), "entries: expected a list, got an object"),
    (damaged("entries", ...), "entries: expected a list, got nothing"),
    (damaged("entries", [0] * 100_001), "entries: expected at most 100000, got 100001"),
    (damaged("entries.1", 7), r"entries\[1\]: expected an object, got 7"),
    (damaged("entries.1.workload", ...), r"entries\[1\].workload: expected an object, got nothing"),
    (damaged("entries.1.workload.heads", ...), r"entries\[1\].workload.heads: is missing"),
    (
        damaged("entries.1.workload.heads", "16"),
        r"entries\[1\].workload.heads: expected a whole number from 1, got '16'",
    ),
    (damaged("entries.1.workload.heads", True), r"entries\[1\].workload.heads: expected a whole number"),
    (damaged("entries.1.workload.batch", 0), r"entries\[1\].workload.batch: expected a whole number from 1, got 0"),
    (damaged("entries.1.workload.batch", 10**30), r"entries\[1\].workload.batch: expected a number below"),
    (damaged("entries.1.workload.causal", 0), r"entries\[1\].workload.causal: expected true or false, got 0"),
    (damaged("entries.1.workload.dtype", "b" * 201), r"entries\[1\].workload.dtype: expected a text"),
    (damaged("entries.1.workload.lengths", ...), r"entries\[1\].workload.lengths: is missing"),
    (damaged("entries.1.workload.wave", 3), r"entries\[1\].workload: unknown key 'wave'"),
    (damaged("entries.1.config", {}), r"entries\[1\].config: expected parameters, got none"),
    (damaged("entries.1.config", [1]), r"entries\[1\].config: expected an object"),
    (damaged("entries.1.config.BLOCK_H", 16.0), r"entries\[1\].config.BLOCK_H: expected a whole number"),
    (damaged("entries.1.config.BLOCK_H", None), r"entries\[1\].config.BLOCK_H: expected a whole number"),
    (damaged("entries.1.config.BLOCK_H", 2**40), r"entries\[1\].config.BLOCK_H: expected a whole number"),
    (damaged("entries.1.config.BLOCK_H", {"a": {"b": 1}}), r"entries\[1\].config.BLOCK_H.a: expected a whole number"),
    (damaged("entries.1.measured", 3), r"entries\[1\].measured: expected an object"),
    (damaged("entries.1.measured.time_us", float("nan")), "NaN is not a number that JSON has"),
    (damaged("entries.1.measured.time_us", float("inf")), "Infinity is not a number that JSON has"),
    (damaged("entries.1.measured.time_us", 7).replace(b"7}", b"1e999}"), r"measured.time_us: expected a number below"),
    (damaged("entries.1.workload.dtype", "\x1b[31mbf16"), r"entries\[1\].workload.dtype: expected printable char"),
    (damaged("entries.1.config", {"a\nb": 1}), r"entries\[1\].config: expected names of printable"),
    (damaged("entries.1.config", {"a": {"": 1}}), r"entries\[1\].config.a, a name: expected a text"),
    (damaged("entries.1.loss", {"inputs": {"\n": None}}), r"entries\[1\].loss.inputs: expected names of printable"),
    (damaged("entries.1.loss", {"inputs": 3}), r"entries\[1\].loss.inputs: expected an object"),
    (damaged("entries.1.loss", {"inputs": {"equal": "x"}}), r"entries\[1\].loss.inputs.equal: expected a number"),
    (damaged("entries.1.loss", {"batch=1,kv_len=2": "x"}), r"entries\[1\].loss.batch=1,kv_len=2: expected a number"),
    (damaged("entries.1.loss", {"batch=1": 0.1}), r"loss.batch=1: expected a name such as batch=N,kv_len=N"),
    (damaged("entries.1.loss", {"=" * 9999: 0.1}), r"loss.=+: expected a name such as batch=N,kv_len=N"),
]


@pytest.mark.parametrize(("data", "says"), DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file_is_a_miss_with_one_warning(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "damaged.json"
    path.write_bytes(data)
    good = write(tmp_path / "good.json", table(entry(5)))
    with pytest.warns(UserWarning, match=says) as caught:  # noqa: PT031
        assert splits(tables=[path]) is None
        assert splits(tables=[path]) is None
        assert splits(tables=[path, good]) == 5  # others still serve
    assert len(caught) == 1
    message = str(caught[0].message)
    assert message.startswith(f"table left out: {path}: ")
    assert "\n" not in message


def test_what_is_not_a_file_is_a_miss_with_one_warning(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    places = [tmp_path / "gone.json", tmp_path / "pipe.json", "a\0b", "/dev/zero"]
    for place, says in zip(places, ["no table there", "not a regular", "null", "not a regular"], strict=True):
        with pytest.warns(UserWarning, match=says) as caught:  # noqa: PT031
            assert splits(tables=[place]) is None
            assert splits(tables=[place]) is None
        assert len(caught) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read_is_a_miss(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", GOOD)
    path.chmod(0)
    with pytest.warns(UserWarning, match="Permission denied"):
        assert splits(tables=[path]) is None


def test_foreign_tables(tmp_path: Path) -> None:
    path = write(tmp_path / "moe.json", table(kernel="moe"))
    with pytest.warns(UserWarning, match="kernel is moe, not mla-decode"):
        assert splits(tables=[path]) is None
    engine = tmp_path / "E=8,N=7168,device_name=NVIDIA_H200.json"
    engine.write_text('{"1": {"BLOCK_SIZE_M": 16}}')
    with pytest.warns(UserWarning, match="schema: expected 1, got nothing"):
        splits(tables=[engine])
    assert find("conv", ASKED, H200) is None


FIELDS = [
    *("schema", "kernel", "device", "device.name", "device.sm_count", "provenance", "entries", "entries.0"),
    *("entries.0.workload", "entries.0.workload.heads", "entries.0.workload.lengths", "entries.0.config"),
    *("entries.0.config.BLOCK_H", "entries.0.measured", "entries.0.loss", "entries.0.loss.inputs"),
    "entries.0.loss.batch=1,kv_len=2",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example("entries.0.loss.inputs", {"\n": None})
@given(
    st.sampled_from(FIELDS),
    JSON,
)
def test_no_value_anywhere_makes_the_check_fail_otherwise(field: str, value: Any) -> None:
    base = damaged("entries.0.loss", {"inputs": {"equal": 0.0}})
    whole = json.loads(base)
    place: Any = whole
    *path, last = [int(name) if name.isdigit() else name for name in field.split(".")]
    for name in path:
        place = place[name]
    place[last] = value
    try:
        parsed = parse_table(json.dumps(whole).encode())
    except TableError as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert parsed.kernel in ("mla-decode", "moe")


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 500), st.binary(max_size=4))
def test_no_damaged_byte_makes_the_check_fail_otherwise(at: int, instead: bytes) -> None:
    data = json.dumps(GOOD).encode()
    broken = data[:at] + instead + data[at + len(instead) :]
    try:
        parse_table(broken)
    except TableError as error:
        assert str(error)  # noqa: PT017


def test_the_lookup_needs_the_standard_library_alone() -> None:
    heavy = "[name for name in ('torch', 'triton', 'msgspec', 'typer') if name in sys.modules]"
    code = f"import sys, kerneltune.kernels.tables; print({heavy})"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
