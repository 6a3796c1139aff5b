"""scaled_dot_product_attention: torch's signature, numbers, shapes and errors; which path runs, and what explain() says."""

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torch_attention

import flashmoe
from flashmoe import _extension
from flashmoe.attn import sdpa, sdpa_dispatch
from flashmoe.attn.dropout import draw_state
from flashmoe.attn.sdpa_dispatch import Backend
from flashmoe.errors import ArgumentError, DtypeError
from tests.forked_python import run_python

from .reference import CLOSE, DTYPES, assert_ran_here

# (query, key, keyword arguments): shapes that flashmoe runs itself; value has key's shape.
SHAPES: tuple[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]], ...] = (
    ((2, 4, 33, 64), (2, 4, 33, 64), {}),
    ((2, 4, 33, 64), (2, 4, 70, 64), {}),
    ((2, 4, 70, 64), (2, 4, 33, 64), {}),
    ((2, 4, 1, 64), (2, 4, 33, 64), {}),
    ((3, 5, 8), (3, 7, 8), {}),
    ((5, 8), (7, 8), {}),
    ((7, 8), (5, 8), {}),
    ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), {}),
    ((2, 2, 3, 4, 5, 8), (2, 2, 3, 4, 7, 8), {}),
    ((2, 4, 5, 8), (1, 4, 7, 8), {}),
    ((1, 4, 5, 8), (2, 4, 7, 8), {}),
    ((2, 4, 5, 8), (2, 1, 7, 8), {}),
    ((2, 1, 5, 8), (2, 4, 7, 8), {}),
    ((4, 5, 8), (2, 4, 7, 8), {}),
    ((2, 4, 5, 8), (4, 7, 8), {}),
    ((2, 4, 5, 8), (7, 8), {}),
    ((5, 8), (2, 4, 7, 8), {}),
    ((5, 1, 4, 5, 8), (1, 3, 1, 7, 8), {}),
    ((2, 8, 5, 8), (2, 2, 7, 8), {"enable_gqa": True}),
    ((2, 8, 5, 8), (2, 1, 7, 8), {"enable_gqa": True}),
    ((2, 8, 5, 8), (2, 8, 7, 8), {"enable_gqa": True}),
    ((8, 5, 8), (2, 7, 8), {"enable_gqa": True}),
    ((3, 8, 5, 8), (1, 2, 7, 8), {"enable_gqa": True}),
    ((2, 3, 8, 5, 8), (2, 3, 2, 7, 8), {"enable_gqa": True}),
    ((2, 4, 5, 59), (2, 4, 7, 59), {"scale": 0.3}),
    ((2, 4, 5, 8), (2, 4, 7, 8), {"scale": -1.0}),
    ((0, 4, 5, 8), (0, 4, 7, 8), {}),
    ((2, 4, 0, 8), (2, 4, 7, 8), {}),
    ((2, 4, 5, 8), (2, 4, 0, 8), {}),
)


def _math(*tensors: Tensor, **options: Any) -> Tensor:
    """torch's plain formula, because its fused CPU kernel gives NaN for a causal mask with a negative scale (torch 2.10)."""
    with sdpa_kernel(SDPBackend.MATH):
        return torch_attention(*tensors, **options)


def _tensors(query: tuple[int, ...], key: tuple[int, ...], device: str, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(shape, device=device).to(dtype) for shape in (query, key, key)]


def test_signature_is_torchs() -> None:
    ours = inspect.signature(flashmoe.scaled_dot_product_attention).parameters
    documented = "(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False)"
    # **misspelt is only there to reject misspelt keywords
    known = [p for p in ours.values() if p.kind is not p.VAR_KEYWORD]
    assert tuple(p.name for p in known) == sdpa_dispatch.ARGUMENTS
    stated = [f"{p.name}={p.default}" if p.default is not p.empty else p.name for p in known]
    assert f"({', '.join(stated)})" == documented
    assert documented.replace(" ", "") in (torch_attention.__doc__ or "").replace(" ", "").replace("\n", "")


every_shape = pytest.mark.parametrize(
    ("query", "key", "options"),
    SHAPES,
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else None,
)
full_and_causal = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@full_and_causal
@every_shape
def test_same_as_torch_and_run_here(
    query: tuple[int, ...],
    key: tuple[int, ...],
    options: dict[str, Any],
    causal: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLASHMOE_FALLBACK", "error")
    for dtype in DTYPES[device]:
        q, k, v = _tensors(query, key, device, dtype)
        assert flashmoe.explain(q, k, v, is_causal=causal, **options).path is Backend.FLASHMOE
        out = flashmoe.scaled_dot_product_attention(q, k, v, is_causal=causal, **options)
        if out.numel() > 0 and k.shape[-2] > 0:
            assert_ran_here(device)
        wide = [tensor.double() if device == "cpu" else tensor.float() for tensor in (q, k, v)]
        expected = _math(*wide, is_causal=causal, **options)
        assert out.shape == expected.shape
        assert out.dtype == dtype
        torch.testing.assert_close(out.to(expected.dtype), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])


def test_last_dimension_may_be_strided(device: str) -> None:
    for causal in (False, True):
        q, k, v = (torch.randn(2, 4, 64, 33, device=device).half().transpose(2, 3) for _ in range(3))
        out = flashmoe.scaled_dot_product_attention(q, k, v, is_causal=causal)
        assert_ran_here(device)
        expected = torch_attention(*(t.float() for t in (q, k, v)), is_causal=causal)
        torch.testing.assert_close(out.float(), expected, rtol=2e-3, atol=2e-3)


# name: (query, key and value shapes, dtype or None for each of the device's, keyword arguments, word in the reason)
FALLBACKS: dict[str, tuple[Any, Any, Any, torch.dtype | None, Any, str]] = {
    "float64": ((2, 4, 33, 64), (2, 4, 33, 64), None, torch.float64, {"is_causal": True}, "float64"),
    "head dim 640": ((1, 2, 33, 640), (1, 2, 33, 640), None, None, {"is_causal": True}, "head dim 640"),
    "wider values": ((1, 2, 33, 64), (1, 2, 33, 64), (1, 2, 33, 640), None, {}, "head dim 640"),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_fallback_gives_torchs_result(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value, only, options, word = FALLBACKS[name]
    for dtype in (only,) if only else DTYPES[device]:
        q, k, v = (torch.randn(shape, device=device).to(dtype) for shape in (query, key, value or key))
        keywords = options(device, dtype) if callable(options) else options
        route = flashmoe.explain(q, k, v, **keywords)
        assert route.path is Backend.TORCH
        assert word in route.reason
        out = flashmoe.scaled_dot_product_attention(q, k, v, **keywords)
        expected = torch_attention(q, k, v, **keywords)
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
        monkeypatch.setenv("FLASHMOE_FALLBACK", "warn")
        with pytest.warns(UserWarning, match="falls back to torch for attention"):
            flashmoe.scaled_dot_product_attention(q, k, v, **keywords)
        monkeypatch.setenv("FLASHMOE_FALLBACK", "error")
        with pytest.raises(ArgumentError, match=word):
            flashmoe.scaled_dot_product_attention(q, k, v, **keywords)
        monkeypatch.setenv("FLASHMOE_FALLBACK", "sometimes")
        with pytest.raises(ArgumentError, match="supported: allow, warn, error"):
            flashmoe.scaled_dot_product_attention(q, k, v, **keywords)
        monkeypatch.delenv("FLASHMOE_FALLBACK")


NO_HEADS = """
import torch, flashmoe
q = torch.randn(2, 0, 5, 8, requires_grad=True)
mask = torch.ones(5, 5, dtype=torch.bool)
for options in ({"attn_mask": mask}, {"attn_mask": mask, "enable_gqa": True}, {"attn_mask": mask.float()}, {"dropout_p": 0.5}):
    out = flashmoe.scaled_dot_product_attention(q, q, q, **options)
    assert out.shape == q.shape, out.shape
    out.sum().backward()
    assert q.grad.shape == q.shape
one = torch.randn(2, 1, 5, 8)
assert flashmoe.scaled_dot_product_attention(one, q, q, attn_mask=mask).shape == q.shape
try:
    flashmoe.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(3, 7, dtype=torch.bool))
except RuntimeError as error:
    print("refused", error)
"""


def test_no_heads_and_a_mask() -> None:
    """torch divides by the number of heads in this case: SIGFPE, so it runs in a separate process."""
    done = run_python("-c", NO_HEADS)
    assert (done.returncode, done.stdout[:7]) == (0, "refused"), done.stderr


@pytest.mark.filterwarnings("ignore:Named tensors:UserWarning")
def test_tensors_of_torchs_own_kinds_are_torchs() -> None:
    q = torch.randn(2, 4, 33, 64)
    if hasattr(q, "rename"):  # later versions of torch have no named tensors
        named = q.rename("B", "H", "S", "D")
        with pytest.raises(RuntimeError) as theirs:
            torch_attention(named, q, q)
        with pytest.raises(type(theirs.value)) as ours:
            flashmoe.scaled_dot_product_attention(named, q, q)
        assert str(ours.value) == str(theirs.value)
    zero = torch._efficientzerotensor(q.shape)
    assert "zero tensor" in flashmoe.explain(zero, q, q).reason
    assert flashmoe.scaled_dot_product_attention(zero, q, q).shape == q.shape


def test_policy_of_falling_back_when_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code reads the policy when it is traced; an empty variable counts as unset."""
    q = torch.randn(1, 2, 5, 8).double()
    for policy, expectation in (("error", pytest.raises(Exception, match="would run on torch")), ("", None)):
        torch._dynamo.reset()
        monkeypatch.setenv("FLASHMOE_FALLBACK", policy)
        compiled = torch.compile(flashmoe.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
        if expectation is None:
            assert torch.equal(compiled(q, q, q), torch_attention(q, q, q))
        else:
            with expectation:
                compiled(q, q, q)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("query", "key", "value", "mask", "options"),
    [
        ((2, 4, 33, 64), (2, 4, 50, 64), (2, 4, 50, 32), (33, 50), {}),
        ((2, 4, 33, 64), (2, 2, 50, 64), (2, 2, 50, 64), (2, 1, 33, 50), {"enable_gqa": True}),
        ((4, 33, 64), (4, 50, 64), (4, 50, 64), (4, 1, 50), {}),
        ((3, 2, 4, 7, 64), (2, 4, 50, 64), (1, 2, 4, 50, 64), (3, 1, 4, 7, 50), {}),
        ((3, 2, 4, 7, 64), (3, 2, 4, 50, 64), (3, 2, 4, 50, 64), (1, 7, 50), {"scale": 0.3}),
        ((3, 2, 4, 7, 64), (3, 2, 4, 50, 64), (3, 2, 4, 50, 64), (2, 1, 7, 50), {}),
        ((7, 64), (50, 64), (50, 16), (7, 50), {}),
    ],
    ids=str,
)
def test_masks_run_here(
    query: Any, key: Any, value: Any, mask: Any, options: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHMOE_FALLBACK", "error")
    for dtype in DTYPES[device]:
        q, k, v = (torch.randn(shape, device=device).to(dtype) for shape in (query, key, value))
        bias = torch.randn(mask, device=device).to(dtype)
        bool_mask = bias > 0
        bool_mask[..., 0, :] = False  # a row without a key: torch gives 0 there
        for one in (bias, bool_mask):
            out = flashmoe.scaled_dot_product_attention(q, k, v, one, **options)
            assert_ran_here(device)
            wide = [tensor.double() if device == "cpu" else tensor.float() for tensor in (q, k, v)]
            expected = _math(*wide, attn_mask=one if one is bool_mask else one.to(wide[0].dtype), **options)
            assert out.shape == expected.shape
            torch.testing.assert_close(out.to(expected.dtype), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])


def test_dropout_runs_here(device: str) -> None:
    """With the device's generator: the same seed gives the mask of a direct call with the state drawn from it; also with a top-left causal mask."""
    q, k, v = _tensors((2, 4, 33, 64), (2, 4, 33, 64), device, torch.float16)
    mask = torch.randn(33, 33, device=device).half()
    assert flashmoe.explain(q, k, v, mask, 0.5).path is Backend.FLASHMOE
    torch.manual_seed(1)
    state = draw_state(q.device)
    for options in ({}, {"causal": True}, {"attn_mask": mask}):
        expected = flashmoe.attention(q, k, v, **options, dropout_p=0.5, rng_state=state)
        torch.manual_seed(1)
        given = {"is_causal" if name == "causal" else name: value for name, value in options.items()}
        assert torch.equal(flashmoe.scaled_dot_product_attention(q, k, v, **given, dropout_p=0.5), expected)
        assert_ran_here(device)
        assert not torch.equal(flashmoe.scaled_dot_product_attention(q, k, v, **given, dropout_p=0.5), expected)
    for length in (20, 40):  # rows whose mean over many masks is that of the call without dropout
        longer = [torch.randn(1, 1, length, 64, device=device).half() for _ in range(2)]
        many = torch.stack(
            [
                flashmoe.scaled_dot_product_attention(q[:1, :1], *longer, is_causal=True, dropout_p=0.3)
                for _ in range(400)
            ]
        )
        plain = flashmoe.scaled_dot_product_attention(q[:1, :1], *longer, is_causal=True)
        assert (many.float().mean(0) - plain.float()).abs().max().item() < 0.25


def test_all_dropped_goes_to_torch() -> None:
    q = torch.randn(1, 2, 5, 8)
    assert "dropout_p" in flashmoe.explain(q, q, q, dropout_p=1.0).reason
    assert not flashmoe.scaled_dot_product_attention(q, q, q, dropout_p=1.0).any()


@pytest.mark.gpu
def test_float32_on_a_gpu_goes_to_torch() -> None:
    q, k, v = _tensors((2, 4, 33, 64), (2, 4, 33, 64), "cuda", torch.float32)
    assert "float32" in flashmoe.explain(q, k, v).reason
    assert torch.equal(flashmoe.scaled_dot_product_attention(q, k, v), torch_attention(q, k, v))
    with pytest.raises(DtypeError, match="float16, bfloat16"):
        flashmoe.attention(q, k, v)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_go_to_torch() -> None:
    parts = [torch.randn(length, 4, 8) for length in (3, 5)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    assert "nested" in flashmoe.explain(nested, nested, nested).reason
    out = flashmoe.scaled_dot_product_attention(nested, nested, nested)
    for part, expected in zip(
        out.transpose(1, 2).unbind(), torch_attention(nested, nested, nested).transpose(1, 2).unbind(), strict=True
    ):
        torch.testing.assert_close(part, expected)


def test_subclasses_and_parameters_are_taken(device: str) -> None:
    class Plain(Tensor):
        pass

    q, k, v = _tensors((2, 4, 33, 64), (2, 4, 33, 64), device, torch.float16)
    expected = flashmoe.attention(q, k, v)
    assert torch.equal(flashmoe.attention(torch.nn.Parameter(q), k, v), expected)
    wrapped = flashmoe.attention(q.as_subclass(Plain), k, v)
    assert isinstance(wrapped, Plain)
    assert torch.equal(wrapped.as_subclass(Tensor), expected)


BROKEN: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "heads without enable_gqa": ((2, 8, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), {}),
    "heads that are not divisible into groups": ((2, 8, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), {"enable_gqa": True}),
    "batch sizes": ((2, 4, 5, 8), (3, 4, 7, 8), (3, 4, 7, 8), {}),
    "head dims": ((2, 4, 5, 8), (2, 4, 7, 16), (2, 4, 7, 16), {}),
    "one dimension": ((8,), (8,), (8,), {}),
    "dropout": ((2, 4, 5, 8), (2, 4, 5, 8), (2, 4, 5, 8), {"dropout_p": 1.5}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_wrong_arguments_raise_torchs_own_errors(name: str) -> None:
    query, key, value, options = BROKEN[name]
    q, k, v = (torch.randn(shape) for shape in (query, key, value))
    with pytest.raises(Exception) as theirs:
        torch_attention(q, k, v, **options)
    with pytest.raises(type(theirs.value)) as ours:
        flashmoe.scaled_dot_product_attention(q, k, v, **options)
    hint = " (query has 8 heads and key 2: pass enable_gqa=True)" if name == "heads without enable_gqa" else ""
    assert str(ours.value) == f"{theirs.value}{hint}"
    assert flashmoe.explain(q, k, v, **options).path is Backend.TORCH


def test_what_is_no_tensor_raises_torchs_error() -> None:
    q = torch.randn(2, 4, 5, 8)
    with pytest.raises(TypeError):
        flashmoe.scaled_dot_product_attention(q, None, q)
    with pytest.raises(TypeError):
        flashmoe.scaled_dot_product_attention([1.0], q, q)
    with pytest.raises(RuntimeError):
        flashmoe.scaled_dot_product_attention(q, q.half(), q)
    assert "not a tensor" in flashmoe.explain(q, None, q).reason
    assert "dtypes" in flashmoe.explain(q, q.half(), q).reason
    assert "devices" in flashmoe.explain(q, q.to("meta"), q).reason


def test_causal_is_top_left(device: str) -> None:
    """Key j is visible to query i when j <= i: flashmoe.attention differs if Sq != Sk."""
    q, k, v = _tensors((1, 1, 4, 64), (1, 1, 9, 64), device, torch.float16)
    out = flashmoe.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out[0, 0, 0], v[0, 0, 0])
    bottom_right = flashmoe.attention(q, k, v, causal=True)
    assert not torch.allclose(bottom_right, out)
    torch.testing.assert_close(bottom_right[:, :, -1:], flashmoe.attention(q[:, :, -1:], k, v))


def test_gradients_through_every_shape_rule() -> None:
    """Broadcast, merged and split inputs get summed and reshaped gradients like torch's."""
    for query, key, options in SHAPES:
        for causal in (False, True):
            ours = [tensor.requires_grad_() for tensor in _tensors(query, key, "cpu", torch.float32)]
            theirs = [tensor.detach().double().requires_grad_() for tensor in ours]
            out = flashmoe.scaled_dot_product_attention(*ours, is_causal=causal, **options)
            weights = torch.randn(out.shape)
            expected = _math(*theirs, is_causal=causal, **options)
            gradients = torch.autograd.grad(out, ours, weights)
            for a, b in zip(gradients, torch.autograd.grad(expected, theirs, weights.double()), strict=True):
                torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


@full_and_causal
@every_shape
def test_the_operator_leaves_what_it_would_get_wrong(
    query: tuple[int, ...], key: tuple[int, ...], options: dict[str, Any], causal: bool, device: str
) -> None:
    """None, and no error, if inputs must be broadcast or the mask is aligned to another corner; the fake kernel agrees."""
    tensors = _tensors(query, key, device, torch.float16)
    arguments = (options.get("scale"), causal, options.get("enable_gqa", False))
    _extension.load()
    operator = torch.ops.flashmoe._flash_attention_drop_in
    out, shape = operator(*tensors, *arguments), operator(*(t.to("meta") for t in tensors), *arguments)
    plain = len(query) == len(key) == 4 and query[0] == key[0]
    if plain and (query[1] == key[1] or "enable_gqa" in options) and (not causal or query[2] == key[2]):
        assert torch.equal(out, flashmoe.attention(*tensors, causal=causal, scale=options.get("scale")))
        assert (shape.shape, shape.dtype, shape.stride()) == (out.shape, out.dtype, out.stride())
    else:
        assert out is None
        assert shape is None


def test_default_scale_of_the_operators_is_pythons(device: str) -> None:
    """Bit for bit at every head dim: calls that take different paths through Python give the same numbers."""
    for head_dim in range(1, 257):
        q, k, v = _tensors((1, 2, 5, head_dim), (1, 2, 5, head_dim), device, torch.float16)
        expected = flashmoe.attention(q, k, v, scale=head_dim**-0.5)
        assert torch.equal(flashmoe.attention(q, k, v), expected), head_dim
        assert torch.equal(flashmoe.scaled_dot_product_attention(q, k, v), expected), head_dim
        assert torch.equal(flashmoe.attention(q, k, v, return_lse=True)[0], expected), head_dim


def test_default_scale_is_one_over_root_of_head_dim(device: str) -> None:
    q, k, v = _tensors((1, 2, 9, 64), (1, 2, 9, 64), device, torch.float16)
    assert torch.equal(
        flashmoe.scaled_dot_product_attention(q, k, v), flashmoe.attention(q, k, v, scale=1 / math.sqrt(64))
    )
    assert _extension.last_kernel()


def test_a_mask_that_needs_no_merging_is_no_copy() -> None:
    """Expanded, its gradient would be as large as the scores."""
    q, mask = torch.randn(2, 4, 3, 8), torch.zeros(3, 3)
    for given in (mask, mask[None], mask[None, None]):
        assert sdpa._as_four_dimensions(q, q, q, given, False)[3] is given
    merged = sdpa._as_four_dimensions(*(q.expand(5, 2, 4, 3, 8),) * 3, mask.expand(1, 2, 1, 3, 3), False)[3]
    assert merged is not None
    assert merged.shape == (10, 4, 3, 3)


def test_one_key_head_for_all_is_no_copy() -> None:
    q, one, wide = torch.randn(2, 4, 3, 8), torch.randn(2, 1, 3, 8), torch.randn(2, 4, 3, 8)
    for k, v, heads in ((one, one, 1), (one, wide, 4), (wide, one, 4)):
        found = sdpa._as_four_dimensions(q, k, v, None, False)
        assert [found[at].shape[1] for at in (1, 2)] == [heads, heads]
