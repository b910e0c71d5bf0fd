"""Which configs are re-timed against the default at the end of a workload, and which of them wins."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kerneltune.recordings import canonical
from kerneltune.records import Trial

FINALISTS = 4  # besides the default; of 96 to 360 MLA configs 4 to 9 lie within 5 % of the best
PER_PART = 2  # best of each part, for each value of the shared parameters
MIN_GAIN = 0.01  # memory-bound medians repeat within 0.3 %, finals of compute-bound kernels within 1 %


def choose(
    trials: Sequence[Trial],
    parts: Sequence[str],
    shared: Sequence[str],
    limit: int = FINALISTS,
) -> list[dict[str, Any]]:
    """The most promising whole configs by the times of their parts, fastest first.

    Args:
        trials: search trials of one workload, all parts.
        shared: parameters that must be equal in all parts of a config.
    """
    good = [t for t in trials if t.outcome == "ok" and t.time_us is not None]
    if len(parts) == 1:
        ranked = sorted(good, key=lambda t: (t.time_us, t.index))
        return [dict(t.config) for t in ranked[:limit]]
    by_group: dict[tuple[Any, ...], dict[str, list[Trial]]] = {}
    for trial in good:
        group = tuple(trial.config[name] for name in shared)
        by_group.setdefault(group, {}).setdefault(trial.part, []).append(trial)
    ranked_pairs: list[tuple[float, dict[str, Any]]] = []
    for by_part in by_group.values():
        if set(by_part) != set(parts):
            continue
        best = [sorted(by_part[part], key=lambda t: (t.time_us, t.index))[:PER_PART] for part in parts]
        for combination in itertools.product(*best):
            total = sum(t.time_us - t.launch_us for t in combination if t.time_us is not None)
            ranked_pairs.append((total, {t.part: dict(t.config) for t in combination}))
    ranked_pairs.sort(key=lambda pair: (pair[0], canonical(pair[1])))
    return [config for _, config in ranked_pairs[:limit]]


@dataclass(frozen=True)
class Decision:
    """The end of one workload."""

    winner: Trial
    default: Trial | None  # None: the default did not run
    gain: float | None  # default time / winner time, both net of the launch
    kept_default: bool
    timed: tuple[Trial, ...] = ()  # all that ran, the default first


def decide(default: Trial | None, others: Sequence[Trial]) -> Decision | None:
    """The fastest finalist, unless it beats the default by no more than the noise; None when nothing ran."""
    good = [t for t in others if t.outcome == "ok" and t.time_us is not None]
    sound = default if default is not None and default.outcome == "ok" and default.time_us is not None else None
    if not good and sound is None:
        return None
    best = min(good, key=net_us) if good else sound
    assert best is not None
    if sound is None:
        return Decision(winner=best, default=None, gain=None, kept_default=False, timed=tuple(good))
    timed = (sound, *good)
    gain = net_us(sound) / net_us(best)
    if gain - 1 <= max(MIN_GAIN, noise(sound), noise(best)):
        return Decision(winner=sound, default=sound, gain=1.0, kept_default=True, timed=timed)
    return Decision(winner=best, default=sound, gain=gain, kept_default=False, timed=timed)


def noise(trial: Trial) -> float:
    """Half the spread between the 20th and the 80th percentile, as a fraction of the median."""
    if not trial.time_us or trial.p20_us is None or trial.p80_us is None:
        return 0.0
    return (trial.p80_us - trial.p20_us) / 2 / trial.time_us


def net_us(trial: Trial) -> float:
    """The time without the launch of an empty graph."""
    assert trial.time_us is not None
    return max(trial.time_us - trial.launch_us, 1e-3)


def best(trials: Sequence[Trial]) -> Trial | None:
    """The fastest that ran, net of the launch."""
    good = [trial for trial in trials if trial.outcome == "ok" and trial.time_us is not None]
    return min(good, key=net_us, default=None)


def distinct(configs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Without repetitions, in order."""
    return list({canonical(config): config for config in configs}.values())


def same_config(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Equal whatever the order of the keys."""
    return canonical(a) == canonical(b)
