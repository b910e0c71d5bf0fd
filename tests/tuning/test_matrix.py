"""The loss matrix: every winner timed where others won, few configs in the table, each loss measured and stated."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from proto import proto_recordings

from kerneltune.cli import main
from kerneltune.compile import Compiled
from kerneltune.device import target
from kerneltune.kernels.table_format import KEYS, parse_scaled, scaled_text
from kerneltune.recordings import Recording, canonical, find_recordings, write_recording
from kerneltune.records import Trial, read_folder
from kerneltune.registry import load_tunable
from kerneltune.tables import measured_loss
from kerneltune.tuning import finalists, matrix
from kerneltune.tuning.backends import LiveBackend, ReplayBackend
from kerneltune.tuning.options import Options
from kerneltune.tuning.progress import Silent
from kerneltune.tuning.seconds import Seconds
from kerneltune.tuning.session import Result, run

RESULTS = Path(__file__).parents[2] / "results"
LAUNCH_US = 4.2
DEFAULT, ALL = 1, 5  # num_splits of the default, and of the config that is near the best everywhere
KEYS_MLA = KEYS["mla-decode"]


def config(splits: int) -> dict[str, int]:
    return {"BLOCK_H": 16, "BLOCK_N": 32, "num_warps": 4, "STAGES": 2, "num_splits": splits}


def recording(batch: int, net_us: Mapping[int, float], lengths: str = "equal") -> Recording:
    """A space of configs that differ in `num_splits`, with these net times."""
    proto = proto_recordings()[0]
    workload = proto.workload | {"batch": batch, "lengths": lengths}
    trials = tuple(
        msgspec.structs.replace(
            proto.trials[0],
            workload=workload,
            config=config(splits),
            index=index,
            outcome="ok",
            reason="",
            time_us=net + LAUNCH_US,
            p20_us=net + LAUNCH_US - 0.01,
            p80_us=net + LAUNCH_US + 0.01,
            samples=48,
            flops=1000,
            bytes=1000,
            timing_s=0.02,
        )
        for index, (splits, net) in enumerate(net_us.items())
    )
    return dataclasses.replace(proto, workload=workload, default_config=config(DEFAULT), trials=trials)


def ladder() -> list[Recording]:
    """Four workloads with a best config each; `ALL` is 1.5 % off on three of them, 10 % on the last."""
    found = []
    for index, batch in enumerate((1, 2, 4, 8)):
        times = {splits: 150.0 + splits for splits in range(10, 20)} | {DEFAULT: 130.0, ALL: 101.5}
        found.append(recording(batch, times | {20 + index: 100.0} | ({ALL: 110.0} if index == 3 else {})))
    every = {t.config["num_splits"] for each in found for t in each.trials}
    return [
        recording(
            each.workload["batch"],
            {splits: 140.0 + splits / 10 for splits in every}
            | {t.config["num_splits"]: (t.time_us or 0) - LAUNCH_US for t in each.trials},
        )
        for each in found
    ]


def replay(out: Path, recordings: list[Recording], **options: Any) -> Result:
    backend = ReplayBackend(recordings)
    settings: dict[str, Any] = {"trials": 400, "sampler": "random"} | options
    return run(backend, backend.workloads, Options(out, **settings), Silent())


def entries(result: Result) -> list[dict[str, Any]]:
    """The table's entries, without the dates."""
    assert result.table is not None
    found = json.loads(result.table.read_text())["entries"]
    for entry in found:
        entry["measured"].pop("date")
    return found


def test_few_configs_serve_the_ladder_and_every_loss_is_stated(tmp_path: Path) -> None:
    result = replay(tmp_path, ladder())
    found = entries(result)
    assert [e["config"]["num_splits"] for e in found] == [ALL, ALL, ALL, 23]
    assert result.configs == 2
    assert result.worst_loss == pytest.approx(0.015)
    first = found[0]
    assert first["loss"] == {f"batch={b},kv_len=8192": 0.015 for b in (1, 2, 4)} | {"batch=8,kv_len=8192": 0.1}
    assert first["measured"]["time_us"] == pytest.approx(101.5 + LAUNCH_US)
    assert first["measured"]["gain"] == pytest.approx(130.0 / 101.5, abs=1e-4)
    assert first["measured"]["default_us"] == pytest.approx(130.0 + LAUNCH_US)
    assert found[3]["loss"]["batch=8,kv_len=8192"] == 0


def test_without_a_loss_each_workload_has_its_own_winner(tmp_path: Path) -> None:
    result = replay(tmp_path, ladder(), max_loss=0.0)
    assert [e["config"]["num_splits"] for e in entries(result)] == [20, 21, 22, 23]
    assert (result.configs, result.worst_loss) == (4, 0.0)


def test_every_winner_is_timed_on_every_workload_once(tmp_path: Path) -> None:
    result = replay(tmp_path, ladder())
    trials = read_folder(tmp_path)[1]
    assert len({canonical([t.workload, t.config, t.stage]) for t in trials}) == len(trials)
    for _, decision in result.decisions:
        assert decision is not None
        for workload, _ in result.decisions:
            mine = [t for t in trials if t.workload == workload and t.config == decision.winner.config]
            assert {"final", "matrix"} & {t.stage for t in mine}


@pytest.mark.parametrize("max_loss", [0.02, 0.3])
@pytest.mark.parametrize("kernel", ["mla-decode", "moe"])
def test_shipped_recordings_keep_the_bound(tmp_path: Path, kernel: str, max_loss: float) -> None:
    recordings = find_recordings([RESULTS], kernel)[-3:]
    result = replay(tmp_path, recordings, max_loss=max_loss, trials=24)
    timed: dict[str, dict[str, float]] = {}
    for t in read_folder(tmp_path)[1]:
        if t.stage in ("final", "matrix") and t.outcome == "ok":
            timed.setdefault(canonical(t.workload), {})[canonical(t.config)] = (t.time_us or 0.0) - t.launch_us
    for entry in entries(result):
        column = timed[canonical(entry["workload"])]
        net = column[canonical(entry["config"])]
        assert net / min(column.values()) - 1 <= max_loss + finalists.MIN_GAIN  # the default is kept within the noise
        assert entry["measured"]["time_us"] - entry["measured"]["launch_us"] == pytest.approx(net, abs=2e-3)
        assert entry["measured"]["gain"] >= 1
        assert entry["loss"][scaled_text(KEYS[kernel], entry["workload"])] <= max_loss
    strict = replay(tmp_path / "strict", recordings, max_loss=0.0, trials=24)
    assert result.configs <= strict.configs


def test_killed_in_the_middle_of_the_matrix_it_resumes_to_the_same_table(tmp_path: Path) -> None:
    whole = replay(tmp_path / "whole", ladder())
    lines = (tmp_path / "whole" / "records" / "mla-decode.jsonl").read_bytes().splitlines(keepends=True)
    at = [index for index, line in enumerate(lines) if b'"stage":"matrix"' in line]
    assert len(at) > 8
    for cut in (at[0], at[1], at[len(at) // 2], at[-1]):
        out = tmp_path / str(cut)
        records = out / "records" / "mla-decode.jsonl"
        records.parent.mkdir(parents=True)
        records.write_bytes(b"".join(lines[:cut]) + lines[cut][:50])  # what a kill leaves
        again = replay(out, ladder())
        assert entries(again) == entries(whole)
        assert again.measured == len(lines) - cut
        assert replay(out, ladder()).measured == 0


def test_a_workload_that_wants_its_default_gets_it(tmp_path: Path) -> None:
    """The default is 0.5 % off a config that serves the others: no gain, so no config of theirs."""
    recordings = ladder()[:2]
    every = {t.config["num_splits"]: 140.0 for t in recordings[0].trials}
    result = replay(tmp_path, [*recordings, recording(4, every | {DEFAULT: 100.5, ALL: 100.0})])
    assert result.decisions[2][1] is not None
    assert result.decisions[2][1].kept_default
    found = entries(result)
    assert [e["config"]["num_splits"] for e in found] == [ALL, ALL, DEFAULT]
    assert found[2]["measured"]["gain"] == 1.0
    assert found[2]["measured"]["default_us"] == found[2]["measured"]["time_us"]
    assert found[2]["loss"]["batch=4,kv_len=8192"] == 0.0


def test_no_entry_is_slower_than_the_default(tmp_path: Path) -> None:
    """The one config near the best of all three is inside the bound on the third, but its default is better."""
    recordings = ladder()[:2]
    every = {t.config["num_splits"]: 140.0 for t in recordings[0].trials}
    result = replay(
        tmp_path, [*recordings, recording(4, every | {20: 100.0, DEFAULT: 103.0, ALL: 104.0})], max_loss=0.05
    )
    assert all(e["measured"]["gain"] >= 1 for e in entries(result))
    assert entries(result)[2]["config"]["num_splits"] == 20


def test_what_was_not_recorded_there_is_left_out(tmp_path: Path) -> None:
    recordings = ladder()
    kept = tuple(t for t in recordings[1].trials if t.config["num_splits"] != ALL)
    recordings[1] = dataclasses.replace(recordings[1], trials=kept)
    found = entries(replay(tmp_path, recordings))
    assert found[1]["config"]["num_splits"] == 21
    assert "batch=2,kv_len=8192" not in found[0]["loss"]


def test_losses_over_input_classes_are_stated_for_lookups_without_one(tmp_path: Path) -> None:
    first = ladder()[0]
    spread = recording(1, {t.config["num_splits"]: 150.0 for t in first.trials} | {ALL: 99.0, 20: 108.9}, "spread")
    equal, other = entries(replay(tmp_path, [first, spread], max_loss=0.0))
    assert equal["loss"] == {"batch=1,kv_len=8192": 0.0, "inputs": {"equal": 0.0, "spread": 0.1}}
    assert other["loss"]["inputs"] == {"equal": 0.015, "spread": 0.0}


def test_a_budget_bounds_the_matrix(tmp_path: Path) -> None:
    short = replay(tmp_path / "a", ladder(), budget_s=2.0)
    long = replay(tmp_path / "b", ladder())
    count = {out: sum(t.stage == "matrix" for t in read_folder(tmp_path / out)[1]) for out in "ab"}
    assert count["a"] < count["b"]
    assert len(entries(short)) == len(entries(long)) == 4


def trial(splits: int, time_us: float, batch: int = 1) -> Trial:
    row = next(t for t in ladder()[0].trials if t.config["num_splits"] == splits)
    spread = {"p20_us": time_us, "p80_us": time_us}
    return msgspec.structs.replace(row, workload=row.workload | {"batch": batch}, time_us=time_us, part="", **spread)


def column(batch: int, winner: int, default_us: float = 134.2) -> matrix.Column:
    decision = finalists.decide(trial(DEFAULT, default_us, batch), [trial(winner, 104.2, batch)])
    assert decision is not None
    ((found,),) = matrix.groups([(decision.winner.workload, decision)], "mla-decode")
    return found


def test_a_slower_gpu_during_the_matrix_is_no_loss() -> None:
    """All of a run read 10 % more than in the finals: the winner, timed again beside them, says so."""

    def time(workload: dict[str, Any], configs: list[dict[str, Any]]) -> list[Trial]:
        assert [c["num_splits"] for c in configs] == [DEFAULT, 20, ALL]
        net = {DEFAULT: 143.0, 20: 110.0, ALL: 111.1}
        return [trial(c["num_splits"], net[c["num_splits"]] + LAUNCH_US) for c in configs]

    (found,) = matrix.measure([column(1, 20)], [[config(ALL)]], time)
    timed = found.timed[canonical(config(ALL))]
    assert timed.net_us == pytest.approx(101.0)
    (served,) = matrix.serve([found], 0.0, "mla-decode")
    assert served.own_loss == 0.0
    assert timed.trial.time_us == pytest.approx(111.1 + LAUNCH_US)
    assert timed.default is not None
    assert timed.default.time_us == pytest.approx(143.0 + LAUNCH_US)


def test_what_fails_there_cannot_serve_there() -> None:
    def time(workload: dict[str, Any], configs: list[dict[str, Any]]) -> list[Trial]:
        ok = [trial(c["num_splits"], 104.2) for c in configs]
        return [msgspec.structs.replace(t, outcome="wrong") if t.config == config(ALL) else t for t in ok]

    (found,) = matrix.measure([column(1, 20)], [[config(ALL)]], time)
    assert canonical(config(ALL)) not in found.timed


def test_too_many_pairs_leave_the_near_neighbours() -> None:
    group = [column(1 << i, 20 + i % 4) for i in range(4)]
    planned = matrix.plan(group, 0.02, lambda workload, found: None, pairs=6)
    assert [sorted(c["num_splits"] for c in each) for each in planned] == [[21], [20, 22], [21, 23], [22]]
    assert [len(each) for each in matrix.plan(group, 0.02, lambda workload, found: None, pairs=200)] == [3] * 4
    assert not any(matrix.plan(group, 0.02, lambda workload, found: "no", pairs=200))


@pytest.mark.parametrize(
    "text", ["", "batch=1", "kv_len=2,batch=1", "batch=1,kv_len=x", "batch=01,kv_len=2", "batch=0,kv_len=2"]
)
def test_names_of_losses_are_the_scaled_keys(text: str) -> None:
    assert parse_scaled(KEYS_MLA, text) is None
    assert parse_scaled(KEYS_MLA, "batch=8,kv_len=2048") == {"batch": 8, "kv_len": 2048}


def test_the_loss_of_a_lookup_is_that_of_the_nearest_other_workload() -> None:
    loss = {
        "batch=1,kv_len=8192": 0.001,
        "batch=2,kv_len=8192": 0.014,
        "batch=8,kv_len=8192": 0.3,
        "inputs": {"equal": 0.0},
    }
    entry = {"workload": ladder()[0].workload, "loss": loss}
    assert measured_loss("mla-decode", entry, {"batch": 1, "kv_len": 8192}) == ({"batch": 1, "kv_len": 8192}, 0.001)
    assert measured_loss("mla-decode", entry, {"batch": 2, "kv_len": 6000}) == ({"batch": 2, "kv_len": 8192}, 0.014)
    assert measured_loss("mla-decode", entry | {"loss": {}}, {"batch": 2, "kv_len": 6000}) is None


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main([*map(str, arguments)])
    printed = capsys.readouterr()
    return int(stopped.value.code or 0), printed.out, printed.err


def test_the_command_line_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for each in ladder():
        write_recording(tmp_path / "recordings" / f"{each.workload['batch']}.parquet", each)
    given = ["search", "mla-decode", "--replay", tmp_path / "recordings", "--sampler", "exhaustive"]
    code, out, err = command(capsys, *given, "--out", tmp_path / "out")
    assert code == 0
    assert "table     mla-decode: 4 workloads, 2 configs, worst loss 1.5 %" in out
    assert "loss matrix of 4 workloads: " in err
    assert (tmp_path / "out" / "plots" / "loss-matrix.png").stat().st_size > 10_000
    assert "batch=8" in (tmp_path / "out" / "plots" / "loss-matrix.svg").read_text()
    (line,) = [line for line in out.splitlines() if line.startswith("batch=1 ")]
    assert "1.5 %" in line

    code, out, _ = command(capsys, *given, "--out", tmp_path / "own", "--max-loss", "0", "--json")
    summary = json.loads(out)
    assert (summary["configs"], summary["worst_loss"]) == (4, 0.0)
    assert [e["config"]["num_splits"] for e in summary["entries"]] == [20, 21, 22, 23]

    table = tmp_path / "out" / "tables" / "mla-decode.bf16.nvidia-h200.json"
    asked = ["lookup", "mla-decode", "batch=6,kv_len=8192,heads=128", "--target", "sm_90", "--table", table]
    _, out, _ = command(capsys, *asked)
    assert "(nearest, sizes a factor of 1.33 away, measured loss" in out
    asked[2] = "batch=1,kv_len=8192,heads=128"
    _, out, _ = command(capsys, *asked)
    assert "(exact, measured loss 1.5 %)" in out


@pytest.mark.parametrize("text", ["2", "1", "-1%", "two", "100%", "nan", ""])
def test_a_senseless_loss_is_refused(capsys: pytest.CaptureFixture[str], text: str) -> None:
    code, _, err = command(capsys, "search", "mla-decode", f"--max-loss={text}")
    assert code == 2
    assert "--max-loss" in err
    assert err.count("\n") == 1


class Done:
    """A pool and a worker in one that only note what is asked of them."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def submit(self, key: str, part: str, params: Any, workload: Any) -> None:
        self.calls.append(f"submit {part}")

    def result(self, key: str) -> Compiled:
        self.calls.append("result")
        return Compiled("ok")

    def finals(self, workload: Any, configs: list[Any], *, rounds: int, **given: Any) -> list[dict[str, Any]]:
        self.calls.append(f"finals of {len(configs)}, {rounds} rounds")
        return []


def test_on_a_gpu_the_matrix_waits_for_its_compiles() -> None:
    tunable = load_tunable("moe")
    backend = LiveBackend.__new__(LiveBackend)
    backend._tunable, backend._device, backend.parts, backend._seed = tunable, target("sm_90"), tuple(tunable.parts), 0
    backend._pool = backend._worker = done = Done()  # type: ignore[assignment]
    backend.seconds = Seconds()
    workload = tunable.complete_workload({"tokens": 64})
    found = tunable.default_config(workload, target("sm_90"))
    backend.finals(workload, [found], rounds=matrix.ROUNDS)
    assert done.calls[-1] == "finals of 1, 1 rounds"
    assert {"submit gemm1", "submit gemm2"} < set(done.calls)
    edges = len([edge for _, edge in tunable.edge_workloads(workload)])
    assert done.calls.count("result") == 2 + edges  # each waited for, before the finals
    assert backend.why_not(workload, found) is None
    too_large = {part: dict(found[part]) | {"BLOCK_M": 256, "BLOCK_K": 256, "num_stages": 5} for part in tunable.parts}
    assert "shared memory" in str(backend.why_not(workload, too_large))
