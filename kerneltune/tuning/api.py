"""`kerneltune.search`: from the names of workloads to a table, on the GPU here or on recordings of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kerneltune.device import detect, slug
from kerneltune.errors import NO_GPU, UserError
from kerneltune.kernels.device import Device
from kerneltune.kernels.table_format import KEYS, table_workload
from kerneltune.recordings import Recording, canonical, find_recordings
from kerneltune.registry import KERNELS, load_tunable
from kerneltune.space import Space, load_space
from kerneltune.tuning.backends import Backend, LiveBackend, ReplayBackend
from kerneltune.tuning.ladder import in_order
from kerneltune.tuning.options import Options
from kerneltune.tuning.progress import Progress, Silent
from kerneltune.tuning.samplers import SAMPLERS
from kerneltune.tuning.session import Result, run
from kerneltune.workloads import base_sizes, format_workload, ladder_workloads, parse_workload, served_note

RESULTS = Path("kerneltune-results")
SHIPPED = "shipped"  # as `replay`: the recordings in the package's results


@dataclass(frozen=True)
class Request:
    """The workloads that a user names: single ones, or a ladder of a model at a parallelism."""

    kernel: str
    model: str | None = None
    tp: int | None = None
    ep: int = 1
    single: tuple[str | Mapping[str, Any], ...] = ()
    ladder: str = "standard"
    space_path: Path | None = None
    routing: str | None = None  # input class of each workload that does not name its own: a name, or a file
    lengths: str | None = None

    def check(self) -> Space:
        """The space; everything that can be wrong with the names is said before anything starts.

        Raises:
            UserError: unknown kernel, ladder or model, or a space of another kernel.
        """
        if self.kernel not in KERNELS:
            raise UserError(f"unknown kernel {self.kernel!r}: expected one of {', '.join(KERNELS)}")
        space = load_space(self.space_path if self.space_path is not None else self.kernel)
        if space.kernel != self.kernel:
            raise UserError(f"{self.space_path}: a space of {space.kernel}, not of {self.kernel}")
        for key, value in self._classes().items():
            if KEYS[self.kernel].input != key:
                raise UserError(f"--{key} {value}: {self.kernel} has no {key}, but --{KEYS[self.kernel].input}")
        if not self.single:
            space.ladder(self.ladder)
        return space

    @property
    def names_something(self) -> bool:
        """Whether anything but the defaults was asked for."""
        others = self.tp is not None or self.ep != 1 or self.ladder != "standard" or self._classes()
        return bool(self.model or self.single or others)

    def workloads(self) -> list[dict[str, Any]]:
        """Complete, checked workloads, as the kernel writes them.

        Raises:
            UserError, ValueError: a bad name or value, in one line.
        """
        base = base_sizes(self.kernel, self.model, self.tp, self.ep) | self._classes()
        if not self.single:
            return ladder_workloads(self.kernel, base, self.ladder, self.check())
        tunable = load_tunable(self.kernel)
        named = [parse_workload(each, base) if isinstance(each, str) else {**base, **each} for each in self.single]
        return [dict(tunable.complete_workload(each)) for each in named]

    def _classes(self) -> dict[str, Any]:
        """The input class asked for, by its workload key."""
        named = {"routing": self.routing, "lengths": self.lengths}
        return {key: value for key, value in named.items() if value is not None}


def search(
    kernel: str,
    *,
    model: str | None = None,
    tp: int | None = None,
    ep: int = 1,
    workloads: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] = (),
    ladder: str = "standard",
    routing: str | None = None,
    lengths: str | None = None,
    space: str | Path | None = None,
    trials: int | None = None,
    budget_s: float | None = None,
    sampler: str = "default",
    seed: int = 0,
    max_loss: float = 0.02,
    out: str | Path | None = None,
    device: int = 0,
    replay: str | Path | None = None,
    install: bool = True,
    progress: Progress | None = None,
    command: str = "kerneltune.search()",
) -> Result:
    """Find the fastest correct config of every workload, write the table, and install it for the kernels to find.

    Args:
        kernel: "mla-decode" or "moe".
        model: a preset; without `tp` unsharded. Default: DeepSeek-V3 at tensor parallelism 8.
        workloads: single ones ("batch=8,kv_len=4096" or mappings) instead of the model's ladder.
        routing, lengths: input class of every workload that names none: "zipf", "spread", ..., or a recorded file.
        space: another search space, a TOML file.
        trials: distinct configs for each workload and part, those already recorded counted in; None: until another is
            unlikely to pay.
        budget_s: seconds for the whole search (recorded seconds in a replay).
        max_loss: what a workload may lose against its best config, so that few configs serve all (each is a compile
            at serving time); 0: its own winner for each.
        out: folder of records, tables; default ./kerneltune-results/<device>/<kernel>. The same folder resumes.
        replay: a recording or a folder of them to answer from, or "shipped"; without a GPU that is what happens.
        install: put the table where the kernels find it; never done in a replay.

    Raises:
        UserError: bad names or values (exit code 2), or no GPU and no recording of what was named (3).
    """
    single = (workloads,) if isinstance(workloads, str | Mapping) else tuple(workloads)
    space_path = Path(space) if space is not None else None
    request = Request(kernel, model, tp, ep, single, ladder, space_path, routing, lengths)
    request.check()
    if sampler not in SAMPLERS:
        raise UserError(f"sampler {sampler!r}: expected one of {', '.join(SAMPLERS)}")
    if not 0 <= max_loss < 1:
        raise UserError(f"max_loss {max_loss}: expected a fraction from 0 to below 1, such as 0.02 for 2 %")
    progress = progress or Silent()
    if request.names_something:
        request.workloads()  # whatever is wrong with the names is said first
    present = detect(device) if replay is None else None
    if replay is None and present is None:
        progress.note("no GPU here: replaying the recordings shipped in results/; nothing is measured")
        replay = SHIPPED
    note = served_note(kernel, model)
    if note is not None and (model or replay is None):
        progress.note(note)
    backend: Backend
    if replay is not None:
        recordings = choose_recordings(request, replay, progress)
        backend = ReplayBackend(recordings, request.check() if request.space_path is not None else None)
        named = backend.workloads
    else:
        named = request.workloads()
        backend = LiveBackend(kernel, request.check(), device, seed, in_order(named)[0])
        if present is not None:
            progress.note(left_out(request.check(), kernel, present, named))
    folder = Path(out) if out is not None else RESULTS / slug(str(backend.device["name"])) / kernel
    try:
        options = Options(folder, trials, budget_s, sampler, seed, command, max_loss)
        result = run(backend, named, options, progress)
    finally:
        backend.close()
    if install and replay is None:
        from kerneltune import tables

        for table in result.tables:
            progress.note(f"installed: {tables.install(table)} (the kernels load it from now on)")
    return result


def left_out(space: Space, kernel: str, device: Device, workloads: Sequence[Mapping[str, Any]]) -> str:
    """One line: how many points of these workloads are never compiled, by the rule that rejects them."""
    tunable = load_tunable(kernel)
    total = 0
    rejected: Counter[str] = Counter()
    for survey in (space.survey(tunable, part, each, device) for each in workloads for part in tunable.parts):
        total += survey.total
        rejected.update(survey.rejected)
    counts = ", ".join(f"{rule} {count:,}" for rule, count in rejected.most_common())
    return f"{total:,} points, {total - rejected.total():,} feasible; never compiled: {counts or 'none'}"


def choose_recordings(request: Request, replay: str | Path, progress: Progress) -> list[Recording]:
    """The recordings that a replay answers from: those of the workloads named, or all.

    Raises:
        UserError: exit 3 when a workload was named that nobody recorded, or nothing was recorded at all.
    """
    kernel = request.kernel
    shipped = Path(__file__).parents[1] / "results"
    found = find_recordings([shipped if replay == SHIPPED else Path(replay)], kernel)
    if not found:
        raise UserError(f"no recording of {kernel} in {'the shipped results' if replay == SHIPPED else replay}", NO_GPU)
    first, count = found[0], len(found)
    kind = (first.device, first.kernel_hash, first.parts, first.shared)
    found = [r for r in found if (r.device, r.kernel_hash, r.parts, r.shared) == kind]
    if len(found) < count:
        progress.note(f"{count - len(found)} of {count} recordings left out: of another device or kernel source")
    twice = [key for key, number in Counter(canonical(r.workload) for r in found).items() if number > 1]
    if twice:
        one = next(r for r in found if canonical(r.workload) == twice[0])
        raise UserError(f"{format_workload(kernel, one.workload)} was recorded twice in {replay}: leave one recording")
    if not request.names_something:
        return found
    # A file of inputs is the same wherever it lies.
    wanted = {canonical(table_workload(kernel, workload)): workload for workload in request.workloads()}
    chosen = [r for r in found if canonical(table_workload(kernel, r.workload)) in wanted]
    recorded = {canonical(table_workload(kernel, r.workload)) for r in found}
    missing = [workload for key, workload in wanted.items() if key not in recorded]
    if (missing and request.single) or not chosen:
        there = "; ".join(format_workload(kernel, r.workload) for r in found)
        what = format_workload(kernel, missing[0])
        raise UserError(f"{what} was not recorded, and measuring it needs a GPU. Recorded: {there}", NO_GPU)
    if missing:
        progress.note(f"replaying the {len(chosen)} of {len(wanted)} workloads that were recorded")
    return chosen
