"""A layer with e4m3 weights as an operation of the benchmarks: what a problem states, both references, what they reject."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashmoe.errors import ArgumentError
from flashmoe_tools.bench.contenders import default_registry
from flashmoe_tools.bench.suites import load_suite, parse_suite
from flashmoe_tools.operations import problem_from_json, problem_from_key
from flashmoe_tools.operations.fields import SuiteError
from flashmoe_tools.operations.moe import vllm
from flashmoe_tools.operations.moe.problem import MoeProblem
from flashmoe_tools.operations.moe_scaled import formats, peers
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


def by_expert(a: vllm.Scaled, b: vllm.Scaled, rows: Tensor, expert: Tensor) -> Tensor:
    """a[rows] times the weights of each row's expert, float32."""
    left = a[0] if a[1] is None else formats.dequantize(a[0], a[1])
    weights = b[0] if b[1] is None else formats.dequantize(b[0], b[1], formats.BLOCK)
    return torch.einsum("mk,mnk->mn", left.float()[rows], weights.float()[expert.long()])


def fake_deep_gemm() -> Any:
    def product(a: Any, b: Any, out: Tensor, expert: Tensor) -> None:
        assert (len(out), len(out) % 128) == (len(expert), 0)
        out.copy_(by_expert(a, b, torch.arange(len(out)), expert))

    return SimpleNamespace(m_grouped_fp8_gemm_nt_contiguous=product)


def fake_vllm(folder: Path) -> Any:
    """A kernel by definition; the table has one row, with 16 rows per block."""

    def launch(*given: Any, top_k: int, **options: Any) -> None:
        a, b, out, _, a_scale, b_scale, weights, rows, experts, count, n, k, _, slots, *strides = given
        assert (n, k, slots, len(strides)) == (b.shape[1], b.shape[2], len(out), 16)
        assert options["naive_block_assignment"] is (rows is None)
        if rows is None:
            assert int(count) == 16 * slots
            rows, expert = torch.arange(slots), experts
        else:
            assert int(count) == len(rows)
            expert = experts.repeat_interleave(options["BLOCK_SIZE_M"])
        is_slot = rows < slots
        rows, expert = rows[is_slot].long(), expert[is_slot]
        found = by_expert((a, a_scale), (b, b_scale), rows // top_k, expert)
        out[rows] = (found * weights.flatten()[rows, None] if options["MUL_ROUTED_WEIGHT"] else found).to(out.dtype)

    (folder / "configs").mkdir()
    tuned = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1, "num_warps": 4}
    for form in ("", ",dtype=fp8_w8a8,block_shape=[128,128]"):
        name = f"E=8,N=128,device_name=NVIDIA_H200{form}.json"
        (folder / "configs" / name).write_text(json.dumps({"8": tuned}))
    return SimpleNamespace(fused_moe_kernel={(grid,): launch for grid in range(99)}, __file__=str(folder / "it.py"))


@pytest.fixture
def _fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"deep_gemm": fake_deep_gemm(), vllm.MODULE: fake_vllm(tmp_path)}
    for module in (peers, vllm):
        monkeypatch.setattr(module, "import_module", lambda wanted: modules.get(wanted) or SimpleNamespace(bfloat16=0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")


@pytest.mark.usefixtures("_fakes")
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("name", ["deepgemm", "vllm"])
def test_products_alone_are_judged_as_the_layer(name: str, tokens: int) -> None:
    problem = replace(SMALL, tokens=tokens)
    inputs = problem.make_inputs("cpu", 0)
    prepared = default_registry("moe_scaled")[name].prepare(inputs)
    reference = problem.make_reference(inputs)
    judged = [reference.judge(prepared.call()).passed for _ in range(1 + len(inputs.routings))]
    assert judged == [True, *[name == "deepgemm"] * 3, True]
    inputs.w2_scale[inputs.routings[0][0, 0]] *= 2
    assert not reference.judge(
        prepared.call() if name == "deepgemm" else [prepared.call() for _ in range(4)][-1]
    ).passed


@pytest.mark.usefixtures("_fakes")
@pytest.mark.parametrize("tokens", [1, 5])
def test_products_of_sixteen_bits_are_judged_as_the_layer(tokens: int) -> None:
    problem = MoeProblem("bf16", experts=8, top_k=2, hidden=256, intermediate=128, tokens=tokens)
    inputs = problem.make_inputs("cpu", 0)
    prepared, reference = default_registry("moe")["vllm"].prepare(inputs), problem.make_reference(inputs)
    assert reference.judge(prepared.call()).passed
    inputs.w2[inputs.topk_ids[0, 0]] *= 2
    assert not reference.judge(prepared.call()).passed
    with pytest.raises(ArgumentError, match="bf16"):
        default_registry("moe")["vllm"].prepare(replace(inputs, x=inputs.x.half()))
