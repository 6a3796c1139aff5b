"""Two reports, and a report against marks: what counts as a change, what does not, what fails."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flashmoe.__main__ import main
from flashmoe.errors import ExitCode, ReportError
from flashmoe_tools.bench.compare import (
    compare_files,
    compare_markdown,
    compare_reports,
    decide_change,
    difference,
    read_bench,
)
from flashmoe_tools.bench.markdown import bench_markdown
from flashmoe_tools.bench.page import render_page
from flashmoe_tools.bench.ratchet import Mark, check_ratchet, device_name, evaluate, read_marks, write_marks
from flashmoe_tools.bench.statistics import Interval
from flashmoe_tools.bench.summaries import expand, summarise_bench
from flashmoe_tools.bench.thresholds import load_thresholds
from flashmoe_tools.report import Check, Report, Verdict, write_report
from tests.bench.synthetic import synthetic_report

SPEEDS = {"flashmoe": 0.8, "sdpa-flash": 0.5}


def verdicts(report: Report) -> set[str]:
    return {row["verdict"] for row in report.data["changes"]}


def test_two_runs_of_one_thing_are_the_same() -> None:
    report = compare_reports(
        synthetic_report(speeds=SPEEDS, seed=1), synthetic_report(speeds=SPEEDS, seed=2), "not-same"
    )
    assert len(report.data["changes"]) == 36
    assert verdicts(report) == {"SAME"}
    assert report.exit_code is ExitCode.OK
    text = compare_markdown(report)
    assert "36 SAME" in text
    table = [line for line in text.splitlines() if "|" in line]
    assert len(table) == 36 + 2
    assert {(line[0], line.count("|"), line[-1]) for line in table} == {("|", 6, "|")}


def test_a_slower_machine_alone_is_no_change() -> None:
    everything = {name: 0.6 * speed for name, speed in SPEEDS.items()}
    report = compare_reports(synthetic_report(speeds=SPEEDS, seed=1), synthetic_report(speeds=everything, seed=2))
    assert verdicts(report) <= {"SAME", "AMBIGUOUS"}


def test_a_slower_kernel_fails_only_when_asked_to() -> None:
    a, b = synthetic_report(speeds=SPEEDS, seed=1), synthetic_report(speeds={**SPEEDS, "flashmoe": 0.72}, seed=2)
    assert "SLOWER" in verdicts(compare_reports(a, b))
    assert compare_reports(a, b).verdict is Verdict.WARN
    assert compare_reports(a, b, "slower").exit_code is ExitCode.FAILED
    assert compare_reports(b, a, "slower").exit_code is ExitCode.OK
    assert "FASTER" in verdicts(compare_reports(b, a))
    assert compare_reports(b, a, "not-same").exit_code is ExitCode.FAILED


def test_times_of_another_mode_are_not_compared() -> None:
    report = compare_reports(
        synthetic_report(speeds=SPEEDS, timing="events"), synthetic_report(speeds=SPEEDS, timing="graph")
    )
    assert report.data["changes"] == []
    assert [check.verdict for check in report.checks] == [Verdict.SKIP]


def test_ratios_to_two_baselines_are_not_compared() -> None:
    """Ratios are to each run's own baseline; if the baselines differ, raw times are compared."""
    a, b = synthetic_report(speeds=SPEEDS, seed=1), synthetic_report(speeds=SPEEDS, seed=2)
    b.data["baseline"] = "flashmoe"
    changes = compare_reports(a, b).data["changes"]
    assert changes
    assert {row["against"] for row in changes} == {""}


def test_without_a_common_baseline_raw_times_meet_a_wider_margin() -> None:
    a = synthetic_report(speeds={"flashmoe": 0.8, "sdpa-flash": 0.5}, seed=1)
    b = synthetic_report(speeds={"flashmoe": 0.76, "sdpa-cudnn": 0.7}, seed=2)
    report = compare_reports(a, b)
    assert {row["against"] for row in report.data["changes"]} == {""}
    assert "SLOWER" not in verdicts(report)
    far = compare_reports(a, synthetic_report(speeds={"flashmoe": 0.5, "sdpa-cudnn": 0.7}, seed=2))
    assert verdicts(far) == {"SLOWER"}


def test_an_interval_is_constant_only_where_both_runs_are() -> None:
    still, moving = np.zeros(12), np.linspace(-0.1, 0.1, 12)
    settings = load_thresholds().statistics
    methods = [difference(a, b, 0.95, settings)[1].method for a in (still, moving) for b in (still, moving)]
    assert [method == "constant" for method in methods] == [True, False, False, False]


def test_a_result_that_became_wrong_fails() -> None:
    a = synthetic_report(speeds=SPEEDS)
    report = compare_reports(a, synthetic_report(speeds=SPEEDS, wrong="flashmoe"))
    assert report.exit_code is ExitCode.FAILED
    assert any("wrong in B" in check.found for check in report.checks)


def test_vanished_cases_and_other_devices_are_said() -> None:
    a = synthetic_report(speeds=SPEEDS)
    report = compare_reports(a, synthetic_report(speeds=SPEEDS, partial="interrupted"))
    assert sum(check.found == "only in A" for check in report.checks) == 36
    other = replace(a, environment={"gpu": {"name": "Another GPU", "capability": "8.9"}})
    assert any(check.name == "device" and check.verdict is Verdict.WARN for check in compare_reports(a, other).checks)


def test_nothing_in_common_is_no_pass() -> None:
    report = compare_reports(synthetic_report("decode", speeds=SPEEDS), synthetic_report("science", speeds=SPEEDS))
    assert "no case in common" in compare_markdown(report)
    assert report.exit_code is ExitCode.NOTHING_CHECKED
    empty = replace(synthetic_report(speeds=SPEEDS), data={**synthetic_report(speeds=SPEEDS).data, "cells": []})
    assert compare_reports(empty, empty).exit_code is ExitCode.NOTHING_CHECKED


@pytest.mark.parametrize(
    ("interval", "blocks", "verdict"),
    [
        ((1.03, 1.2), 30, "FASTER"),
        ((0.8, 0.97), 30, "SLOWER"),
        ((0.99, 1.03), 30, "SAME"),
        ((1.01, 1.3), 30, "AMBIGUOUS"),
        ((0.8, 1.2), 30, "AMBIGUOUS"),
        ((1.5, 1.6), 3, "AMBIGUOUS"),
    ],
)
def test_changes_between_runs_need_the_whole_interval(interval: tuple[float, float], blocks: int, verdict: str) -> None:
    limits = load_thresholds().compare
    assert decide_change(Interval(*interval, "percentile"), blocks, 8, 0.02, limits).verdict.value == verdict


def test_a_busy_machine_shows_only_large_changes() -> None:
    warning = Check("quiet machine", Verdict.WARN, "load 13 before the run")
    a = synthetic_report(speeds=SPEEDS, seed=1)
    busy = replace(a, checks=(*a.checks, warning))
    slower = synthetic_report(speeds={**SPEEDS, "flashmoe": 0.65}, seed=2)
    assert verdicts(compare_reports(busy, a)) == {"AMBIGUOUS"}
    assert {row["reason"] for row in compare_reports(busy, slower).data["changes"]} == {"busy-machine"}
    assert "SLOWER" in verdicts(compare_reports(a, slower))
    far = synthetic_report(speeds={**SPEEDS, "flashmoe": 0.3}, seed=2)
    assert "FASTER" in verdicts(compare_reports(far, busy))


def test_damaged_and_foreign_reports_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_report(path, replace(synthetic_report(), kind="audit"))
    with pytest.raises(ReportError, match="expected a bench report"):
        read_bench(path)
    path.write_text("{")
    with pytest.raises(ReportError, match="not JSON"):
        compare_files(path, path)


def marks_of(report: Report, factor: float = 1.0) -> list[Mark]:
    return [
        Mark(cell["case"]["key"], row["subject"], row["baseline"], factor * row["ratio"], "then")
        for cell in report.data["cells"]
        for row in cell["comparisons"]
    ]


def test_the_ratchet_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = synthetic_report(speeds=SPEEDS)
    path = tmp_path / "ratchet-invented-gpu.toml"
    assert device_name(report) == "Invented GPU"
    assert check_ratchet(tmp_path, report) == ExitCode.NOTHING_CHECKED  # no marks yet: only proposals, not a pass
    (tmp_path / "ratchet-invented-gpu.proposed.toml").rename(path)
    assert check_ratchet(tmp_path, report) == ExitCode.OK
    slower = synthetic_report(speeds={**SPEEDS, "flashmoe": 0.7})
    assert check_ratchet(path, slower) == ExitCode.FAILED
    assert "slower than the mark" not in capsys.readouterr().err
    name, marks = read_marks(path)
    assert (name, len(marks)) == ("Invented GPU", 36)
    write_marks(tmp_path / "copy.toml", name, marks)
    assert read_marks(tmp_path / "copy.toml") == (name, marks)
    write_report(tmp_path / "old.json", report)
    assert main(["bench", "--render", str(tmp_path / "old.json"), "--ratchet", str(path)]) == ExitCode.OK
    other = replace(slower, environment={"gpu": {"name": "Invented GPU 2", "capability": "9.0"}})
    with pytest.raises(ReportError, match="belongs to Invented GPU, this run was on Invented GPU 2"):
        check_ratchet(path, other)
    # Of the same architecture, but without its own marks
    assert check_ratchet(tmp_path, other) == ExitCode.NOTHING_CHECKED
    path.write_text("schema = 1\ngpu = 'Invented GPU'\n[[mark]]\nkase = 1\n")
    with pytest.raises(ReportError, match="is not a ratchet file"):
        read_marks(path)


def test_a_summary_stands_for_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A summary is rendered, compared and checked against marks like its report, at a fraction of the size."""
    report = synthetic_report(speeds=SPEEDS, seed=1, blocks=20)
    write_report(tmp_path / "run.json", report)
    assert main(["bench", "--render", str(tmp_path / "run.json"), "--summary", str(tmp_path / "kept.json")]) == 0
    text = (tmp_path / "kept.json").read_text()
    assert "samples_ns" not in text
    assert len(text) < (tmp_path / "run.json").stat().st_size / 4
    kept = read_bench(tmp_path / "kept.json")
    assert kept.verdict is report.verdict
    assert {check.verdict for check in evaluate(marks_of(report), kept).checks} == {Verdict.PASS}
    tables = [bench_markdown(one).splitlines() for one in (kept, report)]
    assert tables[0][42:] == tables[1][42:], "means, worst cases and verdicts; cells may round otherwise"
    assert "</svg>" in render_page(kept)

    other = synthetic_report(speeds={**SPEEDS, "flashmoe": 0.72}, seed=2, blocks=20)
    for a, b in ((kept, other), (other, kept), (kept, kept)):
        whole = [report if one is kept else one for one in (a, b)]
        rows = zip(compare_reports(a, b).data["changes"], compare_reports(*whole).data["changes"], strict=True)
        for of_summary, of_samples in rows:
            assert of_summary["verdict"] == of_samples["verdict"]
            assert of_summary["interval"] == pytest.approx(of_samples["interval"], rel=3e-3)
    assert main(["bench", "--render", str(tmp_path / "kept.json"), "--summary", str(tmp_path / "again.json")]) == 0
    assert (tmp_path / "again.json").read_text() == text
    assert "36 FASTER" in capsys.readouterr().out


def test_a_damaged_summary_is_refused(tmp_path: Path) -> None:
    kept = summarise_bench(synthetic_report(speeds=SPEEDS))
    cells = [{key: value for key, value in kept.data["cells"][0].items() if key != "contenders"}]
    write_report(tmp_path / "kept.json", replace(kept, data={**kept.data, "cells": cells}))
    with pytest.raises(ReportError, match=r"missing or invalid field of flashmoe.bench-summary/1: KeyError\('cont"):
        read_bench(tmp_path / "kept.json")


def test_raw_times_of_summaries_meet_the_wider_margin() -> None:
    def kept(**speeds: float) -> Report:
        return expand(summarise_bench(synthetic_report(speeds=speeds, seed=1)))

    a = kept(flashmoe=0.8, **{"sdpa-flash": 0.5})
    report = compare_reports(a, kept(flashmoe=0.5, **{"sdpa-cudnn": 0.7}))
    assert {row["against"] for row in report.data["changes"]} == {""}
    assert verdicts(report) == {"SLOWER"}
