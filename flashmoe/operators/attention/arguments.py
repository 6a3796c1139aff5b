"""The rules for the arguments of attention, stated once in Python, and why a call failed.

The compiled operator checks every call itself. Eager calls therefore run no check here: :func:`explain` looks for the
reason only after a call has failed. Fake tensors have no C++ behind them, so their rules call :func:`validate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flashmoe.checks import check_flag, has_names, is_number, shape_of, translate
from flashmoe.errors import ArgumentError, ArgumentTypeError, DeviceError, DtypeError, FlashmoeError, ShapeError

MAX_HEAD_DIM = 256
MAX_SIZE = 2**31 - 1  # the kernels hold sizes in 32 bits and strides in 64
MAX_SCALE = 3.4028234663852886e38 / 1.4426950408889634  # the kernels hold scale * log2(e) in float32
LAYOUT = "[batch, heads, length, head_dim]"
# A plain dict: torch.compile traces no mapping proxy where the code that it compiles has changed any dict before.
DTYPES: Mapping[str, tuple[torch.dtype, ...]] = {
    "cpu": (torch.float16, torch.bfloat16, torch.float32),
    "cuda": (torch.float16, torch.bfloat16),
    "meta": (torch.float16, torch.bfloat16, torch.float32),
}


def validate(q: Any, k: Any, v: Any, scale: Any, causal: Any = False) -> None:
    """Raise the typed error that says what is wrong with these arguments, or return when the operator takes them.

    q is [B, Hq, Sq, D], k and v are [B, Hkv, Sk, D], Hkv divides Hq, 1 <= D <= 256, the last dimension is contiguous,
    scale is a number, finite in float32. Sizes may be symbolic.
    """
    tensors = {"q": q, "k": k, "v": v}
    for name, tensor in tensors.items():
        check_is_dense_tensor(name, tensor)
    check_devices(q, k, v)
    check_dtypes(q, k, v)
    for name, tensor in tensors.items():
        if tensor.dim() != 4:
            msg = (
                f"{name} must be {LAYOUT}; found {shape_of(tensor)}, {tensor.dim()} dimensions; {_rank_advice(tensor)}"
            )
            raise ShapeError(msg)
        if any(size > MAX_SIZE for size in tensor.shape):
            msg = f"each size of {name} must be below 2^31; found {shape_of(tensor)}; split that dimension"
            raise ShapeError(msg)
    _check_sizes(q, k, v)
    for name, tensor in tensors.items():
        _check_last_stride(name, tensor)
    check_scalars(scale, causal)


def check_is_dense_tensor(name: str, tensor: Any, layout: str = LAYOUT) -> None:
    if not isinstance(tensor, Tensor):
        msg = f"{name} must be a torch.Tensor {layout}; found {type(tensor).__name__}; convert it with torch.as_tensor"
        raise ArgumentTypeError(msg)
    if tensor.is_nested or tensor.layout is not torch.strided:
        found = "nested" if tensor.is_nested else str(tensor.layout)
        msg = (
            f"{name} must be a dense (strided) tensor; found a {found} tensor; "
            "pad or densify it, or use flashmoe.scaled_dot_product_attention, which hands it to torch"
        )
        raise ArgumentError(msg)
    if has_names(tensor):
        msg = f"{name} has named dimensions {tensor.names}; no operator here knows names; drop them with .rename(None)"
        raise ArgumentError(msg)
    if tensor._is_zerotensor():
        msg = f"{name} is a zero tensor without memory, as forward-mode differentiation makes them; give it some with .clone()"
        raise ArgumentError(msg)


def check_devices(q: Tensor, k: Tensor, v: Tensor) -> None:
    if k.device != q.device or v.device != q.device:
        msg = f"q, k and v must be on one device; found {q.device}, {k.device} and {v.device}; move them with .to(q.device)"
        raise DeviceError(msg)
    if q.device.type not in DTYPES:
        msg = f"no kernel for tensors on {q.device}; supported: cpu, cuda; move them with .to('cpu') or .to('cuda')"
        raise DeviceError(msg)


def check_dtypes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if k.dtype != q.dtype or v.dtype != q.dtype:
        msg = (
            f"q, k and v must share one dtype; found {q.dtype}, {k.dtype} and {v.dtype}; convert them with .to(q.dtype)"
        )
        raise DtypeError(msg)
    supported = DTYPES[q.device.type]
    if q.dtype not in supported:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in supported)
        msg = (
            f"no kernel for {q.dtype} on {q.device.type}; supported: {names}; convert with .to(torch.bfloat16), or use "
            "flashmoe.scaled_dot_product_attention, which hands it to torch"
        )
        raise DtypeError(msg)


def _check_sizes(q: Tensor, k: Tensor, v: Tensor) -> None:
    head_dim = q.shape[3]
    if head_dim != k.shape[3]:
        msg = f"q and k must share head_dim; found {head_dim} in q and {k.shape[3]} in k; check the projections"
        raise ShapeError(msg)
    if k.shape != v.shape:
        msg = (
            f"k and v must have one shape [batch, kv_heads, keys, head_dim]; found k {shape_of(k)} and v {shape_of(v)}"
        )
        raise ShapeError(msg)
    if q.shape[0] != k.shape[0]:
        msg = f"q, k and v must share the batch size; found {q.shape[0]} in q and {k.shape[0]} in k; expand one of them"
        raise ShapeError(msg)
    if head_dim < 1 or head_dim > MAX_HEAD_DIM:
        msg = (
            f"head_dim is {head_dim}; supported: 1 to {MAX_HEAD_DIM}; use more heads of a smaller size, or "
            "flashmoe.scaled_dot_product_attention, which hands larger ones to torch"
        )
        raise ShapeError(msg)
    heads_q, heads_kv = q.shape[1], k.shape[1]
    if (heads_q != 0) if heads_kv == 0 else (heads_q % heads_kv != 0):
        msg = (
            f"the number of query heads must be a multiple of the number of key heads; found {heads_q} and {heads_kv}; "
            f"repeat or drop key heads so that it is; the layout is {LAYOUT}"
        )
        raise ShapeError(msg)


def _check_last_stride(name: str, tensor: Tensor) -> None:
    if tensor.shape[3] > 1 and tensor.stride(3) != 1:
        msg = (
            f"the last dimension of {name} must be contiguous; found strides {tuple(tensor.stride())}; "
            "call .contiguous() on it, or project to a layout that ends in head_dim"
        )
        raise ShapeError(msg)


def check_scalars(scale: Any, causal: Any, return_lse: Any = False) -> None:
    """The rules for ``scale`` (None stands for the default) and the flags."""
    if isinstance(scale, Tensor):
        msg = (
            f"scale must be a number or None; found a {type(scale).__name__}; use float(scale), or multiply q by it where its "
            "gradient is wanted"
        )
        raise ArgumentTypeError(msg)
    if not (scale is None or is_number(scale)):
        msg = f"scale must be a number or None; found {type(scale).__name__}; use float(scale)"
        raise ArgumentTypeError(msg)
    if not (scale is None or is_finite_number(scale)):
        found = str(scale) if len(str(scale)) < 40 else f"{str(scale)[:20]}... ({len(str(scale))} characters)"
        msg = f"scale must be finite in float32; found {found}; the default is 1 / sqrt(head_dim)"
        raise ArgumentError(msg)
    check_flag("causal", causal, "; a mask is attn_mask" if isinstance(causal, Tensor) else "")
    check_flag("return_lse", return_lse)


def is_finite_number(value: Any) -> bool:
    """Whether ``value`` is a number (no tensor) that the kernels can hold; a symbolic one is taken to be."""
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return True
    return is_number(value) and -MAX_SCALE <= value <= MAX_SCALE  # false for NaN; right for integers of any size


def explain(error: BaseException, q: Any, k: Any, v: Any, scale: Any, causal: Any) -> BaseException:
    """Why a call with these arguments failed: our typed error where a rule was broken, else ``error`` itself.

    ``scale`` None stands for the default. Out of memory and other errors of torch come back unchanged.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return error
    coded = error if isinstance(error, FlashmoeError) else translate(error)
    try:
        validate(q, k, v, 1.0 if scale is None else scale, causal)
    except FlashmoeError as broken_rule:
        return broken_rule
    return error if coded is None else coded


def _rank_advice(tensor: Tensor) -> str:
    missing = 4 - tensor.dim()
    if missing > 0:
        return f"add the missing {'dimension' if missing == 1 else 'dimensions'} with .unsqueeze(0)"
    return "merge the leading dimensions with .flatten(0, -4)"
