"""flashmoe.fused_moe(precision="fp8"): results and gradients compared with the definition in float64, rejected calls, torch's machinery."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashmoe
from flashmoe.errors import ArgumentError, ArgumentTypeError, DifferentiationError, DtypeError, ShapeError
from flashmoe.moe import training
from flashmoe_tools.operations.judging import high_dtype
from flashmoe_tools.operations.moe.reference import ACTIVATIONS
from flashmoe_tools.operations.moe_scaled import formats
from flashmoe_tools.operations.moe_train_fp8.reference import TOLERANCE, relative_error, step

NAMES = ("out", "x", "w13", "w2", "topk_weights")


class Step:
    """Autograd leaves, and the other arguments of a call."""

    def __init__(
        self, device: str, tokens: int = 150, experts: int = 4, top_k: int = 2, hidden: int = 256, inner: int = 128
    ) -> None:
        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape) * scale).to(device, torch.bfloat16).requires_grad_()

        self.x, self.dout = normal(tokens, hidden), normal(tokens, hidden).detach()
        self.w13, self.w2 = (
            normal(experts, 2 * inner, hidden, scale=hidden**-0.5),
            normal(experts, hidden, inner, scale=inner**-0.5),
        )
        self.topk_weights = torch.rand(tokens, top_k).to(device).requires_grad_()
        # Expert 1 has no tokens, the last one the most.
        ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]) if tokens else torch.empty(0, top_k)
        ids[: tokens // 2, 0] = experts - 1
        ids[: tokens // 2, 1:] = 0
        ids[ids == 1] = 2
        self.topk_ids = ids.int().to(device)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.x, self.w13, self.w2, self.topk_weights

    def __call__(self, **changes: Any) -> Tensor:
        return flashmoe.fused_moe(*self.leaves, self.topk_ids, **{"precision": "fp8", **changes})

    def results(self, **changes: Any) -> tuple[Tensor, ...]:
        """(out, dx, dw13, dw2, dweights)."""
        out = self(**changes)
        return (out.detach(), *torch.autograd.grad(out, self.leaves, self.dout))

    def expected(self, **changes: Any) -> tuple[Tensor, ...]:
        return step(*self.leaves, self.topk_ids, self.dout, high_dtype(self.x.device), **changes)


def check(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for name, one, other in zip(NAMES, found, expected, strict=True):
        assert one.shape == other.shape, name
        assert relative_error(one, other) <= TOLERANCE, name


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "clamped_swiglu"])
def test_step_is_that_of_the_definition(device: str, activation: str) -> None:
    given = Step(device, 40, 3, 2, 128)
    found = given.results(activation=activation)
    check(found, given.expected(activation=activation))
    assert not found[2][1].any(), "an expert without tokens has a gradient of zeros"


def test_sixteen_bits_are_not_within_the_tolerance() -> None:
    """The tolerance is tight enough to distinguish the same step without e4m3."""
    given = Step("cpu")
    errors = [relative_error(*pair) for pair in zip(given.results(precision=None), given.expected(), strict=True)]
    assert min(errors) > 2 * TOLERANCE, errors


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "inner"),
    [(1, 3, 1, 128, 128), (130, 3, 3, 128, 384), (300, 40, 4, 128, 128)],
)
def test_step_of_other_sizes(device: str, tokens: int, experts: int, top_k: int, hidden: int, inner: int) -> None:
    given = Step(device, tokens, experts, top_k, hidden, inner)
    check(given.results(), given.expected())


def test_shared_and_choices_that_are_none(device: str) -> None:
    given = Step(device)
    given.topk_ids[::3, 1] = -1
    shared = torch.randn_like(given.dout).requires_grad_()
    out = given(shared=shared)
    found = torch.autograd.grad(out, (*given.leaves, shared), given.dout)
    check((out.detach(), *found[:-1]), given.expected(shared=shared))
    assert torch.equal(found[-1], given.dout)
    assert not found[3][::3, 1].any()


def test_expert_map(device: str) -> None:
    given = Step(device)
    expected = given.results()
    given.topk_ids = given.topk_ids + 3
    moved = torch.tensor([-1, -1, -1, *range(4), -1], dtype=torch.int32, device=device)
    for name, one, other in zip(NAMES, given.results(expert_map=moved), expected, strict=True):
        assert torch.equal(one, other), name


def test_gradients_that_nobody_needs(device: str) -> None:
    given = Step(device)
    everything = dict(zip(("x", "w13", "w2", "topk_weights"), given.results()[1:], strict=True))
    for name, expected in everything.items():
        for leaf in given.leaves:
            leaf.requires_grad_(leaf is getattr(given, name))
        (found,) = torch.autograd.grad(given(), getattr(given, name), given.dout)
        assert torch.equal(found, expected), name


def test_same_bits_again(device: str) -> None:
    given = Step(device, tokens=500 if device == "cuda" else 40)
    first = given.results()
    for _ in range(20 if device == "cuda" else 2):
        assert all(torch.equal(one, other) for one, other in zip(given.results(), first, strict=True))


def test_no_tokens(device: str) -> None:
    given = Step(device, tokens=0)
    _, dx, dw13, dw2, dweights = given.results()
    assert dx.shape == (0, 256)
    assert dweights.shape == (0, 2)
    assert not dw13.any()
    assert not dw2.any()


def test_weights_that_change_unseen(device: str) -> None:
    """As with FSDP's gathered weights: the version counter does not change."""
    given = Step(device)
    before = given().detach()
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(given.w13):
        given.w13.mul_(2.0)
    check(given.results(), given.expected())
    assert not torch.equal(given().detach(), before)


def test_quantised_weights_are_those_of_the_definition(device: str) -> None:
    w = Step(device).w13.detach()
    found = flashmoe.quantize_weights(w)
    for expert, one in enumerate(w.cpu()):
        codes, scales = formats.quantize(one, 128)
        assert torch.equal(found.values[expert].view(torch.uint8).cpu(), codes)
        assert torch.equal(found.scales[expert].cpu(), scales)
        assert torch.equal(found.transposed[expert].view(torch.uint8).cpu(), codes.mT)
        assert torch.equal(found.transposed_scales[expert].cpu(), scales.mT)


@pytest.mark.parametrize("shape", [(1, 128, 128), (2, 128, 128), (2, 128, 256)])
def test_no_two_quantised_tensors_share_memory(device: str, shape: tuple[int, ...]) -> None:
    """The transpose of a single scale is already contiguous. torch 2.11 and later warn if an operator's results share memory."""
    found = flashmoe.quantize_weights(torch.randn(shape, device=device, dtype=torch.bfloat16))
    assert len({one.untyped_storage().data_ptr() for one in found}) == 4


def test_weights_quantised_once_for_several_calls(device: str) -> None:
    given = Step(device)
    once = tuple(flashmoe.quantize_weights(w) for w in (given.w13, given.w2))
    assert not any(one.requires_grad for one in once[0])
    for found, expected in zip(given.results(quantized=once), given.results(), strict=True):
        assert torch.equal(found, expected)
    with torch.no_grad():
        given.w13.mul_(2.0)  # not noticed, as documented
    assert torch.equal(given(quantized=once), given(quantized=once))
    assert not torch.equal(given(quantized=once), given())


def test_quantised_under_autocast(device: str) -> None:
    w = Step(device).w13.detach()
    with torch.autocast(device, torch.bfloat16):
        found = flashmoe.quantize_weights(w.float())
    for one, expected in zip(found, flashmoe.quantize_weights(w), strict=True):
        assert torch.equal(one.view(torch.uint8), expected.view(torch.uint8))


def test_quantised_weights_that_are_refused() -> None:
    given = Step("cpu")
    q13, q2 = (flashmoe.quantize_weights(w) for w in (given.w13, given.w2))
    with pytest.raises(ArgumentTypeError, match=r"quantized is QuantizedWeights; a pair"):
        given(quantized=q13)
    with pytest.raises(ShapeError, match=r"quantized holds \[.*\] on cpu for w13, which is"):
        given(quantized=(q2, q13))
    with pytest.raises(ArgumentError, match="quantized is given without precision='fp8'"):
        given(precision=None, quantized=(q13, q2))
    with pytest.raises(ArgumentTypeError):
        flashmoe.quantize_weights(None)  # type: ignore[arg-type]


def test_inference_is_the_scaled_layer(device: str) -> None:
    given = Step(device)
    q13, q2 = training._quantized(given.w13), training._quantized(given.w2)
    with torch.no_grad():
        found = given()
        scaled = flashmoe.fused_moe(
            given.x, q13.values, q2.values, given.topk_weights, given.topk_ids, w13_scale=q13.scales, w2_scale=q2.scales
        )
    assert torch.equal(found, scaled)


def test_float32_masters_under_autocast(device: str) -> None:
    given = Step(device)
    expected = given.results()
    masters = [leaf.detach().float().requires_grad_() for leaf in given.leaves]
    with torch.autocast(device, torch.bfloat16):
        out = flashmoe.fused_moe(*masters, given.topk_ids, precision="fp8")
    found = torch.autograd.grad(out, masters, given.dout)
    assert torch.equal(out, expected[0])
    assert all(torch.equal(one, other.float()) for one, other in zip(found, expected[1:], strict=True))
    assert found[1].dtype is torch.float32


def test_module_trains(device: str) -> None:
    layer = flashmoe.MoE(128, 128, 4, 2, precision="fp8", device=device, dtype=torch.bfloat16)
    x = torch.randn(64, 128, device=device, dtype=torch.bfloat16)
    target = torch.randn_like(x)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = (layer(x) - target).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # from torch, while it traces
def test_compiled(device: str) -> None:
    given = Step(device, tokens=64)
    function = torch.compile(
        lambda *args: flashmoe.fused_moe(*args, precision="fp8"), backend="aot_eager", fullgraph=True
    )
    out = function(*given.leaves, given.topk_ids)
    found = (out.detach(), *torch.autograd.grad(out, given.leaves, given.dout))
    assert all(torch.equal(one, other) for one, other in zip(found, given.results(), strict=True))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # from torch, while it traces
def test_compiled_with_weights_quantised_in_the_graph(device: str) -> None:
    given = Step(device, tokens=64)

    def once(x: Tensor, w13: Tensor, w2: Tensor, *routing: Tensor) -> Tensor:
        quantized = (flashmoe.quantize_weights(w13), flashmoe.quantize_weights(w2))
        return flashmoe.fused_moe(x, w13, w2, *routing, precision="fp8", quantized=quantized)

    out = torch.compile(once, backend="aot_eager", fullgraph=True)(*given.leaves, given.topk_ids)
    found = (out.detach(), *torch.autograd.grad(out, given.leaves, given.dout))
    assert all(torch.equal(one, other) for one, other in zip(found, given.results(), strict=True))


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("precision", "fp4", ArgumentError),
        ("b13", torch.zeros(4, 256, dtype=torch.bfloat16), ArgumentError),
        ("b2", torch.zeros(4, 256, dtype=torch.bfloat16), ArgumentError),
        ("layout", "interleaved", ArgumentError),
        ("transposed", True, ArgumentError),
        ("weights_on_input", True, ArgumentError),
        ("x_scale", torch.zeros(150, 2), ArgumentError),
        ("out", torch.zeros(150, 256, dtype=torch.bfloat16), ArgumentError),
    ],
)
def test_refused(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=name):
        Step("cpu")(**{name: value})


def test_dtypes_and_sizes_that_are_refused() -> None:
    given = Step("cpu")
    given.w13 = given.w13.half()
    with pytest.raises(DtypeError, match=r"weights is float16; supported with precision='fp8': bfloat16"):
        given()
    with pytest.raises(
        ShapeError, match="the number of columns is 192; with precision='fp8' it must be a multiple of 128"
    ):
        Step("cpu", hidden=192)()


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_transforms_are_refused(transform: Callable[..., Any]) -> None:
    given = Step("cpu")
    with pytest.raises(ArgumentError, match=r"torch\.func"):
        transform(lambda x: flashmoe.fused_moe(x, *given.leaves[1:], given.topk_ids, precision="fp8").sum())(
            given.x if transform is torch.func.grad else given.x[None]
        )


def test_second_derivative_is_refused() -> None:
    given = Step("cpu")
    (dx,) = torch.autograd.grad(given(), given.x, given.dout.requires_grad_(), create_graph=True)
    with pytest.raises(DifferentiationError, match="once"):
        dx.sum().backward()
