"""The record file of a search under way: what it holds already, and what is added."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from kerneltune.recordings import canonical
from kerneltune.records import Conditions, RecordWriter, Session, Summary, Trial, read_lines
from kerneltune.tuning.backends import Backend
from kerneltune.tuning.failures import Failures
from kerneltune.tuning.options import Options


class Log:
    """The record file of one search, and what it already holds for this kernel, device, compiler and source."""

    def __init__(self, backend: Backend, options: Options) -> None:
        self.session = new_session(backend, options)
        path = options.out / "records" / f"{backend.kernel}.jsonl"
        self._writer = RecordWriter(path)
        self._known: dict[str, Trial] = {}
        self.failures = Failures(backend.varying_keys)
        self.measured = self.remembered = self.samples = self.freaks = 0
        sound: set[str] = set()
        for line in read_lines(path):
            if isinstance(line, Session):
                if _same_measurement(line, self.session):
                    sound.add(line.id)
            elif line.session in sound:
                self._known.setdefault(_key(line.workload, line.part, line.config, line.stage), line)
                self.failures.add(line)
        self._announced = False

    def known(self, workload: Mapping[str, Any], part: str, config: Mapping[str, Any], stage: str) -> Trial | None:
        """The record of this very measurement, if there is one."""
        return self._known.get(_key(workload, part, config, stage))

    def recorded(self, workload: Mapping[str, Any], stage: str) -> list[Trial]:
        """The records of a workload's whole configs at one stage."""
        return [t for t in self._known.values() if t.stage == stage and not t.part and t.workload == workload]

    def add(self, trial: Trial) -> None:
        """Onto the disk, before anything else happens."""
        if not self._announced:
            self._writer.append(self.session)
            self._announced = True
        self._writer.append(trial)
        self._known[_key(trial.workload, trial.part, trial.config, trial.stage)] = trial
        self.failures.add(trial)
        self.samples += trial.samples
        self.freaks += trial.freaks

    def note(self, line: Conditions | Summary) -> None:
        """Something about trials that are on the disk."""
        self._writer.append(line)

    def need_not_measure(self, workload: Mapping[str, Any], part: str, config: Mapping[str, Any], stage: str) -> bool:
        """Whether this very measurement is recorded, or the config is known to fail: nothing to compile then."""
        recorded = self.known(workload, part, config, stage) is not None
        return recorded or self.failures.recall(workload, part, config) is not None

    def close(self) -> None:
        self._writer.close()


def new_session(backend: Backend, options: Options) -> Session:
    """Who measures now, with what."""
    return Session(
        id=uuid.uuid4().hex[:12],
        kernel=backend.kernel,
        device=backend.device,
        source=backend.source,
        kernel_hash=backend.kernel_hash,
        versions=backend.versions,
        ceilings=backend.ceilings,
        seed=options.seed,
        sampler=options.sampler,
        command=options.command,
        date=now(),
    )


def _same_measurement(old: Session, new: Session) -> bool:
    """Whether a figure of `old` still holds: same device, source of figures, kernel code, compiler and input seed."""
    return (
        old.device.get("name") == new.device.get("name")
        and old.source == new.source
        and old.kernel_hash == new.kernel_hash
        and old.versions.get("triton") == new.versions.get("triton")
        and (old.source != "live" or old.seed == new.seed)
    )


def provenance(session: Session) -> dict[str, Any]:
    """What a table says of where its figures come from."""
    return {
        **session.versions,
        "kernel_hash": session.kernel_hash,
        "ceilings": session.ceilings,
        "date": session.date,
        "command": session.command,
        "source": session.source,
        "seed": session.seed,
    }


def _key(workload: Mapping[str, Any], part: str, config: Mapping[str, Any], stage: str) -> str:
    return canonical([workload, part, config, stage])


def now() -> str:
    """As records write dates: ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")
