"""A bench report as one self-contained HTML page: a chart of ratios and a table of every number, no downloads."""

import io
import re
import shlex
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from flashmoe_tools.bench.markdown import describe_case, number, rate_unit, ratio_text
from flashmoe_tools.report import Report, Verdict, count

UNITS = {"power_limit": "W"}
BYTES = ("memory", "l2_bytes")
SHARES = ("cpu_busy", "gpu_busy")
FORCED = re.compile(r"flashmoe-sm\d+")  # one of our families, forced on a GPU that has another; only in the table
# Colours that people with any colour vision can tell apart (Okabe and Ito), dark enough for lines on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#a8518a", "#3d3d3d", "#b58900", "#56a0d3", "#7a4f2b")
MARKERS = "os^DvPX*"
SETTINGS: Any = {"svg.hashsalt": "flashmoe", "svg.fonttype": "none", "font.size": 9, "axes.grid": True}


def render_page(report: Report) -> str:
    """The complete page as text."""
    data = report.data
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).resolve().parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    factor, unit = rate_unit(data)
    text: str = environment.get_template("report.html.j2").render(
        report=report,
        data=data,
        device=device_of(report),
        chart=Markup(draw(data)),
        rows=detail_rows(data, factor),
        unit=unit,
        environment=list(flatten(report.environment)),
        ceilings=list(_ceilings(data, factor, unit)),
        problems=[check for check in report.checks if check.verdict in (Verdict.FAIL, Verdict.WARN)],
        skipped=count(report.checks, Verdict.SKIP),
        checked=count(report.checks, *Verdict),
        repeat=shlex.join(report.command) if report.command else "",
    )
    return text


def device_of(report: Report) -> str:
    gpu = report.environment.get("gpu") or {}
    return str(gpu.get("name") or report.environment.get("processor") or "unknown device")


def draw(data: Mapping[str, Any]) -> str:
    """The chart as an ``<svg>`` element: ratio against case number, one line per comparison; empty without comparisons.

    The same report gives the same bytes. A missing interval is drawn as a point without bars.
    """
    lines: dict[str, list[tuple[int, float, float, float]]] = {}
    for index, cell in enumerate(data["cells"], 1):
        for row in cell["comparisons"]:
            if not FORCED.fullmatch(row["subject"]):
                ratio, (low, high) = row["ratio"], (row["ratio"] if one is None else one for one in row["interval"])
                # A ratio of samples can be outside the interval, which is one of blocks.
                point = (index, ratio, max(0.0, ratio - low), max(0.0, high - ratio))
                lines.setdefault(f"{row['subject']} / {row['baseline']}", []).append(point)
    if not lines:
        return ""
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(10.0, 3.6))
        ax = figure.add_axes((0.06, 0.14, 0.92, 0.82))
        for at, (title, points) in enumerate(lines.items()):
            cases, ratios, below, above = zip(*points, strict=True)
            look: dict[str, Any] = {"color": COLOURS[at % 8], "marker": MARKERS[at % 8]}
            ax.errorbar(cases, ratios, yerr=[below, above], label=title, markersize=4, linewidth=1, capsize=2, **look)
        ax.axhline(1.0, color="#6b7480", linewidth=1.0, linestyle="--")
        ax.set(xlabel="case, as numbered in the table", ylabel="times as fast", yscale="log")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.legend(fontsize=8)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'\s+xmlns(:xlink)?="[^"]*"', "", text).replace("xlink:href", "href")
    label = escape(f"{data['suite']['title']}: times as fast, by case", quote=True)
    return text.replace("<svg", f'<svg class="chart" role="img" aria-label="{label}"', 1)


def detail_rows(data: Mapping[str, Any], factor: float) -> list[dict[str, Any]]:
    """One row per case and contender with every measured value, or the reason why there is none."""
    rows = []
    for index, cell in enumerate(data["cells"], 1):
        for name, outcome in cell["verification"].items():
            summary, cpu = cell["summaries"].get(name), cell["call_cpu_ns"].get(name)
            rows.append(
                {
                    "index": index,
                    "case": describe_case(cell["case"]),
                    "name": name,
                    "outcome": "right" if outcome["passed"] else f"WRONG: {outcome['reason']}",
                    "summary": summary,
                    "rate": factor * summary["tflops"] if summary else None,
                    "cpu_us": sorted(cpu)[len(cpu) // 2] / 1e3 if cpu else None,
                    "peak_mb": cell["peak_bytes"][name] / 1e6 if name in cell["peak_bytes"] else None,
                    "ratios": [
                        f"{ratio_text(one)} {one['baseline']}" for one in cell["comparisons"] if one["subject"] == name
                    ],
                }
            )
        rows += [
            {
                "index": index,
                "case": describe_case(cell["case"]),
                "name": name,
                "summary": None,
                "outcome": f"not timed: {reason}",
            }
            for name, reason in cell["unsupported"].items()
        ]
    return rows


def _ceilings(data: Mapping[str, Any], factor: float, unit: str) -> Iterator[tuple[str, str]]:
    ceilings = data["ceilings"]
    if ceilings:
        for dtype, rate in ceilings["matmul_tflops"].items():
            product = ceilings.get("matmul_of", {}).get(dtype)
            yield (
                f"fastest matrix product for {dtype}",
                f"{number(factor * rate)} {unit}{f' ({product})' if product else ''}",
            )
        yield "copy, read plus written", f"{number(ceilings['copy_gbps'])} GB/s"


def flatten(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested tables as rows (dotted name, text with its unit)."""
    rows: list[tuple[str, str]] = []
    for name, value in table.items():
        if isinstance(value, Mapping):
            rows += flatten(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", with_unit(name, value)))
    return rows


def with_unit(name: str, value: Any) -> str:
    """A value of the environment with its unit: 79.2 GiB, 700 W, 3%."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if name in BYTES:
            return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"
        if name in SHARES:
            return f"{value:.0%}"
        if name in UNITS:
            return f"{value:g} {UNITS[name]}"
        if name == "cudnn":  # 91900 is 9.19.0
            return f"{value // 10000}.{value // 100 % 100}.{value % 100}"
    return "not known" if value is None else str(value)
