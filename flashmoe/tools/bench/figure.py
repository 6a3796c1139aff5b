"""The figure of a benchmark page: speed against sequence length, a panel for each kind of problem, as inline SVG.

The same report gives the same bytes, and the text fetches nothing. Contenders differ in marker and dashes, too.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from flashmoe.tools.problems.attention import AttentionProblem

Cells = list[Mapping[str, Any]]

# Colours that people with any colour vision tell apart (Okabe and Ito), dark enough for lines on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#a8518a", "#3d3d3d", "#b58900", "#56a0d3", "#7a4f2b")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)))
SETTINGS: Any = {
    "svg.hashsalt": "flashmoe",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e2e6ea",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
}
COLUMNS = 2
PANEL_INCHES = (5.0, 3.0)
FEW_QUERIES = 64  # fewer than this against more keys: reading K and V is the work, and GB/s its measure


@dataclass(frozen=True)
class Panel:
    """Cells that differ in sequence length alone (and in batch, which prefill grids trade for length)."""

    title: str
    unit: str
    cells: Cells
    ceiling: float | None = None  # in ``unit``: what a matrix product, or a copy, reached in the same run

    def point(self, summary: Mapping[str, Any], factor: float) -> tuple[float, float, float]:
        """(value, lower bound, upper bound) in ``unit``; bounds equal the value where there is no interval."""
        if self.unit == "us":
            low, high = summary["interval_us"]
            median = summary["median_us"]
            return median, median if low is None else low, median if high is None else high
        scale = summary["gbps"] / summary["tflops"] if self.unit == "GB/s" else factor
        rate = summary["tflops"]
        low, high = summary["tflops_interval"] or (rate, rate)
        return scale * rate, scale * low, scale * high


def heads_text(case: AttentionProblem) -> str:
    return f", {case.heads_q} on {case.heads_kv} heads" if case.heads_q != case.heads_kv else ""


def panels(data: Mapping[str, Any], factor: float, unit: str) -> list[Panel]:
    """Latency where calls were timed in a graph, else TFLOP/s, or GB/s where few queries read many keys.

    Of prefill, cells with one length have no line to draw; they are left to the tables, unless no others are there.
    """
    found: dict[tuple[str, str], Cells] = {}
    for cell in data["cells"]:
        case: AttentionProblem = AttentionProblem.from_json(cell["case"])
        if cell["summaries"] and cell["timing"] in ("events", "wall", "graph"):
            decode = case.seq_q != case.seq_k and case.seq_q < FEW_QUERIES
            queries = f", B = {case.batch}, {case.seq_q} of Q" if case.seq_q != case.seq_k else ""
            title = f"{case.dtype}, D = {case.head_dim}, {case.mask}{heads_text(case)}{queries}"
            measure = "us" if cell["timing"] == "graph" else "GB/s" if decode else unit
            found.setdefault((title, measure), []).append(cell)
    lines = {
        (title, measure): cells
        for (title, measure), cells in found.items()
        if measure == "GB/s" or len({cell["case"]["seq_k"] for cell in cells}) > 1
    }
    chosen = lines or found
    return [
        Panel(title, measure, cells, _ceiling(data, measure, cells, factor))
        for (title, measure), cells in chosen.items()
    ]


def _ceiling(data: Mapping[str, Any], unit: str, cells: Cells, factor: float) -> float | None:
    table = data["ceilings"]
    if not table or unit == "us":
        return None
    if unit == "GB/s":
        return float(table["copy_gbps"])
    peak = table["matmul_tflops"].get(cells[0]["case"]["dtype"])
    return factor * peak if peak else None


def draw(data: Mapping[str, Any], factor: float, unit: str) -> str:
    """The figure as ``<svg>`` text; empty when nothing was timed."""
    chosen = panels(data, factor, unit)
    if not chosen:
        return ""
    columns = min(COLUMNS, len(chosen))
    rows = -(-len(chosen) // columns)
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows + 0.5), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for ax, panel in zip(axes, chosen, strict=False):
            _draw_panel(ax, panel, data["contenders"], factor)
        for ax in axes[len(chosen) :]:
            ax.set_axis_off()
        lines: dict[str, Any] = {}
        for ax in axes:
            lines |= {label: line for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
        figure.legend(lines.values(), lines.keys(), loc="outside upper left", ncols=4, frameon=False)
        return _svg(figure, "; ".join(f"{panel.title}: {panel.unit}" for panel in chosen))


def _draw_panel(ax: Axes, panel: Panel, contenders: Sequence[Mapping[str, Any]], factor: float) -> None:
    for style, contender in enumerate(contenders):
        cells = [cell for cell in panel.cells if contender["name"] in cell["summaries"]]
        cells.sort(key=lambda cell: cell["case"]["seq_k"])
        if not cells:
            continue
        points = [panel.point(cell["summaries"][contender["name"]], factor) for cell in cells]
        ax.errorbar(
            [cell["case"]["seq_k"] for cell in cells],
            [value for value, _, _ in points],
            # A median of samples can lie outside of the interval, which is one of medians of blocks.
            yerr=[[max(0.0, y - low) for y, low, _ in points], [max(0.0, high - y) for y, _, high in points]],
            label=contender["title"],
            color=COLOURS[style % 8],
            marker=MARKERS[style % 8],
            linestyle=DASHES[style % 8],
            capsize=2,
        )
    if panel.ceiling:
        ax.axhline(panel.ceiling, color="#6b7480", linewidth=1.0, linestyle=(0, (1, 2)))
    lengths = sorted({cell["case"]["seq_k"] for cell in panel.cells})
    ax.set(title=panel.title, ylabel="us a call" if panel.unit == "us" else panel.unit, xscale="log")
    ax.xaxis.set_major_locator(FixedLocator(lengths[:: -(-len(lengths) // 8)]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: length_text(value)))
    ax.set_ylim(bottom=0.0)


def length_text(length: float) -> str:
    """A sequence length as a tick: 16384 is 16K."""
    return f"{length / 1024:g}K" if length >= 1024 and length % 1024 == 0 else f"{length:g}"


def _svg(figure: Figure, label: str) -> str:
    """Only the element, without the addresses of namespaces, which a page does not need."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'\s+xmlns(:xlink)?="[^"]*"', "", text).replace("xlink:href", "href")
    return text.replace("<svg", f'<svg class="chart" role="img" aria-label="{escape(label, quote=True)}"', 1)
