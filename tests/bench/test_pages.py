"""Output for people: the page downloads nothing and contains every number; so does Markdown."""

import re
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from flashmoe.__main__ import main
from flashmoe.errors import ExitCode, ReportError
from flashmoe_tools.bench.index import write_index
from flashmoe_tools.bench.markdown import bench_markdown, number
from flashmoe_tools.bench.page import COLOURS, MARKERS, draw, flatten, render_page
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
    assert all(address.startswith("#") for address in reader.addresses)
    assert not FETCHING & set(reader.tags)
    assert not re.search(r"https?:|//[a-z]|@import|url\([^#]", page)
    for chart in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(chart)


def test_the_page_holds_what_it_must() -> None:
    page = page_of("folded")
    assert page.count('<svg class="chart"') == 1
    assert page.count(" / sdpa-flash</text>") == 1  # a forced family of ours is only in the table
    for words in (
        "--suite decode",
        "flashmoe is <strong>1.280</strong> times as fast as sdpa-flash",
        "flashmoe-sm80 is <strong>0.876</strong> times as fast as sdpa-flash",
        "95% interval",
        "Invented GPU",
        "] + sdpa-flash",
    ):
        assert words in page, words


def test_a_partial_page_says_so_and_names_what_was_wrong() -> None:
    page = page_of("latency, partial, one wrong")
    assert "<strong>Partial:</strong> interrupted" in page
    assert "WRONG: max error 0.7" in page


def test_text_from_reports_is_escaped() -> None:
    page = render_page(synthetic_report("decode", partial="<script>alert(1)</script>"))
    assert "<script" not in page


def test_the_chart_is_the_same_each_time_and_its_lines_differ_without_colour() -> None:
    data = synthetic_report("decode").data
    assert draw(data) == draw(data)
    assert len(set(MARKERS)) == len(set(COLOURS)) == 8


def test_a_page_without_the_plotting_library_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_report(tmp_path / "a.json", synthetic_report("decode"))
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "flashmoe_tools.bench.page")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = ["bench", "--render", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    assert main(words) == ExitCode.FAILED
    assert "needs matplotlib, which is not installed; pip install 'flashmoe-kernels[bench]'" in capsys.readouterr().err


def test_markdown_names_every_case_verdict_and_problem() -> None:
    text = bench_markdown(PAGES["latency, partial, one wrong"]())
    assert "PARTIAL: interrupted" in text
    assert "| WRONG |" in text
    assert "- WARN f16-d64" in text
    whole = bench_markdown(synthetic_report())
    assert whole.count("bf16-d") >= 36
    assert "36 FASTER" in whole
    rows = [line for line in whole.splitlines() if line.startswith("| bf16")]
    assert len({line.count("|") for line in rows}) == 1


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
    assert page.index("audit.json") < page.index("deep/bench.json")  # newest first
    assert "<svg" in (tmp_path / "deep" / "bench.html").read_text()
    with pytest.raises(ReportError, match="no report"):
        write_index(tmp_path / "nothing")


def _cell(key: str, **others: Any) -> dict[str, Any]:
    return {"case": {"key": key}, "summaries": {}, "comparisons": [], "verification": {}, **others}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_whole_text_of_a_report(device: str) -> None:
    row = {"subject": "ours", "baseline": "sdpa", "ratio": 1.2345, "interval": [1.2, 1.26], "verdict": "FASTER"}
    times = {"ours": {"median_us": 123.4, "tflops": 0.456}, "sdpa": {"median_us": 12.34, "tflops": 0.0567}}
    data: dict[str, Any] = {
        "suite": {"title": "A suite"},
        "contenders": [{"name": "ours", "ours": True}, {"name": "sdpa", "ours": False}],
        "settings": {"device": device, "timing": "events"},
        "cells": [
            _cell("a", summaries=times, comparisons=[row], load={"sdpa": {"sm_clock": 1755.0, "power": 99.96}}),
            _cell("b", verification={"ours": {"passed": False}, "sdpa": {"passed": True}}, yardsticks={"plain": 1}),
            _cell("c", comparisons=[{**row, "interval": [1.2, None], "verdict": "AMBIGUOUS"}]),
        ],
        "aggregates": [
            {"subject": "ours", "baseline": "sdpa", "geometric_mean": 1.1, "interval": [1.0, 1.2], "worst": 0.9,
             "worst_case": "c", "cells": 2, "verdicts": {"FASTER": 1, "SAME": 3}},
            {"subject": "ours", "baseline": "other", "geometric_mean": 1.1, "interval": [1.0, None], "worst": 0.9,
             "worst_case": "a", "cells": 1, "verdicts": {"SLOWER": 1}},
        ],
        "call_shares": [
            {"subject": "ours", "baseline": "sdpa", "geometric_mean": 0.5, "worst": 0.75, "worst_case": "a", "cells": 2}
        ],
    }  # fmt: skip
    checks = (
        Check("x", Verdict.FAIL, "bad"), Check("y", Verdict.WARN, "odd"), Check("z", Verdict.PASS, "fine"),
        Check("s", Verdict.SKIP, "not here"), Check("t", Verdict.SKIP, "not here"),
    )  # fmt: skip
    environment = {
        "gpu": {"name": "a GPU"} if device == "cuda" else None,
        "processor": "a CPU",
        "packages": {"torch": "2.11"},
    }
    lines = bench_markdown(Report("bench", checks, data, environment, (), "2031-01-02", 61.4)).splitlines()
    unit, ours, base = ("TFLOP/s", "0.46", "0.06") if device == "cuda" else ("GFLOP/s", "456", "56.7")
    assert lines == [
        "## A suite",
        "",
        f"FAIL on {'a GPU' if device == 'cuda' else 'a CPU'}, torch 2.11, 61 s, 2031-01-02",
        "",
        f"| case | ours us ({unit}) | sdpa us ({unit}) | ours / sdpa |",
        "| --- | --- | --- | --- |",
        f"| a | 123 ({ours}) | 12.3 ({base}) 1755 MHz 100.0 W | 1.234 [1.200, 1.260] + |",
        "| b | WRONG | - | - |",
        "| c | - | - | 1.234 ? |",
        "",
        "Ratio: baseline time / ours, above 1 is faster, with a 95% interval; + FASTER, - SLOWER, = SAME, ? AMBIGUOUS.",
        "plain: without what a case does to its scores; ratios are of TFLOP/s of visible work.",
        "",
        "| ratio | geometric mean | worst | worst case | cells | verdicts |",
        "| --- | --- | --- | --- | --- | --- |",
        "| ours / sdpa | 1.100 [1.000, 1.200] | 0.900 | c | 2 | 1 FASTER, 3 SAME |",
        "| ours / other | 1.100 | 0.900 | a | 1 | 1 SLOWER |",
        "",
        "| CPU time of a call | share, geometric mean | worst | worst case | cells |",
        "| --- | --- | --- | --- | --- |",
        "| ours of sdpa | 0.500 | 0.750 | a | 2 |",
        "",
        "- FAIL x: bad",
        "- WARN y: odd",
        "- SKIP: 2 of 5 checks proved nothing (not supported here, or not reached)",
    ]
    data["settings"]["timing"] = "call"
    data |= {"partial": "stopped", "aggregates": [], "call_shares": [], "cells": data["cells"][:1]}
    environment |= {"forced_family": "sm80"}
    text = bench_markdown(Report("bench", (), data, environment, (), "2031-01-02", 0.0)).splitlines()
    assert text[2].endswith("0 s, 2031-01-02, our sm80 kernels forced. PARTIAL: stopped")
    assert text[4:7:2] == [
        "| case | ours us (CPU time) | sdpa us (CPU time) | ours / sdpa |",
        "| a | 123 | 12.3 | 1.234 [1.200, 1.260] + |",
    ]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (100.0, "100"), (99.96, "100.0"), (10.0, "10.0"), (9.994, "9.99"), (0.0, "0.00")]
)
def test_three_digits(value: float | None, text: str) -> None:
    assert number(value) == text
