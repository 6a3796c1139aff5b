"""Layers and batches of every kind, and their reference results.

The reference in float64 is what a result is compared with; in the inputs' dtype it gives the natural error. For a small batch the
composition may be exact by chance if a sum cancels; the natural error is then at least the effect of changing every input by half
a unit in the last place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from flashmoe_tools.operations.moe import reference as operation
from flashmoe_tools.operations.moe.reference import activate, allowed

__all__ = ["activate", "allowed"]

ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "reglu", "clamped_swiglu")
LAYOUTS = ("concat", "interleaved")
ROUTINGS = ("uniform", "zipf", "hot", "one")
SMALL = 1 << 13  # elements of x up to which a result may be exact by chance
# Gradients, in the order of the operator's bits.
NAMES = ("x", "w13", "w2", "topk_weights", "b13", "b2")


@dataclass(frozen=True)
class Case:
    """A layer and its batch. ``routing``: see `choose_experts`; ``sentinels``: some ids name no expert."""

    tokens: int
    experts: int = 4
    top_k: int = 2
    hidden: int = 32
    intermediate: int = 24
    dtype: torch.dtype = torch.float32
    activation: str = "swiglu"
    layout: str = "concat"
    transposed: bool = False
    biases: bool = False
    shared: bool = False
    mapped: bool = False
    sentinels: bool = False
    routing: str = "uniform"
    ids_dtype: torch.dtype = torch.int64
    weights_dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        """The options that are not the default."""
        own = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        usual = {field.name: field.default for field in fields(self)[1:]}
        words = [f"{name}={value}" for name, value in own.items() if value != usual[name]]
        return ",".join([f"tokens={self.tokens}", *words])


@dataclass
class Inputs:
    """The tensors of a layer; those that a case does not use are None."""

    x: Tensor  # [T, H]
    w13: Tensor  # [E, 2I, H], transposed [E, H, 2I]
    w2: Tensor  # [E, H, I], transposed [E, I, H]
    topk_weights: Tensor  # [T, k]
    topk_ids: Tensor  # [T, k]
    b13: Tensor | None = None  # [E, 2I]
    b2: Tensor | None = None  # [E, H]
    expert_map: Tensor | None = None  # [global experts] int32
    shared: Tensor | None = None  # [T, H]

    def to(self, dtype: torch.dtype) -> Inputs:
        """Floating tensors in ``dtype``, detached."""
        return Inputs(
            **{
                field.name: value.detach().to(dtype) if value is not None and value.is_floating_point() else value
                for field in fields(self)
                for value in [getattr(self, field.name)]
            }
        )

    def leaves(self) -> list[Tensor]:
        """The tensors that have gradients, in the order of NAMES, then shared."""
        return [value for name in (*NAMES, "shared") if (value := getattr(self, name)) is not None]


def choose_experts(case: Case, experts: int, generator: torch.Generator) -> Tensor:
    """[T, k] distinct ids; hot: all tokens choose the same k experts; one: the same, the last ones."""
    routing = "hot" if case.routing == "one" else case.routing
    device = generator.device
    ids = operation.choose_experts(case.tokens, experts, case.top_k, routing, device, generator)[1]
    return torch.randperm(experts, generator=generator, device=device)[ids] if case.routing == "hot" else ids


def make_inputs(case: Case, seed: int = 0, kind: str = "normal", device: str = "cpu") -> Inputs:
    """Fresh random tensors, made on the device: a model's weights take seconds on the CPU.

    ``kind``: normal, shifted (a mean of 0.5), outlier (one huge element), large (x times 30).
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(case.dtype)

    both = 2 * case.intermediate
    x = torch.randn(case.tokens, case.hidden, generator=generator, device=device)
    if kind == "shifted":
        x = x + 0.5
    elif kind == "outlier" and x.numel():
        x[-1, case.hidden // 2] = 500.0
    elif kind == "large":
        x = x * 30
    w13 = normal(
        case.experts, *((case.hidden, both) if case.transposed else (both, case.hidden)), scale=case.hidden**-0.5
    )
    down = (case.intermediate, case.hidden) if case.transposed else (case.hidden, case.intermediate)
    w2 = normal(case.experts, *down, scale=case.intermediate**-0.5)
    world = 2 * case.experts if case.mapped else case.experts
    ids = choose_experts(case, world, generator)
    weights = torch.rand(ids.shape, generator=generator, device=device) + 0.1
    expert_map = None
    if case.mapped:  # every other global expert is local, in another order
        expert_map = torch.full((world,), -1, dtype=torch.int32, device=device)
        expert_map[::2] = torch.randperm(case.experts, generator=generator, device=device).int()
        expert_map[1::4] = case.experts  # outside of the layer, as -1 is
        expert_map[3::8] = 2**31 - 1
    if case.sentinels:
        ids[torch.rand(ids.shape, generator=generator, device=device) < 0.2] = -1
        ids[torch.rand(ids.shape, generator=generator, device=device) < 0.1] = world + 3
    return Inputs(
        x.to(case.dtype),
        w13,
        w2,
        weights.to(case.weights_dtype),
        ids.to(case.ids_dtype),
        b13=normal(case.experts, both) if case.biases else None,
        b2=normal(case.experts, case.hidden) if case.biases else None,
        expert_map=expert_map,
        shared=normal(case.tokens, case.hidden) if case.shared else None,
    )


def local_experts(case: Case, inputs: Inputs) -> Tensor:
    """[T, k]: the expert's index in this layer, or -1."""
    ids = inputs.topk_ids.long()
    world = case.experts if inputs.expert_map is None else len(inputs.expert_map)
    known = (ids >= 0) & (ids < world)
    if inputs.expert_map is not None:
        ids = inputs.expert_map.long()[ids.clamp(0, world - 1)]
        known &= ids < case.experts
    return torch.where(known, ids, -1)


def compose(case: Case, inputs: Inputs) -> Tensor:
    """The layer as the operation defines it, in the inputs' dtype."""
    return operation.compose(
        *(inputs.x, inputs.w13, inputs.w2, inputs.topk_weights, local_experts(case, inputs), inputs.x.dtype),
        b13=inputs.b13,
        b2=inputs.b2,
        shared=inputs.shared,
        activation=case.activation,
        layout=case.layout,
        transposed=case.transposed,
    )


@dataclass(frozen=True)
class Expected:
    """Results in float64 and their tolerances."""

    out: Tensor
    tolerance: float
    gradients: tuple[Tensor, ...] = ()  # of Inputs.leaves()
    tolerances: tuple[float, ...] = ()


def differentiate(case: Case, inputs: Inputs, dout: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(out, gradients of leaves()), zeros where nothing depends on a leaf."""
    leaves = [leaf.requires_grad_() for leaf in inputs.leaves()]
    out = compose(case, inputs)
    if not out.requires_grad:
        return out, tuple(torch.zeros_like(leaf) for leaf in leaves)
    found = torch.autograd.grad(out, leaves, dout.to(out.dtype), allow_unused=True)
    return out.detach(), tuple(
        torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)
    )


def expect(case: Case, inputs: Inputs, dout: Tensor | None = None) -> Expected:
    """The layer's result and, given the gradient of the result, those of its inputs."""
    exact, plain = inputs.to(torch.float64), inputs.to(case.dtype)
    if dout is None:
        out, own = compose(case, exact), compose(case, plain)
        return Expected(out, allowed(out, own, case.dtype))
    out, gradients = differentiate(case, exact, dout)
    others = [differentiate(case, plain, dout)]
    if inputs.x.numel() <= SMALL:
        others += [differentiate(case, nudged(inputs, case.dtype, seed), dout.double()) for seed in range(2)]
    return Expected(
        out,
        allowed(out, [found for found, _ in others], case.dtype),
        gradients,
        tuple(
            allowed(exact, own, case.dtype)
            for exact, own in zip(gradients, zip(*(found for _, found in others), strict=True), strict=True)
        ),
    )


def nudged(inputs: Inputs, dtype: torch.dtype, seed: int) -> Inputs:
    """The inputs in float64, every value moved half a unit in the last place of ``dtype`` up or down."""
    generator = torch.Generator(inputs.x.device).manual_seed(seed)
    moved = inputs.to(torch.float64)
    for leaf in moved.leaves():
        signs = torch.randint(0, 2, leaf.shape, generator=generator, device=leaf.device) * 2 - 1
        leaf.mul_(1 + signs * (torch.finfo(dtype).eps / 2))
    return moved


def compare(name: str, found: Tensor, exact: Tensor, tolerance: float) -> None:
    """Raises AssertionError with the error and its limit."""
    assert found.shape == exact.shape, f"{name}: {tuple(found.shape)} for {tuple(exact.shape)}"
    if found.numel():
        error = (found.double() - exact).abs().max().item()
        assert error <= tolerance, f"{name}: max error {error:.3e} over {tolerance:.3e}"


def compare_all(names: Sequence[str], found: Sequence[Tensor | None], expected: Expected) -> None:
    for name, value, exact, tolerance in zip(names, found, expected.gradients, expected.tolerances, strict=True):
        assert value is not None, f"no gradient of {name}"
        compare(f"gradient of {name}", value, exact, tolerance)
