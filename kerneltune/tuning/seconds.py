"""Where the seconds of a search go: waiting for compiles, the gate, timing, pauses, finals, the sampler, the rest."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# "compile wait": nothing to measure until a compile is done. "gate": inputs, references and checks, in search trials.
# "start": the processes, and the ceilings where they are not known.
KINDS = ("start", "compile wait", "gate", "timing", "pauses", "finals", "sampler", "other")


class Seconds:
    """Adds up by kind; what nobody claimed since it was made is "other"."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._spent = dict.fromkeys(KINDS[:-1], 0.0)

    @contextmanager
    def of(self, kind: str) -> Iterator[None]:
        """Count the time inside the block."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.add(kind, time.monotonic() - begin)

    def add(self, kind: str, seconds: float) -> None:
        """Count seconds; of a kind's own, never counted twice."""
        self._spent[kind] += seconds

    def split(self) -> dict[str, float]:
        """Seconds by kind until now, in the order of KINDS; they add up to the wall clock's."""
        wall = time.monotonic() - self._start
        return {**self._spent, "other": max(wall - sum(self._spent.values()), 0.0)}


def seconds_text(split: Mapping[str, float]) -> str:
    """One line, the total first: "41.2 s: compile wait 3.1 (8 %), gate 6.0 (15 %), ..."."""
    total = sum(split.values())
    shares = (f"{kind} {spent:.1f} ({spent / total if total else 0:.0%})" for kind, spent in split.items())
    return f"{total:.1f} s: {', '.join(shares)}"
