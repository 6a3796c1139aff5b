"""The backward pass as an operation of the benchmarks: what a problem states, what its judge rejects, a CPU run."""

import importlib
from pathlib import Path

import pytest

from flashmoe.__main__ import main
from flashmoe.errors import ArgumentError
from flashmoe_tools.bench.cli import only_cases
from flashmoe_tools.bench.compare import compare_reports
from flashmoe_tools.bench.markdown import bench_markdown
from flashmoe_tools.bench.ratchet import Mark, evaluate
from flashmoe_tools.bench.suites import load_suite
from flashmoe_tools.operations import problem_from_json, problem_type
from flashmoe_tools.operations.attention.problem import AttentionProblem
from flashmoe_tools.operations.attention_backward.problem import AttentionBackwardProblem
from flashmoe_tools.profile.resources import slowest_case
from flashmoe_tools.report import Verdict, read_report


def test_a_problem_is_named_counted_and_read_back() -> None:
    forward = AttentionProblem.from_key("bf16-d128-causal-b4-h16-s4096")
    backward = AttentionBackwardProblem.from_key(f"backward-{forward.key}")
    assert backward.key == f"backward-{forward.key}"
    assert problem_from_json(backward.to_json()) == backward
    assert problem_type("attention_backward") is AttentionBackwardProblem
    assert 2 * backward.flops == 5 * forward.flops
    rows = forward.batch * forward.heads_q * forward.seq_q
    assert backward.bytes_moved == 2 * forward.bytes_moved + 4 * rows
    with pytest.raises(ArgumentError, match="is not a case key"):
        AttentionProblem.from_key(backward.key)  # a report of one is not mistaken for the other


@pytest.mark.parametrize("operation", ["attention", "attention_backward"])
def test_values_may_have_columns_of_their_own(operation: str) -> None:
    """Values with a different number of columns: named, counted, and judged.

    Our result on the CPU passes; a value off by a tenth does not.
    """
    kind, tools = problem_type(operation), importlib.import_module(f"flashmoe_tools.operations.{operation}.reference")
    contenders = importlib.import_module(f"flashmoe_tools.operations.{operation}.contenders").contenders()
    name = "bf16-d192v128-causal-b1-h2-s64-bshd"
    problem = kind.from_key(name if operation == "attention" else f"backward-{name}")
    assert problem.key.endswith(name)
    assert problem_from_json(problem.to_json()) == problem
    assert problem.flops == 2 * 64 * 64 * (192 + 128 if operation == "attention" else 3 * 192 + 2 * 128)
    inputs = tools.make_inputs(problem, "cpu", 1)
    result = contenders[0].prepare(inputs).call()
    reference = tools.make_reference(inputs)
    assert reference.judge(result).passed
    of_values = result if operation == "attention" else result[2]
    assert of_values.shape == (1, 2, 64, 128)
    of_values[0, 1, 3, 127] += 0.1
    assert not reference.judge(result).passed


def test_the_grid_is_that_of_prefill_and_quick_rows_stay_out_of_it() -> None:
    suite = load_suite("llm-train")
    prefill = [f"backward-{case.key}" for case in load_suite("llm-prefill").cases if case.dtype == "bf16"]
    assert sorted(case.key for case in suite.cases) == sorted(prefill)
    quick = suite.quick()
    assert not {case.key for case in quick.cases} & {case.key for case in suite.cases}
    named = only_cases(suite, [suite.cases[0].key]).quick()
    assert named.cases == suite.cases[:1]


def test_forward_with_backward_is_an_operation_of_its_own() -> None:
    backward = load_suite("llm-train").cases[0]
    training = problem_type("attention_training").from_json(backward.to_json() | {"operation": "attention_training"})
    assert training.key == backward.key.replace("backward-", "training-")
    assert 5 * training.flops == 7 * backward.flops
    assert problem_from_json(training.to_json()) == training


def test_a_quick_run_on_the_cpu_is_written_compared_and_held_to_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashmoe_tools.bench.session.quiet_check", lambda *_: None)
    target, page = tmp_path / "a.json", tmp_path / "a.html"
    quick = ["bench", "--suite", "llm-train", "--quick", "--device", "cpu", "--repeats", "5", "--time-budget", "120"]
    main([*quick, "--json", str(target), "--html", str(page)])
    report = read_report(target)
    keys = {case.key for case in load_suite("llm-train").quick_only}
    assert {cell["case"]["key"] for cell in report.data["cells"]} == keys
    for cell in report.data["cells"]:
        assert set(cell["verification"]) == {"flashmoe", "sdpa"}
        assert all(outcome["passed"] for outcome in cell["verification"].values())
    assert "backward-bf16" in bench_markdown(report)
    assert "backward bf16" in page.read_text()
    marks = [Mark(key, "flashmoe", "sdpa", 0.01, "") for key in sorted(keys)]
    assert all(check.verdict is Verdict.PASS for check in evaluate(marks, report).checks)
    changes = compare_reports(report, report)
    assert {change["case"] for change in changes.data["changes"]} == keys
    assert not any(check.verdict is Verdict.FAIL for check in changes.checks)
    assert slowest_case(report.data).key in keys  # what profile runs
