"""The loss matrix of a ladder: what each workload takes with the configs that others want, and the few that serve all.

Workloads of equal exact keys form a group. The winner of each is timed on all others of its group, beside that
workload's own default and winner; with few of them, so are the runners-up. Nets of two runs are compared by way of
the winner, which is in both. `cover` then picks the configs of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kerneltune.kernels.table_format import KEYS, scaled_text, table_workload
from kerneltune.recordings import canonical
from kerneltune.records import Trial
from kerneltune.tuning import cover, finalists, ladder

ROUNDS = 1  # each timing costs a pause of 0.25 s, so one turn each: 110 of them, 11 winners on 11 workloads, take 35 s
PAIR_S = 0.35  # of one timing: pause, gate, samples; how many fit into what a budget leaves
PAIRS = 200  # timings of a group at most, about a minute; the nearest neighbours first
FEW_PAIRS = 64  # runners-up are timed only while all timings of the group stay below this
BUDGET_SHARE = 0.1  # of a search's budget, kept for the matrix

Config = Mapping[str, Any]
Timer = Callable[[dict[str, Any], list[dict[str, Any]]], list[Trial]]  # (workload, configs in turns) -> their trials
Feasible = Callable[[dict[str, Any], dict[str, Any]], str | None]  # None, or why this config cannot run there


@dataclass(frozen=True)
class Timed:
    """One config on one workload, with the default of that workload timed beside it."""

    trial: Trial
    default: Trial | None
    net_us: float  # at the level of the workload's finals


@dataclass(frozen=True)
class Served:
    """The table's answer for one workload."""

    workload: dict[str, Any]
    timed: Timed
    gain: float | None  # over the default timed beside it
    loss: dict[str, Any]  # by scaled keys, what this config loses on each workload it was timed on; DESIGN.md §6
    own_loss: float  # of this workload against its best config


@dataclass(frozen=True)
class Column:
    """One decided workload and all configs timed on it, by their canonical text."""

    workload: dict[str, Any]
    decision: finalists.Decision
    timed: dict[str, Timed]

    def best_us(self) -> float:
        """Net time of the best config that may serve here."""
        return min(self.may_serve().values())

    def may_serve(self) -> dict[str, float]:
        """Net times of the configs that a table may state here.

        None that is slower than the default; where the workload wants its default, none that does not beat it by more
        than the noise.
        """
        return {text: timed.net_us for text, timed in self.timed.items() if self._may_serve(timed)}

    def _may_serve(self, timed: Timed) -> bool:
        default = timed.default
        if finalists.same_config(timed.trial.config, self.decision.winner.config) or default is None:
            return True
        if finalists.same_config(timed.trial.config, default.config):
            return True
        if self.decision.kept_default:
            against = finalists.decide(default, [timed.trial])
            return against is not None and not against.kept_default
        return finalists.net_us(timed.trial) < finalists.net_us(default)


def groups(decided: Sequence[tuple[dict[str, Any], finalists.Decision]], kernel: str) -> list[list[Column]]:
    """The decided workloads by their exact keys, with what their finals timed."""
    found: dict[str, list[Column]] = {}
    for workload, decision in decided:
        timed = {
            canonical(trial.config): Timed(trial, decision.default, finalists.net_us(trial)) for trial in decision.timed
        }
        key = canonical([workload[name] for name in KEYS[kernel].exact])
        found.setdefault(key, []).append(Column(workload, decision, timed))
    return list(found.values())


def plan(group: Sequence[Column], max_loss: float, feasible: Feasible, pairs: int) -> list[list[dict[str, Any]]]:
    """For each workload the configs to time there: winners of the others, near ones first when there are too many."""
    winners = [(column.workload, dict(column.decision.winner.config)) for column in group]
    wanted = _pairs(group, winners, feasible)[:pairs]
    near_winner = [
        (column.workload, dict(timed.trial.config))
        for column in group
        for timed in column.timed.values()
        if timed.net_us <= finalists.net_us(column.decision.winner) * (1 + max_loss) and not _is_default(timed, column)
    ]
    more = [pair for pair in _pairs(group, near_winner, feasible) if pair not in wanted]
    wanted += more[: max(min(FEW_PAIRS, pairs) - len(wanted), 0)]
    return [[config for index, config in wanted if index == position] for position in range(len(group))]


def measure(group: Sequence[Column], planned: Sequence[list[dict[str, Any]]], time: Timer) -> list[Column]:
    """The columns with the planned timings added, each workload's default and winner timed beside them."""
    return [
        _with_timings(column, configs, time) if configs else column
        for column, configs in zip(group, planned, strict=True)
    ]


def serve(group: Sequence[Column], max_loss: float, kernel: str) -> list[Served]:
    """Which config the table states for each workload; with `max_loss` 0 its own winner."""
    if max_loss > 0:
        times = {str(index): column.may_serve() for index, column in enumerate(group)}
        serves = cover.smallest(times, max_loss).serves
        chosen = [serves[str(index)] for index in range(len(group))]
    else:
        chosen = [canonical(column.decision.winner.config) for column in group]
    return [_served(group, column, text, kernel) for column, text in zip(group, chosen, strict=True)]


def _pairs(
    group: Sequence[Column], homes: Sequence[tuple[dict[str, Any], dict[str, Any]]], feasible: Feasible
) -> list[tuple[int, dict[str, Any]]]:
    """(workload's index, config) to be timed, by how near the workload is to one that wants the config."""
    ranked: dict[tuple[int, str], tuple[float, dict[str, Any]]] = {}
    for index, column in enumerate(group):
        for home, config in homes:
            key = index, canonical(config)
            away = ladder.distance(column.workload, home)
            if key[1] not in column.timed and (key not in ranked or away < ranked[key][0]):
                ranked[key] = away, config
    order = sorted(ranked, key=lambda key: (ranked[key][0], key))
    return [(key[0], ranked[key][1]) for key in order if feasible(group[key[0]].workload, ranked[key][1]) is None]


def _is_default(timed: Timed, column: Column) -> bool:
    default = column.decision.default
    return default is not None and finalists.same_config(timed.trial.config, default.config)


def _with_timings(column: Column, configs: Sequence[dict[str, Any]], time: Timer) -> Column:
    winner, default = column.decision.winner, column.decision.default
    beside = [dict(trial.config) for trial in (default, winner) if trial is not None]
    turns = {canonical(config): config for config in [*beside, *configs]}
    trials = {
        canonical(trial.config): trial
        for trial in time(column.workload, list(turns.values()))
        if trial.outcome == "ok" and trial.time_us is not None
    }
    scale = 1.0  # the winner's finals against the winner in this run: clocks and temperature drift in between
    for anchor in (winner, default):
        again = trials.get(canonical(anchor.config)) if anchor is not None else None
        if anchor is not None and again is not None:
            scale = finalists.net_us(anchor) / finalists.net_us(again)
            break
    beside_us = trials.get(canonical(default.config), default) if default is not None else None
    added = {
        text: Timed(trial, beside_us, finalists.net_us(trial) * scale)
        for text, trial in trials.items()
        if text not in column.timed
    }
    return Column(column.workload, column.decision, column.timed | added)


def _served(group: Sequence[Column], column: Column, text: str, kernel: str) -> Served:
    timed = column.timed[text]
    gain = finalists.net_us(timed.default) / finalists.net_us(timed.trial) if timed.default is not None else None
    keys = KEYS[kernel]
    loss: dict[str, Any] = {}
    by_class: dict[str, float] = {}
    here = table_workload(kernel, column.workload)
    for other in group:
        if text not in other.timed:
            continue
        there = table_workload(kernel, other.workload)
        lost = round(max(other.timed[text].net_us / other.best_us() - 1, 0.0), 4)
        if there.get(keys.input) == here.get(keys.input):
            loss[scaled_text(keys, there)] = lost
        if all(there[name] == here[name] for name in keys.scaled):
            by_class[str(there.get(keys.input))] = lost
    own = loss[scaled_text(keys, column.workload)]
    if len(by_class) > 1:
        loss["inputs"] = by_class
    return Served(column.workload, timed, gain, loss, own)


def count_configs(served: Sequence[Served], kernel: str) -> int:
    """Distinct configs, those of each set of exact keys counted on their own."""
    exact = KEYS[kernel].exact
    return len({canonical([[each.workload[name] for name in exact], each.timed.trial.config]) for each in served})
