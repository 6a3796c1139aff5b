"""flashmoe.MoE compared with the same module in torch operators, and the requirements of an nn.Module."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import flashmoe
from flashmoe.errors import ArgumentError, ArgumentTypeError, DtypeError, ShapeError
from flashmoe.moe.module import load_balancing_loss
from tests.torch_warnings import COMPILED

from .composed import ComposedMoE

pytestmark = COMPILED
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixtral": {"scoring": "topk_softmax"},
    "gpt-oss": {"scoring": "topk_softmax", "bias": True, "activation": "clamped_swiglu", "layout": "interleaved"},
    "deepseek": {"scoring": "sigmoid", "selection_bias": True, "shared_intermediate": 40, "scale": 2.5},
    "llama4": {"scoring": "sigmoid", "renormalize": False, "weights_on_input": True, "shared_intermediate": 24},
    "transposed": {"transposed": True, "activation": "geglu", "layout": "interleaved", "shared_intermediate": 16},
}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def make(kind: str, device: str, dtype: torch.dtype | None = None) -> flashmoe.MoE:
    made = flashmoe.MoE(32, 24, 6, 2, device=device, dtype=dtype or DTYPES[device], **KINDS[kind])
    if made.selection_bias is not None:
        made.selection_bias.uniform_(-0.2, 0.2)
    return made


def composed(module: flashmoe.MoE, kind: str) -> ComposedMoE:
    """The same parameters in float64."""
    made = ComposedMoE(32, 24, 6, 2, device=module.w13.device, **KINDS[kind])
    made.load_state_dict(module.state_dict())
    return made.double()


def tokens_far_from_ties(module: flashmoe.MoE, reference: ComposedMoE, device: str) -> Tensor:
    """[2, T, 32]: tokens whose choice of experts does not depend on rounding."""
    x = torch.randn(200, 32, device=device, dtype=module.w13.dtype)
    with torch.no_grad():
        logits = reference.router(x.double())
        scores = logits.sigmoid() if reference.scoring == "sigmoid" else logits
        scores = scores if reference.selection_bias is None else scores + reference.selection_bias
        best = scores.topk(reference.top_k + 1, 1).values
    far = x[best[:, -2] - best[:, -1] > 0.05]
    return far[: len(far) // 2 * 2].unflatten(0, (2, -1))


@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients(kind: str, device: str) -> None:
    module = make(kind, device)
    reference = composed(module, kind)
    x = tokens_far_from_ties(module, reference, device).requires_grad_()
    exact = x.detach().double().requires_grad_()
    out, loss = module(x, return_loss=True)
    expected, expected_loss = reference(exact, return_loss=True)
    assert out.shape == x.shape
    assert torch.equal(out, module(x))
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 4e-2}[out.dtype]

    def close(name: str, found: Tensor, wanted: Tensor) -> None:
        scale = max(1e-3, wanted.abs().max().item())
        torch.testing.assert_close(
            found.double(), wanted, rtol=0, atol=tolerance * scale, msg=lambda words: f"{name}: {words}"
        )

    close("out", out, expected)
    close("loss", loss, expected_loss)
    upstream = torch.randn_like(out)
    names = ["x", *(name for name, _ in module.named_parameters())]
    found = torch.autograd.grad([out, loss], [x, *module.parameters()], [upstream, torch.ones_like(loss)])
    wanted = torch.autograd.grad(
        [expected, expected_loss], [exact, *reference.parameters()], [upstream.double(), torch.ones_like(expected_loss)]
    )
    for name, a, b in zip(names, found, wanted, strict=True):
        close(f"gradient of {name}", a, b)


def test_names_and_shapes_are_stable() -> None:
    module = flashmoe.MoE(16, 8, 4, 2, shared_intermediate=24, bias=True, selection_bias=True, scoring="sigmoid")
    assert {name: tuple(value.shape) for name, value in module.state_dict().items()} == {
        "router.weight": (4, 16),
        "router.bias": (4,),
        "w13": (4, 16, 16),
        "w2": (4, 16, 8),
        "b13": (4, 16),
        "b2": (4, 16),
        "shared_w13": (48, 16),
        "shared_w2": (16, 24),
        "selection_bias": (4,),
    }
    turned = flashmoe.MoE(16, 8, 4, 2, transposed=True)
    assert (turned.w13.shape, turned.w2.shape) == ((4, 16, 16), (4, 8, 16))
    assert set(turned.state_dict()) == {"router.weight", "w13", "w2"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_module_is_the_same_module(kind: str, device: str) -> None:
    module = make(kind, device)
    other = make(kind, device)
    x = torch.randn(9, 32, device=device, dtype=module.w13.dtype)
    assert not torch.equal(other(x), module(x))
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x), module(x))
    assert torch.equal(copy.deepcopy(module)(x), module(x))


def test_the_selection_bias_stays_float32_and_the_choice_with_it(device: str) -> None:
    """In 16 bits a balancing step of 0.001 would be lost."""
    module = make("deepseek", device, torch.float32)
    assert module.selection_bias is not None
    before = module.selection_bias.clone()
    module.to(torch.bfloat16)
    assert (module.w13.dtype, module.selection_bias.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(module.selection_bias, before)
    assert module(torch.randn(3, 32, device=device, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert not module.selection_bias.requires_grad


def test_from_meta(device: str) -> None:
    module = flashmoe.MoE(32, 24, 6, 2, bias=True, shared_intermediate=8, device="meta").to_empty(device=device)
    module.reset_parameters()
    module.to(DTYPES[device])
    assert all(parameter.isfinite().all() and parameter.any() for parameter in module.parameters())
    assert module(torch.randn(5, 32, device=device, dtype=DTYPES[device])).isfinite().all()


def test_autocast(device: str) -> None:
    """float32 parameters, 16-bit kernels, float32 gradients."""
    module = make("deepseek", device, torch.float32)
    x = torch.randn(40, 32, device=device)
    with torch.autocast(device, torch.bfloat16):
        out, loss = module(x, return_loss=True)
    assert (out.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    (out.float().sum() + loss).backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype is torch.float32, name
        assert parameter.grad.any(), name


@pytest.mark.parametrize("kind", ["plain", "deepseek"])
def test_compiled_is_one_graph_and_equal(kind: str, device: str) -> None:
    torch._dynamo.reset()
    module = make(kind, device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 7, 32, device=device, dtype=module.w13.dtype)
    expected, loss = module(x, return_loss=True)
    found, found_loss = compiled(x, return_loss=True)
    assert torch.equal(found, expected)
    assert torch.equal(found_loss, loss)
    leaves = list(module.parameters())
    (a, b) = (
        torch.autograd.grad(y.float().square().sum() + z, leaves) for y, z in ((found, found_loss), (expected, loss))
    )
    assert all(torch.equal(left, right) for left, right in zip(a, b, strict=True))


def test_no_tokens(device: str) -> None:
    module = make("deepseek", device)
    out, loss = module(torch.empty(0, 3, 32, device=device, dtype=module.w13.dtype), return_loss=True)
    assert out.shape == (0, 3, 32)
    assert loss == 0


def test_the_load_balancing_loss(device: str) -> None:
    """1 if all experts are chosen equally often, E / k if the same k always are; sigmoid scores are divided by their sum."""
    even = torch.full((12, 4), 0.25, device=device, requires_grad=True)
    loss = load_balancing_loss(even, torch.full((4,), 6, device=device), 2)
    assert loss.item() == 1.0
    (gradient,) = torch.autograd.grad(loss, even)
    assert not gradient.isnan().any()
    hot = torch.tensor([[0.5, 0.5, 0.0, 0.0]], device=device).expand(12, 4)
    assert load_balancing_loss(hot, torch.tensor([12, 12, 0, 0], device=device), 2).item() == 2.0
    counts = torch.tensor([5, 7, 9, 3], device=device)
    scores = torch.rand(12, 4, device=device)
    halved = load_balancing_loss(scores / 2, counts, 2)
    torch.testing.assert_close(halved, load_balancing_loss(scores, counts, 2))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (ArgumentError, {"top_k": 7}),
        (ArgumentError, {"experts": 0}),
        (ArgumentError, {"experts": 1025}),
        (ArgumentError, {"groups": 4}),
        (ArgumentError, {"groups": 6, "topk_groups": 1}),
        (ArgumentError, {"scale": float("inf")}),
        (ArgumentError, {"scoring": "topk_softmax", "selection_bias": True}),
        (ArgumentError, {"dim": -1}),
        (ArgumentError, {"scoring": "tanh"}),
        (ArgumentError, {"activation": "gelu"}),
        (ArgumentError, {"layout": "blocked"}),
        (ArgumentError, {"shared_intermediate": -8}),
        (ArgumentTypeError, {"top_k": 2.0}),
        (ArgumentTypeError, {"experts": True}),
        (ArgumentTypeError, {"bias": 1}),
        (ArgumentTypeError, {"dtype": "float16"}),
        (DtypeError, {"dtype": torch.float64}),
    ],
    ids=str,
)
def test_typed_errors(kind: type[Exception], changes: dict[str, Any]) -> None:
    with pytest.raises(kind) as caught:
        flashmoe.MoE(**{"dim": 32, "intermediate": 24, "experts": 6, "top_k": 2, **changes})
    assert type(caught.value) is kind


def test_another_width_is_refused(device: str) -> None:
    with pytest.raises(ShapeError, match=r"x must be \[\.\.\., 32\]"):
        make("plain", device)(torch.randn(3, 31, device=device, dtype=DTYPES[device]))
    with pytest.raises(ShapeError, match=r"x must be \[\.\.\., 32\]; found \[\]"):
        make("plain", device)(torch.tensor(1.0, device=device, dtype=DTYPES[device]))
    with pytest.raises(ArgumentTypeError, match="found list"):
        make("plain", device)([1.0])
    with pytest.raises(ArgumentTypeError, match="return_loss must be True or False; found 1"):
        make("plain", device)(torch.randn(3, 32, device=device, dtype=DTYPES[device]), return_loss=1)


def test_it_says_what_it_is() -> None:
    assert "experts=6, top_k=2" in repr(make("plain", "cpu"))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # weights_on_input queries the number of choices
@pytest.mark.parametrize("kind", ["plain", "deepseek", "llama4"])
def test_torch_jit_traces(kind: str, device: str) -> None:
    """torch checks a trace by calling the module without gradients and expects the same graph; a module traced this way trains."""
    module, x = make(kind, device), torch.randn(5, 32, device=device, dtype=DTYPES[device])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        traced = torch.jit.trace(module, (x,))
    assert not [one for one in told if one.filename.endswith("moe/module.py")], "a check of x was taken for a choice"
    assert torch.equal(traced(x), module(x))
    with torch.no_grad():
        frozen = torch.jit.trace(module, (x,))
    for function in (traced, frozen):
        (found,) = torch.autograd.grad(function(x).sum(), module.w13)
        (expected,) = torch.autograd.grad(module(x).sum(), module.w13)
        assert torch.equal(found, expected)
