"""What people read: the page fetches nothing, and says the same with and without colour."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from flashmoe.__main__ import main
from flashmoe.errors import ExitCode
from flashmoe.tools.bench import figure
from flashmoe.tools.bench.markdown import bench_markdown
from flashmoe.tools.bench.page import heat_level, heat_rows, render_page
from flashmoe.tools.problems.attention import AttentionProblem
from flashmoe.tools.report import write_report
from tests.bench.synthetic import synthetic_report

FETCHING = {"script", "link", "img", "iframe", "object", "embed", "source", "video", "audio", "base", "form"}
VOID = {"meta", "br", "hr", "input"}


class Reader(HTMLParser):
    """Collects tags and attributes, and checks that tags close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [
            value or "" for name, value in attrs if name in ("src", "href", "action", "data", "xlink:href")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


PAGES = {
    "prefill": synthetic_report,
    "latency, partial, one wrong": lambda: synthetic_report(
        "latency", timing="graph", partial="interrupted", wrong="sdpa-cudnn"
    ),
    "one block": lambda: synthetic_report("decode", blocks=1),
    "nothing measured": lambda: synthetic_report(speeds={"flashmoe": 1.0}, wrong="flashmoe"),
}


@pytest.mark.parametrize("name", PAGES)
def test_pages_fetch_nothing_and_are_well_formed(name: str) -> None:
    page = render_page(PAGES[name]())
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    assert all(address.startswith("#") for address in reader.addresses)
    assert not FETCHING & set(reader.tags)
    assert not re.search(r"https?:|//[a-z]|@import|url\([^#]", page)
    for chart in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(chart)


def test_the_page_holds_what_it_must() -> None:
    page = render_page(synthetic_report())
    assert page.count('<svg class="chart"') == 1
    assert page.count("TFLOP/s</text>") == 6  # three head dims, two masks
    assert page.count("prefers-color-scheme: dark") == 1
    assert 'name="viewport"' in page
    for words in (
        "How to repeat it",
        "--suite llm-prefill",
        "SDPA-FLASH</text>",
        "Invented GPU",
        "95% interval",
        "FASTER",
    ):
        assert words in page


def test_the_latency_page_shows_microseconds_and_says_that_it_is_partial() -> None:
    page = render_page(PAGES["latency, partial, one wrong"]())
    assert "us a call" in page
    assert "<strong>Partial:</strong> interrupted" in page
    assert "WRONG: max error 0.7" in page


def test_text_from_reports_is_escaped() -> None:
    page = render_page(synthetic_report(partial="<script>alert(1)</script>"))
    assert "<script" not in page


def test_series_differ_without_colour() -> None:
    assert len(set(figure.MARKERS)) == len(set(figure.DASHES)) == len(set(figure.COLOURS)) == 8


def test_the_figure_is_the_same_each_time() -> None:
    data = synthetic_report("decode").data
    assert figure.draw(data, 1.0, "TFLOP/s") == figure.draw(data, 1.0, "TFLOP/s")


def test_a_page_without_the_plotting_library_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_report(tmp_path / "a.json", synthetic_report("decode"))
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("flashmoe.tools.bench.page", "flashmoe.tools.bench.figure"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = ["bench", "--render", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    assert main(words) == ExitCode.FAILED
    assert "needs matplotlib, which is not installed; pip install 'flashmoe-kernels[bench]'" in capsys.readouterr().err


def test_every_heat_cell_carries_its_verdict_as_a_sign() -> None:
    page = render_page(synthetic_report())
    cells = re.findall(r'<td class="(?:up|down|even)\d?" title="(\w+) [^"]*">([\d.]+)<b>(.)</b>', page)
    assert len(cells) == 72
    signs = {"FASTER": "+", "SLOWER": "−", "SAME": "=", "AMBIGUOUS": "?"}
    assert all(sign == signs[verdict] for verdict, _, sign in cells)


@pytest.mark.parametrize(
    ("ratio", "verdict", "level"),
    [
        (1.3, "FASTER", "up2"),
        (1.1, "FASTER", "up1"),
        (0.9, "SLOWER", "down1"),
        (0.5, "SLOWER", "down2"),
        (1.3, "AMBIGUOUS", "even"),
        (1.0, "SAME", "even"),
    ],
)
def test_only_a_shown_difference_is_coloured(ratio: float, verdict: str, level: str) -> None:
    assert heat_level(ratio, verdict) == level


def test_lengths_as_ticks() -> None:
    assert [figure.length_text(length) for length in (512, 1024, 16384, 1500)] == ["512", "1K", "16K", "1500"]


def test_markdown_names_every_case_verdict_and_problem() -> None:
    text = bench_markdown(PAGES["latency, partial, one wrong"]())
    assert "PARTIAL: interrupted" in text
    assert "| WRONG |" in text
    assert "- FAIL f16-d64" in text
    whole = bench_markdown(synthetic_report())
    assert whole.count("bf16-d") >= 36
    assert "36 FASTER" in whole
    rows = [line for line in whole.splitlines() if line.startswith("| bf16")]
    assert len({line.count("|") for line in rows}) == 1


def test_decoding_is_shown_in_bytes() -> None:
    page = render_page(synthetic_report("decode"))
    assert page.count(">bf16, D = 128, full, 32 on 8 heads, B = ") == 3
    assert page.count("GB/s</text>") == 3


def test_no_case_hides_another_in_the_table_of_ratios() -> None:
    """Equal lengths with other batches, groups of heads or rows of Q each have a place of their own."""
    shapes = [(1, 8, 8, 512, 512), (4, 8, 8, 512, 512), (1, 8, 2, 512, 512), (1, 8, 8, 64, 512), (2, 8, 8, 64, 512)]
    row = {"subject": "ours", "baseline": "base", "verdict": "FASTER", "reason": "inside", "ratio": 1.5}
    cells = [
        {"case": AttentionProblem("bf16", batch, hq, hkv, sq, sk, 64, causal=True).to_json(), "comparisons": [row]}
        for batch, hq, hkv, sq, sk in shapes
    ]
    (rows,) = heat_rows({"cells": cells})["groups"].values()
    assert sum(len(columns) for columns in rows.values()) == len(shapes)
