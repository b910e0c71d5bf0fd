"""Merges keep what each entry is, whoever else writes; diff names exactly what a merge brought in."""

from __future__ import annotations

import json
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kerneltune import table_diff, tables
from kerneltune.device import TARGETS
from kerneltune.errors import UserError
from kerneltune.kernels import table_format
from kerneltune.registry import load_tunable

H200 = TARGETS["sm_90"]
EPOCH = datetime(2025, 1, 1, tzinfo=UTC)


def day(number: int) -> str:
    return (EPOCH + timedelta(days=number)).isoformat()


def entry(batch: int, time_us: float = 9.0, loss: Any = None, **measured: Any) -> dict[str, Any]:
    tunable = load_tunable("mla-decode")
    workload = tunable.complete_workload({"batch": batch})
    config = tunable.default_config(workload, H200)
    stated = tables.table_workload("mla-decode", workload)
    return tables.make_entry(stated, config, {"time_us": time_us, **measured}, loss)


def write(path: Path, *entries: dict[str, Any], **provenance: Any) -> tables.Table:
    whole = tables.make_table("mla-decode", H200.to_dict(), {"triton": "3.6.0", "date": day(0), **provenance}, entries)
    path.write_text(json.dumps(whole))
    return tables.load_table(path)


def merge(to: Path, *sources: tables.Table, prefer: str = "newest") -> list[table_diff.Conflict]:
    return table_diff.merge_into(to, sources, prefer)[1]


def named(found: list[table_diff.Difference]) -> set[int]:
    return {each.workload["batch"] for each in found if each.workload}


Fact = tuple[dict[str, Any], dict[str, Any], datetime | None, Any]  # config, measured, date, triton


def facts(table: tables.Table) -> dict[int, Fact]:
    found: dict[int, Fact] = {}
    for each in table.entries:
        own = each.get("provenance", table.provenance)
        date = tables.entry_date(each, own)
        found[each["workload"]["batch"]] = each["config"], each["measured"], date, own["triton"]
    return found


def better(mine: Fact, theirs: Fact, prefer: str) -> bool:
    """Whether a merge replaces `theirs`, said without the code that does it."""
    if prefer == "newest":
        assert mine[2] is not None
        assert theirs[2] is not None
        return mine[2] > theirs[2]
    return prefer == "fastest" and mine[1]["time_us"] < theirs[1]["time_us"]


SOURCE = st.tuples(
    st.integers(0, 40),  # the day of the table's provenance
    st.booleans(),  # another triton
    st.dictionaries(st.integers(1, 4), st.tuples(st.none() | st.integers(0, 40), st.integers(1, 5)), min_size=1),
)  # batch -> (the entry's own day, its time)


@given(st.lists(st.tuples(SOURCE, st.sampled_from(table_diff.PREFER)), min_size=1, max_size=5))
@settings(max_examples=80, deadline=None)
def test_any_merges_keep_config_measured_and_date_and_are_idempotent(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Any, str]]
) -> None:
    folder = tmp_path_factory.mktemp("m")
    to = folder / "to.json"
    expected: dict[int, Fact] = {}
    for number, ((table_day, other, entries), prefer) in enumerate(steps):
        made = [
            entry(batch, time_us + number / 100, **({} if own is None else {"date": day(own)}))  # unique: no ties
            for batch, (own, time_us) in entries.items()
        ]
        source = write(folder / f"{number}.json", *made, triton="3.5.0" if other else "3.6.0", date=day(table_day))
        before = tables.load_table(to) if to.exists() else None
        contributed = {
            batch
            for batch, fact in facts(source).items()
            if batch not in expected or better(fact, expected[batch], prefer)
        }
        expected |= {batch: fact for batch, fact in facts(source).items() if batch in contributed}
        merge(to, source, prefer=prefer)
        after = tables.load_table(to)
        assert facts(after) == expected
        assert table_diff.diff([after], [after]) == []
        if before is not None:
            assert named(table_diff.diff([before], [after])) == contributed
        data = to.read_bytes()
        merge(to, source, prefer=prefer)
        merge(to, after, prefer=prefer)
        assert to.read_bytes() == data
        tables.write_table(folder / "copy.json", tables.as_dict(after))
        assert facts(tables.load_table(folder / "copy.json")) == expected
        (folder / "copy.json").unlink()


def test_one_measurement_under_another_command_is_no_conflict(tmp_path: Path) -> None:
    a = write(tmp_path / "a.json", entry(1, date=day(1)), command="first")
    b = write(tmp_path / "b.json", entry(2, date=day(2)), command="second")
    assert merge(tmp_path / "to.json", a, b) == []
    assert merge(tmp_path / "to.json", a, b) == []


def test_losses_of_one_measurement_are_put_together_and_told_apart(tmp_path: Path) -> None:
    a = write(tmp_path / "a.json", entry(1, loss={"batch=2,kv_len=64": 0.1, "inputs": {"uniform": 0.2}}))
    b = write(tmp_path / "b.json", entry(1, loss={"batch=4,kv_len=64": 0.3, "inputs": {"zipf": 0.4}}))
    (found,) = table_diff.diff([a], [b])
    assert found.kind == "loss"
    assert "batch=4,kv_len=64 None -> 0.3" in found.what
    assert merge(tmp_path / "to.json", a, b) == []
    (whole,) = tables.load_table(tmp_path / "to.json").entries
    assert whole["loss"] == {
        "batch=2,kv_len=64": 0.1,
        "batch=4,kv_len=64": 0.3,
        "inputs": {"uniform": 0.2, "zipf": 0.4},
    }
    c = write(tmp_path / "c.json", entry(1, loss={"batch=2,kv_len=64": 0.9}))
    (conflict,) = merge(tmp_path / "to.json", c)  # one key, two figures: said, and the first stays
    assert (conflict.taken, conflict.left) == (str(tmp_path / "to.json"), c.path)
    assert tables.load_table(tmp_path / "to.json").entries[0]["loss"] == whole["loss"]


def test_an_entry_that_differs_by_software_or_date_alone_is_named(tmp_path: Path) -> None:
    a = write(tmp_path / "a.json", entry(1), entry(2))
    b = write(tmp_path / "b.json", entry(1), entry(2) | {"provenance": {"triton": "3.5.0", "date": day(9)}})
    (found,) = table_diff.diff([a], [b])
    assert (found.kind, found.workload["batch"]) == ("origin", 2)
    assert "triton 3.6.0 -> 3.5.0" in found.what


def test_what_another_process_writes_during_a_merge_is_judged_too(tmp_path: Path) -> None:
    to = tmp_path / "to.json"
    write(to, entry(1, 5.0))
    slow = write(tmp_path / "slow.json", entry(1, 3.0))
    merging = threading.Thread(target=merge, args=(to, slow), kwargs={"prefer": "fastest"})
    with tables.locked(to):
        merging.start()
        time.sleep(0.5)  # it has come to the lock, and must have neither read nor written the table yet
        assert facts(tables.load_table(to))[1][1]["time_us"] == 5.0
        write(to, entry(1, 1.0), entry(2))
    merging.join(timeout=30)
    assert {batch: fact[1]["time_us"] for batch, fact in facts(tables.load_table(to)).items()} == {1: 1.0, 2: 9.0}


def test_a_file_is_replaced_once_a_merge_so_a_kill_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [write(tmp_path / f"{n}.json", entry(n), date=day(n)) for n in (1, 2, 3)]
    replaced = []

    def replace(path: Path, data: bytes) -> None:
        replaced.append(path)
        tables.replace_file(path, data)

    monkeypatch.setattr(table_diff, "replace_file", replace)
    merge(tmp_path / "to.json", *sources)
    assert replaced == [tmp_path / "to.json"]


def test_a_result_too_large_to_be_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = write(tmp_path / "a.json", entry(1)), write(tmp_path / "b.json", entry(2))
    to = tmp_path / "to.json"
    merge(to, a)
    data = to.read_bytes()
    monkeypatch.setattr(table_format, "MAX_BYTES", len(data) + 100)
    for writes in (lambda: merge(to, b), lambda: tables.write_table(to, tables.as_dict(b))):
        with pytest.raises(UserError, match="no launch would read the result"):
            writes()
        assert to.read_bytes() == data


def test_into_a_folder_each_dtype_is_told_once_and_under_its_kernel(tmp_path: Path) -> None:
    made = entry(1)
    fp8 = {**made, "workload": {**made["workload"], "dtype": "fp16", "kv_dtype": "fp16"}}
    a = write(tmp_path / "a.json", made, fp8)
    b = write(tmp_path / "b.json", {**made, "measured": {"time_us": 2.0}}, fp8, date=day(1))
    conflicts = merge(tmp_path / "out", a, b)
    assert sorted(each.workload["dtype"] for each in conflicts) == ["bf16", "fp16"]
    assert {each.kernel for each in conflicts} == {"mla-decode"}
    assert len(list((tmp_path / "out").glob("*.json"))) == 2


def test_through_a_link_the_file_behind_it_is_written_under_its_one_lock(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    write(tmp_path / "real" / "t.json", entry(1))
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "real" / "t.json")
    tables.write_table(link, tables.as_dict(write(tmp_path / "a.json", entry(2))))
    merge(link, write(tmp_path / "b.json", entry(3)))
    assert link.is_symlink()
    assert facts(tables.load_table(tmp_path / "real" / "t.json")).keys() == {1, 2, 3}
    assert [path.name for path in tmp_path.rglob("*.lock")] == [".t.json.lock"]
