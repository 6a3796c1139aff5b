"""``fused_moe`` with e4m3 weights: which of its arguments go with them, and which operator computes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as transforms_are_active
from torch.compiler import is_compiling

from flashmoe.errors import ArgumentError, DifferentiationError, FlashmoeError
from flashmoe.fallback import note_fallback
from flashmoe.operators.moe import arguments, scaled

CAPABILITY = (9, 0)  # of the GPUs that have the kernels, which are arch-specific
_EIGHT_BITS = frozenset(
    getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
)


def is_scaled(x: Any, w13: Any, w2: Any, *scales: Any) -> bool:
    """Whether a call is meant for this module: something has 8 bits, or there is a scale."""
    if any(scale is not None for scale in scales):
        return True
    return any(getattr(tensor, "dtype", None) in _EIGHT_BITS for tensor in (x, w13, w2))


def layer(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    scales: tuple[Tensor | None, Tensor | None, Tensor | None],
    expert_map: Tensor | None,
    shared: Tensor | None,
    activation: str,
    out: Tensor | None,
    unsupported: Mapping[str, bool],
) -> Tensor:
    """``scales`` of w13, w2 and x. ``unsupported``: arguments of ``fused_moe`` that nothing here has, and whether they were given."""
    for name, is_given in unsupported.items():
        if is_given:
            msg = f"{name} is given with float8_e4m3fn weights, which do not support it; leave it away, or give bfloat16 weights"
            raise ArgumentError(msg)
    w13_scale, w2_scale, x_scale = scales
    values = (x, w13, w2, w13_scale, w2_scale, topk_weights, topk_ids, x_scale, expert_map, shared, activation)
    _refuse_gradients((*values, out))
    if out is not None:
        scaled.validate_scaled(*values)
        arguments.check_out(out, x, scaled.output_dtype(x))
    result = _call(values)
    return result if out is None else out.copy_(result)


def _call(values: tuple[Any, ...]) -> Tensor:
    reason = _why_torch(values[0])
    operators = torch.ops.flashmoe
    operator = operators._fused_moe_scaled.default if reason is None else operators._fused_moe_scaled_torch.default
    if reason is not None:
        note_fallback(reason, "fused_moe with float8_e4m3fn weights")
    if is_compiling():
        compiled: Tensor = operator(*values)
        return compiled
    try:
        result: Tensor = operator(*values)
    except Exception as error:
        if isinstance(error, FlashmoeError):
            raise
        validate = scaled.validate_for_kernels if reason is None else scaled.validate_scaled
        cause = arguments.explain(error, validate, *values)
        if cause is not error:
            raise cause from error
        raise
    return result


def _why_torch(x: Any) -> str | None:
    """Why torch computes the layer; None where there are kernels, and for what is no tensor at all."""
    if not isinstance(x, Tensor):
        return None
    if x.device.type != "cuda":
        return f"tensors on {x.device.type}; the kernels are for GPUs of compute capability {CAPABILITY[0]}.{CAPABILITY[1]}"
    major, minor = torch.cuda.get_device_capability(x.device)
    if (major, minor) == CAPABILITY:
        return None
    return f"the GPU has compute capability {major}.{minor}; the kernels are for {CAPABILITY[0]}.{CAPABILITY[1]}"


def _refuse_gradients(values: tuple[Any, ...]) -> None:
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not torch.is_grad_enabled():
        return
    wanted = any(tensor.requires_grad for tensor in tensors)
    if not wanted and not is_compiling() and transforms_are_active():
        wanted = any(torch._C._functorch.is_gradtrackingtensor(tensor) for tensor in tensors)
    if wanted:
        msg = (
            "a gradient is wanted, and fused_moe with float8_e4m3fn weights has none; call it under torch.no_grad(), or "
            "give bfloat16 weights"
        )
        raise DifferentiationError(msg)
