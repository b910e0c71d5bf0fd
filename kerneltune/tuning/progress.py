"""What a search tells while it runs: the interface, and one that says nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kerneltune.records import Trial
from kerneltune.tuning.finalists import Decision


class Progress(Protocol):
    """Is told what happens, in order."""

    def begin(self, workloads: Sequence[Mapping[str, Any]]) -> None: ...

    def workload(self, position: int, workload: Mapping[str, Any], trials: int) -> None: ...

    def trial(self, trial: Trial, best_us: float | None, roofline: float | None, remembered: bool) -> None: ...

    def decided(self, workload: Mapping[str, Any], decision: Decision | None) -> None: ...

    def note(self, text: str) -> None: ...


class Silent:
    """Progress that says nothing."""

    def begin(self, workloads: Sequence[Mapping[str, Any]]) -> None: ...

    def workload(self, position: int, workload: Mapping[str, Any], trials: int) -> None: ...

    def trial(self, trial: Trial, best_us: float | None, roofline: float | None, remembered: bool) -> None: ...

    def decided(self, workload: Mapping[str, Any], decision: Decision | None) -> None: ...

    def note(self, text: str) -> None: ...
