"""A training step as an operation of the benchmarks: what a problem states, what its judge rejects, a CPU run."""

from pathlib import Path

import pytest

from flashmoe.__main__ import main
from flashmoe_tools.bench.contenders import default_registry
from flashmoe_tools.bench.suites import load_suite, parse_suite
from flashmoe_tools.operations import problem_from_json
from flashmoe_tools.operations.fields import SuiteError
from flashmoe_tools.operations.train_step.problem import TrainStepProblem
from flashmoe_tools.report import read_report

SMALL = TrainStepProblem("bf16", 2, width=64, heads=4, heads_kv=2, ffn=96, vocabulary=50, batch=2, seq=40)
ROW = {"dtype": "f32", "layers": 1, "width": 64, "heads": 4, "heads_kv": 2, "ffn": 8, "vocabulary": 9, "batch": 1}


def test_a_problem_is_counted_and_read_back() -> None:
    assert problem_from_json(SMALL.to_json()) == SMALL
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 64 * 96 * 3
    assert SMALL.parameters == 2 * layer + 50 * 64
    assert SMALL.flops == 6 * SMALL.parameters * 80 + 2 * 7 * 2 * 40 * 40 * 64
    weights = SMALL.make_inputs("cpu", 0).model.parameters()
    assert sum(weight.numel() for weight in weights) == SMALL.parameters


@pytest.mark.parametrize(
    ("change", "words"),
    [({"heads_kv": 3}, "heads"), ({"width": 62}, "width"), ({"width": 12}, "head_dim"), ({"depth": 1}, "depth")],
)
def test_a_shape_that_cannot_be_is_refused(change: dict[str, int], words: str) -> None:
    suite = {"schema": 1, "name": "mine", "operation": "train_step", "cases": [{**ROW, "seq": 16, **change}]}
    with pytest.raises(SuiteError, match=words):
        parse_suite(suite, "mine.toml")


def test_a_wrong_gradient_of_one_weight_is_refused() -> None:
    inputs = SMALL.make_inputs("cpu", 0)
    gradients = [one.clone() for one in default_registry("train_step")["sdpa"].prepare(inputs).call()]
    gradients[1].zero_()  # the first layer's q, k, v
    assert not SMALL.make_reference(inputs).judge(gradients).passed


def test_a_quick_run_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashmoe_tools.bench.session.quiet_check", lambda *_: None)
    target = tmp_path / "a.json"
    quick = ["bench", "--suite", "train-step", "--quick", "--device", "cpu", "--contenders", "flashmoe,sdpa"]
    main([*quick, "--repeats", "5", "--time-budget", "60", "--json", str(target)])
    cells = read_report(target).data["cells"]
    assert [cell["case"]["key"] for cell in cells] == [case.key for case in load_suite("train-step").quick_only]
    assert all(outcome["passed"] for cell in cells for outcome in cell["verification"].values())
