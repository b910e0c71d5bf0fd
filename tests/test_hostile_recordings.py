"""A recording may come from any program: nonsense is one line when it is read, never a wrong figure later."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from proto import proto_recordings
from vllm_recording import vllm_recording

from kerneltune.errors import UserError
from kerneltune.recordings import Recording, canonical, read_recording, write_recording
from kerneltune.records import Trial
from kerneltune.tuning.api import search
from kerneltune.tuning.backends import ReplayBackend
from kerneltune.tuning.simulate import simulate

Change = Callable[[dict[str, list[Any]], dict[str, Any]], None]


def changed(path: Path, change: Change, recording: Recording | None = None) -> Path:
    """A good recording with its columns and header changed."""
    write_recording(path, recording or proto_recordings()[0])
    table = pq.read_table(path)
    metadata = dict(table.schema.metadata)
    columns, header = table.to_pydict(), json.loads(metadata[b"kerneltune"])
    change(columns, header)
    metadata[b"kerneltune"] = json.dumps(header).encode()
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), path)
    return path


def cell(column: str, value: object) -> Change:
    def change(columns: dict[str, list[Any]], header: dict[str, Any]) -> None:
        columns[column][columns["outcome"].index("ok")] = value

    return change


def repeat(columns: dict[str, list[Any]], header: dict[str, Any]) -> None:
    for column in columns.values():
        column.append(column[0])


def field(name: str, **values: object) -> Change:
    return lambda columns, header: header[name].update(values)


def header_is(name: str, value: object) -> Change:
    return lambda columns, header: header.update({name: value})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (repeat, "twice"),
        (cell("part", "other"), "part"),
        (cell("outcome", "banana"), "outcome"),
        (cell("time_us", float("nan")), "a time"),
        (cell("timing_s", float("inf")), "timing_s"),
        (cell("gate_s", -1.0), "gate_s"),
        (cell("num_warps", None), "not all points have the same parameters"),
        (lambda columns, header: columns.pop("outcome"), "outcome"),
        (lambda columns, header: columns.update(estimate_us=[0.0] * len(columns["part"])), "estimate_us"),
        (header_is("shared", ["NOPE"]), "shared"),
        (header_is("shared", "BLOCK_H"), "shared"),
        (header_is("rest_us", {"[]": -5.0}), "rest_us"),
        (header_is("versions", {"triton": 3}), "versions"),
        (field("device", sm_count=0), "device.sm_count"),
        (field("device", arch=90), "device.arch"),
        (field("ceilings", dram_copy_gbps=float("nan")), "ceilings.dram_copy_gbps"),
        (field("workload", heads=0), "workload.heads"),
        (field("workload", dtype=3), "workload.dtype"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_replayed_is_refused_by_name(tmp_path: Path, change: Change, named: str) -> None:
    with pytest.raises(UserError, match=named) as caught:
        read_recording(changed(tmp_path / "bad.parquet", change))
    assert "bad.parquet" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_billions_of_rows_in_a_small_file_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "bomb.parquet"
    pq.write_table(pa.table({"part": pa.nulls(1_000_001)}), path)
    with pytest.raises(UserError, match="1000001 rows"):
        read_recording(path)


@pytest.mark.parametrize("column", ["p20_us", "p80_us", "samples", "error", "reason", "compile_s", "gate_s", "rounds"])
@pytest.mark.parametrize("how", ["missing", "null"])
def test_optional_columns_are_optional(tmp_path: Path, column: str, how: str) -> None:
    def without(columns: dict[str, list[Any]], header: dict[str, Any]) -> None:
        columns[column] = [None] * len(columns[column])
        if how == "missing":
            del columns[column]

    path = changed(tmp_path / "r.parquet", without)
    found = search("mla-decode", replay=path, out=tmp_path / "out", trials=4, sampler="random")
    assert found.table is not None


def test_a_whole_of_two_parts_needs_no_spread() -> None:
    backend = ReplayBackend([vllm_recording(64)])
    (workload,) = backend.workloads
    (whole,) = backend.finals(workload, [backend.default_config(workload)])
    assert whole["outcome"] == "ok"
    assert whole["time_us"] > 0


def test_a_whole_that_nobody_ran_is_neither_served_nor_the_optimum() -> None:
    recording = vllm_recording(64)
    (default,) = {recording.default_config[part]["BLOCK_SIZE_M"] for part in recording.parts}
    recording = replace(recording, rest_us={canonical([default]): 1.0})
    backend = ReplayBackend([recording])
    other = {
        part: dict(next(t.config for t in recording.trials if t.part == part and t.config["BLOCK_SIZE_M"] != default))
        for part in recording.parts
    }
    other["gemm2"]["BLOCK_SIZE_M"] = other["gemm1"]["BLOCK_SIZE_M"]
    assert backend.why_not(recording.workload, other) == "not recorded"
    outcomes = [row["outcome"] for row in backend.finals(recording.workload, [recording.default_config, other])]
    assert outcomes[0] == "ok"
    assert outcomes[1] != "ok"
    only = tuple(t for t in recording.trials if t.config["BLOCK_SIZE_M"] == default)
    alone = replace(recording, trials=only)
    both = [simulate(each, "exhaustive", 1, measurements=len(each.trials)) for each in (recording, alone)]
    assert [each.fractions[0, -1] for each in both] == [1.0, 1.0]


def failed(trial: Trial) -> Trial:
    return Trial(**{name: getattr(trial, name) for name in trial.__struct_fields__} | {"outcome": "wrong"})


def test_a_recording_without_an_optimum_is_one_line() -> None:
    recording = proto_recordings()[0]
    recording = replace(recording, trials=tuple(map(failed, recording.trials)))
    with pytest.raises(UserError, match="no whole config of this recording ran"):
        simulate(recording, "random", 1)


def test_two_recordings_of_one_workload_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_recording(tmp_path / "in" / f"{name}.parquet", proto_recordings()[0])
    with pytest.raises(UserError, match="recorded twice"):
        search("mla-decode", replay=tmp_path / "in", out=tmp_path / "out", trials=4)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_simulate(tmp_path: Path, sent: signal.Signals) -> None:
    for index, recording in enumerate(proto_recordings()[:2]):
        write_recording(tmp_path / f"{index}.parquet", recording)
    line = [sys.executable, "-m", "kerneltune", "simulate", str(tmp_path), "--sampler", "random", "--sampler", "gp"]
    done = subprocess.Popen(
        [*line, "--seeds", "500", "--jobs", "2"], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    time.sleep(6.0)
    if sent == signal.SIGINT:
        os.killpg(done.pid, sent)  # as a terminal does
    else:
        done.send_signal(sent)
    _, said = done.communicate(timeout=30)  # until the last process has closed stderr
    assert done.returncode == (130 if sent == signal.SIGINT else -signal.SIGKILL)
    assert "Traceback" not in said
    if sent == signal.SIGINT:
        assert said.splitlines()[-1] == "interrupted"
