"""torch.func over flashmoe.attention, scaled_dot_product_attention and the operator itself: the same rules for all."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functional_call, functionalize, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import flashmoe
from flashmoe import _extension
from flashmoe.errors import DifferentiationError, ShapeError

from .reference import Problem, make_inputs

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch itself uses it
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def _attention(
    q: Tensor, k: Tensor, v: Tensor
) -> Tensor:  # flashmoe's names are looked up on use, which loads the extension
    return flashmoe.attention(q, k, v)


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flashmoe.scaled_dot_product_attention(q, k, v)


def _operator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    _extension.load()
    out: Tensor = torch.ops.flashmoe.flash_attention_forward(q, k, v, q.shape[-1] ** -0.5, False)[0]
    return out


def _lse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flashmoe.attention(q, k, v, return_lse=True)[1]


FUNCTIONS: dict[str, Function] = {"attention": _attention, "operator": _operator, "lse": _lse, "sdpa": _sdpa}


@pytest.fixture
def tensors(device: str) -> tuple[Tensor, Tensor, Tensor]:
    return make_inputs(Problem(20, 30, 16, 4, 4, batch=2), device, torch.float16)


@pytest.fixture(params=FUNCTIONS)
def function(request: pytest.FixtureRequest) -> Function:
    return FUNCTIONS[request.param]


def _loss(function: Function) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: function(q, k, v).float().square().sum()


def test_grad_and_vjp(function: Function, tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    _loss(function)(*leaves).backward()
    for actual, leaf in zip(grad(_loss(function), (0, 1, 2))(*tensors), leaves, strict=True):
        torch.testing.assert_close(actual, torch.zeros_like(actual) if leaf.grad is None else leaf.grad)
    _, pull = vjp(_loss(function), *tensors)
    assert torch.equal(pull(torch.ones((), device=tensors[0].device))[0], grad(_loss(function))(*tensors))


DIMS = st.tuples(*(st.one_of(st.none(), st.integers(0, 4)) for _ in range(3))).filter(lambda dims: set(dims) != {None})


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(dims=(1, 0, 3), count=2, batch=2)
@example(dims=(4, None, None), count=2, batch=2)
@given(dims=DIMS, count=st.integers(1, 3), batch=st.integers(1, 3))
def test_vmap_over_any_dimension_of_any_input(
    dims: tuple[int | None, ...], count: int, batch: int, function: Function, device: str
) -> None:
    """Including a batch as large as the mapped dimension, which is not the first one."""
    tensors = make_inputs(Problem(5, 7, 16, 4, 4, batch=batch), device, torch.float16)
    stacked = [
        tensor if dim is None else torch.stack([(i + 1) * tensor for i in range(count)], dim)
        for tensor, dim in zip(tensors, dims, strict=True)
    ]
    singles = [
        function(*(t if dim is None else t.select(dim, i).contiguous() for t, dim in zip(stacked, dims, strict=True)))
        for i in range(count)
    ]
    torch.testing.assert_close(vmap(function, dims)(*stacked), torch.stack(singles))


def test_vmap_over_nothing_keeps_the_other_sizes(function: Function, tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v = tensors
    assert vmap(function, (0, None, None))(q.new_empty(0, *q.shape), k, v).shape == (0, *function(q, k, v).shape)


def test_transforms_inside_each_other(function: Function, tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v = tensors
    many = torch.stack([q, 2 * q, -q])

    def loss(one: Tensor) -> Tensor:
        return _loss(function)(one, k, v)

    singles = torch.stack([grad(loss)(one) for one in many])
    torch.testing.assert_close(vmap(grad(loss))(many), singles)
    torch.testing.assert_close(grad(lambda all_: vmap(loss)(all_).sum())(many), singles)
    twice = vmap(vmap(function, (0, None, None)), (0, None, None))(torch.stack([many, many]), k, v)
    torch.testing.assert_close(twice[1, 2], function(-q, k, v))
    leaf = many.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(vmap(loss)(leaf).sum(), leaf)[0], singles)
    out = function(leaf[0], k, v)
    batched = torch.autograd.grad(out, leaf, torch.stack([torch.ones_like(out)] * 2), is_grads_batched=True)[0]
    torch.testing.assert_close(batched[1], torch.autograd.grad(function(leaf[0], k, v).sum(), leaf)[0])


def test_jacobian_in_reverse_mode(function: Function, tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v = (tensor[:1, :1, :3, :4].contiguous() for tensor in tensors)
    jacobian = jacrev(function)(q, k, v)
    out = function(q, k, v)
    assert jacobian.shape == (*out.shape, *q.shape)
    torch.testing.assert_close(
        jacobian.sum(tuple(range(out.dim()))), grad(lambda q: function(q, k, v).sum())(q), rtol=1e-2, atol=1e-2
    )


@pytest.mark.parametrize("name", ["attention", "operator", "lse"])
def test_what_cannot_be_differentiated_says_so(name: str, tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    """Forward mode and second derivatives, through every entry point: an error, never a zero."""
    function = FUNCTIONS[name]
    q, k, v = tensors

    def of_q(q: Tensor) -> Tensor:
        return function(q, k, v)

    def slope(q: Tensor) -> Tensor:
        return grad(lambda q: of_q(q).float().sum())(q)

    for refused in (
        lambda: jvp(of_q, (q,), (q,)),
        lambda: jacfwd(of_q)(q),
        lambda: linearize(of_q, q),
        lambda: hessian(lambda q: of_q(q).sum())(q),
        lambda: grad(lambda q: slope(q).float().sum())(q),
        lambda: torch.autograd.grad(slope(leaf := q.clone().requires_grad_()).sum(), leaf),
        lambda: vmap(lambda tangent: jvp(of_q, (q,), (tangent,))[1])(torch.stack([q, q])),
    ):
        with pytest.raises(DifferentiationError):
            refused()


def test_functionalize(function: Function, tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v = tensors

    def changes_its_input(q: Tensor) -> Tensor:
        return function(q.mul_(2), k, v)

    torch.testing.assert_close(functionalize(changes_its_input)(q.clone()), function(2 * q, k, v))


@pytest.mark.parametrize("options", [{"dropout_p": 0.5}, {"window": (5, 0)}, {"softcap": 2.0}], ids=str)
def test_functionalize_takes_options(options: dict[str, Any], tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    if "dropout_p" in options:
        options = {**options, "rng_state": torch.tensor([3, 0], device=tensors[0].device)}
    wanted = flashmoe.attention(*tensors, **options)
    found = functionalize(lambda q, k, v: flashmoe.attention(q.add_(0), k, v, **options))(*tensors)
    assert torch.equal(found, wanted)


def test_errors_under_transforms_speak_of_the_callers_tensors(tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v = tensors
    for call in (
        lambda: vmap(flashmoe.attention, (0, None, None))(torch.stack([q, q]), k[..., :8], v),
        lambda: grad(lambda q: flashmoe.attention(q, k[..., :8], v).sum())(q),
    ):
        with pytest.raises(ShapeError, match="share head_dim; found 16 in q and 8 in k"):
            call()
    with pytest.raises(ShapeError, match=r"found \[4, 20, 16\], 3 dimensions"):  # vmap removed the batch dimension
        vmap(flashmoe.attention)(q, k, v)


def test_modules_under_functional_call() -> None:
    module = flashmoe.Attention(16, 4, 2, causal=True)
    x = torch.randn(3, 5, 16)
    parameters = dict(module.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        result: Tensor = functional_call(module, parameters, (x,)).square().sum()
        return result

    per_sample = vmap(grad(loss), (None, 0))(parameters, x.unsqueeze(1))
    for index in range(3):
        module.zero_grad()
        module(x[index : index + 1]).square().sum().backward()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(per_sample[name][index], parameter.grad, rtol=1e-4, atol=1e-5)


def test_compiled_transforms() -> None:
    torch._dynamo.reset()
    q, k, v = make_inputs(Problem(9, 9, 16), "cpu", torch.float32)
    for function in (flashmoe.attention, _operator):
        slope = grad(lambda q, function=function: function(q, k, v).square().sum())
        compiled = torch.compile(slope, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(q), slope(q))
