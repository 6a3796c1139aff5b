"""Gradients: against float64 references, SDPA's own, and finite differences; and clear errors for what has no gradient."""

import math
from itertools import product

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torch_attention

import flashmoe
from flashmoe.attn import autograd, backward
from flashmoe.errors import DifferentiationError

from .gradients import autograd_gradients, make_leaves, plain_function
from .reference import DTYPES, Problem, make_inputs, reference_dtype

PROBLEMS = (
    Problem(65, 65, 64, 2, 2, batch=2),
    Problem(65, 65, 64, 4, 2, batch=2, causal=True),
    Problem(33, 70, 40, 8, 1, causal=True),
    Problem(70, 33, 59, 2, 1, causal=True),  # the first 37 rows see no key
    Problem(600, 1100, 32, 2, 1, causal=True),  # several blocks of keys
    Problem(1, 300, 128, 4, 4),
)


@pytest.mark.parametrize("with_lse", [False, True], ids=["out", "out and lse"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"q{p.seq_q}k{p.seq_k}d{p.head_dim}")
def test_gradients_against_the_reference(problem: Problem, with_lse: bool, device: str) -> None:
    """Within twice plain PyTorch's own error, as for the forward pass, in every dtype."""
    for dtype, bshd in product(DTYPES[device], (False, True)):
        tensors = make_inputs(problem, device, dtype, bshd=bshd)
        grad_out = torch.randn(tensors[0].shape, device=device).to(dtype)
        grad_lse = torch.randn(tensors[0].shape[:3], device=device) if with_lse else None
        by_formula = plain_function(problem)
        expected = autograd_gradients(by_formula, tensors, reference_dtype(device), grad_out, grad_lse)
        plain = autograd_gradients(by_formula, tensors, dtype, grad_out, grad_lse)

        def ours(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return flashmoe.attention(q, k, v, causal=problem.causal, return_lse=True)

        actual = autograd_gradients(ours, tensors, dtype, grad_out, grad_lse)
        factor = 6 if dtype is torch.float32 else 3
        for name, a, b, c, source in zip("qkv", actual, expected, plain, tensors, strict=True):
            assert a.dtype == dtype
            assert a.shape == source.shape
            own = (c.to(b.dtype) - b).abs().max().item()
            limit = factor * own + 2 * torch.finfo(dtype).eps * b.abs().max().item()
            assert (a.to(b.dtype) - b).abs().max().item() <= limit, f"d{name}, {dtype}"


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_equal_those_of_sdpa(causal: bool, device: str) -> None:
    for dtype in DTYPES[device]:
        tensors = make_inputs(Problem(130, 130, 64, 4, 4, batch=2), device, dtype)
        ours, torchs = make_leaves(*tensors), make_leaves(*tensors)
        grad_out = torch.randn(tensors[0].shape, device=device).to(dtype)
        flashmoe.scaled_dot_product_attention(*ours, is_causal=causal).backward(grad_out)
        torch_attention(*torchs, is_causal=causal).backward(grad_out)
        tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        for a, b in zip(ours, torchs, strict=True):
            assert a.grad is not None
            torch.testing.assert_close(a.grad, b.grad, rtol=tolerance, atol=tolerance)


def test_directional_derivative_by_finite_differences() -> None:
    """The operator has no float64; float32 on the CPU and a step of 1e-2 leave an error of about 1e-4."""
    problem = Problem(17, 23, 16, 4, 2, causal=True)
    tensors = [tensor.float() for tensor in make_inputs(problem, "cpu", torch.float32)]
    directions = [torch.randn_like(tensor) / tensor.numel() ** 0.5 for tensor in tensors]
    weights = torch.randn(tensors[0].shape)

    def value(step: float) -> Tensor:
        moved = [tensor + step * direction for tensor, direction in zip(tensors, directions, strict=True)]
        return (flashmoe.attention(*moved, causal=True).double() * weights).sum()

    leaves = make_leaves(*tensors)
    (flashmoe.attention(*leaves, causal=True) * weights).sum().backward()
    slope = sum((leaf.grad * direction).sum() for leaf, direction in zip(leaves, directions, strict=True))
    step = 1e-2
    assert abs((value(step) - value(-step)) / (2 * step) - slope).item() <= 1e-3 * max(1.0, abs(slope.item()))


def test_backward_formula_in_float64() -> None:
    """The block-wise backward itself, at float64, against autograd through the plain formula: without rounding errors that could hide a bug."""
    for causal, (seq_q, seq_k) in product((False, True), ((40, 600), (600, 40), (70, 70))):
        problem = Problem(seq_q, seq_k, 24, 4, 2, batch=2, causal=causal)
        q, k, v = (tensor.double() for tensor in make_inputs(problem, "cpu", torch.float32))
        grad_out, grad_lse = torch.randn(q.shape).double(), torch.randn(q.shape[:3]).double()
        function = plain_function(problem)
        expected = autograd_gradients(function, (q, k, v), torch.float64, grad_out, grad_lse)
        out, lse = function(q, k, v)
        hidden = max(0, seq_q - seq_k) if causal else 0
        lse[:, :, :hidden] = -math.inf
        actual = backward.backward(grad_out, grad_lse, q, k, v, out, lse, 24**-0.5, causal)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_rows_are_split_when_scores_would_take_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make_inputs(Problem(700, 900, 32, 4, 2), "cpu", torch.float32)
    grad_out = torch.randn(q.shape)
    out, lse = flashmoe.attention(q, k, v, causal=True, return_lse=True)
    whole = backward.backward(grad_out, None, q, k, v, out, lse, 32**-0.5, True)
    tiny = backward.BlockSize(96, 1 << 16)
    monkeypatch.setattr(backward, "BLOCKS", {"cpu": tiny})
    assert backward.rows_per_block(4, 96, tiny) == backward.MIN_ROWS_PER_BLOCK
    for a, b in zip(backward.backward(grad_out, None, q, k, v, out, lse, 32**-0.5, True), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_backward_memory_is_linear_in_the_length() -> None:
    """At 16384 x 16384 one float32 score matrix per head would be 1 GiB; blocks keep the peak below that for 8 heads."""
    q, k, v = make_leaves(*make_inputs(Problem(16384, 16384, 64, 8, 8), "cuda", torch.bfloat16))
    out = flashmoe.attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out.backward(torch.ones_like(out))
    tensors = 8 * 16384 * 64 * 4
    assert torch.cuda.max_memory_allocated() - before <= 12 * tensors + 6 * backward.BLOCKS["cuda"].bytes


def test_rows_without_a_key_have_zero_gradients(device: str) -> None:
    for dtype in DTYPES[device]:
        q, k, v = make_leaves(*make_inputs(Problem(80, 30, 64), device, dtype))
        out, lse = flashmoe.attention(q, k, v, causal=True, return_lse=True)
        (out.float().sum() + lse[:, :, 50:].sum()).backward()
        assert torch.equal(q.grad[:, :, :50], torch.zeros_like(q.grad[:, :, :50]))
        for leaf in (q, k, v):
            assert leaf.grad.isfinite().all()


@pytest.mark.parametrize(("seq_q", "seq_k"), [(0, 7), (7, 0), (0, 0)])
def test_empty_gradients(seq_q: int, seq_k: int, device: str) -> None:
    q, k, v = make_leaves(*make_inputs(Problem(seq_q, seq_k), device, torch.float16))
    flashmoe.attention(q, k, v, causal=True).sum().backward()
    for leaf in (q, k, v):
        assert leaf.grad.shape == leaf.shape
        assert not leaf.grad.any()


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qv"])
def test_only_the_gradients_asked_for(wanted: str, device: str) -> None:
    tensors = dict(zip("qkv", make_inputs(Problem(40, 50), device, torch.float16), strict=True))
    full = dict(zip("qkv", make_leaves(*tensors.values()), strict=True))
    flashmoe.attention(**full).float().square().sum().backward()
    for name in wanted:
        tensors[name] = tensors[name].clone().requires_grad_()
    flashmoe.attention(**tensors).float().square().sum().backward()
    for name, tensor in tensors.items():
        if name in wanted:
            assert torch.equal(tensor.grad, full[name].grad)
        else:
            assert tensor.grad is None


def test_gradient_through_lse_alone(device: str) -> None:
    q, k, v = make_leaves(*make_inputs(Problem(40, 50), device, torch.float16))
    _, lse = flashmoe.attention(q, k, v, return_lse=True)
    lse.sum().backward()
    assert q.grad.isfinite().all()
    assert q.grad.any()
    assert not v.grad.any()


def test_gradient_is_recorded_exactly_where_it_is_wanted(device: str) -> None:
    q, k, v = make_inputs(Problem(9, 9), device, torch.float16)
    assert flashmoe.attention(q, k, v).grad_fn is None
    q.requires_grad_()
    assert flashmoe.attention(q, k, v).grad_fn is not None
    assert torch.ops.flashmoe.flash_attention_forward(q, k, v, 0.1, False)[0].grad_fn is not None
    assert flashmoe.scaled_dot_product_attention(q, k, v).grad_fn is not None
    with torch.no_grad():
        assert flashmoe.attention(q, k, v).grad_fn is None
    with torch.inference_mode():
        assert flashmoe.attention(q, k, v).is_inference()


def test_second_derivative_says_that_there_is_none(device: str) -> None:
    q, k, v = make_leaves(*make_inputs(Problem(9, 9), device, torch.float16))
    (first,) = torch.autograd.grad(flashmoe.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(DifferentiationError, match="differentiated once"):
        first.sum().backward()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch itself uses it
def test_forward_mode_says_that_there_is_none_and_sdpa_falls_back() -> None:
    q, k, v = make_inputs(Problem(9, 9), "cpu", torch.float32)
    with torch.autograd.forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(DifferentiationError, match="forward-mode"):
            flashmoe.attention(dual, k, v)
        out = flashmoe.scaled_dot_product_attention(dual, k, v)
        expected = torch_attention(dual, k, v)
        tangents = [torch.autograd.forward_ad.unpack_dual(tensor).tangent for tensor in (out, expected)]
        assert tangents[0] is not None
        torch.testing.assert_close(*tangents)
        assert flashmoe.attention(q, k, v).shape == q.shape  # nothing dual is involved


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch itself uses it
def test_transforms_of_torch_func(device: str) -> None:
    """grad, vmap, and one inside the other, against loops and plain autograd."""
    q, k, v = make_inputs(Problem(20, 30, 16, 4, 2, batch=2), device, torch.float16)
    many = torch.stack([q * scale for scale in (0.5, 1.0, 2.0)])

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashmoe.attention(q, k, v, causal=True).float().square().sum()

    leaves = make_leaves(q, k, v)
    loss(*leaves).backward()
    for a, leaf in zip(torch.func.grad(loss, (0, 1, 2))(q, k, v), leaves, strict=True):
        torch.testing.assert_close(a, leaf.grad)
    mapped = torch.func.vmap(lambda one: flashmoe.attention(one, k, v))(many)
    torch.testing.assert_close(mapped, torch.stack([flashmoe.attention(one, k, v) for one in many]))
    other_axis = torch.func.vmap(flashmoe.attention, in_dims=(2, None, None))(many.movedim(0, 2), k, v)
    torch.testing.assert_close(other_axis, mapped)
    per_sample = torch.func.vmap(torch.func.grad(loss, (0, 1)), in_dims=(0, None, None))(many, k, v)
    singles = [torch.func.grad(loss, (0, 1))(one, k, v) for one in many]
    for position in range(2):
        torch.testing.assert_close(per_sample[position], torch.stack([single[position] for single in singles]))
    with pytest.raises(DifferentiationError):
        torch.func.jvp(lambda x: flashmoe.attention(x, k, v), (q,), (q,))
    with pytest.raises(DifferentiationError):
        torch.func.grad(lambda x: torch.func.grad(loss)(x, k, v).float().sum())(q)


def test_eager_calls_give_the_gradients_of_the_operator(device: str) -> None:
    """The shortcut that eager calls take, also under checkpointing and with hooks on saved tensors."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    q, k, v = (torch.randn(2, 4, 33, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    grad_out = torch.randn_like(q)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flashmoe.attention(q, k, v, causal=True)

    plain = attend(q, k, v)
    operator = torch.ops.flashmoe.flash_attention_forward
    expected = torch.autograd.grad(operator(q, k, v, 64**-0.5, True)[0], (q, k, v), grad_out)
    assert "EagerForward" in type(plain.grad_fn).__name__
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        hooked = attend(q, k, v)
    assert len(kept) == 5
    checkpointed = torch.utils.checkpoint.checkpoint(attend, q, k, v, use_reentrant=False)
    for out in (plain, hooked, checkpointed):
        for gradient, wanted in zip(torch.autograd.grad(out, (q, k, v), grad_out), expected, strict=True):
            assert torch.equal(gradient, wanted)


def test_eager_calls_with_options_give_the_gradients_of_the_operator(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with a mask's gradient and with dropout; anything that must see the operator still does."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    q, k, v = (torch.randn(2, 4, 33, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    bias = torch.randn(4, 33, 33, device=device, dtype=dtype, requires_grad=True)
    grad_out, leaves = torch.randn_like(q), (q, k, v, bias)
    state = torch.tensor((3, 4), device=device)
    for dropout_p in (0.0, 0.3):

        def call(p: float = dropout_p) -> Tensor:
            return flashmoe.attention(q, k, v, attn_mask=bias, causal=True, dropout_p=p, rng_state=state)

        out = call()
        assert type(out.grad_fn).__name__ == "EagerBackward"
        found = torch.autograd.grad(out, leaves, grad_out)
        with torch.autocast(device, dtype=torch.bfloat16):
            assert type(call().grad_fn).__name__ != "EagerBackward"
        with monkeypatch.context() as patched:
            patched.setattr(autograd, "is_eager", lambda given: False)
            out = call()
        assert type(out.grad_fn).__name__ != "EagerBackward"
        for gradient, wanted in zip(found, torch.autograd.grad(out, leaves, grad_out), strict=True):
            assert torch.equal(gradient, wanted)
        with pytest.raises(DifferentiationError):
            torch.autograd.grad(torch.autograd.grad(call(), q, grad_out, create_graph=True)[0].sum(), q)
