"""Recording what a recording answers gives that recording again, also after an interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kerneltune.recordings import find_recordings, read_recording
from kerneltune.tuning import recorder
from kerneltune.tuning.backends import ReplayBackend
from kerneltune.tuning.options import Options
from kerneltune.tuning.progress import Silent

SHIPPED = find_recordings([Path(__file__).parents[2] / "results"], "moe")[:2]


def record(out: Path, progress: Any = None) -> list[Path]:
    backend = ReplayBackend(SHIPPED)
    return recorder.record(backend, backend.workloads, "space", Options(out), progress or Silent())


def test_a_recording_of_a_recording_is_the_same(tmp_path: Path) -> None:
    again = {path.name: read_recording(path) for path in record(tmp_path)}
    assert len(again) == len(SHIPPED)
    for old in SHIPPED:
        new = next(each for each in again.values() if each.workload == old.workload)
        times = {(t.part, str(sorted(t.config.items()))): t.time_us for t in new.trials}
        assert times == {(t.part, str(sorted(t.config.items()))): t.time_us for t in old.trials}
        assert new.default_config == old.default_config
        assert max(new.rounds.values()) >= 3
        for shared, rest in old.rest_us.items():
            assert new.rest_us[shared] == pytest.approx(rest, abs=0.01)


def test_an_interrupted_recording_goes_on_and_measures_nothing_twice(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    class StopAfter(Silent):
        left = 100

        def trial(self, *args: Any) -> None:
            self.left -= 1
            if not self.left:
                raise Stop

    with pytest.raises(Stop):
        record(tmp_path, StopAfter())
    record(tmp_path)
    lines = (tmp_path / "records" / "moe.jsonl").read_text().splitlines()
    trials = [line.partition('"workload"')[2].partition('"outcome"')[0] for line in lines if '"kind":"trial"' in line]
    assert len(trials) == len(set(trials))
