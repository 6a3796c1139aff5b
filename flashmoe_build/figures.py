"""The picture of the architecture, as SVG, drawn from the tree; ``nox -s docs`` writes it. The speed of README is in speed.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from flashmoe.__main__ import COMMANDS
from flashmoe.errors import ReportError

ARROW = (
    '<defs><marker id="m" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
    '<path d="M0 0L8 4L0 8z" fill="#555"/></marker></defs>'
)
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
    parts = [ARROW]
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


FIGURES = {"docs/architecture.svg": architecture}
