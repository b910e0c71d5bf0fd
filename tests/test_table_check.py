"""`check` judges as a launch does, reads each file once, and sees whatever one lookup reads together; dates survive."""

from __future__ import annotations

import copy
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kerneltune import tables
from kerneltune.device import TARGETS
from kerneltune.kernels.mla_decode import config as mla
from kerneltune.kernels.moe import config as moe
from kerneltune.registry import load_tunable
from kerneltune.table_check import check_tables
from kerneltune.table_diff import diff, merged

H200 = TARGETS["sm_90"]
PROVENANCE = {"triton": "3.6.0", "date": "2026-01-01T00:00:00+00:00"}


def table(kernel: str = "mla-decode", **more: Any) -> dict[str, Any]:
    tunable = load_tunable(kernel)
    workload = tunable.complete_workload({})
    entry = tables.make_entry(
        tables.table_workload(kernel, workload), tunable.default_config(workload, H200), {"time_us": 9.0}
    )
    return tables.make_table(kernel, H200.to_dict(), PROVENANCE, [entry | more])


def write(path: Path, content: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def faults(*paths: Path) -> list[str]:
    return [str(finding) for finding in check_tables(paths) if finding.fault]


VALUES = st.sampled_from([0, 1, 2, 3, 4, 8, 16, 24, 32, 64, 128, 256, 1024, True, "4", 4.0, None, "hopper"])
NAMES = st.sampled_from(
    ["BLOCK_H", "BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "num_splits", "num_warps", "num_stages", "variant", "x"]
)
CHANGES = st.lists(st.tuples(st.sampled_from(["gemm1", "gemm2", "gemm3"]), NAMES, VALUES), max_size=3)


@given(kernel=st.sampled_from(["mla-decode", "moe"]), changes=CHANGES, dropped=st.lists(NAMES, max_size=1))
@settings(max_examples=400, deadline=None)
def test_a_config_is_refused_exactly_where_a_launch_refuses_it(
    kernel: str, changes: list[tuple[str, str, Any]], dropped: list[str]
) -> None:
    tunable = load_tunable(kernel)
    workload = tunable.complete_workload({})
    config = copy.deepcopy(dict(tunable.default_config(workload, H200)))
    for part, name, value in changes:
        if kernel == "mla-decode":
            config[name] = value
        else:
            config.setdefault(part, {})[name] = value
    for name in dropped:
        (config if kernel == "mla-decode" else config["gemm1"]).pop(name, None)

    def launch_refuses() -> bool:
        """What the public calls do with a config: `op._config_for`, `op._choose_config`."""
        try:
            if kernel == "mla-decode":
                return mla.is_valid(mla.Config.from_dict(config), workload, H200) is not None
            moe.checked_config(config, workload, H200)
        except (TypeError, ValueError):
            return True
        return False

    assert (tables.why_not(kernel, config, workload, H200) is not None) == launch_refuses()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gemm3": {"BLOCK_M": 16}}, "config has parts ['gemm1', 'gemm2', 'gemm3']"),
        ({"gemm1": {"BLOCK_M": 64}}, "it must be equal"),
        ({"gemm1": {"x": 1}}, "expected BLOCK_M"),
    ],
)
def test_configs_of_moe_that_no_launch_takes(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    content = table("moe")
    config = content["entries"][0]["config"] = copy.deepcopy(content["entries"][0]["config"])
    for part, values in change.items():
        config.setdefault(part, {}).update(values)
    (fault,) = faults(write(tmp_path / "t.json", content))
    assert said in fault


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    path = write(tmp_path / "x" / "t.json", table())
    link = tmp_path / "link.json"
    link.symlink_to(path)
    assert faults(path, path, tmp_path / "x" / ".." / "x" / "t.json", link, tmp_path / "x") == []


def test_doubles_in_a_folder_and_its_tables_are_seen(tmp_path: Path) -> None:
    one, two = write(tmp_path / "x" / "t.json", table()), write(tmp_path / "x" / "tables" / "u.json", table())
    for given_paths in ((tmp_path / "x",), (one, two)):
        (fault,) = faults(*given_paths)
        assert str(two) in fault
        assert f"the same workload as {one} entries[0]" in fault


def test_a_field_of_the_device_that_is_not_ours_is_no_fault(tmp_path: Path) -> None:
    content = table()
    content["device"]["serial"] = "abc"
    assert faults(write(tmp_path / "t.json", content)) == []
    del content["device"]["l2_bytes"]
    (fault,) = faults(write(tmp_path / "t.json", content))
    assert "device: fields are missing" in fault


DAYS = st.integers(0, 400)


@given(st.lists(st.tuples(st.integers(1, 4), DAYS, st.booleans(), st.booleans()), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_every_entry_keeps_its_date_through_any_writes(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[int, int, bool, bool]]
) -> None:
    """(batch, day, whether the entry says its own date, whether the software is another) written one after another."""
    path = tmp_path_factory.mktemp("t") / "t.json"
    last: dict[int, datetime] = {}
    for batch, day, own, other in writes:
        date = datetime(2025, 1, 1, tzinfo=UTC) + timedelta(days=day)
        content = table()
        entry = content["entries"][0]
        entry["workload"] = {**entry["workload"], "batch": batch}
        if own:
            entry["measured"] = {**entry["measured"], "date": date.isoformat()}
        content["provenance"] = {"triton": "3.5.0" if other else "3.6.0", "date": date.isoformat()}
        tables.write_table(path, content)
        last[batch] = date
    found = tables.load_table(path)
    dates = {e["workload"]["batch"]: tables.entry_date(e, e.get("provenance", found.provenance)) for e in found.entries}
    assert dates == last
    tables.write_table(path, tables.as_dict(found))
    assert diff([found], [tables.load_table(path)]) == []
    assert merged([found, found], "newest")[1] == []


def test_newest_goes_by_the_entries_own_dates(tmp_path: Path) -> None:
    old, new = "2025-01-01T00:00:00+00:00", "2025-06-01T00:00:00+00:00"
    a, b = table(), table()
    a["entries"][0]["measured"] = {"time_us": 1.0, "date": new}
    a["provenance"] = {**PROVENANCE, "date": old}
    b["entries"][0]["measured"] = {"time_us": 2.0, "date": old}
    b["provenance"] = {**PROVENANCE, "date": "2026-01-01T00:00:00+00:00"}  # of other entries, measured later
    loaded = [tables.load_table(write(tmp_path / name, each)) for name, each in (("a.json", a), ("b.json", b))]
    for order in (loaded, loaded[::-1]):
        ((_, entry),), _ = merged(order, "newest")
        assert entry["measured"]["time_us"] == 1.0
