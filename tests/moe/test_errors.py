"""flashmoe.fused_moe, topk_route and grouped_mm reject invalid calls with a typed error that says what to do."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashmoe
from flashmoe import rules
from flashmoe.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeviceError,
    DtypeError,
    FlashmoeError,
    ShapeError,
)
from flashmoe.rules import translate

from .layer import FULL, SMALL, call
from .reference import Inputs, make_inputs

WORDS = {"activation": "swiglu", "layout": "concat", "transposed": False}


def test_a_transposed_weight_is_named(device: str) -> None:
    """The error names w2, not w13, whose expected size is derived from it."""
    inputs = make_inputs(SMALL, device=device)
    for name in ("w13", "w2"):
        wrong = replace(inputs, **{name: getattr(inputs, name).mT.contiguous()})
        with pytest.raises(ShapeError, match=rf"{name} has shape .*; pass {name}\.mT"):
            call(SMALL, wrong)


def wrong_call(inputs: Inputs, changes: dict[str, Any]) -> Tensor:
    names = {name for name in vars(inputs) if name in changes}
    changed = replace(inputs, **{name: changes[name] for name in names})
    return call(FULL, changed, **{name: value for name, value in changes.items() if name not in names})


@pytest.mark.parametrize("changes", [{"x": [1.0]}, {"activation": 1}, {"transposed": "yes"}], ids=str)
def test_arguments_of_a_wrong_type(changes: dict[str, Any]) -> None:
    with pytest.raises(ArgumentTypeError, match=f"{next(iter(changes))} must be"):
        wrong_call(make_inputs(FULL), changes)


@pytest.mark.filterwarnings("ignore::UserWarning")  # from torch, about names and quantization
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["x", "w13", "b2", "topk_weights", "shared"])
def test_tensors_that_no_kernel_reads(name: str) -> None:
    inputs = make_inputs(FULL)
    value = getattr(inputs, name)
    quantized = torch.quantize_per_tensor(value.float(), 0.1, 0, torch.qint8)
    unread = [(quantized, DtypeError, "qint8.*dequantize"), (value.to_sparse(), ArgumentError, "sparse.*densify")]
    if hasattr(Tensor, "rename"):
        unread.append((value.rename(*"ABC"[: value.dim()]), ArgumentError, r"rename\(None\)"))
    for changed, kind, words in unread:
        with pytest.raises(kind, match=f"{name} .*{words}"):
            wrong_call(inputs, {name: changed})


def test_the_operator_and_a_tracer_hear_the_same(device: str) -> None:
    """A call and its description, as for fake tensors, give the same error; tests/arguments tests every rule."""
    names = [*("x", "w13", "w2", "topk_weights", "topk_ids", "b13", "b2", "expert_map", "shared"), *WORDS]
    for change in (
        lambda i: {"w2": i.w2[:-1]},
        lambda i: {"topk_ids": i.topk_ids.float()},
        lambda i: {"activation": "gelu"},
    ):
        inputs = make_inputs(FULL, device=device)
        words = [{**vars(inputs), **WORDS, **change(inputs)}[name] for name in names]
        with pytest.raises((RuntimeError, FlashmoeError)) as caught:
            torch.ops.flashmoe._fused_moe_inference.default(*words)
        with pytest.raises(FlashmoeError, match=re.escape(str(translate(caught.value) or caught.value))):
            rules.check("_fused_moe_inference", words)
        with pytest.raises(FlashmoeError, match=re.escape(str(translate(caught.value) or caught.value))):
            wrong_call(inputs, change(inputs))


@pytest.mark.parametrize("weights_on_input", [False, True])
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (ArgumentTypeError, lambda x: 1.0),
        (DtypeError, lambda x: x.float()),
        (ShapeError, lambda x: x[1:]),
        (ShapeError, lambda x: x[:1].expand_as(x)),
        (ShapeError, lambda x: x.mT.contiguous().mT),
        (DeviceError, lambda x: x.to("meta")),
        (ArgumentError, lambda x: x.clone().requires_grad_()),
    ],
)
def test_an_out_that_does_not_fit(
    kind: type[Exception], change: Callable[[Tensor], Any], weights_on_input: bool, device: str
) -> None:
    inputs = make_inputs(SMALL, device=device)
    with pytest.raises(kind, match="out"):
        call(SMALL, inputs, out=change(inputs.x), weights_on_input=weights_on_input)


def test_out_may_be_an_input_but_no_part_of_shared(device: str) -> None:
    """shared is read while the output is written; everything else is read before."""
    case, inputs = SMALL, make_inputs(SMALL, device=device)
    tokens, hidden = inputs.x.shape
    memory = torch.randn(2 * tokens, 2 * hidden, device=device).to(inputs.x.dtype)
    rows = memory[:tokens, :hidden]
    expected = call(case, inputs, shared=rows)

    def result(out: slice | tuple[slice, slice], shared: Tensor = rows) -> Tensor:
        lent = memory.clone()
        given = lent.as_strided(shared.shape, shared.stride(), shared.storage_offset())
        return call(case, inputs, shared=given, out=lent[out])

    assert torch.equal(result((slice(tokens), slice(hidden))), expected)  # shared itself
    assert torch.equal(result((slice(tokens), slice(hidden, None))), expected)  # the other half of each row
    assert torch.equal(result((slice(tokens, None), slice(hidden))), expected)  # the rows after it
    for start, column in ((1, 0), (0, 8), (1, 8), (tokens - 1, 0)):
        with pytest.raises(ShapeError, match="out overlaps a part of shared"):
            result((slice(start, start + tokens), slice(column, column + hidden)))
    with pytest.raises(ShapeError, match="out overlaps a part of shared"):  # every second row: by its bounds
        result((slice(tokens), slice(hidden)), memory[::2, hidden:])
    x = memory.clone()[1 : tokens + 1, :hidden]
    expected = call(case, replace(inputs, x=x.clone()))
    wide = torch.cat((x.new_zeros(1, hidden), x))
    assert torch.equal(call(case, replace(inputs, x=wide[1:]), out=wide[:-1]), expected)


def test_out_takes_no_gradient_of_weights_on_input() -> None:
    inputs = make_inputs(SMALL)
    inputs.x.requires_grad_()
    with pytest.raises(ArgumentError, match="out= is given, but a gradient is requested"):
        call(SMALL, inputs, out=torch.empty_like(inputs.x), weights_on_input=True)


def test_a_misspelt_keyword_is_told_the_right_one() -> None:
    with pytest.raises(ArgumentTypeError, match=r"fused_moe\(\) has no argument 'activaton': write activation="):
        call(SMALL, make_inputs(SMALL), activaton="swiglu")


@pytest.mark.parametrize("size", ["hidden", "intermediate"])
def test_sizes_on_a_gpu_are_multiples_of_eight(size: str, device: str) -> None:
    case = replace(SMALL, **{size: 12})  # type: ignore[arg-type]
    inputs = make_inputs(case, device=device)
    if device == "cpu":
        call(case, inputs)
        return
    with pytest.raises(ShapeError, match=rf"the {size} size is 12; on a GPU it must be a multiple of 8; pad"):
        call(case, inputs)


@pytest.mark.gpu
def test_float32_on_a_gpu_is_refused() -> None:
    inputs = make_inputs(replace(SMALL, dtype=torch.float32), device="cuda")
    with pytest.raises(DtypeError, match="float16, bfloat16"):
        call(SMALL, inputs)


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {"k": 2.0},
            {"k": True},
            {"groups": True},
            {"renormalize": None},
            {"renormalise": False},
            {"return_counts": 1},
        ),
        *({"scale": True}, {"scale": "1"}, {"scale": torch.ones((), requires_grad=True)}),
    ],
    ids=str,
)
def test_routing_arguments_of_a_wrong_type(changes: dict[str, Any]) -> None:
    values = {"logits": torch.zeros(3, 8), "k": 2, **changes}
    with pytest.raises(ArgumentTypeError):
        flashmoe.topk_route(values.pop("logits"), values.pop("k"), **values)


def test_products_of_two_matrices_have_rules_of_their_own() -> None:
    """They do not use the rules for one matrix per group, which require a third dimension."""
    ends = torch.tensor([2, 5], dtype=torch.int32)
    for a, b, needed in (
        ((16, 5), (6, 8), r"\[5, 8\] \[rows, k\]"),
        ((5, 16), (2, 8, 8), r"\[2, 16, 8\] \[experts, k, n\]"),
    ):
        with pytest.raises(ShapeError, match=f"; {needed} is needed"):
            flashmoe.grouped_mm(torch.zeros(a), torch.zeros(b), ends)


def test_offsets_that_are_no_tensor() -> None:
    with pytest.raises(ArgumentTypeError):
        flashmoe.grouped_mm(torch.zeros(20, 16), torch.zeros(3, 16, 24), [5, 5, 20])  # type: ignore[arg-type]
