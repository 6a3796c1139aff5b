"""Runs on the CPU with artificial contenders: what is timed, what is not, what remains after a stop."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashmoe.errors import ArgumentError
from flashmoe_tools.bench import ceilings
from flashmoe_tools.bench.contenders import Contender, Prepared, choose, default_registry
from flashmoe_tools.bench.markdown import bench_markdown
from flashmoe_tools.bench.session import Options, Session
from flashmoe_tools.bench.suites import Suite, parse_suite
from flashmoe_tools.bench.telemetry import Telemetry
from flashmoe_tools.bench.verify import verify
from flashmoe_tools.operations.attention.problem import AttentionProblem
from flashmoe_tools.operations.attention.reference import Inputs, choose_pairs, make_inputs, make_reference
from flashmoe_tools.report import Report, Verdict, read_report, write_report

CASE = AttentionProblem(dtype="f32", batch=2, heads_q=4, heads_kv=2, seq_q=65, seq_k=65, head_dim=40, causal=True)


@pytest.fixture(autouse=True)
def quick_and_steady(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small ceilings, and one thread, so that a busy machine disturbs samples less."""
    monkeypatch.setattr(ceilings, "PRODUCT_SIZE", {"cpu": 128})
    monkeypatch.setattr(ceilings, "COPY_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(ceilings, "SECONDS", {"cpu": 0.01})
    monkeypatch.setattr("flashmoe_tools.bench.session.quiet_check", lambda *_: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def plain(inputs: Inputs) -> torch.Tensor:
    """Attention by definition; causal is aligned bottom-right."""
    group = inputs.problem.heads_q // inputs.problem.heads_kv
    k, v = (one.repeat_interleave(group, dim=1) for one in (inputs.k, inputs.v))
    scores = inputs.q @ k.transpose(-1, -2) * inputs.scale
    if inputs.problem.causal:
        rows, columns = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(rows, columns, dtype=torch.bool).triu(columns - rows + 1), float("-inf"))
    return torch.softmax(scores, dim=-1) @ v


def contender(
    name: str, result: Callable[[Inputs], torch.Tensor], *, ours: bool = False, calls: list[str] | None = None
) -> Contender:
    def prepare(inputs: Inputs) -> Prepared:
        def call() -> torch.Tensor:
            if calls is not None:
                calls.append(name)
            return result(inputs)

        return Prepared(call)

    return Contender(name, name, ("cpu",), lambda _: "", prepare, ours=ours)


def suite(contenders: list[str], **changes: Any) -> Suite:
    table = {
        "schema": 1,
        "name": "test",
        "devices": ["cpu"],
        "repeats": 30,
        "block": 3,
        "baseline": contenders[-1],
        "contenders": contenders,
        "cases": [{"dtype": "f32", "head_dim": 16, "batch": 1, "heads": 2, "seq": [16, 33]}],
    }
    return parse_suite({**table, **changes}, "test")


def run(suite: Suite, registry: list[Contender], **options: Any) -> tuple[Report, Session]:
    session = Session(suite, Options("cpu", **options), {one.name: one for one in registry})
    return session.run(lambda _: None), session


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_the_rule_accepts_plain_attention_and_refuses_a_shifted_row(dtype: str, causal: bool, layout: str) -> None:
    case = AttentionProblem(65, 65, 40, 4, 2, 2, causal, dtype, layout)
    inputs = make_inputs(case, "cpu", seed=3)
    reference = make_reference(inputs)
    expected = plain(Inputs(case, inputs.q.double(), inputs.k.double(), inputs.v.double()))
    torch.testing.assert_close(
        reference.out.double(), expected[[b for b, _ in reference.pairs], [h for _, h in reference.pairs]]
    )
    good = verify(Prepared(lambda: expected.to(inputs.q.dtype)), inputs, reference)
    assert good.passed, good
    shifted = expected.roll(1, dims=2).to(inputs.q.dtype)
    assert not verify(Prepared(lambda: shifted), inputs, reference).passed


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda out: out[:, :, :, :-1], "expected"),
        (lambda out: out.double(), "expected"),
        (lambda out: out.clone().index_fill_(2, torch.tensor([64]), float("nan")), "NaN or Inf"),
        (lambda out: out.clone().index_fill_(2, torch.tensor([64]), 0.0), "exceeds"),
    ],
)
def test_what_a_wrong_result_is_told(spoil: Callable[[torch.Tensor], torch.Tensor], reason: str) -> None:
    inputs = make_inputs(CASE, "cpu", seed=1)
    outcome = verify(Prepared(lambda: spoil(plain(inputs))), inputs, make_reference(inputs))
    assert not outcome.passed
    assert reason in outcome.reason


def test_a_wrong_log_sum_exp_is_refused() -> None:
    inputs = make_inputs(CASE, "cpu", seed=1)
    reference = make_reference(inputs)
    right = reference.lse.reshape(2, 4, 65)
    assert verify(Prepared(lambda: plain(inputs), lambda: right), inputs, reference).passed
    wrong = verify(Prepared(lambda: plain(inputs), lambda: right + 0.001), inputs, reference)
    assert "LSE" in wrong.reason


def test_a_yardstick_is_judged_by_what_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_mask(inputs: Inputs) -> Prepared:
        own = replace(inputs, problem=replace(inputs.problem, causal=False))
        return Prepared(lambda: plain(own), own=own)

    monkeypatch.setenv("FLASHMOE_KERNEL", "sm80")
    case = {"dtype": "f32", "head_dim": 16, "batch": 1, "heads": 2, "seq": 16, "causal": True}
    reference = Contender("full", "full", ("cpu",), lambda _: "", without_mask)
    report, _ = run(suite(["ours", "full"], cases=[case]), [contender("ours", plain, ours=True), reference])
    [cell] = report.data["cells"]
    assert cell["verification"]["full"]["passed"]
    assert cell["yardsticks"]["full"]["key"] == cell["case"]["key"].replace("causal", "full")
    text = bench_markdown(report)
    assert "our sm80 kernels forced" in text.splitlines()[2]
    assert "full: without what a case does to its scores" in text


def test_inputs_are_fresh_but_repeatable() -> None:
    first, again, other = (make_inputs(CASE, "cpu", seed) for seed in (1, 1, 2))
    assert torch.equal(first.q, again.q)
    assert not torch.equal(first.q, other.q)
    assert first.q.abs().sum() > 0


def test_checked_pairs_reach_both_ends() -> None:
    assert len(choose_pairs(2, 8, 10, 10**6)) == 16
    some = choose_pairs(4, 8, 1000, 5000)
    assert (some[0], some[-1], len(some)) == ((0, 0), (3, 7), 5)


def test_a_wrong_result_is_never_timed() -> None:
    calls: list[str] = []
    planted = contender("ours", lambda inputs: plain(inputs) * 1.5, ours=True, calls=calls)
    report, _ = run(suite(["ours", "base"]), [planted, contender("base", plain)])
    assert calls == ["ours"]  # only the check of the smallest problem
    assert report.verdict is Verdict.FAIL
    assert report.data["cells"] == []
    assert "wrong on the smallest problem" in report.data["partial"]


def test_a_result_wrong_at_one_size_is_not_timed_there() -> None:
    calls: list[str] = []

    def from_33_on(inputs: Inputs) -> torch.Tensor:
        out = plain(inputs)
        return out.roll(1, dims=2) if inputs.problem.seq_q == 33 else out

    report, _ = run(
        suite(["ours", "base"]), [contender("ours", from_33_on, ours=True, calls=calls), contender("base", plain)]
    )
    small, large = report.data["cells"]
    assert small["samples_ns"]["ours"]
    assert "ours" not in large["samples_ns"]
    assert large["samples_ns"]["base"]
    assert not large["comparisons"]
    assert report.verdict is Verdict.FAIL
    assert any("s33 ours" in check.name for check in report.checks if check.verdict is Verdict.FAIL)


def test_a_contender_of_ours_that_raises_fails_and_a_foreign_one_is_skipped() -> None:
    def refuse(_: Inputs) -> torch.Tensor:
        raise RuntimeError("no kernel for this")

    report, _ = run(suite(["odd", "base"]), [contender("odd", refuse), contender("base", plain)])
    assert report.verdict is Verdict.PASS
    assert report.data["cells"][0]["unsupported"] == {"odd": "RuntimeError: no kernel for this"}
    assert any(check.verdict is Verdict.SKIP for check in report.checks)
    report, _ = run(suite(["odd", "base"]), [contender("odd", refuse, ours=True), contender("base", plain)])
    assert report.verdict is Verdict.FAIL


def test_a_planted_slowdown_is_found_and_equal_contenders_are_not_told_apart() -> None:
    def busy(inputs: Inputs) -> torch.Tensor:
        end = time.perf_counter_ns() + 2_000_000
        while time.perf_counter_ns() < end:
            pass
        return plain(inputs)

    names = ["slow", "base"]
    report, _ = run(suite(names), [contender("slow", busy, ours=True), contender("base", plain)])
    assert {row["verdict"] for cell in report.data["cells"] for row in cell["comparisons"]} == {"SLOWER"}
    for cell in report.data["cells"]:
        assert cell["summaries"]["slow"]["samples"] == 30
        assert all(len(block) == 3 for block in cell["samples_ns"]["slow"])


def test_the_context_of_a_contender_surrounds_its_calls_alone() -> None:
    inside: list[str] = []

    def watched(name: str) -> Contender:
        @contextlib.contextmanager
        def context() -> Iterator[None]:
            inside.append(name)
            yield
            inside.remove(name)

        def prepare(inputs: Inputs) -> Prepared:
            def call() -> torch.Tensor:
                assert inside == [name]
                return plain(inputs)

            return Prepared(call)

        return Contender(name, name, ("cpu",), lambda _: "", prepare, context)

    report, _ = run(suite(["one", "two"]), [watched("one"), watched("two")])
    assert report.verdict is Verdict.PASS
    assert inside == []


def test_an_interruption_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = 0

    def read(_: Telemetry) -> None:
        """Called after each block: ten in the first cell, then four in the second."""
        nonlocal blocks
        blocks += 1
        if blocks == 14:
            raise KeyboardInterrupt

    monkeypatch.setattr(Telemetry, "read", read)
    monkeypatch.setattr("flashmoe_tools.bench.runner.READ_SECONDS", 0.0)
    report, session = run(suite(["ours", "base"]), [contender("ours", plain, ours=True), contender("base", plain)])
    assert session.stopped == "interrupted"
    write_report(tmp_path / "partial.json", report)
    again = read_report(tmp_path / "partial.json")
    first, second = again.data["cells"]
    assert first["summaries"]["ours"]["samples"] == 30
    assert second["summaries"]["ours"]["samples"] == 12
    assert second["comparisons"][0]["reason"] == "few-blocks"
    assert again.data["partial"] == "interrupted"
    assert json.loads((tmp_path / "partial.json").read_text())["schema"] == "flashmoe.report/1"


def test_a_spent_budget_names_what_was_not_reached() -> None:
    report, _ = run(suite(["one", "base"]), [contender("one", plain), contender("base", plain)], time_budget=1e-3)
    assert report.data["cells"] == []
    assert "was used up with 2 cases left" in report.data["partial"]
    assert sum("time budget" in check.found for check in report.checks) == 2


def test_a_missing_extension_fails_unless_it_was_not_wanted() -> None:
    gone = Contender(
        "ours", "ours", ("cpu",), lambda _: "not built", lambda inputs: Prepared(lambda: plain(inputs)), ours=True
    )
    report, _ = run(suite(["ours", "base"]), [gone, contender("base", plain)])
    assert report.verdict is Verdict.FAIL
    assert "not built" in [check.found for check in report.checks]
    report, _ = run(suite(["ours", "base"]), [gone, contender("base", plain)], baseline_only=True)
    assert report.verdict is Verdict.PASS
    with pytest.raises(ArgumentError, match="no contender that runs on cpu: none named"):
        run(suite(["ours"]), [gone], baseline_only=True)
    with pytest.raises(ArgumentError, match=r"no contender that runs on cpu: .*base.*too old"):
        run(suite(["base"]), [replace(gone, name="base", ours=False, available=lambda _: "too old")])


def test_the_registry_knows_every_backend() -> None:
    registry = default_registry()
    assert {"flashmoe", "flashmoe-sm80", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "sdpa-math", "sdpa-cpu"} <= set(
        registry
    )
    names = [one.name for one in choose(registry, list(registry), "cpu", baseline_only=True)]
    assert names == ["sdpa", "sdpa-math", "sdpa-cpu"]
    with pytest.raises(ArgumentError, match=r"no contender 'sdpa-flsh'; known: flash-attn"):
        choose(registry, ["sdpa-flsh"], "cuda", baseline_only=False)


def test_a_forced_backend_is_really_forced() -> None:
    registry = default_registry()
    inputs = make_inputs(AttentionProblem(8, 8, 16, dtype="f32"), "cpu", seed=0)
    enabled = torch.backends.cuda.flash_sdp_enabled()
    with registry["sdpa-math"].context():
        assert not torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.math_sdp_enabled()
        registry["sdpa-math"].prepare(inputs).call()
    assert torch.backends.cuda.flash_sdp_enabled() == enabled


def test_a_contender_that_cannot_be_warmed_is_left_out() -> None:
    """Like one whose calls cannot be captured into a CUDA graph: its result is right, then it fails."""
    calls = 0

    def once(inputs: Inputs) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if inputs.problem.seq_q == 16 and calls > 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return plain(inputs)

    report, _ = run(suite(["odd", "base"]), [contender("odd", once), contender("base", plain)])
    first, second = report.data["cells"]
    assert "capturing" in first["unsupported"]["odd"]
    assert first["summaries"]["base"]["samples"] == 30
    assert second["summaries"]["odd"]["samples"] == 30


def test_ceilings_are_the_best_of_several_products_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU without a fast f16 product, the ceiling of f16 kernels is a product that they could match."""
    rates = {("f32", 64): 100, ("f32", 128): 200, ("bf16", 64): 300, ("bf16", 128): 250, ("f16", 64): 1}
    tried = []

    def times(device: str, product: ceilings.Product) -> list[int]:
        tried.append(product)
        time = product.flops / rates[product.dtype, product.size] * (0.5 if product.transposed else 1.0)
        return [round(time) + 100, round(time)] if product.dtype != "f16" else [round(2 * ceilings.SLOW)]

    monkeypatch.setattr(ceilings, "_product", times)
    found = ceilings.measure_ceilings("cpu", ["f16", "f32", "f16"])
    assert found.matmul_of == {"f16": "bf16 64 x 64 x 64, B transposed", "f32": "f32 128 x 128 x 128, B transposed"}
    assert found.matmul_tflops == {"f16": pytest.approx(0.6, rel=1e-3), "f32": pytest.approx(0.4, rel=1e-3)}
    assert [(one.size, one.transposed) for one in tried if one.dtype == "f16"] == [(64, False)]
    assert ceilings.product_dtypes("cuda", "f16") == ("f16",)
    monkeypatch.undo()
    monkeypatch.setattr(ceilings, "PRODUCT_SIZE", {"cpu": 64})
    monkeypatch.setattr(ceilings, "SECONDS", {"cpu": 0.01})
    monkeypatch.setattr(ceilings, "COPY_BYTES", {"cpu": 2**20})
    real = ceilings.measure_ceilings("cpu", ["f32"])
    assert real.matmul_tflops["f32"] > 0.0
    assert len(real.samples) == 5


def test_a_report_is_saved_while_it_runs_but_not_after_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that is advanced by 12 s per case; a report is due after 20 s."""
    clock = {"now": 0.0}
    monkeypatch.setattr("flashmoe_tools.bench.session.time.monotonic", lambda: clock["now"])

    def cell(one: Any, *_: Any) -> None:
        clock["now"] += 12.0

    monkeypatch.setattr("flashmoe_tools.bench.session.run_cell", cell)
    saved: list[Report] = []
    cases = [{"dtype": "f32", "head_dim": 16, "batch": 1, "heads": 2, "seq": [8, 9, 10, 11, 12]}]
    session = Session(suite(["base"], cases=cases), Options("cpu"), {"base": contender("base", plain)})
    monkeypatch.setattr(Session, "_record", lambda *_: {})
    monkeypatch.setattr(Session, "report", lambda self: len(self.records))
    session.run(saved.append)
    assert saved == [2, 4]


def test_what_a_report_that_is_saved_on_the_way_has_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Report] = []
    monkeypatch.setattr("flashmoe_tools.bench.session.SAVE_EVERY_SECONDS", 0.0)
    session = Session(suite(["base"]), Options("cpu"), {"base": contender("base", plain)})
    session.run(saved.append)
    assert [check.found for check in saved[0].checks if check.verdict is Verdict.SKIP] == ["not reached"]
