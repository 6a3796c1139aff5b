"""Small charts as inline SVG text. Colours come from the page's style sheet, so one chart serves light and dark.

A series is told apart by its marker and its dashes as well as by its colour. Charts are drawn 420 units wide, so that
on a telephone they shrink little and their text stays readable; wide screens show several side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 420.0, 280.0
LEFT, RIGHT, TOP, BOTTOM = 50.0, 20.0, 14.0, 44.0
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 2", "12 4", "6 2 1 2 1 2")
MARKERS = ("circle", "square", "triangle", "diamond", "cross", "plus", "down", "ring")


@dataclass(frozen=True)
class Point:
    """One value with its interval (equal bounds: none to draw)."""

    x: float
    y: float
    low: float
    high: float
    label: str = ""


@dataclass(frozen=True)
class Series:
    """``style`` picks colour, marker and dashes; the same contender keeps its style in every chart of a page."""

    name: str
    style: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Scale:
    """Maps values to units of the drawing."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def at(self, value: float) -> float:
        low, high, here = self.low, self.high, value
        if self.log:
            low, high, here = math.log2(low), math.log2(high), math.log2(max(value, self.low / 16))
        share = (here - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)


def nice_ticks(top: float, count: int = 5) -> list[float]:
    """0 and round steps (1, 2, 5 times a power of ten) until ``top`` is covered."""
    if top <= 0.0:
        return [0.0, 1.0]
    raw = top / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1.0, 2.0, 5.0, 10.0) if power * factor >= raw * 0.999)
    return [step * index for index in range(math.ceil(top / step - 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Round values that enclose the range: 1, 2 and 5 of each power of ten, or the powers alone when there are many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1.0, 2.0, 5.0) if high / low < 50.0 else (1.0,)
    ticks = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    start = max(tick for tick in ticks if tick <= low * 1.001)
    end = min(tick for tick in ticks if tick >= high / 1.001)
    return [tick for tick in ticks if start <= tick <= end]


def short(value: float) -> str:
    """A tick's label: 16384 is 16K, 0.05 stays 0.05."""
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:g}K"
    return f"{value:g}" if value < 10000 else f"{value / 1000:g}k"


def line_chart(title: str, x_label: str, y_label: str, series: Sequence[Series], *, y_log: bool = False) -> str:
    """Lines over a logarithmic x axis whose ticks are the measured x values. Empty text when nothing was measured."""
    points = [point for one in series for point in one.points]
    if not points:
        return ""
    xs = sorted({point.x for point in points})
    x_scale = Scale(xs[0] / 1.15, xs[-1] * 1.15, LEFT, WIDTH - RIGHT, log=True)
    top = max(point.high for point in points)
    bottom = min(point.low for point in points)
    if y_log and top > 5.0 * bottom:
        y_ticks = log_ticks(bottom, top)
        y_scale = Scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP, log=True)
    else:
        y_ticks = nice_ticks(top * 1.02)
        y_scale = Scale(0.0, y_ticks[-1], HEIGHT - BOTTOM, TOP, log=False)
    body = [_axes(x_scale, y_scale, _thin(xs), y_ticks, x_label, y_label)]
    body += [_series(one, x_scale, y_scale) for one in series if one.points]
    return _frame(title, "".join(body))


def roofline(title: str, peak: float, slope: float, unit: str, series: Sequence[Series]) -> str:
    """Achieved rate over operations per byte, under two measured ceilings: ``peak``, and ``slope`` rate per op/byte.

    Both axes are logarithmic; ``peak``, ``slope`` and the points are in ``unit``.
    """
    points = [point for one in series for point in one.points]
    if not points:
        return ""
    ridge = peak / slope
    x_ticks = log_ticks(
        min([ridge, *(point.x for point in points)]) / 1.5, max([ridge * 2, *(point.x for point in points)])
    )
    low_x, high_x = x_ticks[0], x_ticks[-1]
    y_ticks = log_ticks(
        min([low_x * slope, *(point.y for point in points)]) / 1.2, max([peak, *(point.y for point in points)]) * 1.3
    )
    low_y = y_ticks[0]
    x_scale = Scale(low_x, high_x, LEFT, WIDTH - RIGHT, log=True)
    y_scale = Scale(low_y, y_ticks[-1], HEIGHT - BOTTOM, TOP, log=True)
    body = [_axes(x_scale, y_scale, x_ticks, y_ticks, "operations per byte", unit)]
    corner = [(low_x, low_x * slope), (ridge, peak), (high_x, peak)]
    path = " ".join(f"{x_scale.at(x):.1f},{y_scale.at(y):.1f}" for x, y in corner)
    body.append(f'<polyline class="roof" points="{path}"/>')
    label = f"product {short(float(f'{peak:.3g}'))} {unit}"
    at = f'x="{WIDTH - RIGHT - 2:.0f}" y="{y_scale.at(peak) - 6:.1f}"'
    body.append(f'<text class="note" {at} text-anchor="end">{label}</text>')
    for one in series:
        body += [_marker(one.style, x_scale.at(p.x), y_scale.at(p.y), p.label or one.name) for p in one.points]
    return _frame(title, "".join(body))


def swatch(style: int) -> str:
    """A series' line and marker, for the legend."""
    line = f'<line class="line s{style % 8}" x1="1" y1="8" x2="33" y2="8"{_dash(style)}/>'
    mark = _marker(style, 17, 8, "")
    return f'<svg class="swatch" viewBox="0 0 34 16" width="34" height="16" aria-hidden="true">{line}{mark}</svg>'


def _frame(title: str, body: str) -> str:
    name = escape(title, quote=True)
    return f'<svg class="chart" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" aria-label="{name}">{body}</svg>'


def _axes(x: Scale, y: Scale, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str, y_label: str) -> str:
    parts = []
    for tick in y_ticks:
        at = y.at(tick)
        parts.append(f'<line class="grid" x1="{LEFT:.0f}" y1="{at:.1f}" x2="{WIDTH - RIGHT:.0f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 5:.0f}" y="{at + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    for tick in x_ticks:
        at = x.at(tick)
        foot = HEIGHT - BOTTOM
        parts.append(f'<line class="axis" x1="{at:.1f}" y1="{foot:.0f}" x2="{at:.1f}" y2="{foot + 4:.0f}"/>')
        parts.append(f'<text x="{at:.1f}" y="{foot + 17:.0f}" text-anchor="middle">{short(tick)}</text>')
    foot, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts.append(f'<line class="axis" x1="{LEFT:.0f}" y1="{foot:.0f}" x2="{right:.0f}" y2="{foot:.0f}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 8:.0f}" text-anchor="middle">{escape(x_label)}</text>')
    half = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text transform="translate(12 {half:.0f}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
    )
    return "".join(parts)


def _thin(values: Sequence[float], most: int = 8) -> list[float]:
    step = -(-len(values) // most)
    return list(values[::step])


def _series(series: Series, x: Scale, y: Scale) -> str:
    ordered = sorted(series.points, key=lambda point: point.x)
    path = " ".join(f"{x.at(point.x):.1f},{y.at(point.y):.1f}" for point in ordered)
    parts = [f'<polyline class="line s{series.style % 8}" points="{path}"{_dash(series.style)}/>']
    for point in ordered:
        at = x.at(point.x)
        parts.append(_bar(series.style, at, y.at(point.low), y.at(point.high)))
        parts.append(_marker(series.style, at, y.at(point.y), point.label or f"{series.name}: {point.y:.3g}"))
    return "".join(parts)


def _bar(style: int, x: float, low: float, high: float) -> str:
    if abs(low - high) < 1.0:
        return ""
    name = f"bar s{style % 8}"
    ends = "".join(
        f'<line class="{name}" x1="{x - 3:.1f}" y1="{y:.1f}" x2="{x + 3:.1f}" y2="{y:.1f}"/>' for y in (low, high)
    )
    return f'<line class="{name}" x1="{x:.1f}" y1="{low:.1f}" x2="{x:.1f}" y2="{high:.1f}"/>{ends}'


def _dash(style: int) -> str:
    dash = DASHES[style % len(DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def _marker(style: int, x: float, y: float, label: str) -> str:
    """A shape of about eight units around (x, y); ``label`` shows when it is pointed at."""
    title = f"<title>{escape(label)}</title>" if label else ""
    shapes = {
        "circle": f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4">{title}</circle>',
        "square": f'<rect x="{x - 3.6:.1f}" y="{y - 3.6:.1f}" width="7.2" height="7.2">{title}</rect>',
        "triangle": f'<path d="M{x:.1f} {y - 4.8:.1f}l4.6 8h-9.2z">{title}</path>',
        "diamond": f'<path d="M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5-5z">{title}</path>',
        "cross": f'<path class="open" d="M{x - 4:.1f} {y - 4:.1f}l8 8m0-8l-8 8">{title}</path>',
        "plus": f'<path class="open" d="M{x:.1f} {y - 5:.1f}v10m-5-5h10">{title}</path>',
        "down": f'<path d="M{x:.1f} {y + 4.8:.1f}l4.6-8h-9.2z">{title}</path>',
        "ring": f'<circle class="open" cx="{x:.1f}" cy="{y:.1f}" r="4">{title}</circle>',
    }
    return f'<g class="mark s{style % 8}">{shapes[MARKERS[style % len(MARKERS)]]}</g>'
