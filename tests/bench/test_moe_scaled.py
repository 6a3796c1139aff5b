"""A layer with e4m3 weights as an operation of the benchmarks: what a problem states, both references, what they refuse."""

from __future__ import annotations

import pytest

from flashmoe.errors import ArgumentError
from flashmoe_tools.bench.contenders import default_registry
from flashmoe_tools.bench.suites import load_suite, parse_suite
from flashmoe_tools.operations import problem_from_json, problem_from_key
from flashmoe_tools.operations.fields import SuiteError
from flashmoe_tools.operations.moe_scaled.problem import MoeScaledProblem
from flashmoe_tools.operations.moe_scaled.reference import ScaledInputs, ScaledReference
from flashmoe_tools.profile.resources import build_facts

SMALL = MoeScaledProblem("e4m3", experts=8, top_k=2, hidden=256, intermediate=128, tokens=5)
ROW = {"experts": 8, "top_k": 2, "hidden": 256, "intermediate": 128, "tokens": [1, 8]}


@pytest.fixture(scope="module")
def made() -> tuple[ScaledInputs, ScaledReference]:
    inputs = SMALL.make_inputs("cpu", 0)
    return inputs, SMALL.make_reference(inputs)


def test_a_problem_is_counted_and_read_back() -> None:
    case = load_suite("moe-fp8").cases[0]
    assert problem_from_json(case.to_json()) == problem_from_key(case.key) == case
    assert case.key == "e4m3-e128k8-h2048i768-t1"
    assert case.flops == 6 * 8 * 2048 * 768
    weights = 8 * 3 * 2048 * 768
    assert case.bytes_moved == weights + weights // 4096 + 2 * 2048 * 2
    assert case.fit({"f16"}, 1) == case


@pytest.mark.parametrize(
    ("change", "words"), [({"hidden": 192}, "hidden is 192"), ({"dtype": "bf16"}, "dtype"), ({"top_k": 9}, "top_k")]
)
def test_a_layer_that_cannot_be_is_refused(change: dict[str, int], words: str) -> None:
    suite = {"schema": 1, "name": "mine", "operation": "moe_scaled", "cases": [{**ROW, **change}]}
    with pytest.raises(SuiteError, match=words):
        parse_suite(suite, "mine.toml")
    with pytest.raises(ArgumentError, match="e4m3-e4k2"):
        MoeScaledProblem.from_key("bf16-e8k2-h256i128-t5")


@pytest.mark.parametrize("name", ["flashmoe", "flashmoe-bf16", "torch-grouped"])
def test_right_results_pass_and_calls_take_the_routings_in_turn(
    name: str, made: tuple[ScaledInputs, ScaledReference]
) -> None:
    inputs, reference = made
    prepared = default_registry("moe_scaled")[name].prepare(inputs)
    results = [prepared.call() for _ in range(1 + len(inputs.routings))]
    assert [reference.judge(result).passed for result in results] == [True, False, False, False, True]


def test_the_heaviest_kernel_is_the_gated_product_with_scales() -> None:
    symbols = [f"flashmoe_grouped_gemm_gated{scaled}_sm90_bf16" for scaled in ("", "_scaled")]
    rows = dict.fromkeys(("registers", "stack", "spill_stores", "spill_loads", "static_shared"), 1)
    build = {"units": [{"target": "sm_90a", "kernels": [{"symbol": symbol, **rows} for symbol in symbols]}]}
    assert build_facts(build, SMALL)[0] == symbols[1]
