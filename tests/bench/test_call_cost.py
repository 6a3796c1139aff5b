"""The CPU time of an eager call: what is sampled, the share of SDPA's, and the verdict against the limit."""

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashmoe.__main__ import main
from flashmoe_tools.bench.call_cost import share_checks, shares
from flashmoe_tools.bench.contenders import Contender, Prepared
from flashmoe_tools.bench.markdown import bench_markdown
from flashmoe_tools.bench.page import render_page
from flashmoe_tools.bench.sampling import CALL_CALLS, CallSampler, WallSampler, call_time_ns, make_sampler
from flashmoe_tools.bench.session import Options, Session
from flashmoe_tools.bench.suites import Suite, load_suite
from flashmoe_tools.bench.thresholds import load_thresholds
from flashmoe_tools.operations.attention.reference import Inputs
from flashmoe_tools.report import Verdict, read_report

BUSY_SECONDS = 50e-6


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gpu_is_waited_for_in_front_of_each_call_and_behind_the_last(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("wait"))
    waits = ["wait"] if device == "cuda" else []
    call_time_ns(lambda: seen.append("call"), device, 2)
    assert seen == [*waits, "call", "call", *waits]
    seen.clear()
    sampler = CallSampler(device)
    sampler.slot(sampler.prepare(lambda: seen.append("call")), 1)
    assert seen[: len(waits) + 1] == [*waits, "call"]


def _record(key: str, ratios: dict[str, float], timing: str = "call") -> dict[str, Any]:
    rows = [
        {"subject": subject, "baseline": baseline, "ratio": ratio}
        for name, ratio in ratios.items()
        for subject, baseline in [name.split("/")]
    ]
    return {"timing": timing, "case": {"key": key}, "comparisons": rows}


RECORDS = [
    _record("a", {"ours/sdpa": 2.0, "ours/math": 8.0, "second/sdpa": 1.25}),
    _record("b", {"ours/sdpa": 1.6, "ours/math": 9.0, "second/sdpa": 1.0}),
    _record("c", {"ours/sdpa": 0.1}, timing="graph"),
]


def test_shares_are_the_inverse_of_ratios_against_the_baseline_alone() -> None:
    rows = {row["subject"]: row for row in shares(RECORDS, "sdpa")}
    assert set(rows) == {"ours", "second"}
    assert rows["ours"]["geometric_mean"] == pytest.approx(math.sqrt(0.5 * 0.625))
    assert rows["ours"]["worst"] == pytest.approx(0.625)
    assert rows["ours"]["worst_case"] == "b"
    assert rows["ours"]["cells"] == 2
    assert shares(RECORDS, "absent") == []


def test_the_verdict_is_about_the_worst_case_on_a_gpu() -> None:
    checks = share_checks(RECORDS, {"ours", "second"}, "sdpa", "cuda")
    assert [check.verdict for check in checks] == [Verdict.PASS, Verdict.WARN]
    assert "0.56x of sdpa by geometric mean of 2 cases, at worst 0.62x (b)" in checks[0].found
    assert "at most 0.7x" in checks[1].expected
    assert "--case b" in checks[1].next_step
    bar = load_thresholds().call.max_share
    just_over = [_record("a", {"ours/sdpa": 1 / (bar + 0.001)})]
    just_under = [_record("a", {"ours/sdpa": 1 / (bar - 0.001)})]
    assert share_checks(just_over, {"ours"}, "sdpa", "cuda")[0].verdict is Verdict.WARN
    assert share_checks(just_under, {"ours"}, "sdpa", "cuda")[0].verdict is Verdict.PASS
    assert [check.verdict for check in share_checks(RECORDS, {"ours"}, "sdpa", "cpu")] == [Verdict.SKIP]
    assert share_checks(RECORDS, set(), "sdpa", "cuda") == []


def test_a_sample_is_one_call_of_many() -> None:
    calls = []

    def call() -> torch.Tensor:
        end = time.perf_counter() + BUSY_SECONDS
        while time.perf_counter() < end:
            pass
        calls.append(1)
        return torch.empty(0)

    samples = CallSampler("cpu").slot(call, 3)
    assert len(calls) == 3 * (CALL_CALLS + 1)
    assert len(samples) == 3
    assert all(sample >= BUSY_SECONDS * 1e9 for sample in samples)
    assert min(samples) < 3 * BUSY_SECONDS * 1e9  # not the sum over the calls


def test_the_suites_choose_the_sampler() -> None:
    assert isinstance(make_sampler("cpu", "call", flush=False), CallSampler)
    assert isinstance(make_sampler("cpu", "graph", flush=False), WallSampler)
    for name, device in (("call-cost", "cuda"), ("call-cost-cpu", "cpu")):
        suite = load_suite(name)
        assert (suite.timing, suite.devices, suite.baseline) == ("call", (device,), "sdpa")
        assert {"flashmoe", "flashmoe-sdpa", "sdpa", "sdpa-math"} <= set(suite.contenders)


def _busy(name: str, seconds: float, *, ours: bool = False) -> Contender:
    """SDPA after a busy loop on the CPU."""

    def prepare(inputs: Inputs) -> Prepared:
        def call() -> torch.Tensor:
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                pass
            return torch.nn.functional.scaled_dot_product_attention(
                inputs.q, inputs.k, inputs.v, is_causal=inputs.problem.causal
            )

        return Prepared(call)

    return Contender(name, name, ("cpu", "cuda"), lambda _: "", prepare, ours=ours)


def _session(device: str, ours: float, baseline: float) -> Session:
    suite: Suite = load_suite("call-cost" if device == "cuda" else "call-cost-cpu").quick()
    suite = replace(suite, cases=suite.cases[:2], repeats=24, contenders=("ours", "sdpa"))
    registry = {one.name: one for one in (_busy("ours", ours, ours=True), _busy("sdpa", baseline))}
    return Session(suite, Options(device), registry)


def test_a_planted_cost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With half the busy time on our side, on a CPU; page and table are drawn and say what the numbers are."""
    monkeypatch.setattr("flashmoe_tools.bench.session.quiet_check", lambda *_: None)
    report = _session("cpu", 200e-6, 400e-6).run(lambda _: None)
    (row,) = report.data["call_shares"]
    assert 0.4 < row["geometric_mean"] < 0.75
    text = bench_markdown(report)
    assert "CPU time of a call" in text
    assert "ours us (CPU time)" in text
    assert "GFLOP/s" not in text
    assert "CPU time of a call of ours" in {check.name for check in report.checks}
    assert "<html" in render_page(report)


@pytest.mark.gpu
@pytest.mark.parametrize(("ours", "verdict"), [(100e-6, Verdict.PASS), (500e-6, Verdict.WARN)])
def test_a_planted_cost_is_judged_on_a_gpu(ours: float, verdict: Verdict) -> None:
    report = _session("cuda", ours, 400e-6).run(lambda _: None)
    checks = {check.name: check for check in report.checks}
    assert checks["CPU time of a call of ours"].verdict is verdict


def test_the_program_writes_the_shares(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    main(["bench", "--suite", "call-cost-cpu", "--quick", "--device", "cpu", "--dtype", "f32", "--json", str(target)])
    report = read_report(target)
    assert {row["subject"] for row in report.data["call_shares"]} == {"flashmoe", "flashmoe-sdpa"}
    assert report.data["settings"]["timing"] == "call"


@pytest.mark.gpu
def test_the_program_times_calls_on_a_gpu(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    main(["bench", "--suite", "call-cost", "--quick", "--json", str(target)])
    report = read_report(target)
    (ours, sdpa_like) = sorted(report.data["call_shares"], key=lambda row: str(row["subject"]))
    assert ours["subject"] == "flashmoe"
    assert sdpa_like["cells"] == ours["cells"] > 0  # 6 if the time limit of --quick allows
    for cell in report.data["cells"]:
        assert cell["timing"] == "call"
