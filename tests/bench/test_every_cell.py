"""What the benchmark reports for marks, cells, runs and readings, on each side of each limit."""

import inspect
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashmoe.errors import ArgumentError, ReportError
from flashmoe_tools.bench import (
    call_cost,
    contenders,
    index,
    models,
    page,
    ratchet,
    record,
    runner,
    session,
    statistics,
    summaries,
    summary,
    telemetry,
)
from flashmoe_tools.bench.suites import load_suite, parse_suite
from flashmoe_tools.operations import Verification
from flashmoe_tools.operations.fields import SuiteError
from flashmoe_tools.report import Check, Report, Verdict
from tests.bench.synthetic import synthetic_report

# Marks


MARK = ratchet.Mark("k", "s", "b", 2.0, "then")
MORE = "measure more: --repeats"
STEP = "find the commit since then: python -m flashmoe bisect --help"


@pytest.mark.parametrize(
    ("ratio", "interval", "found"),
    [
        (1.9, (1.8, 1.939), (Verdict.FAIL, "1.900 [1.800, 1.939]", STEP, None)), (1.9, (1.8, 1.94), (Verdict.WARN, "1.900 [1.800, 1.940]", MORE, None)),
        (1.94, (1.8, 1.95), (Verdict.PASS, "1.940 [1.800, 1.950]", "", None)), (1.9, (1.8, None), (Verdict.WARN, "1.900", MORE, None)),
        (1.9, (None, 1.5), (Verdict.FAIL, "1.900", STEP, None)), (2.1, (2.01, 2.2), (Verdict.PASS, "2.100 [2.010, 2.200]", "", None)),
        (2.11, (2.01, 2.2), (Verdict.PASS, "2.110 [2.010, 2.200]: new mark proposed", "", 2.11)), (2.11, (2.0, 2.2),
        (Verdict.PASS, "2.110 [2.000, 2.200]", "", None)),
        (2.11, (None, 2.2), (Verdict.PASS, "2.110", "", None)),
    ],
)  # fmt: skip
def test_a_mark(ratio: float, interval: tuple[float | None, float | None], found: tuple[Any, ...]) -> None:
    limits = SimpleNamespace(fail_below=0.03, propose_above=0.05)
    check, new = ratchet._judge(MARK, {"ratio": ratio, "interval": interval}, limits)  # type: ignore[arg-type]
    assert (check.verdict, check.found, check.next_step, new) == found
    assert (check.name, check.expected) == ("k s / b", "mark 2.000, at least 1.940")
    check, new = ratchet._judge(MARK, None, limits)  # type: ignore[arg-type]
    assert (check.verdict, check.found, check.expected, new) == (
        Verdict.SKIP,
        "not measured in this run",
        "mark 2.000",
        None,
    )


@pytest.mark.parametrize("arch", ["", "sm90"])
def test_a_file_of_marks(tmp_path: Path, arch: str) -> None:
    path = tmp_path / "new" / "marks.toml"
    ratchet.write_marks(path, 'A "GPU"', [replace(MARK, case="l"), MARK], arch)
    lines = path.read_text().splitlines()
    assert lines[1:3] == ["schema = 1", 'gpu = "A \\"GPU\\""']
    assert (lines[3] == 'arch = "sm90"') is bool(arch)
    assert ratchet.read_marks(path) == ('A "GPU"', (MARK, replace(MARK, case="l")))
    path.write_text("schema = 2")
    with pytest.raises(ReportError, match=r"marks\.toml has schema 2; this flashmoe reads 1"):
        ratchet.read_marks(path)
    path.write_text("schema = 1")
    with pytest.raises(ReportError, match=r"marks\.toml is not a ratchet file: KeyError"):
        ratchet.read_marks(path)
    for gpu, name, own, file in (
        ({"name": "NVIDIA H200", "capability": "9.0"}, "NVIDIA H200", "sm90", "ratchet-nvidia-h200.toml"),
        ({"name": "X"}, "X", "", "ratchet-x.toml"), (None, "cpu", "", "ratchet-cpu.toml"),
    ):  # fmt: skip
        report = Report("bench", (), {}, {"gpu": gpu})
        assert (ratchet.device_name(report), ratchet.architecture(report)) == (name, own)
        assert ratchet.marks_file(tmp_path, report) == tmp_path / file
        assert ratchet.marks_file(path, report) == path


@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize("ours", [True, False])
def test_marks_that_are_proposed(busy: bool, ours: bool) -> None:
    rows = [{"subject": "s", "baseline": "b", "ratio": ratio, "interval": (ratio, ratio), "verdict": verdict}
            for ratio, verdict in ((3.0, "FASTER"), (1.0, "AMBIGUOUS"), (1.5, "SAME"))]  # fmt: skip
    cells = [
        {"case": {"key": key}, "comparisons": [row, {**row, "subject": "foreign"}]}
        for key, row in zip("kln", rows, strict=True)
    ]
    data = {"contenders": [{"name": "s", "ours": ours}], "cells": cells}
    checks = (Check(record.QUIET, Verdict.WARN if busy else Verdict.PASS),)
    found = ratchet.evaluate(
        [MARK, replace(MARK, case="gone"), replace(MARK, case="n", ratio=9.0)],
        Report("bench", checks, data, started="now"),
    )
    words = [one.verdict for one in found.checks]
    assert words == [Verdict.WARN if busy else Verdict.PASS, Verdict.SKIP, Verdict.WARN if busy else Verdict.FAIL]
    foreign = [] if ours or busy else [("k", "foreign", 3.0), ("n", "foreign", 1.5)]
    kept = [("k", "s", 2.0 if busy else 3.0), ("gone", "s", 2.0), ("n", "s", 9.0)]
    assert [(one.case, one.subject, one.ratio) for one in found.proposed] == [*kept, *foreign]
    assert found.changed == (0 if busy else 1 + len(foreign))


# A run and its cells


@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize(("text", "message"), [("", "ValueError: "), (" \none\ntwo", "ValueError: one")])
def test_a_refusal(is_ours: bool, text: str, message: str) -> None:
    cell = runner.Cell(None)  # type: ignore[arg-type]
    right = Verification(True, 0.0, 0.1, None, 1.0, "")
    cell.verified["a"] = right
    runner._refused(cell, SimpleNamespace(name="a", ours=is_ours), ValueError(text), 0.25)  # type: ignore[arg-type]
    if is_ours:
        wrong = cell.verified["a"]
        assert (wrong.passed, wrong.tolerance, wrong.reason, cell.unsupported) == (False, 0.25, message, {})
    else:
        assert (cell.verified, cell.unsupported) == ({}, {"a": message})


@pytest.mark.parametrize("absent", [{}, {"mine": "gone"}, {"theirs": "gone"}, {"mine": "gone", "theirs": "gone"}])
@pytest.mark.parametrize("stopped", ["", "late"])
def test_what_a_report_says_of_what_was_not_run(absent: dict[str, str], stopped: str) -> None:
    one = contenders.Contender("mine", "", ("cpu",), lambda _: absent.get("mine", ""), lambda _: None, ours=True)  # type: ignore[arg-type]
    other = replace(one, name="theirs", available=lambda _: absent.get("theirs", ""), ours=False)
    suite = replace(load_suite("cpu"), contenders=("mine", "theirs"), baseline="theirs")
    made = (suite, session.Options("cpu"), {"mine": one, "theirs": other})
    if len(absent) == 2:
        with pytest.raises(
            ArgumentError, match=r"has no contender that runs on cpu: {'mine': 'gone', 'theirs': 'gone'}"
        ):
            session.Session(*made)
        with pytest.raises(ArgumentError, match=r"has no contender that runs on cuda: none named"):
            session.Session(suite, session.Options("cuda"), made[2])
        return
    run = session.Session(*made)
    run.stopped, run.quiet = stopped, Check("quiet", Verdict.WARN)
    assert run.baseline == ("" if "theirs" in absent else "theirs")
    rows = [(check.name, check.verdict, check.found) for check in run.report().checks]
    words = {"mine": Verdict.FAIL, "theirs": Verdict.SKIP}
    gone = [(f"contender {name}", words[name], "gone") for name in absent]
    assert rows == [
        ("quiet", Verdict.WARN, ""),
        *gone,
        *((case.key, Verdict.SKIP, stopped or "not reached") for case in suite.cases),
    ]
    assert ("call_shares" in run.report().data) is False
    assert "call_shares" in replace_suite(run, timing="call").report().data


def replace_suite(run: session.Session, **changes: Any) -> session.Session:
    run.suite = replace(run.suite, **changes)
    return run


def test_what_is_told_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="G", major=9, minor=0, multi_processor_count=132, total_memory=7, uuid="u")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(session, "cpu_busy", lambda: 0.9)
    requested: list[Any] = []
    silent = SimpleNamespace(limits=lambda: {"power_limit": 700.0}, reason="", busy=lambda: 0.5)
    monkeypatch.setattr(session.Telemetry, "of_gpu", lambda *of: requested.append(of) or silent)
    run = session.Session.__new__(session.Session)
    for device, family in (("cuda", "sm80"), ("cpu", "")):
        monkeypatch.setenv("FLASHMOE_KERNEL", family)
        run.options, run.quiet = session.Options(device), None
        run._describe_device()
        assert run.environment.get("forced_family") == (family or None)
        assert (run.environment["cpu_busy"], run.environment["device"]) == (0.9, device)
        assert run.quiet is not None
        assert run.quiet.found == f"{device} busy {'50%' if device == 'cuda' else '90%'} of the time before the run"
        gpu = run.environment.get("gpu")
        assert (gpu is not None) is (device == "cuda")
        if gpu:
            assert (gpu["name"], gpu["capability"], gpu["l2_bytes"], gpu["power_limit"]) == ("G", "9.0", None, 700.0)
            assert run.environment["telemetry"] == "NVML"
    assert requested == [("u", 1)]


@pytest.mark.parametrize(
    ("worst", "device", "verdict"),
    [(0.7, "cuda", Verdict.PASS), (0.71, "cuda", Verdict.WARN), (0.71, "cpu", Verdict.SKIP)],
)
def test_the_cost_of_a_call(worst: float, device: str, verdict: Verdict) -> None:
    def cell(key: str, share: float, timing: str = "call", subject: str = "s", baseline: str = "b") -> Any:
        return {
            "timing": timing,
            "case": {"key": key},
            "comparisons": [{"subject": subject, "baseline": baseline, "ratio": 1 / share}],
        }

    cells = [
        cell("x", worst / 4),
        cell("y", worst),
        cell("z", 9.0, timing="wall"),
        cell("z", 9.0, baseline="c"),
        cell("z", 9.0, subject="t"),
    ]
    rows = call_cost.shares(cells, "b")
    assert [(row["subject"], row["cells"], row["worst_case"]) for row in rows] == [("s", 2, "y"), ("t", 1, "z")]
    assert rows[0]["geometric_mean"] == pytest.approx(worst / 2)
    (check,) = call_cost.share_checks(cells, {"s"}, "b", device)
    assert (check.name, check.verdict) == ("CPU time of a call of s", verdict)
    assert check.found == f"{worst / 2:.2f}x of b by geometric mean of 2 cases, at worst {worst:.2f}x (y)"
    assert (check.next_step != "") is (verdict is Verdict.WARN)


# Readings and numbers


@pytest.mark.parametrize(
    ("text", "ticks"),
    [
        ("cpu  1 2 3 40 50 6 7 8 99 99\ncpu0 1\n", (27, 117)),
        ("cpu\n", None),
        ("cpu a b c d e\n", None),
        ("", None),
        (None, None),
    ],
)
def test_processor_ticks(monkeypatch: pytest.MonkeyPatch, text: str | None, ticks: tuple[int, int] | None) -> None:
    def read(*_: object, **__: object) -> str:
        if text is None:
            raise FileNotFoundError
        return text

    monkeypatch.setattr(telemetry.Path, "read_text", read)
    assert telemetry._processor_ticks() == ticks


@pytest.mark.parametrize(
    ("before", "after", "busy"),
    [((1, 10), (3, 18), 0.25), ((1, 10), (1, 10), None), (None, (1, 2), None), ((1, 2), None, None)],
)
def test_the_share_that_others_take(
    monkeypatch: pytest.MonkeyPatch, before: Any, after: Any, busy: float | None
) -> None:
    readings = iter((before, after))
    monkeypatch.setattr(telemetry, "_processor_ticks", lambda: next(readings))
    assert telemetry.cpu_busy(0.0) == busy


@pytest.mark.parametrize("word", ["rng", "random_state"])
def test_the_generator_by_scipys_word_for_it(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    parameter = inspect.Parameter(word, inspect.Parameter.KEYWORD_ONLY)
    monkeypatch.setattr(inspect, "signature", lambda _: inspect.Signature([parameter]))
    assert list(statistics.seeded(1)) == [word]


@pytest.mark.parametrize(
    ("values", "found"),
    [([], 0.0), ([1, 2], 0.0), ([3, 3, 3], 0.0), ([1, 2, 3], 0.0), ([1, 2, 4], -1 / 42), ([1, -1, 1, -1], -0.75)],
)
def test_one_after_the_other(values: list[float], found: float) -> None:
    import numpy as np

    assert statistics.lag_one(np.asarray(values, dtype=np.float64)) == pytest.approx(found)
    assert statistics.locate([[0.0, 0.0]]).spread == 0.0
    assert statistics.locate([[1.0, 2.0, 3.0]]).spread == pytest.approx(0.5)
    assert (
        statistics.cliffs_delta(np.asarray([]), np.asarray([1.0]))
        == statistics.cliffs_delta(np.asarray([1.0]), np.asarray([]))
        == 0.0
    )
    assert statistics.cliffs_delta(np.asarray([1.0, 2.0]), np.asarray([2.0, 3.0])) == 0.75


@pytest.mark.parametrize(
    ("names", "ours", "baseline", "pairs"),
    [
        ("abc", "a", "b", "ab ac"), ("abc", "ab", "c", "ac bc"), ("abc", "", "b", "ab cb"), ("abc", "", "z", "ba ca"), ("", "", "b", ""), ("ab", "ab", "a", ""),
    ],
)  # fmt: skip
def test_pairs(names: str, ours: str, baseline: str, pairs: str) -> None:
    assert summary.pairs_to_compare(list(names), set(ours), baseline) == [tuple(pair) for pair in pairs.split()]
    wanted = baseline if baseline in names else next((one for one in names if one not in ours), "")
    assert record.effective_baseline(list(names), set(ours), baseline) == wanted


def test_a_summary_of_a_cell() -> None:
    report = synthetic_report("latency", timing="graph", wrong="sdpa-cudnn")
    cell = {**report.data["cells"][0], "skipped": "s", "load": {"flashmoe": {"power": 1.0}}}
    kept = summaries._cell(cell)
    assert (kept["skipped"], kept["load"], kept["unsupported"]) == ("s", cell["load"], cell["unsupported"])
    assert kept["contenders"]["sdpa-cudnn"] == {"max_error": 0.7, "reason": "max error 0.7"}
    assert set(kept["contenders"]["flashmoe"]) == {"median_us", "interval_us", "max_error"}
    assert (kept["samples"], kept["blocks"]) == (30, 10)
    bare = summaries._cell({**cell, "skipped": "", "load": {}, "unsupported": {}, "summaries": {}, "comparisons": []})
    assert set(bare) == {"case", "timing", "samples", "blocks", "contenders", "comparisons"}
    assert (bare["samples"], bare["blocks"]) == (0, 0)


@pytest.mark.parametrize("found", ["", "x" * 200])
def test_a_row_of_the_index(tmp_path: Path, found: str) -> None:
    from flashmoe_tools.report import write_report

    report = Report(
        "audit<",
        (Check("a", Verdict.PASS, ""), Check("b", Verdict.WARN, found)),
        {},
        {"processor": "P"},
        started="then",
    )
    write_report(tmp_path / "a b.json", report)
    words = f"{report.verdict} on P, then, a b.json. " + (f"WARN b: {found}"[:120] if found else "")
    assert index._row(tmp_path, tmp_path / "a b.json") == ("then", f"<li>audit&lt;: {words}</li>")
    (tmp_path / "no.json").write_text("[")
    assert index._row(tmp_path, tmp_path / "no.json") is None


@pytest.mark.parametrize(
    ("task", "left"), [("static", "ours base"), ("train", "ours base other"), ("generate", "ours base other eager")]
)
def test_models_that_a_task_takes(task: str, left: str) -> None:
    base = models.Contender("base")
    every = [models.Contender(models.OURS), base, models.Contender("other"), models.Contender("eager")]
    names = [one.name for one in models._able(every, task, base)]
    assert names == left.replace("ours", models.OURS).split()
    assert [
        one.is_ours
        for one in (every[0], models.Contender(models.OURS, models.OURS), models.Contender(models.OURS, "x"), base)
    ] == [*(True, True, False, False)]
    row = {"model": "m", "task": "t", "contender": "c", "tokens_per_s": 1.5, "ms": [1.0, 2.0]}
    text = "m      t            c                         1.5 tokens/s (1.0 to 2.0 ms, 2 samples)"
    assert models._line(row) == text
    assert models._line({**row, "ours_is_faster_by": 1.25}) == f"{text}, ours 1.250x"


def test_how_many_cases_a_suite_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashmoe_tools.bench import suites

    table = {
        "schema": 1,
        "name": "n",
        "cases": [{"batch": 1, "seq": [8, 16, 24], "heads": 1, "head_dim": 64, "dtype": "f32"}],
    }
    monkeypatch.setattr(suites, "MAX_CASES", 3)
    assert len(parse_suite(table, "f").cases) == 3
    monkeypatch.setattr(suites, "MAX_CASES", 2)
    with pytest.raises(SuiteError, match="at most 2 cases in a suite"):
        parse_suite(table, "f")


def test_a_yardstick_of_two_has_one_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    problem = SimpleNamespace(key="k", make_reference=lambda own: made.append(own) or "its own")
    judged: list[Any] = []
    monkeypatch.setattr(
        runner, "verify", lambda _, __, expected: judged.append(expected) or Verification(True, 0.0, 0.1, None, 1.0, "")
    )
    one = contenders.Contender(
        "a",
        "A",
        ("cpu",),
        contenders.always,
        lambda _: contenders.Prepared(print, own=SimpleNamespace(problem=problem)),
    )
    plain = replace(one, name="c", prepare=lambda _: contenders.Prepared(print))
    cell = runner.Cell(SimpleNamespace(key="case"))  # type: ignore[arg-type]
    reference: Any = SimpleNamespace(tolerance=0.1)
    admitted = runner._admit(cell, [one, replace(one, name="b"), plain], None, reference, print)  # type: ignore[arg-type]
    assert [each.contender.name for each in admitted] == ["a", "b", "c"]
    assert (len(made), judged, list(cell.references)) == (1, ["its own", "its own", reference], ["a", "b"])


def test_rows_of_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "describe_case", lambda case: f"case {case}")
    ratio = {"subject": "a", "baseline": "b", "ratio": 2.0, "interval": (1.0, 3.0), "verdict": "FASTER"}
    timed = {"median_us": 2.0, "tflops": 3.0}
    cell = {"case": 1, "verification": {"a": {"passed": True}, "b": {"passed": False, "reason": "r"}}, "summaries": {"a": timed},
            "call_cpu_ns": {"a": [3000, 1000, 9000]},
            "peak_bytes": {"a": 2_500_000}, "comparisons": [ratio, {**ratio, "subject": "z"}], "unsupported": {"c": "no"}}  # fmt: skip
    rows = page.detail_rows({"cells": [cell, cell]}, 10.0)
    shared = {"index": 1, "case": "case 1"}
    assert rows[:3] == [
        {**shared, "name": "a", "outcome": "right", "summary": timed, "rate": 30.0, "cpu_us": 3.0, "peak_mb": 2.5, "ratios": ["2.000 [1.000, 3.000] + b"]},
        {**shared, "name": "b", "outcome": "WRONG: r", "summary": None, "rate": None, "cpu_us": None, "peak_mb": None, "ratios": []},
        {**shared, "name": "c", "summary": None, "outcome": "not timed: no"},
    ]  # fmt: skip
    assert [row["index"] for row in rows] == [1, 1, 1, 2, 2, 2]
    table = {"matmul_tflops": {"f16": 3.0}, "copy_gbps": 4.0, "matmul_of": {"f16": "p"}}
    assert list(page._ceilings({"ceilings": None}, 1.0, "U")) == []
    assert list(page._ceilings({"ceilings": table}, 10.0, "U")) == [
        ("fastest matrix product for f16", "30.0 U (p)"),
        ("copy, read plus written", "4.00 GB/s"),
    ]
    table.pop("matmul_of")
    assert next(page._ceilings({"ceilings": table}, 10.0, "U"))[1] == "30.0 U"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("share", [None, 8.0])
def test_a_cell_without_memory_is_skipped(monkeypatch: pytest.MonkeyPatch, device: str, share: float | None) -> None:
    emptied: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(""))
    monkeypatch.setattr(runner, "_measure", lambda *given: emptied.append(given[4]))

    def full(*_: object) -> Any:
        raise torch.OutOfMemoryError("no room\nat all")

    case = SimpleNamespace(
        key="k", make_inputs=full, make_reference=lambda _: SimpleNamespace(coverage=0.5, tolerance=0.1)
    )
    cell = runner.Cell(case)  # type: ignore[arg-type]
    given: Any = (cell, [], SimpleNamespace(device=device, seed=1), None, share, print)
    runner.run_cell(*given)
    assert (cell.skipped, len(emptied)) == ("out of memory: no room", int(device == "cuda"))
    assert 0.0 < cell.seconds < 60.0
    case.make_inputs, cell.skipped = lambda *_: "inputs", ""
    runner.run_cell(*given)
    assert (cell.skipped, cell.coverage, cell.seconds_before_samples) == ("", 0.5, 0.0)
