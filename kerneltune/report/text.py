"""The report as text: one table for each kernel and device, then what it adds up to and where it comes from."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from kerneltune.report.coverage import fallback_lines, gap_lines, served_lines, stale_lines
from kerneltune.report.data import Failure, Provenance, Report, Row, count_configs, geomean
from kerneltune.report.load import find_folders, read_report
from kerneltune.tuning.seconds import seconds_text

FEW_NAMES = 3
UNWRAPPED = 100_000  # columns of a console that never breaks a line
HEADERS = ("shape", "default us", "tuned us (p20-p80)", "gain", "loss", "GB/s", "TFLOPS", "% of roof", "bound")


def render(folder: Path | None) -> str:
    """The report of one folder (None: the last search here, else what is shipped), plain, one row a line."""
    return to_text(read_report(find_folders(folder)))


def to_text(report: Report) -> str:
    """Plain text of any width: no colour, no wrapped line."""
    output = io.StringIO()
    print_report(report, Console(file=output, width=UNWRAPPED, color_system=None, highlight=False))
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines()) + "\n"


def print_report(report: Report, console: Console) -> None:
    """Write the report to a console, which may be a terminal."""
    for item in _items(report):
        console.print(item, markup=False, emoji=False, highlight=False)


def cells(row: Row) -> tuple[str, ...]:
    """A row's figures as short text, in the order of HEADERS."""
    spread = f" ({number(row.p20_us)}-{number(row.p80_us)})" if row.p20_us and row.p80_us else ""
    return (
        row.shape,
        number(row.default_us),
        f"{number(row.tuned_us)}{'*' if row.composed else ''}{spread}",
        "no gain" if row.no_gain else f"{row.gain:.2f}x" if row.gain else "-",
        f"{100 * row.loss:.1f} %" if row.loss is not None else "-",
        f"{row.gbps:.0f}" if row.gbps is not None else "-",
        number(row.tflops),
        f"{100 * row.roofline:.0f} %" if row.roofline is not None else "-",
        row.bound or "-",
    )


def summary(report: Report) -> list[tuple[str, str]]:
    """What the rows add up to and where they come from, as (label, sentence)."""
    lines: list[tuple[str, str]] = []
    for kernel in dict.fromkeys(row.kernel for row in report.rows):
        lines += _gains(kernel, [row for row in report.rows if row.kernel == kernel])
        lines += _table_size(kernel, [row for row in report.rows if row.kernel == kernel])
    lines += [("served", line) for line in served_lines(report.rows)]
    lines += [("fallback", line) for line in fallback_lines(report.rows)]
    lines += [("not served", line) for line in gap_lines(report.rows)]
    lines += [("stale", line) for line in stale_lines(report.folders)]
    lines += [("unfinished", f"{u.kernel} {u.shape}: {_progress(u.tried, u.best_us)}") for u in report.unfinished]
    lines += [("warning", f"{d.kernel} {d.shape}: {warning}") for d in report.doubts for warning in d.warnings]
    lines += [("failed", failure_text(failure)) for failure in report.failures]
    lines += [("ceilings", ceilings_text(ceilings)) for ceilings in report.ceilings]
    lines += [("measured", provenance_text(source)) for source in report.provenance]
    lines += [("seconds", f"{s.kernel}, {s.measured} measured in {seconds_text(s.seconds)}") for s in report.searches]
    if launches := sorted({row.launch_us for row in report.rows if row.launch_us}):
        told = " to ".join(f"{launch:.1f}" for launch in dict.fromkeys((launches[0], launches[-1])))
        lines.append(
            ("times", f"as read: each includes the {told} us of an empty graph; gain, rates and % of roof do not")
        )
    if any(row.composed for row in report.rows):
        lines.append(
            (
                "*",
                "composed: the recorded times of the parts and of the rest added up, not one measurement of the whole",
            )
        )
    return lines


def number(value: float | None) -> str:
    """Four significant figures at most, without an exponent; "-" for None."""
    if value is None:
        return "-"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def failure_text(failure: Failure) -> str:
    """One line: how many, in which way, and the first one's own words and shape."""
    where = f"; {failure.shape}" if failure.shape else ""
    return f"{failure.kernel}: {failure.count} {failure.outcome.replace('_', ' ')} ({failure.example}{where})"


def ceilings_text(ceilings: dict) -> str:
    """The measured roofs of one device with their date."""
    parts = []
    for name, key in (("DRAM read", "dram_read_gbps"), ("copy", "dram_copy_gbps")):
        if key in ceilings:
            parts.append(f"{name} {ceilings[key]:.0f} GB/s")
    parts += [f"{dtype} {rate:.0f} TFLOPS" for dtype, rate in ceilings.get("tflops", {}).items()]
    if "launch_us" in ceilings:
        parts.append(f"empty graph {ceilings['launch_us']:.1f} us")
    return f"{ceilings.get('device', 'unknown device')}, {_day(ceilings.get('date', ''))}: {', '.join(parts)}"


def provenance_text(source: Provenance) -> str:
    """One line: device, date, versions, command, seed; a replay says so first."""
    words = [f"{source.kernel} on {source.device}, {_day(source.date)}"]
    if source.recording:
        told = f"replayed from a recording of {source.device} ({source.recording}); times are the recorded ones"
        words = [f"{source.kernel}: {told}"]
    words += [" ".join(f"{name} {version}" for name, version in source.versions)]
    words += [f"`{source.command}`" if source.command else ""]
    if source.seed is not None:
        words.append(f"seed {source.seed}" + (f", sampler {source.sampler}" if source.sampler else ""))
    return "; ".join(word for word in words if word)


def _items(report: Report) -> Iterator[RenderableType]:
    place: Callable[[Row], tuple[str, str]] = lambda row: (row.kernel, row.device)  # noqa: E731
    for (kernel, device), rows in groupby(report.rows, key=place):
        yield Text(f"{kernel}  {device}", style="bold")
        yield _table(list(rows))
        yield Text()
    if not report.rows:
        yield Text(f"no final timing yet: {report.trials} trials recorded so far")
    lines = summary(report)
    width = max((len(label) for label, _ in lines), default=0)
    for label, sentence in lines:
        yield Text(f"{label:<{width}}  ", style="bold").append(sentence, style="not bold")


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for header in HEADERS:
        figure = header not in ("shape", "bound")
        table.add_column(header, justify="right" if figure else "left", no_wrap=header != "shape")
    for row in rows:
        table.add_row(*(Text(cell) for cell in cells(row)), style="dim" if row.no_gain else "")
    return table


def _gains(kernel: str, rows: Sequence[Row]) -> list[tuple[str, str]]:
    compared = [row for row in rows if row.gain]
    lines = []
    mean = geomean(1.0 if row.no_gain else row.gain or 1.0 for row in compared)
    if mean is not None:
        lines.append(
            ("gain", f"{kernel}: {mean:.2f}x over the default (geometric mean of {_count(len(compared), 'shape')})")
        )
    if unchanged := [row.shape for row in rows if row.no_gain]:
        names = f": {'; '.join(unchanged)}" if len(unchanged) <= FEW_NAMES else ""  # the column says which
        kept = f"{len(unchanged)} of {_count(len(rows), 'shape')} keep the default{names}"
        lines.append(("no gain", f"{kernel}: {kept}"))
    if unknown := len(rows) - len(compared):
        lines.append(("note", f"{kernel}: {unknown} of {len(rows)} shapes have no timing of the default beside them"))
    return lines


def _table_size(kernel: str, rows: Sequence[Row]) -> list[tuple[str, str]]:
    rows = [row for row in rows if row.origin == "table"]
    losses = [row.loss for row in rows if row.loss is not None]
    if not rows:
        return []
    words = [_count(len(rows), "workload"), _count(count_configs(rows), "config")]
    words += [f"worst loss {100 * max(losses):.1f} % against a shape's best config"] if losses else []
    return [("table", f"{kernel}: {', '.join(words)}")]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _progress(tried: int, best_us: dict[str, float]) -> str:
    if not best_us:
        return f"{tried} configs tried, none passed yet"
    best = ", ".join(
        f"{part + ' ' if part and len(best_us) > 1 else ''}{number(time)} us" for part, time in best_us.items()
    )
    return f"{tried} configs tried, best so far {best} (not re-timed)"


def _day(date: str) -> str:
    return str(date)[:10] or "no date"
