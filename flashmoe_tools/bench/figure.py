"""The charts of a benchmark page as inline SVG: speed against length for each kind of problem, and rooflines.

The same report gives the same bytes, and the text fetches nothing. Contenders differ in marker and dashes, too.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from flashmoe_tools.bench.places import heads_text, place_of
from flashmoe_tools.operations import problem_from_json
from flashmoe_tools.operations.attention.problem import AttentionProblem

Cells = list[Mapping[str, Any]]

# Colours that people with any colour vision tell apart (Okabe and Ito), dark enough for lines on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#a8518a", "#3d3d3d", "#b58900", "#56a0d3", "#7a4f2b")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)))
SETTINGS: Any = {
    "svg.hashsalt": "flashmoe",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e2e6ea",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
}
PANEL_INCHES = (4.6, 2.9)
TITLE_COLUMNS = 44
SWATCH_INCHES = (0.5, 0.16)
FEW_QUERIES = 64  # fewer than this against more keys: reading K and V is the work, and GB/s its measure
TIMED = ("events", "wall", "graph")
ROOF = "#6b7480"


@dataclass(frozen=True)
class Panel:
    """Cells that differ in length alone (and in batch, which prefill grids trade for length)."""

    title: str
    unit: str
    axis: str
    cells: Cells
    ceiling: float | None = None  # in ``unit``: what a matrix product, or a copy, reached in the same run

    @property
    def scale(self) -> tuple[str, str]:
        """Panels of one scale share it."""
        return self.unit, self.cells[0]["case"]["dtype"]

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

    def highest(self, shown: Collection[str], factor: float) -> float:
        """Of the contenders ``shown``, intervals included."""
        rows = (row for cell in self.cells for name, row in cell["summaries"].items() if name in shown)
        return max((max(self.point(row, factor)) for row in rows), default=0.0)


def panels(data: Mapping[str, Any], factor: float, unit: str) -> list[Panel]:
    """Latency where calls were timed in a graph, else TFLOP/s, or GB/s where few queries read many keys.

    Cells with one length have no line to draw; they are left to the tables, unless no others are there.
    """
    found: dict[tuple[str, str, str], Cells] = {}
    for cell in data["cells"]:
        if cell["summaries"] and cell["timing"] in TIMED:
            title, axis, decode = _panel_of(cell)
            measure = "us" if cell["timing"] == "graph" else "GB/s" if decode else unit
            found.setdefault((title, axis, measure), []).append(cell)
    lines = {
        key: cells
        for key, cells in found.items()
        if key[2] == "GB/s" or len({place_of(problem_from_json(cell["case"])).length for cell in cells}) > 1
    }
    return [
        Panel(title, measure, axis, cells, _ceiling(data, measure, cells, factor))
        for (title, axis, measure), cells in (lines or found).items()
    ]


def _panel_of(cell: Mapping[str, Any]) -> tuple[str, str, bool]:
    """(title, what its axis counts, whether reading is the work)."""
    case = problem_from_json(cell["case"])
    if not isinstance(case, AttentionProblem):
        at = place_of(case)
        return at.line, at.axis, False
    queries = f", B = {case.batch}, {case.seq_q} of Q" if case.seq_q != case.seq_k else ""
    title = f"{case.dtype}, D = {case.head_dim}, {case.mask}{heads_text(case)}{queries}"
    return title, "sequence length", case.seq_q != case.seq_k and case.seq_q < FEW_QUERIES


def _ceiling(data: Mapping[str, Any], unit: str, cells: Cells, factor: float) -> float | None:
    table = data["ceilings"]
    if not table or unit == "us":
        return None
    if unit == "GB/s":
        return float(table["copy_gbps"])
    peak = table["matmul_tflops"].get(cells[0]["case"]["dtype"])
    return factor * peak if peak else None


def styles(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Colour, marker and dashes of each contender, the same in every chart."""
    return {
        row["name"]: {"color": COLOURS[at % 8], "marker": MARKERS[at % 8], "linestyle": DASHES[at % 8]}
        for at, row in enumerate(data["contenders"])
    }


def draw(data: Mapping[str, Any], factor: float, unit: str, shown: Collection[str]) -> list[str]:
    """One ``<svg>`` text for each panel; y axes of one unit and dtype end at the same value."""
    chosen = panels(data, factor, unit)
    tops: dict[tuple[str, str], float] = {}
    for panel in chosen:
        highest = max(panel.highest(shown, factor), panel.ceiling or 0.0)
        tops[panel.scale] = max(tops.get(panel.scale, 0.0), highest)
    looks = {name: look for name, look in styles(data).items() if name in shown}
    charts = []
    for panel in chosen:
        with mpl.rc_context(SETTINGS):
            figure, ax = _sheet()
            _draw_panel(ax, panel, looks, factor)
            ax.set_ylim(0.0, 1.05 * tops[panel.scale] or 1.0)
            charts.append(_svg(figure, f"{panel.title}: {panel.unit}"))
    return charts


def _sheet() -> tuple[Figure, Axes]:
    """Fixed margins: a layout that is computed takes most of a page's time, and charts side by side should agree."""
    figure = Figure(figsize=PANEL_INCHES)
    return figure, figure.add_axes((0.14, 0.17, 0.83, 0.73))


def _draw_panel(ax: Axes, panel: Panel, looks: Mapping[str, Mapping[str, Any]], factor: float) -> None:
    length = {id(cell): place_of(problem_from_json(cell["case"])).length for cell in panel.cells}
    for name, look in looks.items():
        cells = sorted((cell for cell in panel.cells if name in cell["summaries"]), key=lambda cell: length[id(cell)])
        if not cells:
            continue
        points = [panel.point(cell["summaries"][name], factor) for cell in cells]
        ax.errorbar(
            [length[id(cell)] for cell in cells],
            [value for value, _, _ in points],
            # A median of samples can lie outside of the interval, which is one of medians of blocks.
            yerr=[[max(0.0, y - low) for y, low, _ in points], [max(0.0, high - y) for y, _, high in points]],
            capsize=2,
            **look,
        )
    roof = panel.ceiling and max(panel.ceiling, panel.highest(looks, factor))
    if roof:
        ax.axhline(roof, color=ROOF, linewidth=1.0, linestyle=(0, (1, 2)))
    lengths = sorted(set(length.values()))
    ax.set(title=_title(panel.title), ylabel="us a call" if panel.unit == "us" else panel.unit, xlabel=panel.axis)
    if min(lengths) > 0:
        ax.set_xscale("log")
    ax.xaxis.set_major_locator(FixedLocator(lengths[:: -(-len(lengths) // 8)]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: length_text(value)))


def _title(text: str) -> str:
    """In lines that a panel holds whole."""
    return textwrap.fill(text, TITLE_COLUMNS)


def rooflines(data: Mapping[str, Any], factor: float, unit: str, shown: Collection[str]) -> list[str]:
    """Rate against operations per byte, a chart for each dtype and head dim (or kind of layer), with its roof.

    The roof is the best product and the copy of the run, raised where a kernel was faster: no point lies above it.
    """
    groups: dict[str, Cells] = {}
    for cell in data["cells"]:
        if cell["summaries"] and cell["timing"] in TIMED and data["ceilings"]:
            groups.setdefault(place_of(problem_from_json(cell["case"])).kind, []).append(cell)
    looks = {name: look for name, look in styles(data).items() if name in shown}
    return [_roofline(title, cells, data["ceilings"], factor, unit, looks) for title, cells in groups.items()]


def _roofline(
    title: str,
    cells: Cells,
    ceilings: Mapping[str, Any],
    factor: float,
    unit: str,
    looks: Mapping[str, Mapping[str, Any]],
) -> str:
    points = {
        name: [
            (cell["flops"] / cell["bytes"], factor * cell["summaries"][name]["tflops"])
            for cell in cells
            if name in cell["summaries"]
        ]
        for name in looks
    }
    every = [point for one in points.values() for point in one]
    peak, slope = roof_over(
        every,
        factor * (ceilings["matmul_tflops"].get(cells[0]["case"]["dtype"]) or 0.0),
        factor * ceilings["copy_gbps"] / 1e3,
    )
    with mpl.rc_context(SETTINGS):
        figure, ax = _sheet()
        for name, look in looks.items():
            if points[name]:
                ax.plot(*zip(*points[name], strict=True), **{**look, "linestyle": "none"})
        low = min([*(x for x, _ in every), peak / slope]) / 2
        high = max([*(x for x, _ in every), peak / slope]) * 2
        ax.plot([low, peak / slope, high], [slope * low, peak, peak], color=ROOF, linewidth=1.0, linestyle=(0, (1, 2)))
        ax.set(title=_title(title), xlabel="operations per byte", ylabel=unit, xscale="log", yscale="log")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_locator(NullLocator())
        return _svg(figure, f"roofline, {title}: {unit}")


def roof_over(points: Collection[tuple[float, float]], peak: float, slope: float) -> tuple[float, float]:
    """(peak, slope) of a roof that no (operations per byte, rate) lies above."""
    peak = max([peak, *(y for _, y in points)])
    # A point may be above the slope where its data stayed in a cache: only one below the peak can be.
    return peak, max([slope, *(y / x for x, y in points)])


def swatch(look: Mapping[str, Any]) -> str:
    """A contender's line and marker, for a legend."""
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=SWATCH_INCHES)
        ax = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        ax.set_axis_off()
        ax.plot([0.0, 0.5, 1.0], [0.0, 0.0, 0.0], markevery=[1], **look)
        return _svg(figure, "", "swatch")


def length_text(length: float) -> str:
    """A sequence length as a tick: 16384 is 16K."""
    return f"{length / 1024:g}K" if length >= 1024 and length % 1024 == 0 else f"{length:g}"


def _svg(figure: Figure, label: str, kind: str = "chart") -> str:
    """Only the element, without the addresses of namespaces and the numbered names of its parts, which a page does not need."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=kind == "swatch")
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'\s+xmlns(:xlink)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'(<g) id="[a-zA-Z0-9.]+_\d+"', r"\1", text)
    spoken = f'role="img" aria-label="{escape(label, quote=True)}"' if label else 'aria-hidden="true"'
    return text.replace("<svg", f'<svg class="{kind}" {spoken}', 1)
