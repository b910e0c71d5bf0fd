"""Stale entries measured again, on recordings of an H200: just those, and written one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kerneltune import tables
from kerneltune.kernels.source_hash import VARIANTS, variant_hash
from kerneltune.kernels.staleness import triton_version
from kerneltune.recordings import Recording, find_recordings
from kerneltune.tuning.backends import ReplayBackend
from kerneltune.tuning.revalidate import measure_entries, revalidate

RESULTS = Path(__file__).parents[2] / "results"


def recorded(kernel: str) -> list[Recording]:
    return [r for r in find_recordings([RESULTS], kernel) if r.workload["dtype"] == "bf16"]


def backend(kernel: str, first: dict[str, Any]) -> ReplayBackend:
    return ReplayBackend(recorded(kernel), None)


def fresh(kernel: str) -> dict[str, Any]:
    variant = next(iter(VARIANTS[kernel]))
    return {"triton": triton_version(), "kernel_hash": {variant: variant_hash(kernel, variant)}, "date": "2026-01-01"}


STALE = {"triton": "3.5.9", "kernel_hash": {"split_kv": "0" * 12}, "date": "2025-01-01"}


def write(path: Path, kernel: str, entries: list[dict[str, Any]], provenance: dict[str, Any]) -> Path:
    device = recorded(kernel)[0].device
    path.write_text(json.dumps(tables.make_table(kernel, device, provenance, entries)))
    return path


def entry(recording: Recording, config: dict[str, Any], **more: Any) -> dict[str, Any]:
    return tables.make_entry(recording.workload, config, {"time_us": 1.0}, {"batch=1,kv_len=1": 0.5}) | more


def slowest(recording: Recording) -> dict[str, Any]:
    good = [t for t in recording.trials if t.outcome == "ok" and t.time_us is not None]
    return dict(max(good, key=lambda t: t.time_us or 0.0).config)


def test_only_stale_entries_are_measured_and_the_default_takes_what_lost_its_worth(tmp_path: Path) -> None:
    first, second, third = recorded("mla-decode")[:3]
    kept = entry(first, slowest(first))
    path = write(
        tmp_path / "t.json",
        "mla-decode",
        [kept, entry(second, slowest(second), provenance=STALE), entry(third, third.default_config, provenance=STALE)],
        fresh("mla-decode"),
    )
    before = tables.load_table(path).entries[0]
    done = list(revalidate([path], backend))
    assert [each.outcome for each in done] == ["default", "kept"]
    assert all("measured with triton 3.5.9" in each.why[0] for each in done)
    by_workload = {json.dumps(e["workload"]): e for e in tables.load_table(path).entries}
    assert by_workload[json.dumps(before["workload"])]["config"] == kept["config"]
    assert by_workload[json.dumps(before["workload"])]["measured"] == {"time_us": 1.0}
    renewed = by_workload[json.dumps(tables.table_workload("mla-decode", second.workload))]
    assert renewed["config"] == second.default_config
    assert renewed["measured"]["time_us"] > 1.0
    assert renewed["measured"]["gain"] == 1.0
    assert renewed["loss"] == {}  # it compared nothing that was measured now
    table = tables.load_table(path)
    assert renewed.get("provenance", table.provenance)["kernel_hash"] == second.kernel_hash
    assert not list(revalidate([path], backend)) or triton_version() != second.versions["triton"]


def test_all_measures_every_entry_and_keeps_losses_that_still_compare(tmp_path: Path) -> None:
    first = recorded("mla-decode")[0]
    path = write(tmp_path / "t.json", "mla-decode", [entry(first, first.default_config)], fresh("mla-decode"))
    assert not list(revalidate([path], backend))
    (done,) = revalidate([path], backend, everything=True)
    assert (done.outcome, done.why) == ("kept", ())
    assert tables.load_table(path).entries[0]["loss"] == {"batch=1,kv_len=1": 0.5}


def test_a_moe_entry_of_two_parts_is_renewed(tmp_path: Path) -> None:
    recording = recorded("moe")[0]
    old = {"triton": "3.5.9"}
    path = write(tmp_path / "t.json", "moe", [entry(recording, recording.default_config, loss={})], old)
    (done,) = revalidate([path], backend)
    assert done.outcome == "kept"
    assert done.time_us is not None
    assert done.time_us > 10


def test_a_config_that_can_no_longer_run_is_replaced_and_said(tmp_path: Path) -> None:
    recording = recorded("mla-decode")[0]
    path = write(tmp_path / "t.json", "mla-decode", [entry(recording, {"BLOCK_Q": 3})], STALE)
    (done,) = revalidate([path], backend)
    assert (done.outcome, done.reason) == ("broken", "not recorded")
    assert tables.load_table(path).entries[0]["config"] == recording.default_config


def test_an_interruption_keeps_what_is_done(tmp_path: Path) -> None:
    entries = [entry(r, slowest(r)) for r in recorded("mla-decode")[:3]]
    path = write(tmp_path / "t.json", "mla-decode", entries, STALE)
    work = revalidate([path], backend)
    next(work)
    del work  # as an interruption does
    times = [each["measured"]["time_us"] for each in tables.load_table(path).entries]
    assert sum(time_us > 1.0 for time_us in times) == 1
    left = len([each for each in revalidate([path], backend) if each.before_us == 1.0])
    assert left == 2


def test_tables_of_other_devices_and_recorded_inputs_are_left_and_said(tmp_path: Path) -> None:
    recording = recorded("mla-decode")[0]
    mine = entry(recording, recording.default_config)
    path = write(tmp_path / "t.json", "mla-decode", [mine], STALE)
    raw = json.loads(path.read_text())
    raw["device"]["name"] = "NVIDIA H100"
    path.write_text(json.dumps(raw))
    (done,) = revalidate([path], backend)
    assert (done.outcome, done.reason) == ("left", "is of NVIDIA H100, and here is NVIDIA H200")
    mine["workload"] = mine["workload"] | {"lengths": "lens@1a2b3c4d"}
    path = write(tmp_path / "u.json", "mla-decode", [mine], STALE)
    (done,) = revalidate([path], backend)
    assert (done.outcome, done.reason) == ("left", "the inputs lens@1a2b3c4d are not here")


def test_measuring_finds_what_is_slower_than_the_default(tmp_path: Path) -> None:
    first, second = recorded("mla-decode")[:2]
    entries = [entry(first, slowest(first)), entry(second, second.default_config)]
    path = write(tmp_path / "t.json", "mla-decode", entries, fresh("mla-decode"))
    slow, same = measure_entries([path], backend)
    assert slow.fault
    assert slow.what.startswith("slower than the default: ")
    assert not same.fault
    assert "it states the default" in same.what


def test_measuring_finds_what_cannot_run(tmp_path: Path) -> None:
    recording = recorded("mla-decode")[0]
    path = write(tmp_path / "t.json", "mla-decode", [entry(recording, {"BLOCK_Q": 3})], STALE)
    (found,) = measure_entries([path], backend)
    assert found.fault
    assert found.what.startswith("infeasible: not recorded")
    raw = json.loads(path.read_text())
    raw["device"]["name"] = "NVIDIA H100"
    path.write_text(json.dumps(raw))
    with pytest.raises(tables.UserError, match="is of NVIDIA H100, and here is NVIDIA H200"):
        list(measure_entries([path], backend))


def test_an_entry_that_no_call_asks_for_and_recorded_inputs_are_left_and_named(tmp_path: Path) -> None:
    good, other = recorded("mla-decode")[:2]
    impossible = entry(good, good.default_config, provenance=STALE)
    impossible["workload"] = {**impossible["workload"], "heads": 7, "h_kv": 2}
    in_service = entry(good, good.default_config, provenance=STALE)
    in_service["workload"] = {**in_service["workload"], "lengths": "lens@1a2b3c4d"}
    fine = entry(other, other.default_config, provenance=STALE)
    path = write(tmp_path / "t.json", "mla-decode", [impossible, in_service, fine], fresh("mla-decode"))
    before = {json.dumps(e["workload"]): e for e in tables.load_table(path).entries}
    done = list(revalidate([path], backend))
    assert sorted(each.outcome for each in done) == ["kept", "left", "left"]
    reasons = [each.reason for each in done if each.outcome == "left"]
    assert any("heads=7: must be a multiple of h_kv (2)" in reason for reason in reasons)
    assert any("lens@1a2b3c4d are not here" in reason for reason in reasons)
    after = {json.dumps(e["workload"]): e for e in tables.load_table(path).entries}
    assert after.keys() == before.keys()
    found = list(measure_entries([path], backend))
    assert len(found) == 3
    assert sum("not measured: " in each.what for each in found) == 2
    assert not any(each.fault for each in found if "not measured: " in each.what)


def test_nothing_but_entries_that_cannot_be_posed_needs_no_gpu(tmp_path: Path) -> None:
    recording = recorded("mla-decode")[0]
    in_service = entry(recording, recording.default_config, provenance=STALE)
    in_service["workload"] = {**in_service["workload"], "lengths": "lens@1a2b3c4d"}
    path = write(tmp_path / "t.json", "mla-decode", [in_service], fresh("mla-decode"))

    def none(kernel: str, first: dict[str, Any]) -> ReplayBackend:
        raise AssertionError("no backend is needed")

    assert [each.outcome for each in revalidate([path], none)] == ["left"]
    assert ["not measured" in each.what for each in measure_entries([path], none)] == [True]


def test_one_entry_that_trips_the_measurement_is_named_and_the_others_are_renewed(tmp_path: Path) -> None:
    class Trips(ReplayBackend):
        def finals(self, workload: Any, configs: Any, *more: Any, **named: Any) -> list[dict[str, Any]]:
            if workload["batch"] == tripped:
                raise ValueError("no such layout")
            return super().finals(workload, configs, *more, **named)

    first, second = recorded("mla-decode")[:2]
    tripped = first.workload["batch"]
    assert second.workload["batch"] != tripped
    unknown = entry(first, first.default_config, loss={})  # recorded nowhere: preparing it fails
    unknown["workload"] = {**unknown["workload"], "batch": 3}
    entries = [entry(first, first.default_config), unknown, entry(second, second.default_config)]
    path = write(tmp_path / "t.json", "mla-decode", entries, STALE)
    before = {e["workload"]["batch"]: e for e in tables.load_table(path).entries}
    done = {each.workload["batch"]: each for each in revalidate([path], lambda *_: Trips(recorded("mla-decode"), None))}
    assert (done[tripped].outcome, done[tripped].fault, done[tripped].number) == ("left", True, 0)
    assert done[tripped].reason == "cannot be measured: no such layout"
    assert (done[3].outcome, done[3].fault, done[3].number) == ("left", True, 1)
    assert done[second.workload["batch"]].outcome == "kept"
    after = {e["workload"]["batch"]: e for e in tables.load_table(path).entries}
    assert after.keys() == before.keys()
    for batch in (tripped, 3):
        assert after[batch]["config"] == before[batch]["config"]
        assert after[batch]["measured"] == before[batch]["measured"]
    found = list(measure_entries([path], lambda *_: Trips(recorded("mla-decode"), None)))
    assert sorted(each.fault for each in found) == [False, True, True]
