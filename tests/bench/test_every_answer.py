"""What the benchmark harness returns on each side of each limit, and with and without each optional input."""

import argparse
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmoe.errors import ArgumentError, DeviceError, ExitCode, ExtensionError
from flashmoe_tools.bench import cli, compare, contenders, markdown, page, plan, presets, ratchet, session
from flashmoe_tools.bench.statistics import Interval
from flashmoe_tools.bench.suites import load_suite
from flashmoe_tools.bench.verdict import Decision, Reason, Speed
from flashmoe_tools.operations.fields import SuiteError
from flashmoe_tools.report import Check, Report, Verdict

# How many samples


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 400),
    st.integers(1, 12),
    st.lists(st.sampled_from((0.0, 2**-12, 2**-9, 2**-7, 2**-4, 0.5)), min_size=1, max_size=3),
    st.sampled_from((None, 0.0, 0.25, 1.0, 8.0)),
    st.integers(1, 40),
    st.integers(0, 2),
)
def test_a_plan_is_what_time_allows(
    repeats: int, block: int, seconds: list[float], share: float | None, floor: int, untimed: int
) -> None:
    """The same plan, computed again by counting up."""
    a_round = max(sum(seconds), 1e-9)
    longest = 1
    while longest < block and (not untimed or (longest + 1) * a_round <= plan.ROUND_SECONDS):
        longest += 1
    wanted = repeats
    if share is not None:
        rate = longest / (longest + untimed) / a_round  # samples per second
        least = min(floor, repeats, max(plan.MIN_BLOCKS, int(plan.FLOOR_SECONDS * rate)))
        wanted = min(repeats, max(least, int(share * rate)))
    size = next((one for one in range(longest, 0, -1) if one * plan.MIN_BLOCKS <= wanted), 1)
    blocks = next(number for number in range(1, wanted + 2) if number * size >= wanted)
    assert plan.plan_samples(repeats, block, seconds, share, floor, untimed) == plan.Plan(blocks, size)
    assert plan.Plan(blocks, size).samples == blocks * size


@pytest.mark.parametrize(
    ("budget", "elapsed", "work", "before", "share"),
    [
        (None, 1.0, [1.0], 0.0, None), (10.0, 4.0, [1.0], 0.0, 6.0), (10.0, 12.0, [1.0], 1.0, 0.0), (10.0, 0.0, [1.0, 1.0], 0.0, 5.0),
        (11.0, 0.0, [3.0, 1.0], 0.0, 11 * 3.2 / 4.4), (12.0, 0.0, [1.0, 1.0], 2.0, 6.0), (13.0, 0.0, [3.0, 1.0], 1.0, 1 + 11 * 3.2 / 4.4),
        (2.0, 0.0, [3.0, 1.0], 5.0, 1.0),
    ],
)  # fmt: skip
def test_a_cell_s_part_of_the_time(
    budget: float | None, elapsed: float, work: list[float], before: float, share: float | None
) -> None:
    found = plan.share_of_budget(budget, elapsed, work, before)
    assert found == (None if share is None else pytest.approx(share))


# The command line


@pytest.mark.parametrize(
    ("wanted", "devices", "has_gpu", "found"),
    [
        ("auto", [("cpu", "cuda")], True, "cuda"), ("auto", [("cpu", "cuda")], False, "cpu"), ("auto", [("cpu",)], True, "cpu"),
        ("auto", [("cuda",)], True, "cuda"), ("cpu", [("cpu", "cuda"), ("cpu",)], True, "cpu"), ("cuda", [("cpu", "cuda")], True, "cuda"),
        ("cuda", [("cpu",)], True, "this suite runs on cpu, not on cuda"), ("cpu", [("cuda",)], True, "this suite runs on cuda, not on cpu"),
        ("auto", [("cuda",)], False, "no CUDA GPU that torch can use"), ("cuda", [("cpu", "cuda")], False, "no CUDA GPU that torch can use"),
        ("auto", [("cpu",), ("cuda",)], True, "the suites s0, s1 have no device in common; run them one by one"),
    ],
)  # fmt: skip
def test_on_what_a_run_is(
    monkeypatch: pytest.MonkeyPatch, wanted: str, devices: list[tuple[str, ...]], has_gpu: bool, found: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    suites: Any = [SimpleNamespace(name=f"s{number}", devices=own) for number, own in enumerate(devices)]
    if found in ("cpu", "cuda"):
        assert cli.resolve_device(wanted, suites) == found
    else:
        with pytest.raises((ArgumentError, DeviceError), match=f"^{found}"):
            cli.resolve_device(wanted, suites)
    assert cli.default_suite(wanted) == ("llm-prefill" if has_gpu and wanted != "cpu" else "cpu")


def test_suites_that_measure_otherwise_are_not_one() -> None:
    first = load_suite("cpu")
    assert cli.merge([first]) is first
    for change in ({"timing": "graph"}, {"flush_l2": not first.flush_l2}, {"baseline": "other"}, {"operation": "moe"}):
        other = replace(first, name="other", **change)
        message = "are of .* and moe" if "operation" in change else "measure differently"
        with pytest.raises(ArgumentError, match=f"suites {first.name} and other {message}; run them one by one"):
            cli.merge([first, other])
    both = cli.merge(
        [first, replace(first, name="other", title="O", contenders=("x", *first.contenders), cases=first.cases[:1])]
    )
    assert (both.name, both.title, both.cases) == (f"{first.name}+other", f"{first.title} + O", first.cases)
    assert both.contenders == (*first.contenders, "x")


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ((), {}), (("--repeats", "1"), {"repeats": 1}), (("--warm",), {"flush_l2": False}), (("--contenders", "a,b"), {"contenders": ("a", "b")}),
        (("--sustained",), {"timing": "sustained", "flush_l2": False, "block": 1, "repeats": 10}),
        (("--sustained", "--repeats", "3"), {"timing": "sustained", "flush_l2": False, "block": 1, "repeats": 3}),
        (("--dtype", "f16"), {"cases": "f16"}),
    ],
)  # fmt: skip
def test_what_options_change(words: tuple[str, ...], changes: dict[str, Any]) -> None:
    suite, args = load_suite("llm-prefill"), parsed("--preset", "none", *words)
    if "cases" in changes:
        own = tuple(case for case in suite.cases if case.dtype == "f16")
        changes = {"cases": own, "quick_only": tuple(case for case in suite.quick_only if case.dtype == "f16")}
        with pytest.raises(ArgumentError, match=f"suite {suite.name} has no case of dtype f8 or f4; it has "):
            cli.only_dtypes(suite, ["f8", "f4"])
    assert cli.fit_suite(suite, args, "cuda") == replace(suite, **changes)
    if args.sustained:
        with pytest.raises(ArgumentError, match="--sustained follows a GPU's clock and power; this run is on cpu"):
            cli.fit_suite(suite, args, "cpu")
    with pytest.raises(ArgumentError, match="--repeats 0: at least 1"):
        cli.fit_suite(suite, parsed("--repeats", "0"), "cpu")
    key = suite.cases[1].key
    one = cli.fit_suite(suite, parsed("--case", key), "cpu")
    assert ([case.key for case in one.cases], one.quick_only) == ([key], ())
    with pytest.raises(ArgumentError, match=f"suite {suite.name} has no case 'no'; it has {suite.cases[0].key}, "):
        cli.only_cases(suite, [key, "no"])


@pytest.mark.parametrize(
    ("words", "budget"),
    [((), None), (("--quick",), 20.0), (("--time-budget", "3"), 3.0), (("--quick", "--time-budget", "3"), 3.0)],
)
@pytest.mark.parametrize(
    ("stopped", "verdict"),
    [("", Verdict.PASS), ("interrupted", Verdict.PASS), ("late", Verdict.PASS), ("", Verdict.FAIL)],
)
@pytest.mark.parametrize("has_marks", [True, False])
def test_how_a_run_ends(
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    budget: float | None,
    stopped: str,
    verdict: Verdict,
    has_marks: bool,
) -> None:
    seen: list[Any] = []
    report = Report("bench", (Check("c", verdict),), {})
    made = SimpleNamespace(stopped=stopped, run=lambda save: save(report) or report)
    monkeypatch.setattr(session, "Session", lambda _, options, __: seen.append(options.time_budget) or made)
    monkeypatch.setattr(contenders, "default_registry", lambda _: {})
    monkeypatch.setattr(cli, "_write", lambda *_: seen.append("written"))
    monkeypatch.setattr(cli, "_markdown", lambda _: "text")
    monkeypatch.setattr(ratchet, "check_ratchet", lambda *_: 7)
    args = parsed("--suite", "cpu", "--device", "cpu", *words, *(("--ratchet", "m") if has_marks else ()))
    code = cli.run(args)
    expected = ExitCode.INTERRUPTED if stopped == "interrupted" else report.exit_code
    assert code == (7 if has_marks and expected is ExitCode.OK else expected)
    assert seen == [budget, "written", "written"]


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(words)


def test_presets() -> None:
    named = {one.name: one for one in presets.load_presets()}
    for device, name in (
        ("NVIDIA H200", "H100"),
        ("Tesla-T4", "T4"),
        ("NVIDIA A30 PCIe", "A100"),
        ("NVIDIA L40", None),
        ("", None),
    ):
        assert presets.find_preset("auto", device) == named.get(name)  # type: ignore[arg-type]
    assert presets.find_preset("t4", "NVIDIA H200") == named["T4"]
    with pytest.raises(SuiteError, match="no preset 'B7'; known: auto, T4, L4, A100, H100"):
        presets.find_preset("B7", "")
    suite = load_suite("llm-prefill")
    assert presets.apply_preset(suite, None) is suite
    other = replace(suite, kind="distributed")
    assert presets.apply_preset(other, named["T4"]) is other
    without = replace(named["T4"], without=("x",), baseline="y")
    for baseline, own, found in (
        ("x", ("a", "x"), ("y", ("a", "y"))),
        ("a", ("a", "x"), ("a", ("a",))),
        ("z", ("a",), ("z", ("a", "z"))),
    ):
        fitted = presets.apply_preset(replace(suite, baseline=baseline, contenders=own), without)
        assert (fitted.baseline, fitted.contenders) == found


def test_contenders_that_take_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = contenders.Contender("a", "A", ("cpu",), contenders.always, lambda _: None, ours=True)  # type: ignore[arg-type]
    registry = {
        "a": one,
        "b": replace(one, name="b", ours=False),
        "c": replace(one, name="c", devices=("cuda",), ours=False),
    }
    for baseline_only, found in ((False, "ab"), (True, "b")):
        chosen = contenders.choose(registry, ["a", "b", "a", "c"], "cpu", baseline_only=baseline_only)
        assert "".join(each.name for each in chosen) == found
    with pytest.raises(ArgumentError, match="no contender 'd'; known: a, b, c"):
        contenders.choose(registry, ["a", "d", "e"], "cpu", baseline_only=False)
    assert contenders.installed("json")("cpu") == contenders.always("cpu") == ""
    missing = contenders.installed("no_such")("cpu")
    assert missing.startswith("no_such is not usable here: ModuleNotFoundError: No module named")
    (tmp_path / "broken_peer.py").write_text("import os\nos.environ['NO_SUCH_VARIABLE']\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert contenders.installed("broken_peer")("cpu") == "broken_peer is not usable here: KeyError: 'NO_SUCH_VARIABLE'"

    def refuse() -> None:
        raise ExtensionError("gone")

    monkeypatch.setattr(contenders, "import_module", lambda _: SimpleNamespace(load=refuse))
    assert contenders.flashmoe_available("cpu") == "ExtensionError: gone"


# Words


GIB, MIB = 2**30, 2**20


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("memory", GIB, "1.0 GiB"), ("memory", GIB - 1, "1024 MiB"), ("l2_bytes", 50 * MIB, "50 MiB"), ("cpu_busy", 0.256, "26%"),
        ("gpu_busy", 1, "100%"), ("power_limit", 700.0, "700 W"), ("cudnn", 91903, "9.19.3"), ("cudnn", None, "not known"), ("memory", True, "True"),
        ("memory", "x", "x"), ("cores", 4, "4"), ("cores", None, "not known"),
    ],
)  # fmt: skip
def test_values_with_their_units(name: str, value: Any, text: str) -> None:
    assert page.with_unit(name, value) == text
    assert page.flatten({"a": {"b": {name: value}}, "c": 1}) == [(f"a.b.{name}", text), ("c", "1")]


@pytest.mark.parametrize(
    ("environment", "partial", "text"),
    [
        ({"gpu": {"name": "G"}, "processor": "P", "packages": {"torch": "2"}}, "", "SKIP on G, torch 2, 3 s, then"),
        ({"gpu": None, "processor": "P", "forced_family": "sm80"}, "late", "SKIP on P, torch ?, 3 s, then, our sm80 kernels forced. PARTIAL: late"),
        ({"gpu": {}}, "", "SKIP on , torch ?, 3 s, then"),
    ],
)  # fmt: skip
def test_a_headline(environment: dict[str, Any], partial: str, text: str) -> None:
    report = Report(
        "bench", (Check("c", Verdict.SKIP),), {"partial": partial}, environment, started="then", seconds=3.2
    )
    assert markdown._headline(report) == text.replace("SKIP", str(report.verdict))
    device = (environment.get("gpu") or {}).get("name") or environment.get("processor") or "unknown device"
    assert page.device_of(report) == device


def test_a_time() -> None:
    cell = {
        "summaries": {"a": {"median_us": 5.0, "tflops": 2.0}},
        "verification": {"b": {"passed": False}, "c": {"passed": True}},
        "load": {"a": {"sm_clock": 1500.0, "power": None}},
    }
    texts = [markdown._time(cell, name, 1.0) for name in "abcd"]
    assert texts == ["5.00 (2.00) 1500 MHz - W", "WRONG", "-", "-"]
    assert (markdown._time(cell, "a", None), markdown._time(cell, "a", 1e3)) == ("5.00", "5.00 (2000) 1500 MHz - W")
    assert markdown.rate_unit({"settings": {"device": "cpu"}}) == (1e3, "GFLOP/s")
    assert markdown.rate_unit({"settings": {"device": "cuda"}}) == (1.0, "TFLOP/s")


@pytest.mark.parametrize("bounds", [(1.1, 1.3), (None, 1.3), (1.1, None)])
def test_aggregates(bounds: tuple[float | None, float | None]) -> None:
    row = {
        "subject": "s",
        "baseline": "b",
        "geometric_mean": 1.2,
        "interval": bounds,
        "worst": 0.5,
        "worst_case": "k",
        "cells": 3,
    }
    data = {"aggregates": [{**row, "verdicts": {"FASTER": 2, "SAME": 1}}], "call_shares": [row]}
    shown = "1.200 [1.100, 1.300]" if None not in bounds else "1.200"
    assert markdown._aggregates(data)[2] == f"| s / b | {shown} | 0.500 | k | 3 | 2 FASTER, 1 SAME |"
    assert markdown._call_shares(data)[2] == "| s of b | 1.200 | 0.500 | k | 3 |"
    assert markdown._aggregates({"aggregates": []}) == markdown._call_shares({}) == []


def test_problems_of_a_report() -> None:
    checks = tuple(Check(str(verdict.name), verdict, "f") for verdict in Verdict)
    bad = [f"- {one} {one.name}: f" for one in Verdict if one in (Verdict.FAIL, Verdict.WARN)]
    skipped = f"- SKIP: 1 of {len(checks)} checks proved nothing (not supported here, or not reached)"
    assert markdown._problems(Report("bench", checks)) == [*bad, skipped]
    assert markdown._problems(Report("bench", (Check("p", Verdict.PASS),))) == []


@pytest.mark.parametrize("fail_on", [None, *compare.FAIL_ON])
@pytest.mark.parametrize("speed", list(Speed))
@pytest.mark.parametrize("against", ["", "base"])
def test_a_change(fail_on: str | None, speed: Speed, against: str) -> None:
    change = compare.Change(
        "k", "s", against, 1.5, Interval(1.2, float("inf"), "t"), 4, Decision(speed, Reason.FEW_BLOCKS)
    )
    check = compare._check(change, fail_on)
    failing = {None: "", "slower": "SLOWER", "changed": "SLOWER FASTER", "not-same": "SLOWER FASTER AMBIGUOUS"}[
        fail_on
    ].split()
    usual = {"SLOWER": Verdict.WARN, "AMBIGUOUS": Verdict.SKIP}.get(speed.value, Verdict.PASS)
    assert check.verdict is (Verdict.FAIL if speed.value in failing else usual)
    assert check.name == ("k s against base" if against else "k s in raw time")
    assert (check.found, check.next_step) == (
        f"1.500 [1.200, inf] {speed} (few-blocks)",
        "measure more: --repeats, or a longer --time-budget",
    )
    assert compare._change_json(change)["interval"] == [1.2, None]
    assert compare._change_json(replace(change, interval=Interval(1.0, 2.0, "t")))["interval"] == [1.0, 2.0]


def test_who_is_compared() -> None:
    def side(names: str, ours: str, baseline: str, key: str = "k", timing: str = "t") -> Any:
        row = {"median_us": 1.0, "interval_us": [1.0, 1.0], "blocks": 9}
        cell = {
            "case": {"key": key},
            "timing": timing,
            "summaries": dict.fromkeys(names, row),
            "comparisons": [],
            "samples_ns": {},
        }
        return {
            "cells": [cell],
            "contenders": [{"name": one, "ours": one in ours} for one in names],
            "baseline": baseline,
        }

    def subjects(a: Any, b: Any) -> str:
        return "".join(change.subject for change in compare.find_changes(a, b))

    assert subjects(side("abc", "a", "b"), side("abd", "", "b")) == "a"
    assert subjects(side("abc", "", "b"), side("abd", "", "b")) == "ab"
    assert subjects(side("ab", "c", "b"), side("ab", "", "b")) == "ab"
    assert subjects(side("ab", "", "b"), side("ab", "", "b", key="other")) == ""
    assert subjects(side("ab", "", "b"), side("ab", "", "b", timing="u")) == ""
    gone = compare._vanished(side("ab", "", "b"), side("b", "", "b"))
    assert [(one.name, one.verdict, one.found) for one in gone] == [("k a", Verdict.WARN, "only in A")]
    assert compare._counts(["SAME", "FASTER", "SAME"]) == ["1 FASTER, 2 SAME", ""]
    assert compare._counts([]) == ["the two reports have no case in common", ""]


@pytest.mark.parametrize(
    ("passed_a", "passed_b", "is_told"),
    [(True, False, True), (True, True, False), (False, False, False), (None, False, False)],
)
def test_results_that_became_wrong(passed_a: bool | None, passed_b: bool, is_told: bool) -> None:
    def side(passed: bool | None) -> Any:
        rows = {} if passed is None else {"n": {"passed": passed, "reason": "r"}}
        return {"cells": [{"case": {"key": "k"}, "verification": rows}]}

    found = [(one.name, one.found) for one in compare._became_wrong(side(passed_a), side(passed_b))]
    assert found == ([("k n", "wrong in B: r")] if is_told else [])
