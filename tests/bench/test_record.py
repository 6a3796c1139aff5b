"""What a report says about a case, at every edge: its checks, marks that may only rise, what remains to be done."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashmoe.errors import ExitCode, ReportError
from flashmoe_tools.bench import cli
from flashmoe_tools.bench.ratchet import (
    Mark,
    architecture,
    check_ratchet,
    device_name,
    evaluate,
    marks_file,
    read_marks,
    write_marks,
)
from flashmoe_tools.bench.record import QUIET, cell_checks, finite, quiet_check
from flashmoe_tools.bench.session import remaining_text
from flashmoe_tools.bench.summary import aggregate, rates, speed_word
from flashmoe_tools.bench.thresholds import RatchetThresholds, load_thresholds
from flashmoe_tools.operations.attention.problem import AttentionProblem
from flashmoe_tools.report import Check, Report, Verdict, read_report, write_report
from tests.bench.synthetic import synthetic_report

LIMITS = RatchetThresholds(fail_below=0.1, propose_above=0.2)
MB = 2**20


def cell(**changes: Any) -> dict[str, Any]:
    """A record of two contenders; ours is twice as fast."""
    outcome = {"passed": True, "max_error": 1e-3, "tolerance": 2e-3, "reason": ""}
    return {
        "case": {"key": "a"},
        "skipped": "",
        "unsupported": {},
        "verification": {"ours": outcome, "base": outcome},
        "summaries": {"ours": {"median_us": 1.0}, "base": {"median_us": 2.0}},
        "comparisons": [{"subject": "ours", "baseline": "base", "verdict": "FASTER", "ratio": 2.0}],
        "peak_bytes": {},
        **changes,
    }


def told(record: dict[str, Any], **options: bool) -> list[tuple[str, str, str]]:
    return [(one.name, str(one.verdict), one.found) for one in cell_checks(record, {"ours"}, "base", **options)]


def test_what_is_said_of_each_contender() -> None:
    base = ("a base", "PASS", "2.0 us, max error 0.001")
    assert told(cell()) == [("a ours", "PASS", "1.0 us, max error 0.001"), base]
    assert told(cell(skipped="out of memory")) == [("a", "SKIP", "out of memory")]
    assert told(cell(unsupported={"fa3": "no f32"}))[0] == ("a fa3", "SKIP", "no f32")
    assert told(cell(summaries={"base": {"median_us": 2.0}})) == [("a ours", "SKIP", "no samples"), base]
    wrong = {"passed": False, "max_error": 1.0, "tolerance": 2e-3, "reason": "far off"}
    assert told(cell(verification={"ours": wrong})) == [("a ours", "FAIL", "far off")]
    right = cell()["verification"]["ours"]
    other = {"ours": right, "base": wrong}  # another library's
    assert told(cell(verification=other))[1] == ("a base", "WARN", "far off")
    for own in ({"ours": wrong}, {"flashmoe-bf16": wrong}):  # otherwise the reference is wrong
        assert told(cell(verification={**other, **own}))[1] == ("a base", "FAIL", "far off")
    assert told(cell(verification={"base": wrong})) == [("a base", "FAIL", "far off")]
    smoke = cell(verification={"ours": wrong, "base": cell()["verification"]["base"]})
    assert told(smoke, smoke=True) == [("smoke a ours", "FAIL", "far off"), ("smoke a base", "PASS", "max error 0.001")]


def test_ours_is_warned_of_where_it_is_slow_by_evidence() -> None:
    stop = load_thresholds().speed.stop

    def row(ratio: float, verdict: str, subject: str = "ours", base: str = "base") -> list[tuple[str, str, str]]:
        return told(cell(comparisons=[{"subject": subject, "baseline": base, "verdict": verdict, "ratio": ratio}]))

    assert row(stop - 0.01, "SLOWER")[0][1:] == ("WARN", f"{stop - 0.01:.2f}x of base, below {stop}: stop and profile")
    for quiet in (row(stop, "SLOWER"), row(stop - 0.01, "AMBIGUOUS"), row(stop - 0.01, "SLOWER", base="other")):
        assert quiet[0][1] == "PASS"
    assert {one[1] for one in row(stop - 0.01, "SLOWER", subject="base", base="ours")} == {"PASS"}


@pytest.mark.parametrize(
    ("ours", "base", "found"),
    [
        (0, 5 * MB, "1.0 us, max error 0.001"),
        (5 * MB, 0, "1.0 us, max error 0.001, peak memory 5.2 MB"),
        (5 * MB, 4 * MB, "1.0 us, max error 0.001, peak memory 5.2 MB (base 4.2 MB)"),
        (20 * MB, 10 * MB, "1.0 us, max error 0.001, peak memory 21.0 MB (base 10.5 MB)"),  # twice as much
        (9 * MB, MB, "1.0 us, max error 0.001, peak memory 9.4 MB (base 1.0 MB)"),  # 8 MB more
        (9 * MB + 1, MB, "peak memory 9.4 MB (base 1.0 MB), 9.0x, above 2x"),
        (21 * MB, 10 * MB, "peak memory 22.0 MB (base 10.5 MB), 2.1x, above 2x"),
    ],
)
def test_memory_is_told_and_warned_of(ours: int, base: int, found: str) -> None:
    peaks = {name: size for name, size in (("ours", ours), ("base", base)) if size}
    (check, other) = cell_checks(cell(peak_bytes=peaks), {"ours"}, "base")
    assert check.found == found
    assert check.verdict is (Verdict.WARN if "above" in found else Verdict.PASS)
    assert "peak" not in other.found


def test_words_that_json_lacks() -> None:
    given = {"a": (1.0, math.inf), "b": [math.nan, {"c": -math.inf}], "d": "inf", "e": 3}
    assert finite(given) == {"a": [1.0, None], "b": [None, {"c": None}], "d": "inf", "e": 3}


def test_a_busy_device_is_one_above_the_limit() -> None:
    machine = load_thresholds().machine
    for device, cpu, gpu, warns in (
        ("cpu", machine.cpu_busy, 1.0, False),
        ("cpu", machine.cpu_busy + 0.01, None, True),
        ("cuda", 1.0, machine.gpu_busy, False),
        ("cuda", None, machine.gpu_busy + 0.01, True),
        ("cuda", 1.0, None, False),
    ):
        check = quiet_check(device, cpu, gpu)
        assert (check is not None) is warns
        assert check is None or (check.name, check.verdict) == (QUIET, Verdict.WARN)


@pytest.mark.parametrize(
    ("ratio", "word"),
    [(0.49, "stop"), (0.5, "caution"), (0.99, "caution"), (1.0, "go on"), (math.inf, "next bottleneck")],
)
def test_words_for_a_speed(ratio: float, word: str) -> None:
    assert speed_word(ratio) == word
    assert speed_word(load_thresholds().speed.next_bottleneck) == "go on"


def test_rates_without_ceilings_and_without_an_interval() -> None:
    case = AttentionProblem(64, 64, 64, 1, 1, 1, False, "f16")
    found = rates(case, 1000.0, None, None)
    assert found["tflops"] == pytest.approx(case.flops / 1e6)
    assert found["gbps"] == pytest.approx(case.bytes_moved / 1000)
    assert [found[name] for name in ("tflops_interval", "share_of_matmul", "share_of_copy")] == [None] * 3
    low, high = rates(case, 1000.0, (500.0, 2000.0), None)["tflops_interval"]
    assert (low, high) == pytest.approx((case.flops / 2e6, case.flops / 0.5e6))
    bound = load_thresholds().speed.launch_bound_us
    assert [rates(case, 1e3 * us, None, None)["launch_bound"] for us in (bound - 0.1, bound)] == [True, False]


def test_several_cases_have_a_worst_one_and_counted_verdicts() -> None:
    row = {"subject": "s", "baseline": "b", "interval": [None, None], "interval_method": "none", "standard_error": None}
    row |= {"p_value": 1.0, "cliffs_delta": 0.0, "blocks": 10}
    cells = [
        {"case": {"key": key}, "comparisons": [{**row, "ratio": ratio, "verdict": verdict}]}
        for key, ratio, verdict in (("x", 2.0, "FASTER"), ("y", 0.5, "SLOWER"), ("z", 1.0, "FASTER"))
    ]
    (found,) = aggregate(cells)
    assert (found["worst"], found["worst_case"], found["cells"]) == (0.5, "y", 3)
    assert found["verdicts"] == {"FASTER": 2, "SLOWER": 1}
    assert found["geometric_mean"] == pytest.approx(1.0)
    assert found["interval"][1] is None


@pytest.mark.parametrize(
    ("done", "left", "budget", "text"),
    [
        (2, 3, None, "about 15 s left"),
        (2, 3, 14.0, "about 4 s left"),
        (2, 3, 5.0, "about 0 s left"),
        (5, 0, None, "done"),
    ],
)
def test_what_is_left_is_told_by_what_was_done(done: int, left: int, budget: float | None, text: str) -> None:
    assert remaining_text(10.0, done, left, budget) == text


# Marks


def ratchet_report(ratio: float, interval: tuple[float | None, float | None], **changes: Any) -> Report:
    row = {
        "subject": "ours",
        "baseline": "base",
        "ratio": ratio,
        "interval": list(interval),
        "verdict": "FASTER",
        **changes,
    }
    data = {"contenders": [{"name": "ours", "ours": True}], "cells": [{"case": {"key": "a"}, "comparisons": [row]}]}
    return Report("bench", (), data, {"gpu": {"name": "NVIDIA Z1", "capability": "9.0"}}, started="now")


MARK = Mark("a", "ours", "base", 2.0, "then")


@pytest.mark.parametrize(
    ("ratio", "interval", "verdict", "proposed"),
    [
        (1.7, (1.6, 1.79), Verdict.FAIL, None),  # the limits require at least 1.8
        (1.7, (1.6, 1.8), Verdict.WARN, None),
        (1.7, (None, None), Verdict.WARN, None),
        (1.8, (1.7, 1.9), Verdict.PASS, None),
        (2.4, (2.1, 2.6), Verdict.PASS, None),  # not above 2.4
        (2.41, (2.0, 2.6), Verdict.PASS, None),  # the interval begins at the mark
        (2.41, (None, None), Verdict.PASS, None),
        (2.41, (2.01, 2.6), Verdict.PASS, 2.41),
    ],
)
def test_a_mark_is_broken_or_raised_by_evidence_alone(
    ratio: float, interval: tuple[float | None, float | None], verdict: Verdict, proposed: float | None
) -> None:
    report = ratchet_report(ratio, interval)
    result = evaluate([MARK], report, LIMITS)
    assert [check.verdict for check in result.checks] == [verdict]
    assert result.proposed == ((MARK,) if proposed is None else (Mark("a", "ours", "base", proposed, "now"),))
    assert result.changed == (proposed is not None)
    text = result.checks[0].found
    assert ("[" in text) is (None not in interval)
    assert text.endswith(": new mark proposed") is (proposed is not None)
    busy = evaluate([MARK], replace(report, checks=(Check(QUIET, Verdict.WARN, "busy"),)), LIMITS)
    is_told = proposed is not None or verdict is Verdict.FAIL
    assert busy.checks[0].verdict is (Verdict.WARN if is_told else verdict)
    assert ("busy" in busy.checks[0].why) is is_told
    assert (busy.proposed, busy.changed) == ((MARK,), 0)


def test_cases_without_a_mark_are_proposed_unless_nothing_is_known_of_them() -> None:
    fresh = ratchet_report(1.5, (1.4, 1.6))
    assert evaluate([], fresh, LIMITS).proposed == (Mark("a", "ours", "base", 1.5, "now"),)
    assert evaluate([], fresh, LIMITS).changed == 1
    for nothing in (
        ratchet_report(1.5, (1.4, 1.6), verdict="AMBIGUOUS"),
        ratchet_report(1.5, (1.4, 1.6), subject="theirs"),
        replace(fresh, checks=(Check(QUIET, Verdict.WARN, "busy"),)),
    ):
        assert evaluate([], nothing, LIMITS).proposed == ()
    for idle in (Check(QUIET, Verdict.PASS, "idle"), Check("a ours", Verdict.WARN, "slow")):
        assert evaluate([], replace(fresh, checks=(idle,)), LIMITS).changed == 1
    result = evaluate([Mark("b", "ours", "base", 2.0, "then")], fresh, LIMITS)
    assert (result.checks[0].verdict, result.checks[0].found) == (Verdict.SKIP, "not measured in this run")


def test_marks_belong_to_a_gpu_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = ratchet_report(2.0, (1.9, 2.1))
    cpu = replace(report, environment={})
    assert (device_name(report), architecture(report)) == ("NVIDIA Z1", "sm90")
    assert (device_name(cpu), architecture(cpu)) == ("cpu", "")
    assert marks_file(tmp_path, report) == tmp_path / "ratchet-nvidia-z1.toml"
    assert marks_file(tmp_path / "mine.toml", report) == tmp_path / "mine.toml"
    path = tmp_path / "new" / "marks.toml"
    write_marks(path, "NVIDIA Z1", [replace(MARK, case="b"), MARK], "sm90")
    assert read_marks(path) == ("NVIDIA Z1", (MARK, replace(MARK, case="b")))
    assert 'arch = "sm90"' in path.read_text()
    assert check_ratchet(path, report) == ExitCode.OK
    assert "proposed" not in capsys.readouterr().out
    write_marks(path, "NVIDIA Z1", [MARK])
    assert "arch" not in path.read_text()
    with pytest.raises(ReportError, match="belongs to NVIDIA Z1, this run was on cpu"):
        check_ratchet(path, cpu)
    path.write_text("schema = 2\n")
    with pytest.raises(ReportError, match="has schema 2; this flashmoe reads 1"):
        read_marks(path)


# The program, on earlier measurements


def test_pages_and_summaries_of_an_old_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "old.json"
    write_report(old, synthetic_report(seed=1))
    before = old.read_bytes()
    parts = {name: tmp_path / "new" / f"file.{name}" for name in ("markdown", "html")}
    words = [word for name, path in parts.items() for word in (f"--{name}", str(path))]
    assert (
        cli.run(_options("--render", str(old), "--json", str(old), *words, "--summary", str(tmp_path / "s.json")))
        == ExitCode.OK
    )
    assert capsys.readouterr().out.strip() == parts["markdown"].read_text().strip()
    assert parts["html"].read_text().startswith("<!")
    assert read_report(tmp_path / "s.json").kind == "bench"
    assert old.read_bytes() == before
    assert cli.run(_options("--compare", str(old), str(old), "--json", str(tmp_path / "c.json"))) == ExitCode.OK
    assert read_report(tmp_path / "c.json").kind == "bench-compare"
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "one.json").write_bytes(before)
    assert cli.run(_options("--index", str(tmp_path / "reports"))) == ExitCode.OK
    assert capsys.readouterr().out.endswith(": 1 reports\n")


def _options(*words: str) -> Any:
    import argparse

    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(words)
