"""Pictures of docs/, as SVG: the roofline of an H100 and a race from committed reports, the architecture from the tree.

``nox -s docs`` writes them. They are text of a few lines, so that a difference can be read; the speed of README is in speed.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from flashmoe.__main__ import COMMANDS
from flashmoe.errors import ReportError
from flashmoe_build.speed import COLOURS, aggregates

RACE = "docs/results/2026-11-24-cpu/race.txt"
SERIES = (("flashmoe", "flashmoe"), ("sdpa-cudnn", "cuDNN"))
WIDTH, HEIGHT = 640, 380  # of the roofline
LEFT, RIGHT, TOP, BOTTOM = 60, 620, 40, 320  # of its axes
X_RANGE, Y_RANGE = (1.0, 20000.0), (4.0, 1200.0)  # operations for each byte, TFLOP/s
ARROW = (
    '<defs><marker id="m" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
    '<path d="M0 0L8 4L0 8z" fill="#c0392b"/></marker></defs>'
)
ACCESS = re.compile(r"FAIL (?P<kernel>\w+).*\nrace: (?P<what>\w+): shared byte (?P<byte>\d+): (?P<second>.*?\)) (?P<does>\w+), and nothing orders "
                    r"that after (?P<first>.*?\)) at (?P<wrapper>\w+) \((?P<where>[^)]*)\), which (?P<did>\w+) it\n  at (?P<here>\S+)")  # fmt: skip
BUILDER = "flashmoe_build"  # not in the wheel
SOURCE, MADE, CHECK = "#e8f0fe", "#f3f3f3", "#eaf5e4"  # what is written, what is built, what is checked
FLOW = (
    ("tables", "translation units", ""),
    ("kernels", "translation units", ""),
    ("translation units", "device binaries", "NVRTC, ptxas"),
    ("translation units", "emulated on the CPU", "g++"),
    ("host and CPU code", "libflashmoe.so", "g++"),
    ("device binaries", "libflashmoe.so", ""),
    ("libflashmoe.so", "wheel", ""),
    ("Python", "wheel", ""),
    ("wheel", "tests", ""),
    ("wheel", "flashmoe COMMAND", ""),
)


@dataclass(frozen=True)
class Box:
    """A box of the architecture: pixels of its corner, its width, what stands in it."""

    x: int
    y: int
    width: int
    title: str
    lines: tuple[str, ...]
    fill: str

    @property
    def height(self) -> int:
        return 30 + 16 * len(self.lines)

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


def svg(width: int, height: int, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, **options: object) -> str:
    given = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in options.items())
    return f'<text x="{x:.0f}" y="{y:.0f}"{given}>{escape(words)}</text>'


def _scale(value: float, span: tuple[float, float], begin: float, end: float) -> float:
    low, high = (math.log10(one) for one in span)
    return begin + (math.log10(value) - low) / (high - low) * (end - begin)


def point(intensity: float, tflops: float) -> tuple[float, float]:
    """Pixels of a point of the roofline."""
    return _scale(intensity, X_RANGE, LEFT, RIGHT), _scale(tflops, Y_RANGE, BOTTOM, TOP)


def work(case: dict[str, Any]) -> tuple[float, float]:
    """Operations, and bytes that attention in 16 bits cannot avoid: queries, keys, values and the output, once each."""
    pairs = case["batch"] * case["heads_q"] * case["seq_q"] * case["seq_k"] / (2 if case["causal"] else 1)
    rows = case["heads_q"] * case["seq_q"] + case["heads_kv"] * case["seq_k"]
    return 4.0 * pairs * case["head_dim"], 4.0 * case["batch"] * rows * case["head_dim"]


def roofline(root: Path) -> str:
    """Forward attention on an H100, prefill and decoding, under what a matrix product and a copy reached in the same run."""
    reports = [aggregates(root, name, gpus=("h100",))[1]["data"] for name in ("llm-prefill-bf16", "decode")]
    peak, copy = reports[0]["ceilings"]["matmul_tflops"]["bf16"], reports[0]["ceilings"]["copy_gbps"] / 1e3
    parts = [
        text(LEFT, 18, "Forward attention, bf16, one H100: TFLOP/s by operations for each byte that must be moved"),
        *_axes(),
    ]
    corner, end = point(peak / copy, peak), point(X_RANGE[1], peak)
    start = point(Y_RANGE[0] / copy, Y_RANGE[0])
    line = f"M{start[0]:.1f} {start[1]:.1f}L{corner[0]:.1f} {corner[1]:.1f}H{end[0]:.1f}"
    parts.append(f'<path d="{line}" fill="none" stroke="#333" stroke-width="1.5"/>')
    parts.append(text(end[0], end[1] - 6, f"a matrix product: {peak:.0f} TFLOP/s", text_anchor="end", fill="#333"))
    middle = point(16.0, 16.0 * copy)
    parts.append(text(middle[0] - 8, middle[1], f"a copy: {copy:.2f} TB/s", text_anchor="end", fill="#333"))
    for name, _ in reversed(SERIES):  # ours on top
        for data in reports:
            parts += [_dot(cell, name) for cell in data["cells"] if name in cell["contenders"]]
    labels = (("decoding", 9.0, 8.0), ("prefill, S 512 to 16384", 900.0, 150.0))
    parts += [text(*point(x, y), words, text_anchor="middle", fill="#333") for words, x, y in labels]
    for index, (name, title) in enumerate(SERIES):
        parts.append(f'<circle cx="{LEFT + 8 + 110 * index}" cy="366" r="4" fill="{COLOURS[name]}"/>')
        parts.append(text(LEFT + 18 + 110 * index, 370, title))
    return svg(WIDTH, HEIGHT, parts)


def _dot(cell: dict[str, Any], name: str) -> str:
    operations, moved = work(cell["case"])
    x, y = point(operations / moved, operations / cell["contenders"][name]["median_us"] / 1e6)
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{COLOURS[name]}" fill-opacity="0.7"/>'


def _axes() -> Iterator[str]:
    for mark in (10, 100, 1000):
        _, y = point(1.0, mark)
        yield f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="#ddd"/>'
        yield text(LEFT - 6, y + 4, f"{mark}", text_anchor="end")
    for mark in (1, 10, 100, 1000, 10000):
        x, _ = point(mark, 10.0)
        yield f'<path d="M{x:.1f} {TOP}V{BOTTOM}" stroke="#ddd"/>'
        yield text(x, BOTTOM + 16, f"{mark:,}", text_anchor="middle")
    yield text((LEFT + RIGHT) / 2, BOTTOM + 32, "operations for each byte", text_anchor="middle")


def race(root: Path) -> str:
    """The race that the emulator printed: who did what to which byte of shared memory, in which line, and what is missing between them."""
    report = (root / RACE).read_text(encoding="utf-8")
    found = ACCESS.search(report)
    if found is None:
        msg = f"{RACE} has no race of two accesses to shared memory; found {report[:200]!r}; write what the emulator prints of one"
        raise ReportError(msg)
    boxes = (
        (20, "first", found["first"], f"{found['did']} it: {found['wrapper']}", found["where"]),
        (420, "then", found["second"], f"{found['does']} it: {found['what']}", found["here"]),
    )
    parts = [
        ARROW,
        text(20, 22, f"race in {found['kernel']}: shared byte {found['byte']}", font_weight="bold"),
    ]
    for x, when, who, what, where in boxes:
        parts.append(f'<rect x="{x}" y="40" width="310" height="82" rx="5" fill="#e8f0fe" stroke="#888"/>')
        parts.append(text(x + 155, 60, f"{when}: {who}", text_anchor="middle"))
        parts.append(text(x + 155, 82, what, text_anchor="middle"))
        parts.append(
            text(x + 155, 106, where.removeprefix("csrc/attention/forward/"), text_anchor="middle", fill="#444")
        )
    parts.append('<path d="M330 81H418" stroke="#c0392b" stroke-dasharray="4 3" fill="none" marker-end="url(#m)"/>')
    parts += [
        text(375, y, words, text_anchor="middle", fill="#c0392b") for y, words in ((74, "nothing"), (98, "orders this"))
    ]
    return svg(750, 140, parts)


def _tree(root: Path) -> dict[str, list[str]]:
    """What the architecture's boxes name, read from the tree, so that a folder which is moved or added is redrawn."""
    operations = sorted(path.parent.name for path in root.glob("csrc/*/kernels.toml"))
    shared = [name for name in ("device", "ptx") if (root / "csrc" / name).is_dir()]
    packages = sorted(path.parent.name for path in root.glob("flashmoe*/__init__.py") if path.parent.name != BUILDER)
    found = {"operations": operations, "shared": shared, "packages": packages}
    for what, names in found.items():
        if not names:
            msg = f"the picture of the architecture found no {what} in {root}; correct the paths in flashmoe_build/figures.py"
            raise ReportError(msg)
    return found


def boxes(root: Path) -> Sequence[Box]:
    """From tables and sources to the checked wheel, with the names of today's folders."""
    tree = _tree(root)
    host, cpu = (
        [name for name in tree["operations"] if (root / "csrc" / name / side).is_dir()] for side in ("host", "cpu")
    )
    return (
        Box(10, 20, 275, "tables", ("csrc/tables", f"csrc/{_either(tree['operations'])}/kernels.toml"), SOURCE),
        Box(
            10, 100, 275, "kernels", (f"csrc/{_either(tree['operations'])}", f"csrc/{_either(tree['shared'])}"), SOURCE
        ),
        Box(
            10,
            180,
            275,
            "host and CPU code",
            (f"csrc/{_either(host)}/host", f"csrc/{_either(cpu)}/cpu, csrc/cpu"),
            SOURCE,
        ),
        Box(10, 260, 275, "Python", (", ".join(tree["packages"]),), SOURCE),
        Box(345, 60, 150, "translation units", ("one per row and type",), MADE),
        Box(345, 140, 150, "device binaries", ("cubins and PTX",), MADE),
        Box(560, 20, 170, "emulated on the CPU", ("races, planted bugs",), CHECK),
        Box(560, 180, 170, "libflashmoe.so", ("torch's stable ABI",), MADE),
        Box(560, 260, 170, "wheel", ("with provenance.json",), MADE),
        Box(780, 170, 160, "tests", ("the installed wheel",), CHECK),
        Box(780, 240, 160, "flashmoe COMMAND", _lines(list(COMMANDS), 3), CHECK),
    )


def architecture(root: Path) -> str:
    """The boxes, and what becomes of which."""
    drawn = boxes(root)
    by_title = {box.title: box for box in drawn}
    parts = [ARROW.replace("#c0392b", "#555")]
    for start, end, words in FLOW:
        parts += _arrow(by_title[start], by_title[end], words)
    for box in drawn:
        parts += _drawn(box)
    return svg(950, 350, parts)


def _either(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else "{" + ",".join(names) + "}"


def _lines(names: Sequence[str], most: int) -> tuple[str, ...]:
    return tuple(", ".join(names[begin : begin + most]) for begin in range(0, len(names), most))


def _drawn(box: Box) -> Iterator[str]:
    yield (
        f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="5" fill="{box.fill}" stroke="#888"/>'
    )
    middle = box.x + box.width / 2
    yield text(middle, box.y + 18, box.title, text_anchor="middle", font_weight="bold")
    for index, line in enumerate(box.lines):
        yield text(middle, box.y + 34 + 16 * index, line, text_anchor="middle", fill="#444", font_size=11)


def _arrow(start: Box, end: Box, words: str) -> Iterator[str]:
    """From the right side to the left one, or down where the boxes stand above each other."""
    if start.x == end.x:
        x, top, bottom = start.x + start.width / 2, start.y + start.height, end.y
        yield f'<path d="M{x:.0f} {top}V{bottom}" stroke="#555" fill="none" marker-end="url(#m)"/>'
        yield text(x + 6, (top + bottom) / 2 + 4, words, fill="#555")
        return
    x1, y1, x2, y2 = start.x + start.width, start.middle, end.x, end.middle
    yield f'<path d="M{x1} {y1:.0f}L{x2} {y2:.0f}" stroke="#555" fill="none" marker-end="url(#m)"/>'
    if words:
        yield text((x1 + x2) / 2, (y1 + y2) / 2 - 8, words, text_anchor="middle", fill="#555")


FIGURES = {"docs/roofline-h100.svg": roofline, "docs/race.svg": race, "docs/architecture.svg": architecture}
