"""The pictures exist, say what they must, and come out the same from the same data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import report_sample as sample

from kerneltune.report.data import Curve, Row
from kerneltune.report.heatmap import loss_groups, loss_matrix
from kerneltune.report.load import find_folders, read_report
from kerneltune.report.plots import convergence, draw, roofline, save_plots

NAMES = {"roofline.png", "roofline.svg", "convergence.png", "convergence.svg"}

pytestmark = pytest.mark.xdist_group("plots")  # drawn once


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Searches of both kernels: 20 workloads, 30 parts."""
    folder = tmp_path_factory.mktemp("searches")
    for kernel in sample.PARTS:
        sample.write_search(folder / kernel, kernel)
    return folder


@pytest.fixture(scope="module")
def plots(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `save_plots` draws of them."""
    out = tmp_path_factory.mktemp("plots")
    written = save_plots(folder, out)
    assert {path.name for path in written} == NAMES
    assert set(written) == set(out.iterdir())
    return out


def test_png_is_large_and_not_empty(plots: Path) -> None:
    for name in ("roofline.png", "convergence.png"):
        pixels = matplotlib.image.imread(plots / name)
        assert pixels.shape[0] >= 800
        assert pixels.shape[1] >= 1200
        dark = (pixels[..., :3].mean(axis=2) < 0.5).mean()
        assert 0.01 < dark < 0.3


def test_svg_says_what_it_shows(plots: Path) -> None:
    text = (plots / "roofline.svg").read_text()
    for label in ("DRAM read 4.41 TB/s", "bf16 741 TFLOPS", "NVIDIA H200, ceilings measured 2026-01-02", "20 shapes"):
        assert label in text
    for group in ("mla-decode heads=16", "mla-decode heads=128", "moe E=8 N=7168 K=4096 top_k=2"):
        assert group in text
    text = (plots / "convergence.svg").read_text()
    for label in ("median", "distinct configs tried", "mla-decode and moe: 20 workloads, 30 parts", "within 5 %"):
        assert label in text


def test_text_is_nine_points_at_half_size(plots: Path) -> None:
    for name in ("roofline.svg", "convergence.svg"):
        sizes = [float(size) for size in re.findall(r"font(?:-size)?: ([\d.]+)px", (plots / name).read_text())]
        assert sizes
        assert min(sizes) >= 18


def test_svg_is_the_same_again(folder: Path, plots: Path, tmp_path: Path) -> None:
    save_plots(folder, tmp_path)
    for name in sorted(NAMES):
        assert (tmp_path / name).read_bytes() == (plots / name).read_bytes(), name


def test_no_text_of_the_roofline_overlaps(folder: Path) -> None:
    rows = read_report(find_folders(folder)).rows
    figure = roofline(rows, sample.CEILINGS.to_dict())
    figure.draw_without_rendering()
    axes = figure.axes[0]
    texts = [axes.xaxis.label, axes.yaxis.label, axes._left_title, *axes.texts, *figure.legends[0].get_texts()]  # type: ignore[attr-defined]
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    assert len(boxes) >= 9
    page = figure.bbox
    for index, box in enumerate(boxes):
        assert page.x0 <= box.x0
        assert box.x1 <= page.x1
        assert not any(box.overlaps(other) for other in boxes[:index])


def test_points_lie_where_the_figures_say(folder: Path) -> None:
    rows = read_report(find_folders(folder), "mla-decode").rows
    axes = roofline(rows, sample.CEILINGS.to_dict()).axes[0]
    drawn = np.concatenate([np.asarray(line.get_xydata()) for line in axes.get_lines()])
    for row in rows:
        point = np.array([row.intensity, row.tflops], dtype=float)
        assert np.isclose(drawn, point).all(axis=1).any()


def test_roofs_close_together_share_a_label(folder: Path) -> None:
    rows = read_report(find_folders(folder), "mla-decode").rows
    ceilings = sample.CEILINGS.to_dict() | {"tflops": {"fp16": 739.8, "other": 1500.0}}  # no row is of either dtype
    labels = [text.get_text() for text in roofline(rows, ceilings).axes[0].texts]
    assert "other 1500 TFLOPS" in labels
    assert "fp16 740 TFLOPS" in labels
    close = sample.CEILINGS.to_dict() | {"tflops": {"fp16": 739.8, "other": 745.0}}
    assert "other 745, fp16 740 TFLOPS" in [text.get_text() for text in roofline(rows, close).axes[0].texts]


def test_convergence_ends_at_the_best() -> None:
    curves = [
        Curve("k", "a", "p", (float("inf"), 40.0, 20.0, 25.0)),
        Curve("k", "b", "p", (10.0,)),
        Curve("k", "c", "p", (30.0, 10.0)),
    ]
    axes = convergence(curves).axes[0]
    median = next(line for line in axes.get_lines() if line.get_linewidth() > 3)
    assert list(np.asarray(median.get_ydata())) == pytest.approx([100 / 3, 100.0, 100.0, 100.0])
    assert "3 workloads\nwithin 5 % of the final best after 2 configs (median)" in axes.get_title(loc="left")


def test_too_early_for_a_picture(tmp_path: Path) -> None:
    sample.write_search(tmp_path / "search", "mla-decode", finals=False)
    assert {path.name for path in draw([tmp_path / "search"], tmp_path / "a")} == {"convergence.png", "convergence.svg"}
    sample.write_search(tmp_path / "failed", "mla-decode", finals=False, trials=0)
    assert draw([tmp_path / "failed"], tmp_path / "b") == []


def test_one_roofline_a_device(tmp_path: Path) -> None:
    entries = sample.write_search(tmp_path / "h200", "mla-decode", trials=9)
    other = sample.CEILINGS.to_dict() | {"device": "NVIDIA A100-SXM4-80GB", "dram_read_gbps": 1700.0}
    device = sample.H200 | {"name": "NVIDIA A100-SXM4-80GB"}
    path = tmp_path / "a100" / "tables" / "mla-decode.json"
    sample.write_table(path, "mla-decode", entries, device=device, provenance={"ceilings": other, "date": "2026-01-03"})
    names = {path.name for path in draw(find_folders(tmp_path), tmp_path / "plots")}
    assert {"roofline-nvidia-h200.svg", "roofline-nvidia-a100-sxm4-80gb.svg"} <= names
    assert "1.70 TB/s" in (tmp_path / "plots" / "roofline-nvidia-a100-sxm4-80gb.svg").read_text()


def with_losses(rows: Sequence[Row], count: int) -> list[Row]:
    """Rows of one group of which the first `count` shapes lose 1 % with the config of the first, others 30 %."""
    names = [f"batch={row.workload['batch']},kv_len={row.workload['kv_len']}" for row in rows]
    losses = dict.fromkeys(names, 0.3) | dict.fromkeys(names[:count], 0.01)
    shared = replace(rows[0], losses=losses, loss=0.01)
    own = [
        replace(row, config={"num_splits": index}, losses={name: 0.0}, loss=0.0)
        for index, (row, name) in enumerate(zip(rows, names, strict=True))
    ]
    return [replace(row, config=shared.config, losses=losses, loss=0.01) for row in rows[:count]] + own[count:]


def test_the_loss_matrix_has_a_figure_in_each_cell_and_a_frame_for_each_shape(folder: Path) -> None:
    rows = [row for row in read_report(find_folders(folder), "mla-decode").rows if row.workload["heads"] == 16]
    (group,) = loss_groups(with_losses(rows, 3))
    figure = loss_matrix(group, "mla-decode heads=16")
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.texts[:5]] == ["1.0", "1.0", "1.0", "30.0", "30.0"]
    assert [text.get_text() for text in axes.texts[5:10]] == ["-", "-", "-", "0.0", "-"]
    assert {text.get_color() for text in axes.texts if text.get_text() == "30.0"} == {"white"}
    assert len(axes.patches) == len(rows)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["A", "B", "C"]
    assert "5 shapes, 3 configs, worst loss 1.0 %" in axes.get_title(loc="left")
    figure.draw_without_rendering()
    for text in (axes._left_title, axes.xaxis.label, *axes.get_xticklabels()):  # type: ignore[attr-defined]
        box = text.get_window_extent()
        assert figure.bbox.x0 <= box.x0
        assert box.x1 <= figure.bbox.x1


def test_rows_without_losses_have_no_matrix(folder: Path) -> None:
    assert loss_groups(read_report(find_folders(folder)).rows) == []
