"""Small functions of the layer's package: names, operation counts, which GPU has kernels, empty gradients."""

from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

import flashmoe
import flashmoe.moe
from flashmoe.errors import ArgumentError, DtypeError, FlashmoeError
from flashmoe.moe import autograd, fake, rules, scaled
from flashmoe.moe.options import Activation
from flashmoe.moe.packed import BLOCK_BYTES, SIDE

TOKENS, TOP_K, HIDDEN, INTERMEDIATE, EXPERTS = 3, 2, 8, 5, 4


def test_a_name_of_the_package_above_is_told() -> None:
    for name, told in (("fused_moe", "it is flashmoe.fused_moe"), ("no_such_name", "no attribute 'no_such_name'$")):
        with pytest.raises(AttributeError, match=told):
            getattr(flashmoe.moe, name)


def call(kind: type, **shapes: Any) -> list[Any]:
    return [shapes.get(name) for name in kind._fields]  # type: ignore[attr-defined]


def test_operations_of_layers_in_few_bits() -> None:
    """Three products of [H, I] per slot; with 4 bits, one byte of the shape is two weights."""
    given = {"topk_ids": (TOKENS, TOP_K), "w2": (EXPERTS, HIDDEN, INTERMEDIATE), "w13_scale": (), "w2_scale": ()}
    layer = 3 * 2 * TOKENS * TOP_K * HIDDEN * INTERMEDIATE
    assert fake.scaled_flops(*call(fake.ScaledLayer, **given)) == layer
    assert fake.mxfp4_flops(*call(fake.Mxfp4Layer, **given)) == 2 * layer
    packed = {"topk_ids": (TOKENS, TOP_K), "w2": (EXPERTS, 3, 5, BLOCK_BYTES)}
    assert fake.mxfp4_flops(*call(fake.Mxfp4Layer, **packed)) == 3 * 2 * TOKENS * TOP_K * (3 * SIDE) * (5 * SIDE)
    assert fake.grouped_flops((7, 5), (3, 5, 11)) == 2 * 7 * 5 * 11
    assert fake.no_flops() == 0


def test_operations_of_any_gradients() -> None:
    """The gated half's gradient, which every gradient except the second bias's needs, is one product; then two each for x and w13, one for w2."""
    products, w2 = {"x": 2, "w13": 2, "w2": 1}, (EXPERTS, HIDDEN, INTERMEDIATE)
    given: list[Any] = [(TOKENS, HIDDEN), (TOKENS, HIDDEN), (), w2, *[()] * 11]
    given[4 + 4] = (TOKENS * TOP_K,)
    for needs in range(1 << len(fake.GRADIENTS)):
        wanted = {name for bit, name in enumerate(fake.GRADIENTS) if needs >> bit & 1}
        given[4 + 10] = needs
        expected = sum(products.get(name, 0) for name in wanted) + (wanted not in ({"b2"}, set()))
        assert fake.layer_backward_flops(*given) == expected * 2 * TOKENS * TOP_K * HIDDEN * INTERMEDIATE


@pytest.mark.parametrize("activation", get_args(Activation))
def test_every_activation(activation: str) -> None:
    """Compared with its formula in float64; the two forms of gelu differ by 5e-4."""
    gate, up = torch.linspace(-12, 12, 97, dtype=torch.float64), torch.linspace(9, -9, 97, dtype=torch.float64)
    tanh = torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))
    low = gate.clamp(max=7.0)
    needed = {
        "swiglu": gate / (1 + torch.exp(-gate)) * up,
        "reglu": gate.clamp(min=0) * up,
        "geglu": 0.5 * gate * (1 + torch.erf(gate / 2**0.5)) * up,
        "geglu_tanh": 0.5 * gate * (1 + tanh) * up,
        "clamped_swiglu": low / (1 + torch.exp(-1.702 * low)) * (up.clamp(-7.0, 7.0) + 1),
    }
    torch.testing.assert_close(scaled.activate(gate, up, activation), needed[activation], rtol=1e-12, atol=1e-12)


def test_messages_say_what_to_do() -> None:
    """Composed messages end with the step that helps."""
    told = {name: rule.message for name, rule in rules.RULES.items()}
    for name, ending in (
        ("moe.transposed", "; pass {name}.mT, or transposed={other} if both w13 and w2 have this layout"),
        ("moe.experts", "split them over several layers with expert_map"),
        ("moe.grouped_experts", "split them over several calls"),
        ("moe.route_experts", "use torch.topk"),
    ):
        assert told[name].endswith(ending)
        assert told[name] != ending
    multiple = told["moe.gpu_multiple"].removeprefix("{what} is {value}; on a GPU ")
    assert "multiple" in multiple
    assert told["moe.scaled_multiple"] == "{what} is {value}; with float8_e4m3fn weights on a GPU " + multiple


def test_kernels_for_one_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu(torch.Tensor):
        @property
        def device(self) -> Any:
            return SimpleNamespace(type="cuda")

    x = torch.zeros(1).as_subclass(OnGpu)
    for capability, told in (
        (scaled.CAPABILITY, None),
        ((8, 0), "the GPU has compute capability 8.0"),
        ((9, 1), "9.1"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, capability=capability: capability)
        why = scaled._why_torch(x)
        assert why is None if told is None else told in str(why)
    assert "tensors on cpu" in str(scaled._why_torch(torch.zeros(1)))
    assert scaled._why_torch("no tensor") is None


def test_gradients_of_nothing_are_nothing() -> None:
    """An output without an upstream gradient, and a layer that kept nothing."""
    inputs = len(autograd.Layer._fields) + 1
    ctx: Any = SimpleNamespace(needs_input_grad=(True,) * inputs, is_kept=False, saved_tensors=(), words=())

    def backward(*_: Any) -> Any:
        raise AssertionError

    assert autograd._layer_gradient(backward, ctx, None) == (None,) * inputs
    with pytest.raises(ArgumentError, match="called with keep=False"):
        autograd._layer_gradient(backward, ctx, torch.zeros(1))
    assert autograd.route_gradient(ctx, None) == (None,) * len(autograd.Routing._fields)


def test_the_most_that_routing_takes() -> None:
    """32 experts per token, 32 groups, 1024 experts; one more of each is rejected."""
    options: dict[str, Any]
    for experts, k, options in (
        (1024, 32, {}),
        (64, 32, {}),
        (64, 2, {"groups": 32, "topk_groups": 32}),
        (64, 2, {"groups": 32, "topk_groups": 1}),
    ):
        weights, ids = flashmoe.topk_route(torch.randn(3, experts), k, **options)
        assert weights.shape == ids.shape == (3, k)
    for experts, k, options in (
        (1056, 2, {}),
        (1024, 33, {}),
        (66, 2, {"groups": 33, "topk_groups": 33}),
        (64, 3, {"groups": 32, "topk_groups": 1}),
    ):
        with pytest.raises(FlashmoeError):
            flashmoe.topk_route(torch.randn(3, experts), k, **options)


def test_what_to_convert_to_is_told() -> None:
    x, w13, w2 = torch.randn(2, 8).bfloat16(), torch.randn(3, 16, 8), torch.randn(3, 8, 8).bfloat16()
    ids = torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(
        DtypeError, match=r"w13 is float32; x's bfloat16 is needed; convert it with w13\.to\(x\.dtype\)"
    ):
        flashmoe.fused_moe(x, w13, w2, torch.ones(2, 1), ids)
