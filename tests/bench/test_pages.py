"""What people read: the page fetches nothing, and says the same with and without colour."""

from __future__ import annotations

import csv
import re
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree as ET

import pytest

from flashmoe.__main__ import main
from flashmoe.errors import ExitCode, ReportError
from flashmoe_tools.bench import figure
from flashmoe_tools.bench.heat import SHADES, heat_level, heat_rows, legend
from flashmoe_tools.bench.index import write_index
from flashmoe_tools.bench.markdown import bench_markdown
from flashmoe_tools.bench.page import flatten, render_page
from flashmoe_tools.bench.places import in_front
from flashmoe_tools.operations.attention.problem import AttentionProblem
from flashmoe_tools.report import Check, Report, Verdict, write_report
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


FOLDED = {"flashmoe": 0.8, "flashmoe-sm80": 0.4, "sdpa-flash": 0.5, "sdpa-cudnn": 0.75, "sdpa-math": 0.05}
PAGES = {
    "prefill": synthetic_report,
    "folded": lambda: synthetic_report("decode", speeds=FOLDED),
    "a layer": lambda: synthetic_report("moe-prefill", speeds={"flashmoe": 0.6, "torch-grouped": 0.3}),
    "a training step": lambda: synthetic_report("train-step", speeds={"flashmoe": 0.6, "sdpa": 0.5}),
    "latency, partial, one wrong": lambda: synthetic_report(
        "latency", timing="graph", partial="interrupted", wrong="sdpa-cudnn"
    ),
    "decode": lambda: synthetic_report("decode"),
    "one block": lambda: synthetic_report("decode", blocks=1),
    "nothing measured": lambda: synthetic_report(speeds={"flashmoe": 1.0}, wrong="flashmoe"),
}


@cache
def page_of(name: str) -> str:
    return render_page(PAGES[name]())


@pytest.mark.parametrize("name", PAGES)
def test_pages_fetch_nothing_and_are_well_formed(name: str) -> None:
    page = page_of(name)
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    assert all(address.startswith(("#", "data:text/csv;")) for address in reader.addresses)  # a link's own content
    names = {address[1:] for address in reader.addresses if address.startswith("#")}
    assert names <= set(re.findall(r'\bid="([^"]+)"', page))
    assert not FETCHING & set(reader.tags)
    assert not re.search(r"https?:|//[a-z]|@import|url\([^#]", page)
    for chart in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(chart)


def test_the_page_holds_what_it_must() -> None:
    page = page_of("prefill")
    assert page.count('<svg class="chart"') == 9
    assert page.count("TFLOP/s</text>") == 9  # three head dims with two masks each, and their rooflines
    assert page.count("prefers-color-scheme: dark") == 1
    assert 'name="viewport"' in page
    for words in (
        "How to repeat it",
        "--suite llm-prefill",
        "SDPA-FLASH</li>",
        "<strong>FLASHMOE</strong> against SDPA-CUDNN",
        "Invented GPU",
        "95% interval",
        "FASTER",
    ):
        assert words in page


def test_the_latency_page_shows_microseconds_and_says_that_it_is_partial() -> None:
    page = page_of("latency, partial, one wrong")
    assert "us a call" in page
    assert "<strong>Partial:</strong> interrupted" in page
    assert "WRONG: max error 0.7" in page


def test_text_from_reports_is_escaped() -> None:
    page = render_page(synthetic_report("decode", partial="<script>alert(1)</script>"))
    assert "<script" not in page


def test_series_differ_without_colour() -> None:
    assert len(set(figure.MARKERS)) == len(set(figure.DASHES)) == len(set(figure.COLOURS)) == 8


def test_the_figure_is_the_same_each_time() -> None:
    data = synthetic_report("decode").data
    draw = [figure.draw, figure.rooflines]
    assert [one(data, 1.0, "TFLOP/s", in_front(data)) for one in draw] == [
        one(data, 1.0, "TFLOP/s", in_front(data)) for one in draw
    ]


def test_a_long_title_is_broken_before_it_leaves_its_panel() -> None:
    data = synthetic_report("serving-graph").data
    texts = re.findall(r"<text[^>]*>([^<]+)</text>", "".join(map(str, figure.draw(data, 1.0, "GB/s", in_front(data)))))
    assert max(map(len, texts)) <= figure.TITLE_COLUMNS
    assert "others of 512" in " ".join(texts), "broken, not cut"


def test_a_page_without_the_plotting_library_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_report(tmp_path / "a.json", synthetic_report("decode"))
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("flashmoe_tools.bench.page", "flashmoe_tools.bench.figure"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = ["bench", "--render", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    assert main(words) == ExitCode.FAILED
    assert "needs matplotlib, which is not installed; pip install 'flashmoe-kernels[bench]'" in capsys.readouterr().err


def test_every_heat_cell_carries_its_verdict_as_a_sign() -> None:
    page = page_of("prefill")
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
        (0.77, "SLOWER", "down2"),
        (0.5, "SLOWER", "down4"),
        (2.0, "FASTER", "up4"),
        (9.0, "FASTER", "up4"),
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
    page = page_of("decode")
    assert page.count(">bf16, D = 128, full, 32 on 8 heads, B = ") == 3
    assert page.count("GB/s</text>") == 3
    assert page.count("TFLOP/s</text>") == 1  # the roofline


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


def test_forced_families_and_references_that_lose_everywhere_are_folded_away() -> None:
    report = PAGES["folded"]()
    assert in_front(report.data) == {"flashmoe", "sdpa-flash", "sdpa-cudnn"}
    page = page_of("folded")
    shown = re.sub(r"<details.*?</details>", "", page, flags=re.DOTALL)
    assert "FLASHMOE-SM80" not in shown
    assert "SDPA-MATH" not in shown
    assert "against SDPA-CUDNN" in shown
    assert "forced families of ours (flashmoe-sm80) and references that are nowhere the fastest (sdpa-math)" in page
    assert "<strong>FLASHMOE-SM80</strong> against SDPA-MATH" in page
    alone = synthetic_report("decode", speeds={"flashmoe-sm80": 0.4, "sdpa-math": 0.05})
    assert "against SDPA-MATH" in re.sub(r"<details.*?</details>", "", render_page(alone), flags=re.DOTALL)


def test_y_axes_are_shared_and_no_point_lies_above_its_roof() -> None:
    data = synthetic_report(speeds={"flashmoe": 1.3, "sdpa-flash": 0.5}).data  # beyond the product of the run
    shown = in_front(data)
    ticks = [re.findall(r">(\d+)</text>", chart)[-5:] for chart in figure.draw(data, 1.0, "TFLOP/s", shown)]
    assert all(one == ticks[0] for one in ticks)
    points = [
        (cell["flops"] / cell["bytes"], row["tflops"]) for cell in data["cells"] for row in cell["summaries"].values()
    ]
    assert max(y for _, y in points) > data["ceilings"]["matmul_tflops"]["bf16"]
    peak, slope = figure.roof_over(points, 790.0, 2.9)
    assert all(y <= min(peak, slope * x) * (1 + 1e-9) for x, y in points)
    assert figure.roof_over([(1.0, 1.0)], 790.0, 2.9) == (790.0, 2.9)


def test_rows_sort_without_a_script_and_are_in_the_csv() -> None:
    page = page_of("latency, partial, one wrong")
    rows = re.findall(
        r'<tr style="([^"]*)"><td>(.*?)</td><td>(.*?)</td>\s*<td(?: data-label="median us")?>(.*?)</td>', page
    )
    by_time = sorted(rows, key=lambda row: int(re.findall(r"--o1:(\d+);", row[0])[0]))
    times = [None if row[3] == "-" else float(row[3]) for row in by_time]
    timed = [one for one in times if one is not None]
    assert timed == sorted(timed)
    assert times[len(timed) :] == [None] * (len(times) - len(timed))  # what was not timed comes last
    assert "#order-1:checked ~ .rows tbody tr { order: var(--o1); }" in page
    (address,) = re.findall(r'href="data:text/csv;charset=utf-8,([^"]*)"', page)
    table = list(csv.DictReader(unquote(address).splitlines()))
    assert len(table) == len(rows)
    assert {row["contender"] for row in table} == {row[2] for row in rows}
    assert float(table[0]["median_us"]) > 0.0
    assert any(row["check"].startswith("WRONG") for row in table)


def test_the_legend_names_every_shade() -> None:
    shades = [shade for shade, _ in legend()]
    assert len(shades) == len(set(shades)) == 2 * SHADES + 1
    assert legend()[0] == ("down4", "under 0.59")
    assert legend()[-1] == ("up4", "over 1.68")


def test_the_environment_has_units() -> None:
    gpu = {"memory": 85017493504, "l2_bytes": 52428800, "power_limit": 700.0, "cudnn": 91900, "driver": None}
    found = dict(flatten({"gpu": gpu, "cpu_busy": 0.034, "cores": 16}))
    assert found == {
        "gpu.memory": "79.2 GiB", "gpu.l2_bytes": "50 MiB", "gpu.power_limit": "700 W", "gpu.cudnn": "9.19.0",
        "gpu.driver": "not known", "cpu_busy": "3%", "cores": "16",
    }  # fmt: skip


def test_an_index_lists_every_report_and_links_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_report(tmp_path / "deep" / "bench.json", synthetic_report("decode"))
    write_report(tmp_path / "audit.json", Report("audit", (Check("it", Verdict.FAIL, "<b>bad</b>"),), started="2031"))
    (tmp_path / "other.json").write_text("[1]")
    assert main(["bench", "--index", str(tmp_path)]) == ExitCode.OK
    assert "2 reports" in capsys.readouterr().out
    page = (tmp_path / "index.html").read_text()
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    assert reader.addresses == ["deep/bench.html"]
    assert not FETCHING & set(reader.tags)
    assert "FAIL it: &lt;b&gt;bad" in page
    assert "flashmoe 1." in page
    assert page.index("audit.json") < page.index("deep/bench.json")  # newest first
    assert "Case by case" in (tmp_path / "deep" / "bench.html").read_text()
    with pytest.raises(ReportError, match="no report"):
        write_index(tmp_path / "nothing")
