"""Where a trial's figures come from: the GPU here, or a recording of one; the search code is the same for both."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kerneltune import compile_cache
from kerneltune.errors import NO_GPU, UserError
from kerneltune.recordings import MEASURED, RESOURCES, Recording, canonical, point_key
from kerneltune.roofline.model import Ceilings
from kerneltune.tuning.seconds import Seconds

if TYPE_CHECKING:
    from kerneltune.kernels.device import Device
    from kerneltune.kernels.tunable import Tunable
    from kerneltune.space import Space

Workload = Mapping[str, Any]
FINAL_ROUNDS = 3
FINAL_SAMPLES = 16  # a turn; 48 samples a finalist in all
PRUNE_EVERY_S = 300.0  # of the compile cache, between workloads: it takes up to a second
PAUSE_S = 0.25  # before each turn; measure.timing.PAUSE_S, which cannot be imported without torch


@dataclass(frozen=True)
class Work:
    """Counted work of the operation or of one part: FLOPs, compulsory bytes, and which compute ceiling applies."""

    flops: int
    bytes: int
    compute: str


class Backend(Protocol):
    """What a search needs of the world. `measure` and `finals` return fields of `records.Trial`, "outcome" first."""

    kernel: str
    parts: tuple[str, ...]
    shared: tuple[str, ...]
    device: dict[str, Any]
    ceilings: dict[str, Any]
    source: str  # "live" or "replay:..."
    kernel_hash: dict[str, str]
    versions: dict[str, str]
    varying_keys: tuple[str, ...]  # workload keys across which a failure holds; (): every workload answers for itself
    seconds: Seconds  # where the time goes; the search adds what its sampler takes

    def points(self, workload: Workload, part: str) -> list[dict[str, Any]]: ...

    def default_config(self, workload: Workload) -> dict[str, Any]: ...

    def incumbents(self, workload: Workload) -> list[dict[str, Any]]:
        """Configs that a table already holds for this workload, tried right after the default."""
        ...

    def admit(self, workload: Workload, configs: Sequence[Mapping[str, Any]]) -> None:
        """Add what the space leaves out but can run to `points`."""
        ...

    def work(self, workload: Workload, part: str) -> Work: ...

    def estimates(self, workload: Workload, part: str) -> list[float] | None:
        """Microseconds that each of `points` should take by occupancy and roofline; None where nobody can say."""
        ...

    def prepare(self, workload: Workload, part: str, params: Mapping[str, Any]) -> None:
        """Begin compiling; returns at once."""
        ...

    def prefetch(self, workload: Workload, likely: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Compile (part, parameters) that may be asked for, as far as cores are idle; returns at once."""
        ...

    def prepare_finals(self, workload: Workload, configs: Sequence[Mapping[str, Any]]) -> None:
        """Begin compiling what `finals` of whole configs needs; returns at once."""
        ...

    def measure(
        self, workload: Workload, part: str, params: Mapping[str, Any], stop_above_us: float | None
    ) -> dict[str, Any]: ...

    def finals(
        self, workload: Workload, configs: Sequence[Mapping[str, Any]], part: str = "", rounds: int = FINAL_ROUNDS
    ) -> list[dict[str, Any]]:
        """Time several configs in turns, `rounds` each: whole configs, or (with `part`) parameters of one part."""
        ...

    def why_not(self, workload: Workload, config: Mapping[str, Any]) -> str | None:
        """None, or why a whole config of another workload cannot be timed on this one."""
        ...

    def conditions(self) -> dict[str, Any]:
        """A snapshot of the GPU now, as `measure.conditions.Snapshot.to_dict`; {} where nothing is measured."""
        ...

    def close(self) -> None: ...


class ReplayBackend:
    """Answers from recordings; needs neither a GPU nor the kernel."""

    varying_keys: tuple[str, ...] = ()

    def __init__(self, recordings: Sequence[Recording], space: Space | None = None) -> None:
        """`recordings`: one kernel, one device, one a workload; `space` leaves only its points and the default.

        Raises:
            UserError: none of the points that `space` allows for some workload was recorded.
        """
        first = recordings[0]
        self.kernel, self.parts, self.shared = first.kernel, first.parts, first.shared
        self.device, self.ceilings = first.device, first.ceilings
        self.source = "replay:" + "+".join(sorted(recording.id for recording in recordings))
        self.kernel_hash, self.versions = first.kernel_hash, first.versions
        self.seconds = Seconds()
        self._space = space
        self._recordings = {canonical(recording.workload): recording for recording in recordings}
        self._points = {
            key: {point_key(t.part, t.config): t for t in recording.trials}
            for key, recording in self._recordings.items()
        }

    @property
    def workloads(self) -> list[dict[str, Any]]:
        """What was recorded."""
        return [recording.workload for recording in self._recordings.values()]

    def points(self, workload: Workload, part: str) -> list[dict[str, Any]]:
        recorded = [dict(t.config) for t in self._recordings[canonical(workload)].trials if t.part == part]
        if self._space is None:
            return recorded
        from kerneltune.kernels.device import Device
        from kerneltune.kernels.tunable import part_params
        from kerneltune.registry import load_tunable

        tunable, device = load_tunable(self.kernel), Device(**self.device)
        default = canonical(part_params(tunable, self.default_config(workload), part))
        allowed = {canonical(point) for point in self._space.points(tunable, part, workload, device)}
        if not allowed & {canonical(point) for point in recorded}:
            raise UserError(f"{self._space.path}: none of its points was recorded for {part} of {dict(workload)}")
        return [point for point in recorded if canonical(point) in allowed or canonical(point) == default]

    def default_config(self, workload: Workload) -> dict[str, Any]:
        return self._recordings[canonical(workload)].default_config

    def incumbents(self, workload: Workload) -> list[dict[str, Any]]:
        return []

    def admit(self, workload: Workload, configs: Sequence[Mapping[str, Any]]) -> None:
        return None  # there are no figures but the recorded ones

    def work(self, workload: Workload, part: str) -> Work:
        recording = self._recordings[canonical(workload)]
        if not part or len(self.parts) == 1:
            whole = recording.whole
            return Work(int(whole["flops"]), int(whole["bytes"]), str(whole["compute"]))
        row = next(t for t in recording.trials if t.part == part)
        return Work(row.flops, row.bytes, str(recording.whole["compute"]))

    def estimates(self, workload: Workload, part: str) -> list[float] | None:
        from kerneltune.kernels.device import Device
        from kerneltune.registry import KERNELS, load_tunable

        points = self.points(workload, part)
        if recorded := self._recordings[canonical(workload)].estimates_us:
            return [recorded[point_key(part, point)] for point in points]
        if self.kernel not in KERNELS:
            return None
        tunable, device = load_tunable(self.kernel), Device(**self.device)
        try:
            return [tunable.estimate(part, point, workload, device, self.ceilings) for point in points]
        except (KeyError, ValueError):  # recorded with other parameters, or a dtype that was not measured
            return None

    def prepare(self, workload: Workload, part: str, params: Mapping[str, Any]) -> None:
        return None

    def prefetch(self, workload: Workload, likely: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        return None

    def prepare_finals(self, workload: Workload, configs: Sequence[Mapping[str, Any]]) -> None:
        return None

    def measure(
        self, workload: Workload, part: str, params: Mapping[str, Any], stop_above_us: float | None
    ) -> dict[str, Any]:
        row = self._points[canonical(workload)][point_key(part, params)]
        return {name: getattr(row, name) for name in (*MEASURED, *RESOURCES)} | {
            "launch_us": self._recordings[canonical(workload)].launch_us
        }

    def finals(
        self, workload: Workload, configs: Sequence[Mapping[str, Any]], part: str = "", rounds: int = FINAL_ROUNDS
    ) -> list[dict[str, Any]]:
        if part or len(self.parts) == 1:
            name = part or self.parts[0]
            return [self.measure(workload, name, config, None) | {"compile_s": 0.0} for config in configs]
        return [self._composed(workload, config) for config in configs]

    def why_not(self, workload: Workload, config: Mapping[str, Any]) -> str | None:
        key = canonical(workload)
        for part in self.parts:
            if point_key(part, config if len(self.parts) == 1 else config[part]) not in self._points[key]:
                return "not recorded"
        return None if len(self.parts) == 1 or self._rest(workload, config) is not None else "not recorded"

    def _rest(self, workload: Workload, config: Mapping[str, Any]) -> float | None:
        values = [config[self.parts[0]][name] for name in self.shared]
        return self._recordings[canonical(workload)].rest(values)

    def _composed(self, workload: Workload, config: Mapping[str, Any]) -> dict[str, Any]:
        """The whole operation from its parts' recorded times and what the rest took, all net of the launch."""
        recording = self._recordings[canonical(workload)]
        rows = [self.measure(workload, part, config[part], None) for part in self.parts]
        bad = next((row for row in rows if row["outcome"] != "ok"), None)
        if bad is not None:
            return bad | {"compile_s": 0.0}
        rest = self._rest(workload, config)
        if rest is None:
            return {"outcome": "infeasible", "reason": "no whole config was recorded with these shared parameters"}
        figures = {
            name: rest + recording.launch_us + sum(row[name] - recording.launch_us for row in rows)
            for name in ("time_us", "p20_us", "p80_us")
            if all(row[name] is not None for row in rows)
        }
        return figures | {
            "outcome": "ok",
            "samples": min(row["samples"] for row in rows),
            "launch_us": recording.launch_us,
            "error": max((row["error"] for row in rows if row["error"] is not None), default=None),
            "gate_s": sum(row["gate_s"] for row in rows),
            "timing_s": sum(row["timing_s"] for row in rows),
            "composed": True,
        }

    def conditions(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        return None


class LiveBackend:
    """Compiles in child processes and measures in a killable process on one GPU of this machine."""

    source = "live"

    def __init__(self, kernel: str, space: Space, device_index: int, seed: int, first: Workload) -> None:
        """`first`: the workload that is measured first; its default compiles while the GPU process starts.

        Raises:
            UserError: that GPU is not there (exit 3).
        """
        from kerneltune.compile import CompilePool
        from kerneltune.device import detect
        from kerneltune.measure.worker import GpuWorker
        from kerneltune.provenance import kernel_hash
        from kerneltune.registry import load_tunable
        from kerneltune.roofline import ceilings

        begin = time.monotonic()
        self.seconds = Seconds()
        found = detect(device_index)
        if found is None:
            raise UserError("no GPU is visible to torch on this machine", NO_GPU)
        self.kernel, self._space, self._seed = kernel, space, seed
        self._device: Device = found
        self.device = found.to_dict()
        self._tunable: Tunable = load_tunable(kernel)
        self.parts, self.shared = tuple(self._tunable.parts), tuple(self._tunable.shared)
        self.kernel_hash = kernel_hash(self._tunable)
        self.varying_keys = (*self._tunable.scaled_keys, *self._tunable.input_keys)
        compile_cache.prune()
        self._pruned = time.monotonic()
        self._pool = CompilePool(kernel, self._device)
        self._pool.start()  # beside the GPU process: both take seconds to import torch
        for part, params in self._part_jobs([self.default_config(first)]):
            self.prepare(first, part, params)
        self._worker = GpuWorker(kernel, device_index)
        self.versions = dict(self._worker.start()["versions"])
        known = ceilings.cached(found.name, self.versions)
        if known is None:
            known = Ceilings.from_dict(self._worker.ceilings())
            ceilings.store(known)
        self.ceilings = known.to_dict()
        self.seconds.add("start", time.monotonic() - begin)
        self._points: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def points(self, workload: Workload, part: str) -> list[dict[str, Any]]:
        from kerneltune.kernels.tunable import part_params

        key = canonical(workload), part
        if key not in self._points:
            found = self._space.points(self._tunable, part, workload, self._device)
            default = part_params(self._tunable, self.default_config(workload), part)
            if canonical(default) not in {canonical(point) for point in found}:
                found.append(default)  # the incumbent is always measured, also where the space leaves it out
            self._points[key] = found
        return self._points[key]

    def default_config(self, workload: Workload) -> dict[str, Any]:
        return dict(self._tunable.default_config(workload, self._device))

    def incumbents(self, workload: Workload) -> list[dict[str, Any]]:
        from kerneltune.kernels.tables import find

        match = find(self.kernel, workload, self._device)
        return [dict(match.config)] if match is not None else []

    def admit(self, workload: Workload, configs: Sequence[Mapping[str, Any]]) -> None:
        for part, params in self._part_jobs(configs):
            points = self.points(workload, part)
            known = canonical(params) in {canonical(point) for point in points}
            if not known and self._tunable.is_valid(part, params, workload, self._device) is None:
                points.append(params)

    def work(self, workload: Workload, part: str) -> Work:
        cost = self._tunable.cost(workload, part or None, seed=self._seed)  # of the inputs that are timed
        return Work(cost.flops, cost.bytes, cost.compute)

    def estimates(self, workload: Workload, part: str) -> list[float] | None:
        points = self.points(workload, part)
        return [self._tunable.estimate(part, point, workload, self._device, self.ceilings) for point in points]

    def prepare(self, workload: Workload, part: str, params: Mapping[str, Any]) -> None:
        self._pool.submit(self._key(workload, part, params), part, params, workload)

    def prefetch(self, workload: Workload, likely: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        for part, params in likely:
            if not self._pool.idle:
                return
            self.prepare(workload, part, params)

    def prepare_finals(self, workload: Workload, configs: Sequence[Mapping[str, Any]]) -> None:
        for part, params in self._part_jobs(configs):
            self.prepare(workload, part, params)
        for config in configs:
            for _, edge in self._valid_edges(workload, config):
                self._pool.submit(self._key(edge, "", config), "", config, edge)

    def measure(
        self, workload: Workload, part: str, params: Mapping[str, Any], stop_above_us: float | None
    ) -> dict[str, Any]:
        self.prepare(workload, part, params)
        with self.seconds.of("compile wait"):
            compiled = self._pool.result(self._key(workload, part, params))
        resources = {
            "registers": compiled.registers,
            "spills": compiled.spills,
            "shared_bytes": compiled.shared_bytes,
            "compile_s": compiled.compile_s,
        }
        if compiled.outcome != "ok":
            return {"outcome": compiled.outcome, "reason": compiled.reason} | resources
        config = self._whole(workload, part, params)
        begin = time.monotonic()
        figures = self._worker.trial(workload, part, config, stop_above_us=stop_above_us, seed=self._seed)
        self.seconds.add("timing", figures["timing_s"])
        self.seconds.add("gate", time.monotonic() - begin - figures["timing_s"])
        return figures | resources

    def finals(
        self, workload: Workload, configs: Sequence[Mapping[str, Any]], part: str = "", rounds: int = FINAL_ROUNDS
    ) -> list[dict[str, Any]]:
        whole = [self._whole(workload, part, config) if part else dict(config) for config in configs]
        with self.seconds.of("compile wait"):  # so that the measuring process compiles nothing itself
            edges = {} if part else self._compiled_edges(workload, whole)  # a part was vetted as a whole before
            for name, params in self._part_jobs(whole):
                self.prepare(workload, name, params)
            for name, params in self._part_jobs(whole):
                self._pool.result(self._key(workload, name, params))
        begin = time.monotonic()
        figures = self._worker.finals(
            workload,
            whole,
            part=part,
            rounds=rounds,
            samples=FINAL_SAMPLES,
            seed=self._seed,
            edges=lambda config: edges.get(canonical(config), []),
        )
        took = time.monotonic() - begin
        paused = min(rounds * PAUSE_S * sum(reply["samples"] > 0 for reply in figures), took)
        self.seconds.add("pauses", paused)
        self.seconds.add("finals", took - paused)
        return figures

    def why_not(self, workload: Workload, config: Mapping[str, Any]) -> str | None:
        from kerneltune.kernels.tunable import part_params

        reasons = (
            self._tunable.is_valid(part, part_params(self._tunable, config, part), workload, self._device)
            for part in self.parts
        )
        return next((reason for reason in reasons if reason is not None), None)

    def conditions(self) -> dict[str, Any]:
        if time.monotonic() - self._pruned > PRUNE_EVERY_S:
            self._pruned = time.monotonic()
            compile_cache.prune()
        return self._worker.conditions()

    def _part_jobs(self, configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
        from kerneltune.kernels.tunable import part_params

        return [(part, part_params(self._tunable, config, part)) for config in configs for part in self.parts]

    def _valid_edges(self, workload: Workload, config: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """The edge workloads on which a whole config can run."""
        found = []
        for label, edge in self._tunable.edge_workloads(workload):
            rules = (
                self._tunable.is_valid(part, params, edge, self._device) for part, params in self._part_jobs([config])
            )
            if not any(rules):
                found.append((label, dict(edge)))
        return found

    def _compiled_edges(
        self, workload: Workload, configs: Sequence[Mapping[str, Any]]
    ) -> dict[str, list[tuple[str, dict[str, Any]]]]:
        """For each whole config the edge workloads on which it can run and compiles: all compile side by side.

        What cannot run there says nothing of the workload that is tuned, so it is left out.
        """
        self.prepare_finals(workload, configs)
        return {
            canonical(config): [
                (label, edge)
                for label, edge in self._valid_edges(workload, config)
                if self._pool.result(self._key(edge, "", config)).outcome == "ok"
            ]
            for config in configs
        }

    def close(self) -> None:
        self._pool.close()
        self._worker.close()
        compile_cache.prune()

    def _key(self, workload: Workload, part: str, params: Mapping[str, Any]) -> str:
        return point_key(part, [params, workload])

    def _whole(self, workload: Workload, part: str, params: Mapping[str, Any]) -> dict[str, Any]:
        from kerneltune.compile import whole_config

        return whole_config(self._tunable, part, params, workload, self._device)
