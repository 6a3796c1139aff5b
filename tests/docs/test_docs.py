"""Generated tables are up to date, and generated from what they claim."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashmoe.errors import ExitCode, ReportError, TableError
from flashmoe_build import docs, speed
from flashmoe_build.links import repository
from flashmoe_tools.report import Check, Report, Verdict, count, read_report, write_report
from flashmoe_tools.report import main as report_main
from flashmoe_tools.tables import load_tables, table_files
from tests.nox_sessions import SESSIONS

ROOT = Path(__file__).resolve().parents[2]
TABLES = load_tables(ROOT / "csrc")


def test_the_committed_tables_are_up_to_date() -> None:
    stale = [
        path.name for path, text in docs.generate(ROOT, TABLES).items() if path.read_text(encoding="utf-8") != text
    ]
    assert stale == [], "run `nox -s docs`"


def test_speeds_in_prose_are_those_of_the_reports() -> None:
    """The tables are generated; a sentence that quotes a report is compared with it here."""
    if not (ROOT / "docs" / "results").is_dir():
        pytest.skip("an sdist is without reports")
    train = speed.aggregates(ROOT, "llm-train")[2]

    def mean(row: dict[str, Any]) -> str:
        return f"{row['geometric_mean']:.2f}"

    backward = (
        f"sm90: {mean(train['sdpa-cudnn'])} of cuDNN's speed, {mean(train['flash-attn-3'])} of FlashAttention-3's fastest mode, "
        f"{mean(train['flash-attn-3-deterministic'])} of its deterministic one"
    )
    message = {
        "docs/performance.md": [
            f"has {mean(train['flash-attn-3'])} times the speed of FlashAttention-3's fastest mode (worst {train['flash-attn-3']['worst']:.2f}:",
            f"{mean(train['flash-attn-3-deterministic'])} times that of its deterministic one",
        ],
        "docs/api.md": [backward],
    }
    for name, sentences in message.items():
        text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
        assert [sentence for sentence in sentences if sentence not in text] == []


def test_the_newest_report_of_a_name_counts(tmp_path: Path) -> None:
    row = {"subject": "flashmoe", "baseline": "sdpa-flash", "geometric_mean": 1.5, "worst": 1.25, "cells": 3}
    data = {"aggregates": [row], "suite": {"cases": 4}}
    for day, folder in (("2026-01-01", "2026-01-01-h100"), ("2026-01-02", "2026-01-02-h100")):
        path = tmp_path / "docs" / "results" / folder / "bench" / "x.json"
        path.parent.mkdir(parents=True)
        report = {"data": data, "environment": {"commit": "0123456789"}, "started": f"{day}T00:00:00"}
        path.write_text(json.dumps(report), encoding="utf-8")
    cells = speed.row_cells(tmp_path, speed.Line("x", "x"), ["sdpa-flash", "sdpa-cudnn"], tmp_path, "h100")
    link = "[2026-01-02](docs/results/2026-01-02-h100/bench/x.json), 0123456"
    assert cells == ("x", "H100", "3 of 4", "1.50, worst 1.25", "", link)
    with pytest.raises(ReportError, match=r"no x\.json .* has flashmoe-sm80"):
        speed.aggregates(tmp_path, "x", "flashmoe-sm80")


def test_cases_newer_than_every_report_leave_a_sentence() -> None:
    assert "does not have these cases" in docs.reported(("case",), [])
    assert docs.reported(("case",), [("8 x 2048",)]).endswith("| 8 x 2048 |")


def test_every_gpu_and_every_row_is_there() -> None:
    text = docs.gpu_table(TABLES)
    assert all(gpu.products in text for gpu in TABLES.gpus)
    page = docs.kernel_page(TABLES)
    assert page.count("\n- **") == len(TABLES.kernels)
    for row in TABLES.kernels:
        assert docs.tile_text(row) in page


def test_a_changed_table_makes_it_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = [path.relative_to(ROOT) for path in table_files(ROOT / "csrc")]
    for name in {*(Path(name) for name, *_ in (*docs.PARTS, *docs.REPORTED)), Path(docs.FIGURE), *tables}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    if (ROOT / "docs" / "results").is_dir():
        (tmp_path / "docs" / "results").symlink_to(ROOT / "docs" / "results")
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    assert docs.main(["--check"]) == 0
    arch = tmp_path / "csrc" / "tables" / "arch.toml"
    text = arch.read_text(encoding="utf-8")
    arch.write_text(text.replace("A100, A30", "A100, A30, A800"), encoding="utf-8")
    load_tables.cache_clear()
    assert docs.main(["--check"]) == 1
    assert "docs/install.md: stale; run `nox -s docs`" in capsys.readouterr().out
    assert docs.main([]) == 0
    assert "A100, A30, A800" in (tmp_path / "docs" / "install.md").read_text(encoding="utf-8")
    assert docs.main(["--check"]) == 0
    load_tables.cache_clear()


def test_a_gpu_that_only_ptx_serves_says_so() -> None:
    gpu = next(gpu for gpu in TABLES.gpus if "sm80" in gpu.families and "sm75" not in gpu.families)
    ptx_only = tuple(replace(row, targets=("compute_80",)) for row in TABLES.kernels if row.family == "sm80")
    row = docs.gpu_row(replace(TABLES, kernels=ptx_only), gpu)
    assert row[3] == "PTX only"
    assert docs.gpu_row(replace(TABLES, kernels=()), gpu)[3] == "none"


def test_a_lost_marker_is_an_error() -> None:
    with pytest.raises(TableError, match=r"x\.md: needs one line '<!-- generated: gpus -->'"):
        docs.replace_part("nothing here", "gpus", "body", "x.md")
    with pytest.raises(TableError):
        docs.replace_part("<!-- end: a -->\n<!-- generated: a -->", "a", "body", "x.md")


def test_only_the_marked_part_changes() -> None:
    text = "before\n<!-- generated: a -->\nold\n<!-- end: a -->\nafter\n"
    assert docs.replace_part(text, "a", "new", "x.md") == text.replace("old", "new")


PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        kept = "results/" not in target or (ROOT / "docs" / "results").is_dir()  # an sdist does not contain them
        if "://" not in target and kept:
            assert (page.parent / target).exists(), target


def test_the_repository_has_one_address() -> None:
    """A release compares `Source` with the repository that it runs in; every other address is derived from it."""
    source = repository()
    owner, name = source.split("/")[-2:]
    pages = f"https://{owner}.github.io/{name}/"
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.urls]")[2].partition("\n[")[0]
    addresses = re.findall(r'^\w+ = "(.*)"$', text, re.MULTILINE)
    assert len(addresses) == 4
    assert all(address == source or address.startswith((f"{source}/", pages)) for address in addresses), addresses
    assert f"]({pages})" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"repository-code: {source}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_results_are_summaries_small_enough_to_review() -> None:
    files = [path for path in (ROOT / "docs" / "results").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 1_000_000
    assert all("samples_ns" not in path.read_text(encoding="utf-8") for path in files)
    assert {path.suffix for path in files} <= {".json", ".jsonl", ".toml", ".txt", ".md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sessions_named_in_the_docs_exist(page: Path) -> None:
    named = set(re.findall(r"nox -s (\w+)", page.read_text(encoding="utf-8"))) - {"SESSION"}
    assert named <= set(SESSIONS)


def test_a_report_is_summarised_with_its_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checks = [Check(f"case {index}", Verdict.PASS, "race" if index % 3 else "wrong result") for index in range(9)]
    checks += [Check("gpu", Verdict.SKIP, "none here"), Check("slow", Verdict.WARN, "3 s", next_step="wait")]
    data = {"totals": {"runs": 9}, "samples": [0.5, 0.1, 0.25, 7.0, 0.123456789], "raw": ["x" * 100] * 200}
    write_report(tmp_path / "a.json", Report("emulation", tuple(checks), data))
    names = [str(tmp_path / "a.json"), str(tmp_path / "kept.json")]
    assert report_main(names) == ExitCode.OK
    kept = read_report(tmp_path / "kept.json")
    assert [(check.name, check.verdict, check.found) for check in kept.checks] == [
        ("slow", Verdict.WARN, "3 s"),
        ("9 checks", Verdict.PASS, "race (6), wrong result (3)"),
        ("gpu", Verdict.SKIP, "none here"),
    ]
    assert kept.verdict is Verdict.WARN
    assert count(kept.checks, Verdict.PASS, Verdict.SKIP) == 10
    assert kept.data == {"totals": {"runs": 9}, "samples": 0.25, "left_out": ["raw"]}
    assert report_main([names[1], names[0]]) == ExitCode.OK
    assert read_report(tmp_path / "a.json") == replace(kept, data={**kept.data, "left_out": ["raw"]})
    assert report_main([*names, "30000"]) == ExitCode.OK
    (tmp_path / "b.json").write_text('{"totals": 1}', encoding="utf-8")
    assert report_main([str(tmp_path / "b.json"), names[1]]) == ExitCode.OK
    assert (tmp_path / "kept.json").read_text(encoding="utf-8") == '{"totals":1}\n'
    assert report_main([str(tmp_path / "gone.json"), names[1]]) == ExitCode.FAILED
    assert report_main([names[0]]) == ExitCode.USAGE
    assert "cannot read the report" in capsys.readouterr().err
