"""The report for other programs and documents: JSON and CSV with unrounded numbers, Markdown as a reader sees it."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict
from itertools import groupby
from typing import Any

from kerneltune.report.data import Report, Row, geomean
from kerneltune.report.text import HEADERS, cells, summary, to_text

SCHEMA = 1
KEYS = ("kernel", "device", "shape")
TIMES = ("default_us", "tuned_us", "p20_us", "p80_us", "gain", "no_gain")
FIGURES = (*TIMES, "gbps", "tflops", "roofline", "bound", "inputs", "composed", "origin", "loss", "config")


def to_json(report: Report) -> str:
    """One object: rows, geomean gain by kernel, unfinished, failures, ceilings, provenance, warnings, doubts
    about times, and where the seconds of each search went."""
    kernels = dict.fromkeys(row.kernel for row in report.rows)
    gains = {kernel: [row for row in report.rows if row.kernel == kernel and row.gain] for kernel in kernels}
    data = {
        "schema": SCHEMA,
        "folders": [str(folder) for folder in report.folders],
        "trials": report.trials,
        "rows": [asdict(row) for row in report.rows],
        "geomean_gain": {
            kernel: geomean(1.0 if row.no_gain else row.gain or 1.0 for row in rows) for kernel, rows in gains.items()
        },
        "unfinished": [asdict(unfinished) for unfinished in report.unfinished],
        "failures": [asdict(failure) for failure in report.failures],
        "ceilings": list(report.ceilings),
        "provenance": [asdict(source) | {"versions": dict(source.versions)} for source in report.provenance],
        "warnings": list(report.warnings),
        "doubts": [asdict(doubt) for doubt in report.doubts],
        "searches": [asdict(search) for search in report.searches],
    }
    return json.dumps(data, indent=1) + "\n"


def to_csv(report: Report) -> str:
    """A line a shape: kernel, device, every workload key, the figures, the config as JSON."""
    records = [_record(row) for row in report.rows]
    columns = [*KEYS, *dict.fromkeys(key for row in report.rows for key in row.workload), *FIGURES]
    output = io.StringIO()
    writer = csv.DictWriter(output, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return output.getvalue()


def to_markdown(report: Report) -> str:
    """A heading and a table for each kernel and device, then the summary as a list."""
    lines: list[str] = []
    for (kernel, device), rows in groupby(report.rows, key=lambda row: (row.kernel, row.device)):
        lines += [f"### {kernel} on {device}", ""]
        lines += [_line(HEADERS), _line(["---" if header in ("shape", "bound") else "---:" for header in HEADERS])]
        lines += [*(_line(cells(row)) for row in rows), ""]
    if not report.rows:
        lines += [f"No final timing yet: {report.trials} trials recorded so far.", ""]
    lines += [f"- **{_escape(label)}** {_escape(sentence)}" for label, sentence in summary(report)]
    return "\n".join(lines) + "\n"


FORMATS = {"text": to_text, "csv": to_csv, "json": to_json, "markdown": to_markdown}


def _record(row: Row) -> dict[str, Any]:
    figures = {name: getattr(row, name) for name in (*KEYS, *FIGURES)}
    return row.workload | figures | {"config": json.dumps(row.config)}


def _line(texts: Any) -> str:
    return f"| {' | '.join(_escape(text) for text in texts)} |"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")
