"""flashmoe.Attention: shapes, parameter names, numbers against the formula, errors."""

import numpy as np
import pytest
import torch
from torch import Tensor

import flashmoe
from flashmoe.errors import ArgumentTypeError, DtypeError, ShapeError

from .reference import plain_attention

DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}


def _formula(module: flashmoe.Attention, x: Tensor, context: Tensor) -> Tensor:
    def heads(projection: torch.nn.Linear, source: Tensor) -> Tensor:
        return projection(source).unflatten(2, (-1, module.head_dim)).transpose(1, 2)

    q, k, v = heads(module.q_proj, x), heads(module.k_proj, context), heads(module.v_proj, context)
    out, _ = plain_attention(q, k, v, module.causal)
    return module.out_proj(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, None, None), (4, 2, None), (4, 1, 40)])
def test_forward_and_backward(
    heads: int, kv_heads: int | None, head_dim: int | None, causal: bool, device: str
) -> None:
    dtype = DTYPE[device]
    module = flashmoe.Attention(
        64, heads, kv_heads, head_dim=head_dim, causal=causal, bias=True, device=device, dtype=dtype
    )
    x = torch.randn(2, 19, 64, device=device, dtype=dtype)
    for context in (None, torch.randn(2, 33, 64, device=device, dtype=dtype)):
        source = x if context is None else context
        tolerance = 1e-5 if dtype is torch.float32 else 3e-2
        module.zero_grad()
        out = module(x, context)
        assert out.shape == (2, 19, 64)
        out.square().sum().backward()
        ours = [parameter.grad.clone() for parameter in module.parameters()]
        module.zero_grad()
        expected = _formula(module, x, source)
        expected.square().sum().backward()
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
        for a, parameter in zip(ours, module.parameters(), strict=True):
            limit = tolerance * max(1.0, parameter.grad.abs().max().item())
            torch.testing.assert_close(a, parameter.grad, rtol=tolerance, atol=limit)


def test_parameters_have_stable_names_and_shapes() -> None:
    module = flashmoe.Attention(96, 6, 2, bias=True, head_dim=8)
    assert {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()} == {
        "q_proj.weight": (48, 96),
        "q_proj.bias": (48,),
        "k_proj.weight": (16, 96),
        "k_proj.bias": (16,),
        "v_proj.weight": (16, 96),
        "v_proj.bias": (16,),
        "out_proj.weight": (96, 48),
        "out_proj.bias": (96,),
    }
    assert all(name.endswith("weight") for name in flashmoe.Attention(96, 6).state_dict())
    twin = flashmoe.Attention(96, 6, 2, bias=True, head_dim=8)
    twin.load_state_dict(module.state_dict())
    x = torch.randn(1, 4, 96)
    assert torch.equal(twin(x), module(x))
    assert "kv_heads=2" in repr(module)


def test_device_and_dtype_reach_the_parameters() -> None:
    module = flashmoe.Attention(32, 2, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.bfloat16)}
    assert module(torch.empty(1, 5, 32, device="meta", dtype=torch.bfloat16)).shape == (1, 5, 32)


@pytest.mark.parametrize("bad", [2.0, "4", True, None])
def test_sizes_of_the_wrong_type(bad: object) -> None:
    with pytest.raises(ArgumentTypeError, match="heads must be an integer"):
        flashmoe.Attention(64, bad)


def test_wrong_inputs() -> None:
    module = flashmoe.Attention(32, 2)
    for wrong in (torch.randn(4, 32), torch.randn(1, 4, 31), torch.randn(1, 1, 4, 32)):
        with pytest.raises(ShapeError, match=r"x must be \[batch, length, 32\]"):
            module(wrong)
    with pytest.raises(ShapeError, match="context must be"):
        module(torch.randn(1, 4, 32), torch.randn(1, 4, 16))
    with pytest.raises(ShapeError, match="batch size"):
        module(torch.randn(1, 4, 32), torch.randn(2, 4, 32))
    with pytest.raises(DtypeError, match="float64"):
        flashmoe.Attention(32, 2, dtype=torch.float64)(torch.randn(1, 4, 32, dtype=torch.float64))


@pytest.mark.parametrize("bad", [None, [1.0], "x"])
def test_inputs_that_are_no_tensors(bad: object) -> None:
    module = flashmoe.Attention(32, 2)
    with pytest.raises(ArgumentTypeError, match=r"x must be a torch.Tensor \[batch, length, 32\]"):
        module(bad)
    if bad is not None:
        with pytest.raises(ArgumentTypeError, match=r"context must be a torch\.Tensor"):
            module(torch.randn(1, 4, 32), bad)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"causal": "yes"}, ArgumentTypeError, "causal must be True or False; found 'yes'"),
        ({"causal": torch.tensor([True, False])}, ArgumentTypeError, "causal must be True or False"),
        ({"bias": 1}, ArgumentTypeError, "bias must be True or False; found 1"),
        ({"dtype": "float16"}, ArgumentTypeError, "dtype must be a torch.dtype or None; found 'float16'"),
        ({"dtype": torch.int64}, DtypeError, "no kernel for torch.int64; supported: float16, bfloat16, float32"),
        ({"dtype": torch.complex64}, DtypeError, "no kernel for torch.complex64"),
    ],
)
def test_options_that_cannot_work_are_refused_when_it_is_built(
    options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        flashmoe.Attention(32, 2, **options)


def test_sizes_of_any_integer_type() -> None:
    module = flashmoe.Attention(np.int64(32), np.int32(4), np.uint8(2))
    assert module(torch.randn(1, 3, 32)).shape == (1, 3, 32)
    assert all(type(size) is int for size in (module.dim, module.heads, module.kv_heads, module.head_dim))


@pytest.mark.parametrize(("batch", "length", "keys"), [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0)])
def test_empty_inputs(batch: int, length: int, keys: int, device: str) -> None:
    module = flashmoe.Attention(32, 4, 2, device=device, dtype=DTYPE[device])
    x, context = (torch.randn(batch, size, 32, device=device, dtype=DTYPE[device]) for size in (length, keys))
    out = module(x.requires_grad_(), context)
    assert out.shape == x.shape
    out.sum().backward()
    assert x.grad.isfinite().all()
