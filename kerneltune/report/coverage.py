"""Which sizes the entries of tables serve, what a neighbour's config loses there, and which entries are out of date."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kerneltune.kernels import table_files
from kerneltune.kernels.staleness import staleness
from kerneltune.kernels.table_format import KEYS, Keys, TableError, parse_scaled, scaled_text
from kerneltune.kernels.tables import BOUND, scaled_distance
from kerneltune.report.data import Row, group_key, group_labels


def served_lines(rows: Iterable[Row]) -> list[str]:
    """For each group of table rows: the sizes served, each scaled key on its own; beyond them the default is used."""
    return [
        f"{label}: {'; '.join(_ranges(name, group) for name in KEYS[group[0].kernel].scaled)}; else the default"
        for label, group in _groups(rows)
    ]


def fallback_lines(rows: Iterable[Row]) -> list[str]:
    """For each group: the largest measured loss of a config on a neighbouring workload of its ladder that has one."""
    lines = []
    for label, group in _groups(rows):
        keys = KEYS[group[0].kernel]
        found = [(loss, row, there) for row in group if (nearest := _neighbour(keys, row)) for there, loss in [nearest]]
        if not found:
            continue
        worst = max(found, key=lambda each: each[0])
        own = scaled_text(keys, worst[1].workload)
        losses = ", ".join(f"{100 * loss:.1f}" for loss, _, _ in found)
        lines.append(
            f"{label}: at most {100 * worst[0]:.1f} % lost by an entry's config on the nearest other workload "
            f"({own}'s on {worst[2]}); of all entries: {losses} %"
        )
    return lines


def gap_lines(rows: Iterable[Row]) -> list[str]:
    """For each group: the sizes that no entry serves although configs were measured there, with the nearest's loss."""
    lines = []
    for label, group in _groups(rows):
        keys = KEYS[group[0].kernel]
        asked = {text: sizes for row in group for text in row.losses if (sizes := parse_scaled(keys, text)) is not None}
        told = []
        for text, sizes in asked.items():
            if any(scaled_distance(keys, row.workload, sizes) is not None for row in group):
                continue
            row = min((row for row in group if text in row.losses), key=lambda row: _apart(keys, row.workload, sizes))
            told.append(f"{text} ({scaled_text(keys, row.workload)}'s config: {100 * row.losses[text]:.1f} %)")
        if told:
            lines.append(f"{label}: the default is used, a config of the table was measured to lose: {', '.join(told)}")
    return lines


def stale_lines(folders: Sequence[Path]) -> list[str]:
    """For each table and reason: how many entries are out of date here, and the command that renews them."""
    lines = []
    for path in (path for folder in folders for path in sorted((folder / "tables").glob("*.json"))):
        try:
            table = table_files.read_table(path)
        except (TableError, OSError):
            continue  # told by who reads its entries
        reasons = Counter(
            f"{each.kind}: {each.reason}"
            for entry in table.entries
            for each in staleness(table.kernel, entry["config"], entry.get("provenance", table.provenance))
        )
        lines += [
            f"{path.name}: {count} of {len(table.entries)} entries, {reason} (to renew: kerneltune revalidate {path})"
            for reason, count in reasons.items()
        ]
    return lines


def _groups(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Rows of tables that differ in scaled sizes only; another device serves for itself."""
    rows = [row for row in rows if row.origin == "table" and row.kernel in KEYS]
    labels = group_labels(rows)
    several = len({row.device for row in rows}) > 1
    found: dict[str, list[Row]] = {}
    for row in rows:
        label = labels[group_key(row)] + (f" on {row.device}" if several else "")
        found.setdefault(label, []).append(row)
    return list(found.items())


def _ranges(name: str, rows: Sequence[Row]) -> str:
    """The union of a factor of BOUND around each size, as "tokens 1-16, 32-128"."""
    merged: list[list[int]] = []
    for size in sorted({int(row.workload[name]) for row in rows}):
        low, high = math.ceil(size / BOUND), int(size * BOUND)
        if merged and low <= merged[-1][1] + 1:
            merged[-1][1] = high
        else:
            merged.append([low, high])
    return f"{name} {', '.join(f'{low}-{high}' for low, high in merged)}"


def _neighbour(keys: Keys, row: Row) -> tuple[str, float] | None:
    """The nearest other workload on which this row's config was measured, and the loss there."""
    own = {name: int(row.workload[name]) for name in keys.scaled}
    found = []
    for text, loss in row.losses.items():
        sizes = parse_scaled(keys, text)
        if sizes is not None and sizes != own:
            found.append((_apart(keys, sizes, own), text, loss))
    return min(found)[1:] if found else None


def _apart(keys: Keys, some: Mapping[str, int], others: Mapping[str, int]) -> float:
    return sum(abs(math.log2(some[name] / others[name])) for name in keys.scaled)
