"""Serving as an operation of the benchmarks: what a problem counts; right results pass, wrong ones do not."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flashmoe.errors import ArgumentError
from flashmoe_tools.bench.contenders import default_registry
from flashmoe_tools.bench.record import cell_record
from flashmoe_tools.bench.runner import Cell, Timing
from flashmoe_tools.bench.suites import load_suite
from flashmoe_tools.bench.summaries import expand, summarise_bench
from flashmoe_tools.operations import Verification, problem_from_json
from flashmoe_tools.operations.fields import SuiteError
from flashmoe_tools.operations.serving.problem import SPREADS, ServingProblem
from flashmoe_tools.report import Report

DECODE = ServingProblem("f32", 64, 4, 2, batch=3, seq_q=1, seq_k=100, page_size=16)
SHARED = ServingProblem("f32", 64, 4, 2, batch=3, seq_q=1, seq_k=100, page_size=16, spread="shared")
RAGGED = ServingProblem("f32", 64, 4, 2, batch=3, seq_q=90, seq_k=90, spread="ramp")
WINDOW = ServingProblem("f32", 64, 4, 2, batch=2, seq_q=40, seq_k=40, window=7, sinks=True)
CAPPED = ServingProblem("bf16", 64, 4, 2, 3, 1, 100, page_size=16, window=20, softcap=5, deviation=5)
ADDITIVE = ServingProblem("f32", 64, 4, 2, batch=2, seq_q=30, seq_k=50, causal=False, mask="additive")
BOOL = replace(ADDITIVE, mask="bool")


@pytest.mark.parametrize(
    ("problem", "name"),
    [
        (DECODE, "flashmoe"),
        (DECODE, "flashmoe-ragged"),
        (DECODE, "flashmoe-dense"),
        (DECODE, "sdpa"),
        (SHARED, "flashmoe"),
        (RAGGED, "flashmoe"),
        (ServingProblem("bf16", 64, 4, 2, batch=2, seq_q=40, seq_k=40), "sdpa"),
        (ServingProblem("bf16", 64, 4, 2, batch=3, seq_q=7, seq_k=700, page_size=24, spread="one"), "flashmoe"),
        (ServingProblem.smallest(), "flashmoe"),
        *((problem, name) for problem in (WINDOW, CAPPED, ADDITIVE) for name in ("flashmoe", "flashmoe-plain")),
        *((problem, name) for problem in (WINDOW, BOOL) for name in ("flashmoe", "flashmoe-dense")),
        (ADDITIVE, "sdpa"),
    ],
    ids=str,
)
def test_right_results_pass(problem: ServingProblem, name: str) -> None:
    inputs = problem.make_inputs("cpu", 0)
    prepared = default_registry("serving")[name].prepare(inputs)
    lse = None if prepared.lse is None else prepared.lse()
    own = inputs if prepared.own is None else prepared.own
    assert (own.problem == problem) == (name not in ("flashmoe-plain", "flashmoe-dense") or problem == problem.plain)
    verdict = own.problem.make_reference(own).judge(prepared.call(), lse)
    assert verdict.passed, verdict.reason
    assert verdict.coverage == 1.0


def test_a_problem_is_counted_and_read_back() -> None:
    others = [ServingProblem("bf16", 128, 64, 8, 64, 1, 65536, page_size=16, spread=spread) for spread in SPREADS]
    for problem in (DECODE, RAGGED, WINDOW, CAPPED, ADDITIVE, BOOL, *others):
        assert problem_from_json(problem.to_json()) == problem
        assert ServingProblem.from_key(problem.key) == problem
    assert DECODE.bytes_moved == 4 * 64 * (2 * 4 * 3 + 2 * 2 * 300)
    assert SHARED.bytes_moved == 4 * 64 * (2 * 4 * 3 + 2 * 2 * 100)
    assert SHARED.flops == DECODE.flops
    assert DECODE.flops == 4 * 4 * 64 * 300
    assert RAGGED.lengths_q == RAGGED.lengths_k == (30, 60, 90)
    assert RAGGED.flops == 4 * 4 * 64 * (30 * 15 + 60 * 30 + 90 * 45)
    assert WINDOW.flops == 4 * 4 * 64 * 2 * (1 + 2 + 3 + 4 + 5 + 6 + 34 * 7)
    assert CAPPED.flops == 4 * 4 * 64 * 3 * 20
    assert CAPPED.bytes_moved == 2 * 64 * (2 * 4 * 3 + 2 * 2 * 3 * 20)
    assert ADDITIVE.bytes_moved - ADDITIVE.plain.bytes_moved == 4 * 2 * 30 * 50


def test_shared_pages_are_one_sequence_for_all() -> None:
    inputs = SHARED.make_inputs("cpu", 0)
    assert inputs.k.shape == (7, 16, 2, 64)
    assert inputs.block_table is not None
    assert torch.equal(inputs.block_table, inputs.block_table[:1].expand(3, 7))
    assert inputs.block_table[0].sort().values.tolist() == list(range(7))


def test_lengths_of_the_ragged_suite() -> None:
    lengths = {sum(case.lengths_q): case for case in load_suite("ragged").cases if case.head_dim == 128}
    assert {
        16384,
        4096 + 3000 + 2500 + 2000 + 1500 + 1200 + 900 + 600 + 300 + 150 + 100 + 38,
        14000 + 70 * 34,
    } <= lengths.keys()
    long = lengths[14000 + 70 * 34]
    assert long.lengths_k == (14000, *(34,) * 70)
    assert long.fit(["bf16"], 65536) == long
    assert sum(long.fit(["f16"], 16000).lengths_q) <= 16000
    assert ServingProblem("bf16", 64, 1, 1, 8, 2048, 2048).fit(["bf16"], 5000).batch == 2


def test_a_yardstick_is_compared_by_the_work_that_it_does() -> None:
    window = ServingProblem("bf16", 64, 4, 2, batch=1, seq_q=1024, seq_k=1024, window=64)
    cell = Cell(window, timing="events", references={"flashmoe-dense": window.plain})
    for name, time in (("flashmoe", 1000), ("flashmoe-dense", 4000)):
        cell.verified[name] = Verification(True, 0.0, 1.0, None, 1.0)
        cell.timings[name] = Timing([[time, time + 1, time + 2]] * 10)
    record = cell_record(cell, {"flashmoe"}, "flashmoe-dense", None)
    [found] = record["comparisons"]
    assert found["ratio"] == pytest.approx(4 * window.flops / window.plain.flops, rel=1e-2)
    rates = {name: one["tflops"] for name, one in record["summaries"].items()}
    assert found["ratio"] == pytest.approx(rates["flashmoe"] / rates["flashmoe-dense"], rel=1e-3)
    data = {"cells": [record], "ceilings": None, "aggregates": []}
    kept = expand(summarise_bench(Report("bench", (), data))).data["cells"][0]
    assert kept["summaries"]["flashmoe-dense"]["tflops"] == pytest.approx(rates["flashmoe-dense"], rel=1e-3)
    assert kept["yardsticks"] == {"flashmoe-dense": window.plain.to_json()}


def test_a_softcap_that_is_left_out_shows_in_the_log_sum_exp() -> None:
    """If scores hardly reach the curve of the softcap: in bfloat16 the output alone would pass."""
    case = ServingProblem("bf16", 128, 2, 2, batch=1, seq_q=512, seq_k=512, softcap=50)
    inputs = case.make_inputs("cpu", 0)
    plain = default_registry("serving")["flashmoe-plain"].prepare(inputs)
    assert plain.lse is not None
    reference = case.make_reference(inputs)
    assert reference.judge(plain.call()).passed
    assert reference.judge(plain.call(), plain.lse()).reason.startswith("LSE error")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"window": 8, "causal": False}, "causal"),
        ({"mask": "additive"}, "mask"),
        ({"mask": "some"}, "mask"),
        ({"softcap": 0}, "softcap"),
        ({"spread": "shared"}, "spread"),
        ({"deviation": 1.5}, "deviation"),
        ({"sinks": 1}, "sinks"),
    ],
    ids=str,
)
def test_a_case_that_cannot_be_is_refused(changes: dict[str, object], word: str) -> None:
    row = {"head_dim": 64, "heads": 2, "heads_kv": 2, "batch": 1, "seq_q": 8, "seq_k": 8}
    with pytest.raises(SuiteError, match=word):
        list(ServingProblem.expand(row | changes, "mine.toml"))


def test_who_cannot_say_a_case_refuses_it() -> None:
    for problem, name, word in (
        (WINDOW, "sdpa", "window 7, sinks"),
        (DECODE, "flashmoe-plain", DECODE.key),
        (RAGGED, "flashmoe-dense", RAGGED.key),
        (SHARED, "sdpa", "share pages"),
    ):
        with pytest.raises(ArgumentError, match=word):
            default_registry("serving")[name].prepare(problem.make_inputs("cpu", 0))


@pytest.mark.parametrize("problem", [DECODE, RAGGED, WINDOW, CAPPED], ids=str)
def test_flash_attention_3_is_told_where_keys_lie(problem: ServingProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = problem.make_inputs("cpu", 0)
    ours = default_registry("serving")["flashmoe-ragged"].prepare(inputs)
    seen: dict[str, object] = {}

    def paged(*tensors: object, **named: object) -> object:
        seen.update(named, tensors=tensors)
        return ours.call()

    def ragged(*tensors: object, **named: object) -> tuple[object, None]:
        return paged(*tensors, **named), None

    def plan(*sizes: object, **named: object) -> str:
        assert sizes[0] == problem.batch
        assert named["page_size"] == problem.page_size
        return "a plan"

    package = SimpleNamespace(flash_attn_with_kvcache=paged, flash_attn_varlen_func=ragged, get_scheduler_metadata=plan)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    peer = default_registry("serving")["flash-attn-3"]
    assert peer.available("cuda") == ""
    assert problem.make_reference(inputs).judge(peer.prepare(inputs).call()).passed
    assert seen["tensors"] == (inputs.q, inputs.k, inputs.v)
    assert ("page_table" in seen) == bool(problem.page_size)
    assert seen["cu_seqlens_q"] is inputs.cu_seqlens_q
    assert seen.get("window_size") == ((problem.window - 1, 0) if problem.window else None)
    assert seen.get("softcap", 0) == problem.softcap
    assert ("s_aux" in seen) == problem.sinks
    is_decode = bool(problem.page_size) and len(set(problem.lengths_q)) == 1
    assert seen.get("scheduler_metadata") == ("a plan" if is_decode else None)  # made once, outside the call


def test_the_grid_is_bounded_by_memory() -> None:
    suite = load_suite("serving")
    assert {case.page_size for case in suite.cases} == {16, 64, 128, 256}
    assert max(sum(case.lengths_k) for case in suite.cases) <= 4 * 2**20
    row = {"head_dim": 64, "heads": 3, "heads_kv": 2, "batch": 1, "seq_q": 1, "seq_k": 8}
    with pytest.raises(SuiteError, match="heads"):
        list(ServingProblem.expand(row, "mine.toml"))
