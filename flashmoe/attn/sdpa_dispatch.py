"""Which path ``flashmoe.scaled_dot_product_attention`` takes for given arguments, and why.

The rule is the same everywhere: calls that the operator computes with exactly SDPA's meaning run on flashmoe; all others, wrong
arguments included, go to ``torch.nn.functional.scaled_dot_product_attention``, which computes them or raises its own error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from flashmoe import keywords
from flashmoe.attn.arguments import DTYPES, MAX_GPU_OPTIONS_HEAD_DIM, MAX_HEAD_DIM, is_finite_number
from flashmoe.checks import has_names, is_number
from flashmoe.errors import ShapeError
from flashmoe.transforms import autocast_dtype, has_tangent

WIDE_CAPABILITY = (8, 0)
BF16_CAPABILITY = (8, 0)
WRONG_DROPOUT = "dropout_p is not a number that is at least 0 and less than 1"
NESTED = "an input is nested or sparse; flashmoe supports dense tensors, and jagged ones through torch's own attention on a GPU after flashmoe.activate()"
ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


class Backend(str, Enum):
    """The library whose attention runs."""

    FLASHMOE = "flashmoe"
    TORCH = "torch"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Route:
    """The path that a call takes, and the reason."""

    path: Backend
    reason: str


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **misspelt: NoReturn,
) -> Route:
    """Say where ``flashmoe.scaled_dot_product_attention`` would run these arguments; computes nothing.

    Raises ShapeError if key and value differ in length, as that function does.
    """
    if misspelt:
        keywords.raise_unknown("explain", misspelt, ARGUMENTS, like="scaled_dot_product_attention")
    unsupported_reason = find_unsupported(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if unsupported_reason is None:
        return Route(Backend.FLASHMOE, "all arguments are supported")
    if jagged_route is not None and unsupported_reason == NESTED and are_jagged(query, key, value):
        return jagged_route(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    check_equal_lengths(key, value)  # as the call does
    return Route(Backend.TORCH, unsupported_reason)


# While flashmoe.activate() is in force: explains where a call with jagged tensors runs; torch chooses the backend of all such calls.
jagged_route: Callable[..., Route] | None = None


def are_jagged(*tensors: Any) -> bool:
    """Whether all are nested tensors in torch's jagged layout."""
    return all(isinstance(x, Tensor) and x.layout is torch.jagged for x in tensors)


def find_unsupported(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any
) -> str | None:
    """Why flashmoe does not run this call, or None if it does. Symbolic sizes may be guarded on."""
    for find, _ in OBSTACLES:
        unsupported_reason = find(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if unsupported_reason is not None:
            return unsupported_reason
    return None


def _unsupported_dropout(query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, *_: Any) -> str | None:
    is_probability = is_number(dropout_p) and 0.0 <= dropout_p < 1.0
    return None if is_probability or dropout_p == 0.0 else WRONG_DROPOUT


def _unsupported_memory(query: Any, key: Any, value: Any, *_: Any) -> str | None:
    for tensor in (query, key, value):
        if not isinstance(tensor, Tensor):
            return f"an input is a {type(tensor).__name__}, not a tensor"
        if tensor.is_nested or tensor.layout is not torch.strided:
            return NESTED
        if not torch.compiler.is_compiling() and (has_names(tensor) or tensor._is_zerotensor()):
            return "an input has named dimensions or is a zero tensor without memory"
    return None


def _unsupported_scalar(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any
) -> str | None:
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool):
            return f"{name} is a {type(flag).__name__}, not a bool"
    if scale is None or is_finite_number(scale):
        return None
    return "scale is not a finite number"


def _unsupported_device(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> str | None:
    device = query.device
    if key.device != device or value.device != device:
        return f"the inputs are on different devices ({device}, {key.device}, {value.device})"
    return None if device.type in DTYPES else f"there is no kernel for device type {device.type}"


def _unsupported_dtype(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> str | None:
    device_type = query.device.type
    dtypes = _dtypes(query, key, value)
    dtype = dtypes[0]
    if dtypes[1] is not dtype or dtypes[2] is not dtype:
        return f"the inputs have different dtypes ({', '.join(map(str, dtypes))})"
    if dtype not in DTYPES[device_type]:
        return f"there is no kernel for {dtype} on {device_type}"
    if dtype is torch.bfloat16 and device_type == "cuda" and _capability(query.device) < BF16_CAPABILITY:
        return "bfloat16 kernels need compute capability 8.0; this GPU is older"
    return None


def _dtypes(*tensors: Tensor) -> list[torch.dtype]:
    """The dtypes that the operator receives, under autocast too."""
    device_type = tensors[0].device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return [tensor.dtype for tensor in tensors]
    target = torch.get_autocast_dtype(device_type)
    return [autocast_dtype(tensor, device_type, target) for tensor in tensors]


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _unsupported_shape(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> str | None:
    q, k, v = query.shape, key.shape, value.shape
    if len(q) < 2 or len(k) < 2 or len(v) < 2:
        return "an input has fewer than two dimensions"
    if k[-1] != q[-1] or k[-2] != v[-2]:
        return "the head dim of query and key, or the length of key and value, differs"
    for head_dim in (q[-1], v[-1]):
        if head_dim < 1 or head_dim > MAX_HEAD_DIM:
            return f"head dim {head_dim} is outside 1 to {MAX_HEAD_DIM}"
    return _unsupported_batch(q[:-2], k[:-2], v[:-2], enable_gqa=options[-1])


def _unsupported_wide(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, dropout_p: Any, *_: Any) -> str | None:
    head_dim = max(query.shape[-1], value.shape[-1])
    if head_dim <= MAX_GPU_OPTIONS_HEAD_DIM or query.device.type == "cpu":
        return None
    if query.device.type == "cuda" and _capability(query.device) < WIDE_CAPABILITY:
        return f"head dim {head_dim} needs compute capability 8.0; this GPU is older"
    if dropout_p:
        return f"dropout supports head dims up to {MAX_GPU_OPTIONS_HEAD_DIM} on a GPU, not {head_dim}"
    tensors = (query, key, value, attn_mask)
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors):
        return f"gradients support head dims up to {MAX_GPU_OPTIONS_HEAD_DIM} on a GPU, not {head_dim}"
    return None


def _unsupported_batch(q: torch.Size, k: torch.Size, v: torch.Size, enable_gqa: bool) -> str | None:
    """Why the dimensions before [length, head_dim] do not fit: they must be equal, or broadcast as in SDPA."""
    if enable_gqa and min(len(q), len(k), len(v)) < 1:
        return "enable_gqa needs a head dimension"
    if q == k and k == v:
        return None
    if enable_gqa:
        if k[-1] != v[-1] or k[-1] < 1 or q[-1] % k[-1] != 0:
            return f"query heads {q[-1]}, key heads {k[-1]} and value heads {v[-1]} are not divisible into groups"
        q, k, v = q[:-1], k[:-1], v[:-1]
    try:
        torch.broadcast_shapes(q, k, v)
    except RuntimeError:
        return f"batch shapes {tuple(q)}, {tuple(k)} and {tuple(v)} do not broadcast"
    return None


def _unsupported_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any,
    dropout_p: Any,
    is_causal: bool,
    scale: Any,
    enable_gqa: bool,
) -> str | None:
    if attn_mask is None:
        return None
    if is_causal:
        return "attn_mask and is_causal are both given, which torch rejects"
    if not isinstance(attn_mask, Tensor) or attn_mask.is_nested or attn_mask.layout is not torch.strided:
        return "attn_mask is not a dense tensor"
    mask_dtype, dtype = _dtypes(attn_mask, query)
    if attn_mask.device != query.device or mask_dtype not in (torch.bool, dtype):
        return f"attn_mask is {mask_dtype} on {attn_mask.device}; flashmoe supports bool or query's dtype, on query's device"
    heads = 3 if enable_gqa else 2  # grouped: the mask has query heads, but key has fewer heads
    batch = torch.broadcast_shapes(*(tensor.shape[:-heads] for tensor in (query, key, value)))
    target = (*batch, *query.shape[-heads:-1], key.shape[-2])
    return None if _broadcasts(attn_mask.shape, target) else "attn_mask does not broadcast to the scores"


def _broadcasts(shape: torch.Size, target: tuple[int, ...]) -> bool:
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(size in (1, wanted) for size, wanted in pairs)


def _unsupported_derivative(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> str | None:
    return "forward-mode differentiation is requested" if has_tangent(query, key, value) else None


# The calls that go to torch: each rule, with its rows of the documentation's table. The rules run in this order, and a rule
# may rely on those before it.
OBSTACLES: tuple[tuple[Callable[..., str | None], tuple[str, ...]], ...] = (
    (_unsupported_dropout, ("`dropout_p` of 1, or a value that is not a probability",)),
    (_unsupported_memory, ("nested, sparse, named or zero tensors",)),
    (_unsupported_scalar, ("`scale` not finite, or a tensor",)),
    (_unsupported_device, ("devices other than CPU and CUDA; inputs on different devices",)),
    (
        _unsupported_dtype,
        (
            "float32 on CUDA; float64 and every other dtype; inputs of different dtypes",
            "bfloat16 on a GPU below compute capability 8.0",
        ),
    ),
    (
        _unsupported_shape,
        (
            f"a head dim of 0 or above {MAX_HEAD_DIM}",
            "batch sizes that do not broadcast; heads that are not divisible into groups",
        ),
    ),
    (
        _unsupported_wide,
        (
            f"a head dim above {MAX_GPU_OPTIONS_HEAD_DIM} on a GPU, with gradients, with dropout, or below compute capability 8.0",
        ),
    ),
    (_unsupported_mask, ("an `attn_mask` of a dtype that is neither bool nor `query`'s",)),
    (_unsupported_derivative, ("forward-mode differentiation",)),
)
# Everything else, and how it runs (sdpa.py).
SUPPORTED: tuple[tuple[str, str], ...] = (
    (f"float16, bfloat16 (CPU also float32), head dims 1 to {MAX_HEAD_DIM}, `value`'s own included", "flashmoe"),
    ("`attn_mask`, bool or of `query`'s dtype, any broadcast and strides, with its gradient", "flashmoe"),
    ("`is_causal`, any `Sq` and `Sk`", "flashmoe; `Sq < Sk`: keys past `Sq` are cut off; `Sq > Sk`: two calls, joined"),
    ("2-D, 3-D, 5-D and higher; batch or head sizes that broadcast", "flashmoe, as 4-D"),
    ("`enable_gqa` with key heads = value heads dividing the query heads", "flashmoe"),
    ("`dropout_p` below 1", "flashmoe: by the device's generator, but not torch's mask for a seed"),
    ("autocast", "flashmoe, in autocast's dtype"),
    ("last dimension not contiguous", "flashmoe, after a copy"),
)


def check_equal_lengths(key: Any, value: Any) -> None:
    """Raise ShapeError for lengths that would make torch read outside of a tensor, or divide by zero (torch 2.10, CPU)."""
    for tensor in (key, value):
        if not isinstance(tensor, Tensor) or tensor.is_nested or tensor.layout is not torch.strided or tensor.dim() < 2:
            return
    if key.shape[-2] != value.shape[-2]:
        msg = (
            f"key and value must have one length; found {key.shape[-2]} and {value.shape[-2]}; slice or pad one of them"
        )
        raise ShapeError(msg)


def has_no_heads(query: Any, key: Any, value: Any) -> bool:
    """Whether these are dense tensors, at least one with a head dimension of size 0."""
    tensors = (query, key, value)
    if not all(isinstance(x, Tensor) and not x.is_nested and x.layout is torch.strided for x in tensors):
        return False
    return any(tensor.dim() > 2 and tensor.shape[-3] == 0 for tensor in tensors)


def would_form_groups(query: Any, key: Any) -> bool:
    """Whether the key has more than one head (one head broadcasts) and fewer than the query, and their number divides the query's."""
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and query.dim() >= 3 and key.dim() >= 3):
        return False
    return 1 < key.shape[-3] < query.shape[-3] and query.shape[-3] % key.shape[-3] == 0
