"""flashmoe.fused_moe, topk_route, grouped_mm refuse what they do not take, with a typed error that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashmoe
from flashmoe import rules
from flashmoe.errors import ArgumentError, ArgumentTypeError, DeviceError, DtypeError, ShapeError
from flashmoe.rules import translate

from .layer import FULL, SMALL, call
from .reference import Inputs, make_inputs

Change = Callable[[Inputs], dict[str, Any]]
WRONG: dict[str, tuple[type[Exception], Change]] = {
    "x is no tensor": (ArgumentTypeError, lambda i: {"x": [1.0]}),
    "x has three dimensions": (ShapeError, lambda i: {"x": i.x[None]}),
    "x has another width": (ShapeError, lambda i: {"x": i.x[:, :-1]}),
    "x is sparse": (ArgumentError, lambda i: {"x": i.x.float().to_sparse()}),
    "w13 has another dtype": (DtypeError, lambda i: {"w13": i.w13.float()}),
    "everything is float64": (
        DtypeError,
        lambda i: {n: getattr(i, n).double() for n in ("x", "w13", "w2", "b13", "b2", "shared")},
    ),
    "w13 has odd rows": (ShapeError, lambda i: {"w13": i.w13[:, :-1]}),
    "w2 has fewer experts": (ShapeError, lambda i: {"w2": i.w2[:-1]}),
    "no experts": (ShapeError, lambda i: {"w13": i.w13[:0], "w2": i.w2[:0], "b13": None, "b2": None}),
    "too many experts": (
        ShapeError,
        lambda i: {"w13": i.w13[:1].expand(1025, -1, -1), "w2": i.w2[:1].expand(1025, -1, -1), "b13": None, "b2": None},
    ),
    "ids are floats": (DtypeError, lambda i: {"topk_ids": i.topk_ids.float()}),
    "ids for fewer tokens": (ShapeError, lambda i: {"topk_ids": i.topk_ids[1:], "topk_weights": i.topk_weights[1:]}),
    "ids have one dimension": (
        ShapeError,
        lambda i: {"topk_ids": i.topk_ids[:, 0], "topk_weights": i.topk_weights[:, 0]},
    ),
    "weights for fewer choices": (ShapeError, lambda i: {"topk_weights": i.topk_weights[:, :1]}),
    "weights are float64": (DtypeError, lambda i: {"topk_weights": i.topk_weights.double()}),
    "weights are bfloat16": (DtypeError, lambda i: {"topk_weights": i.topk_weights.bfloat16()}),
    "no choices": (ShapeError, lambda i: {"topk_ids": i.topk_ids[:, :0], "topk_weights": i.topk_weights[:, :0]}),
    "too many choices": (
        ShapeError,
        lambda i: {"topk_ids": i.topk_ids[:, :1].expand(-1, 33), "topk_weights": i.topk_weights[:, :1].expand(-1, 33)},
    ),
    "b13 has another width": (ShapeError, lambda i: {"b13": i.b2}),
    "b2 has another dtype": (DtypeError, lambda i: {"b2": i.b2.float() if i.b2 is not None else None}),
    "expert_map is int64": (DtypeError, lambda i: {"expert_map": torch.zeros(4, dtype=torch.int64, device=i.x.device)}),
    "expert_map has two dimensions": (
        ShapeError,
        lambda i: {"expert_map": torch.zeros(4, 1, dtype=torch.int32, device=i.x.device)},
    ),
    "shared for fewer tokens": (ShapeError, lambda i: {"shared": i.x[1:]}),
    "w2 on another device": (DeviceError, lambda i: {"w2": i.w2.to("meta")}),
    "an unknown activation": (ArgumentError, lambda i: {"activation": "gelu"}),
    "an unknown layout": (ArgumentError, lambda i: {"layout": "blocked"}),
    "an activation that is no text": (ArgumentTypeError, lambda i: {"activation": 1}),
    "transposed is no bool": (ArgumentTypeError, lambda i: {"transposed": "yes"}),
    "transposed without being so": (ShapeError, lambda i: {"transposed": True}),
}


def test_a_transposed_weight_is_named(device: str) -> None:
    """w2 itself, not w13, whose size would follow from it."""
    inputs = make_inputs(SMALL, device=device)
    for name in ("w13", "w2"):
        wrong = replace(inputs, **{name: getattr(inputs, name).mT.contiguous()})
        with pytest.raises(ShapeError, match=rf"{name} has shape .*; give {name}\.mT"):
            call(SMALL, wrong)


def wrong_call(inputs: Inputs, changes: dict[str, Any]) -> Tensor:
    names = {name for name in vars(inputs) if name in changes}
    changed = replace(inputs, **{name: changes[name] for name in names})
    return call(FULL, changed, **{name: value for name, value in changes.items() if name not in names})


@pytest.mark.parametrize("name", WRONG)
def test_typed_errors(name: str, device: str) -> None:
    kind, change = WRONG[name]
    inputs = make_inputs(FULL, device=device)
    with pytest.raises(kind) as caught:
        wrong_call(inputs, change(inputs))
    assert type(caught.value) is kind
    assert ";" in str(caught.value) or "needed" in str(caught.value), "the message says what to do"


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own about names and quantization
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


@pytest.mark.parametrize(
    "name", [name for name, (kind, _) in WRONG.items() if kind is not ArgumentTypeError and "sparse" not in name]
)
def test_the_operator_and_a_tracer_hear_the_same(name: str, device: str) -> None:
    """A call and a description of it, which fake tensors have, break the same rule."""
    kind, change = WRONG[name]
    inputs = make_inputs(FULL, device=device)
    changes = change(inputs)
    values = {**vars(inputs), "activation": "swiglu", "layout": "concat", "transposed": False, **changes}
    order = [
        "x",
        "w13",
        "w2",
        "topk_weights",
        "topk_ids",
        "b13",
        "b2",
        "expert_map",
        "shared",
        "activation",
        "layout",
        "transposed",
    ]
    words = [values[key] for key in order]
    with pytest.raises((RuntimeError, kind)) as caught:
        torch.ops.flashmoe._fused_moe_inference.default(*words)
    assert kind in (type(caught.value), type(translate(caught.value)))
    with pytest.raises(kind):
        rules.check("_fused_moe_inference", words)


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
    """Shared is read while the output is written; all else before."""
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
    assert torch.equal(result((slice(tokens, None), slice(hidden))), expected)  # the rows behind
    for start, column in ((1, 0), (0, 8), (1, 8), (tokens - 1, 0)):
        with pytest.raises(ShapeError, match="out shares memory with a part of shared"):
            result((slice(start, start + tokens), slice(column, column + hidden)))
    with pytest.raises(ShapeError, match="out shares memory with a part of shared"):  # every second row: by its bounds
        result((slice(tokens), slice(hidden)), memory[::2, hidden:])
    x = memory.clone()[1 : tokens + 1, :hidden]
    expected = call(case, replace(inputs, x=x.clone()))
    wide = torch.cat((x.new_zeros(1, hidden), x))
    assert torch.equal(call(case, replace(inputs, x=wide[1:]), out=wide[:-1]), expected)


def test_out_takes_no_gradient_of_weights_on_input() -> None:
    inputs = make_inputs(SMALL)
    inputs.x.requires_grad_()
    with pytest.raises(ArgumentError, match="out= is given, but a gradient is to be recorded"):
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
    ("kind", "changes"),
    [
        (ArgumentError, {"k": 0}),
        (ArgumentError, {"k": 9}),
        (ArgumentError, {"groups": 3}),
        (ArgumentError, {"groups": 4, "topk_groups": 5}),
        (ArgumentError, {"groups": 4, "topk_groups": 1, "k": 3}),
        (ArgumentError, {"scoring": "tanh"}),
        (ArgumentTypeError, {"k": 2.0}),
        (ArgumentTypeError, {"renormalize": None}),
        (ArgumentTypeError, {"k": True}),
        (ArgumentTypeError, {"groups": True}),
        (ArgumentTypeError, {"scale": True}),
        (ArgumentTypeError, {"return_counts": 1}),
        (ArgumentTypeError, {"scale": "1"}),
        (ArgumentTypeError, {"scale": torch.ones((), requires_grad=True)}),
        (ArgumentError, {"scale": float("nan")}),
        (ArgumentError, {"scale": 1e39}),
        (ArgumentTypeError, {"renormalise": False}),
        (DtypeError, {"bias": torch.zeros(8, dtype=torch.float64)}),
        (ShapeError, {"bias": torch.zeros(7)}),
        (DtypeError, {"logits": torch.zeros(3, 8, dtype=torch.int32)}),
        (ShapeError, {"logits": torch.zeros(8)}),
        (ShapeError, {"logits": torch.zeros(1, 1025)}),
    ],
    ids=str,
)
def test_routing_errors(kind: type[Exception], changes: dict[str, Any]) -> None:
    values = {"logits": torch.zeros(3, 8), "k": 2, **changes}
    with pytest.raises(kind) as caught:
        flashmoe.topk_route(values.pop("logits"), values.pop("k"), **values)
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (ShapeError, lambda a, b, o: (a[:, :-1], b, o)),
        (ShapeError, lambda a, b, o: (a, b, o[:-1])),
        (DtypeError, lambda a, b, o: (a, b, o.long())),
        (DtypeError, lambda a, b, o: (a, b.float(), o)),
        (ShapeError, lambda a, b, o: (a, b[None], o)),
        (ShapeError, lambda a, b, o: (a, a, o)),
        (ArgumentTypeError, lambda a, b, o: (a, b, [5, 5, 20])),
    ],
)
def test_grouped_errors(kind: type[Exception], change: Callable[..., tuple[Any, ...]], device: str) -> None:
    a, b = torch.zeros(20, 16, device=device).half(), torch.zeros(3, 16, 24, device=device).half()
    offsets = torch.tensor([5, 5, 20], dtype=torch.int32, device=device)
    with pytest.raises(kind) as caught:
        flashmoe.grouped_mm(*change(a, b, offsets))
    assert type(caught.value) is kind
