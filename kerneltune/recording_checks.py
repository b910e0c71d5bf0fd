"""What a recording must hold so that replaying it cannot fail half-way, nor answer with figures that nobody measured.

A recording may come from any program, so every field that a replay uses is checked once, when the file is read; each
fault is a ValueError of one line that names the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kerneltune.records import MOST, OUTCOMES, Trial, is_sound

if TYPE_CHECKING:
    from kerneltune.recordings import Recording

TEXTS = ("kernel", "space", "date", "command")
LEAST_ESTIMATE_US = 1e-3  # as surrogate.SMALLEST_US: what is below cannot be reached
MOST_WHOLE = 2**31  # of a parameter or a size, as tables have it


def check(recording: Recording, names: Sequence[Any]) -> None:
    """Raise ValueError where a recording could not be replayed; `names`: of its parameters."""
    _check_header(recording)
    _check_workload(recording)
    _check_points(recording, names)
    for trial in recording.trials:
        _check_trial(trial)
    _check_default(recording)
    _check_rest(recording)
    estimates = recording.estimates_us
    if estimates:
        _require(len(estimates) == len(recording.trials), "estimate_us: expected one for each point, or none at all")
        for estimate in estimates.values():
            _require(_is_number(estimate, LEAST_ESTIMATE_US), f"estimate_us: {estimate} is not above zero")


def _check_header(recording: Recording) -> None:
    from kerneltune.device import slug
    from kerneltune.kernels.device import Device
    from kerneltune.roofline.model import Ceilings

    for name in TEXTS:
        _require(isinstance(getattr(recording, name), str), f"{name}: expected a text")
    _require(bool(recording.kernel and recording.kernel_hash), "kernel, kernel_hash: a name is missing")
    for name, texts in (("versions", recording.versions), ("kernel_hash", recording.kernel_hash)):
        sound = isinstance(texts, dict) and all(isinstance(text, str) for text in texts.values())
        _require(sound, f"{name}: expected texts by name")
    device = Device(**recording.device)
    for field, value in device.to_dict().items():
        if field in ("name", "arch"):
            _require(
                isinstance(value, str) and bool(slug(value)), f"device.{field}: expected a name, got {value!r:.60}"
            )
        else:
            _require(_is_whole(value, 1), f"device.{field}: expected a whole number from 1, got {value!r:.60}")
    ceilings = Ceilings.from_dict(recording.ceilings)
    rates = {"dram_read_gbps": ceilings.dram_read_gbps, "dram_copy_gbps": ceilings.dram_copy_gbps}
    rates |= {f"tflops.{dtype}": rate for dtype, rate in ceilings.tflops.items()}
    for name, rate in rates.items():
        _require(_is_number(rate) and rate > 0, f"ceilings.{name}: expected a number above zero, got {rate!r:.60}")
    for name, launch_us in (("ceilings.launch_us", ceilings.launch_us), ("launch_us", recording.launch_us)):
        _require(_is_number(launch_us), f"{name}: expected a number from zero, got {launch_us!r:.60}")
    for name in ("flops", "bytes"):
        _check_cost(f"whole.{name}", recording.whole[name])
    compute = recording.whole["compute"]
    _require(compute in ceilings.tflops, f"whole.compute: no ceiling of {compute!r:.60} is given")


def _check_workload(recording: Recording) -> None:
    """With the eyes of a table where the kernel is ours; else sizes, texts and flags."""
    from kerneltune.kernels.table_format import KEYS, check_workload, table_workload

    workload = recording.workload
    _require(isinstance(workload, dict), "workload: expected keys and values")
    if recording.kernel in KEYS:
        check_workload(table_workload(recording.kernel, workload), KEYS[recording.kernel], "workload")
    for name, value in workload.items():
        _require(isinstance(value, str) or _is_whole(value, 0), f"workload.{name}: {value!r:.60}")


def _check_points(recording: Recording, names: Sequence[Any]) -> None:
    """Each point once, of a known part, with that part's parameters, the shared ones among them."""
    from kerneltune.recordings import point_key

    parts, shared = recording.parts, recording.shared
    for name, values in (("parts", parts), ("shared", shared), ("parameters", names)):
        _require(all(isinstance(value, str) and value for value in values), f"{name}: a name is missing")
        _require(len(set(values)) == len(values), f"{name}: a name stands there twice")
    _require(bool(parts), "parts: expected one at least")
    columns: dict[str, set[str]] = {}
    types: dict[str, type] = {}
    seen: set[str] = set()
    for trial in recording.trials:
        _require(trial.part in parts, f"part: {trial.part!r:.60} is none of {', '.join(parts)}")
        have = columns.setdefault(trial.part, set(trial.config))
        _require(have == set(trial.config), f"{trial.part}: not all points have the same parameters")
        for name, value in trial.config.items():
            sound = isinstance(value, bool | str) or (_is_whole(value, -MOST_WHOLE))
            _require(sound, f"{name}: expected a whole number, a text or a flag, got {value!r:.60}")
            _require(types.setdefault(name, type(value)) is type(value), f"{name}: values of several types")
        key = point_key(trial.part, trial.config)
        _require(key not in seen, f"the point {key} stands there twice")
        seen.add(key)
    for part in parts:
        missing = [name for name in shared if name not in columns.get(part, ())]
        _require(not missing, f"shared: {part} has no parameter {', '.join(missing)}")


def _check_trial(trial: Trial) -> None:
    where = f"{trial.part} in row {trial.index}"
    _require(trial.outcome in OUTCOMES, f"{where}: outcome {trial.outcome!r:.60}")
    _require(isinstance(trial.reason, str), f"{where}: reason {trial.reason!r:.60}")
    for name in ("compile_s", "gate_s", "timing_s"):
        value = getattr(trial, name)
        _require(_is_number(value), f"{where}: {name} {value!r:.60}")
    for name in ("samples", "registers", "spills", "shared_bytes"):
        value = getattr(trial, name)
        _require(value is None or _is_whole(value, 0), f"{where}: {name} {value!r:.60}")
    for name in ("flops", "bytes"):
        _check_cost(f"{where}: {name}", getattr(trial, name))
    for name in ("time_us", "p20_us", "p80_us", "error"):
        value = getattr(trial, name)
        _require(value is None or isinstance(value, int | float), f"{where}: {name} {value!r:.60}")
    _require(is_sound(trial), f"{where}: a time is not above zero")


def _check_default(recording: Recording) -> None:
    from kerneltune.recordings import point_key

    points = {point_key(t.part, t.config) for t in recording.trials}
    several = len(recording.parts) > 1
    _require(isinstance(recording.default_config, dict), "default_config: expected parameters and values")
    unknown = sorted(set(recording.default_config) - set(recording.parts)) if several else []
    _require(not unknown, f"default_config: no part is named {', '.join(unknown)}")
    chosen = {}
    for part in recording.parts:
        default = recording.default_config.get(part) if several else recording.default_config
        _require(point_key(part, default) in points, f"default_config: that of {part} was not recorded")
        assert isinstance(default, dict)
        chosen[part] = [default[name] for name in recording.shared]
    alike = all(values == chosen[recording.parts[0]] for values in chosen.values())
    _require(alike, "default_config: a shared parameter differs between the parts")


def _check_rest(recording: Recording) -> None:
    rest = recording.rest_us
    _require(isinstance(rest, dict), "rest_us: expected microseconds by values of the shared parameters")
    for key, value in rest.items():
        _require(_is_number(value), f"rest_us.{key:.60}: expected a number from zero, got {value!r:.60}")


def _check_cost(name: str, value: object) -> None:
    sound = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < MOST**2
    _require(sound, f"{name}: expected a number above zero, got {value!r:.60}")


def _is_number(value: object, least: float = 0.0) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value < MOST


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and least <= value < MOST_WHOLE**2


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
