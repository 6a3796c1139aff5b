"""The reference: the layer as a loop over experts in plain PyTorch, in any dtype, differentiated by autograd.

In float64 it is what a result is held against; in the inputs' own dtype it says what error is natural. The rule: the largest
error is at most twice that of the composition in the inputs' dtype, plus two units in the last place of the largest value. In
float32 four times: with so few roundings two orders of summing differ by luck.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "reglu", "clamped_swiglu")
LAYOUTS = ("concat", "interleaved")
ROUTINGS = ("uniform", "zipf", "hot", "one")
CLAMP, STEEPNESS = 7.0, 1.702
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


@dataclass
class Inputs:
    """The tensors of a layer; those that a case does not have are None."""

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
        """What has a gradient, in the order of NAMES, then shared."""
        return [value for name in (*NAMES, "shared") if (value := getattr(self, name)) is not None]


def choose_experts(case: Case, experts: int, generator: torch.Generator) -> Tensor:
    """[T, k] distinct ids. uniform; zipf: expert e as 1 / (e + 1); hot: all tokens to the same k; one: the same, the last."""
    logits = torch.zeros(case.tokens, experts)
    if case.routing == "zipf":
        logits = logits - torch.arange(1.0, experts + 1).log()
    elif case.routing == "hot":
        logits = logits + 100.0 * torch.randn(experts, generator=generator)
    elif case.routing == "one":
        logits = logits + 100.0 * torch.arange(experts)
    noise = torch.rand(case.tokens, experts, generator=generator).clamp_min(1e-20)
    return (logits - (-noise.log()).log()).topk(case.top_k, dim=1).indices


def make_inputs(case: Case, seed: int = 0, kind: str = "normal", device: str = "cpu") -> Inputs:
    """Fresh random tensors; ``kind``: normal, shifted (a mean of 0.5), outlier (one huge element), large (x times 30)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(case.dtype).to(device)

    both = 2 * case.intermediate
    x = torch.randn(case.tokens, case.hidden, generator=generator)
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
    weights = torch.rand(ids.shape, generator=generator) + 0.1
    expert_map = None
    if case.mapped:  # every other expert of the world is here, in another order
        expert_map = torch.full((world,), -1, dtype=torch.int32)
        expert_map[::2] = torch.randperm(case.experts, generator=generator).int()
    if case.sentinels:
        ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
        ids[torch.rand(ids.shape, generator=generator) < 0.1] = world + 3
    return Inputs(
        x.to(case.dtype).to(device),
        w13,
        w2,
        weights.to(case.weights_dtype).to(device),
        ids.to(case.ids_dtype).to(device),
        b13=normal(case.experts, both) if case.biases else None,
        b2=normal(case.experts, case.hidden) if case.biases else None,
        expert_map=None if expert_map is None else expert_map.to(device),
        shared=normal(case.tokens, case.hidden) if case.shared else None,
    )


def activate(z: Tensor, activation: str, layout: str) -> Tensor:
    """[rows, I] of the preactivation [rows, 2I]."""
    gate, up = (z[:, ::2], z[:, 1::2]) if layout == "interleaved" else z.chunk(2, dim=1)
    if activation == "swiglu":
        return F.silu(gate) * up
    if activation == "geglu":
        return F.gelu(gate) * up
    if activation == "geglu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    if activation == "reglu":
        return F.relu(gate) * up
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return gate * torch.sigmoid(STEEPNESS * gate) * (up + 1)


def local_experts(case: Case, inputs: Inputs) -> Tensor:
    """[T, k]: the expert of this layer, or -1."""
    ids = inputs.topk_ids.long()
    world = case.experts if inputs.expert_map is None else len(inputs.expert_map)
    known = (ids >= 0) & (ids < world)
    if inputs.expert_map is not None:
        ids = inputs.expert_map.long()[ids.clamp(0, world - 1)]
    return torch.where(known, ids, -1)


def compose(case: Case, inputs: Inputs) -> Tensor:
    """The layer, in the inputs' dtype; only rows that chose an expert meet its weights."""
    out = torch.zeros_like(inputs.x) if inputs.shared is None else inputs.shared.clone()
    experts = local_experts(case, inputs)
    for expert in range(case.experts):
        tokens, choices = torch.where(experts == expert)
        if not len(tokens):
            continue
        w13, w2 = inputs.w13[expert], inputs.w2[expert]
        if case.transposed:
            w13, w2 = w13.mT, w2.mT
        h = F.linear(inputs.x[tokens], w13, None if inputs.b13 is None else inputs.b13[expert])
        y = F.linear(activate(h, case.activation, case.layout), w2, None if inputs.b2 is None else inputs.b2[expert])
        out = out.index_add(0, tokens, (y * inputs.topk_weights[tokens, choices, None]).to(out.dtype))
    return out


@dataclass(frozen=True)
class Expected:
    """In float64; what each may be off by."""

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
    """The layer's result and, for a gradient of it, those of its inputs."""
    exact, plain = inputs.to(torch.float64), inputs.to(case.dtype)
    if dout is None:
        out, own = compose(case, exact), compose(case, plain)
        return Expected(out, allowed(out, own, case.dtype))
    out, gradients = differentiate(case, exact, dout)
    own, own_gradients = differentiate(case, plain, dout)
    return Expected(
        out,
        allowed(out, own, case.dtype),
        gradients,
        tuple(allowed(a, b, case.dtype) for a, b in zip(gradients, own_gradients, strict=True)),
    )


def allowed(exact: Tensor, own: Tensor, dtype: torch.dtype) -> float:
    """The module's rule."""
    if exact.numel() == 0:
        return 0.0
    largest = exact.abs().max().item()
    ulp = math.ldexp(torch.finfo(dtype).eps, math.frexp(largest)[1] - 1) if largest else 0.0
    factor = 4 if dtype == torch.float32 else 2
    return factor * (own.double() - exact).abs().max().item() + 2 * ulp


def compare(name: str, found: Tensor, exact: Tensor, tolerance: float) -> None:
    """Raises AssertionError with the error and its bound."""
    assert found.shape == exact.shape, f"{name}: {tuple(found.shape)} for {tuple(exact.shape)}"
    if found.numel():
        error = (found.double() - exact).abs().max().item()
        assert error <= tolerance, f"{name}: max error {error:.3e} over {tolerance:.3e}"


def compare_all(names: Sequence[str], found: Sequence[Tensor | None], expected: Expected) -> None:
    for name, value, exact, tolerance in zip(names, found, expected.gradients, expected.tolerances, strict=True):
        assert value is not None, f"no gradient of {name}"
        compare(f"gradient of {name}", value, exact, tolerance)
