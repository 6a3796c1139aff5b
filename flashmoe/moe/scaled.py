"""The layer with e4m3 weights, which have a scale per 128 by 128 block, and activations with a scale per 128 values of a row.

``_fused_moe_scaled`` is the compiled operator, for GPUs that have its kernels. ``_fused_moe_scaled_torch`` computes the same with
torch's operators, on the CPU and other GPUs: both quantise x (unless it is already quantised) and, between the two products, the
activation; sums are float32, and each row's result is rounded to the output's dtype before a token's rows are summed in float32.
Neither has a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as transforms_are_active
from torch.compiler import is_compiling
from torch.nn import functional

from flashmoe.errors import ArgumentError, DifferentiationError
from flashmoe.fallback import note_fallback
from flashmoe.moe import errors
from flashmoe.moe.fake import output_dtype
from flashmoe.moe.options import CLAMPED_ALPHA, CLAMPED_LIMIT, Layer, ScaledLayer, Scales
from flashmoe.rules import check

BLOCK = 128  # values of a row per scale; for weights also rows per scale
E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
_LEAST = 2.0**-100  # lower bound of a block's largest magnitude, so that blocks of zeros have a scale too
CAPABILITY = (9, 0)  # of the GPUs that have the kernels, which are arch-specific
_EIGHT_BITS = frozenset(
    getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
)
SCHEMA = (
    "_fused_moe_scaled_torch(Tensor x, Tensor w13, Tensor w2, Tensor w13_scale, Tensor w2_scale, Tensor topk_weights, "
    "Tensor topk_ids, Tensor? x_scale, Tensor? expert_map, Tensor? shared, str activation) -> Tensor"
)
# The arguments that autocast casts; an 8-bit x is left alone.
CAST = tuple(ScaledLayer._fields.index(name) for name in ("x", "shared"))


def is_scaled(layer: Layer, scales: Scales) -> bool:
    """Whether this module handles the call: a tensor has 8 bits, or there is a scale."""
    if scales.w13 is not None or scales.w2 is not None or scales.x is not None:
        return True
    return any(getattr(tensor, "dtype", None) in _EIGHT_BITS for tensor in (layer.x, layer.w13, layer.w2))


def call_scaled(layer: Layer, scales: Scales, out: Tensor | None, *, weights_on_input: bool) -> Tensor:
    """``fused_moe`` with e4m3 weights."""
    unsupported = {"b13": layer.b13 is not None, "b2": layer.b2 is not None, "layout": layer.layout != "concat"}
    unsupported |= {"transposed": layer.transposed, "weights_on_input": weights_on_input}
    for name, is_given in unsupported.items():
        if is_given:
            msg = f"{name} is given with float8_e4m3fn weights, which do not support it; remove it, or pass bfloat16 weights"
            raise ArgumentError(msg)
    for name, scale in (("w13_scale", scales.w13), ("w2_scale", scales.w2)):
        if scale is None:
            msg = f"{name} is None; float8_e4m3fn weights need w13_scale and w2_scale; pass both, or bfloat16 weights"
            raise ArgumentError(msg)
    given: dict[str, Any] = {name: getattr(layer, name) for name in ScaledLayer._fields if name in Layer._fields}
    given |= {"w13_scale": scales.w13, "w2_scale": scales.w2, "x_scale": scales.x}
    call = ScaledLayer(**given)
    check_no_gradients((*call, out), "float8_e4m3fn")
    if out is not None:
        errors.check_types("_fused_moe_scaled_torch", call)
        errors.check_tensor("out", out)
        check("_fused_moe_scaled_out", (out, *call))
    result = _compute(call)
    return result if out is None else out.copy_(result)


def _compute(call: ScaledLayer) -> Tensor:
    reason = _why_torch(call.x)
    name = "_fused_moe_scaled" if reason is None else "_fused_moe_scaled_torch"
    if reason is not None:
        note_fallback(reason, "fused_moe with float8_e4m3fn weights")
    operator = getattr(torch.ops.flashmoe, name).default
    if is_compiling():
        compiled: Tensor = operator(*call)
        return compiled
    try:
        result: Tensor = operator(*call)
    except Exception as error:
        errors.raise_cause(error, name, call)
        raise
    return result


def _why_torch(x: Any) -> str | None:
    """Why torch computes the layer; None if there are kernels, or if x is not a tensor."""
    if not isinstance(x, Tensor):
        return None
    if x.device.type != "cuda":
        return f"tensors on {x.device.type}; the kernels are for GPUs of compute capability {CAPABILITY[0]}.{CAPABILITY[1]}"
    major, minor = torch.cuda.get_device_capability(x.device)
    if (major, minor) == CAPABILITY:
        return None
    return f"the GPU has compute capability {major}.{minor}; the kernels are for {CAPABILITY[0]}.{CAPABILITY[1]}"


def check_no_gradients(values: tuple[Any, ...], weights: str) -> None:
    """Raise if a gradient is requested. ``weights``: the weights' format, for the message."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not torch.is_grad_enabled():
        return
    is_requested = any(tensor.requires_grad for tensor in tensors)
    if not is_requested and not is_compiling() and transforms_are_active():
        is_requested = any(torch._C._functorch.is_gradtrackingtensor(tensor) for tensor in tensors)
    if is_requested:
        msg = f"a gradient is requested, and fused_moe with {weights} weights has none; call it under torch.no_grad(), or pass bfloat16 weights"
        raise DifferentiationError(msg)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values [rows, columns] and float32 scales [rows, columns / 128] of x; a row's last block may be shorter. A
    block's scale is its largest magnitude / 448. NaN stays NaN; an infinity makes its block NaN."""
    columns = x.shape[1]
    padded = torch.nn.functional.pad(x.float(), (0, -columns % BLOCK)).unflatten(1, (-1, BLOCK))
    magnitudes = padded.abs()
    largest = torch.where(magnitudes.isnan(), 0.0, magnitudes).amax(-1, keepdim=True)
    # On a GPU torch turns a division by a constant into this product anyway
    scales = largest.clamp(min=_LEAST) * (1.0 / LARGEST)
    scaled = padded * (1.0 / scales)
    # Rounding may lift the largest value slightly over 448, which torch's conversion turns into NaN on some devices.
    values = scaled.clamp(-LARGEST, LARGEST).flatten(1)[:, :columns].to(E4M3)
    return values, scales.squeeze(-1)


def activate(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The activation between an expert's two products, in torch's operators; see :func:`flashmoe.fused_moe`."""
    if activation == "swiglu":
        return functional.silu(gate) * up
    if activation == "reglu":
        return functional.relu(gate) * up
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=CLAMPED_LIMIT), up.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT)
        return gate * torch.sigmoid(CLAMPED_ALPHA * gate) * (up + 1)
    return functional.gelu(gate, approximate="tanh" if activation == "geglu_tanh" else "none") * up


def dequantize_rows(values: Tensor, scales: Tensor) -> Tensor:
    """float32 of values [rows, columns] with scales [rows, ceil(columns / 128)]."""
    return values.float() * scales.repeat_interleave(BLOCK, 1)[:, : values.shape[1]]


def dequantize_weights(values: Tensor, scales: Tensor) -> Tensor:
    """float32 of one expert's values [n, k] with scales [ceil(n / 128), ceil(k / 128)]."""
    wide = scales.repeat_interleave(BLOCK, 0)[: values.shape[0]]
    return dequantize_rows(values, wide)


def in_torch(*arguments: Any) -> Tensor:
    """``_fused_moe_scaled_torch``; reads only the weights of experts that were chosen. Reads ids on the host."""
    check("_fused_moe_scaled_torch", arguments)
    call = ScaledLayer(*arguments)
    x, ids, experts = call.x, call.topk_ids.long(), call.w13.shape[0]
    if call.expert_map is not None:
        known = (ids >= 0) & (ids < call.expert_map.shape[0])
        mapped = call.expert_map.long()[torch.where(known, ids, 0)] if call.expert_map.shape[0] else -1
        ids = torch.where(known, mapped, -1)
    tokens = dequantize_rows(*(quantize(x) if call.x_scale is None else (x, call.x_scale)))
    dtype = output_dtype(x)
    rows = torch.zeros((*ids.shape, x.shape[1]), dtype=dtype, device=x.device)
    for expert in ids.unique().tolist():
        if not 0 <= expert < experts:
            continue
        chosen = (ids == expert).nonzero(as_tuple=True)
        both = tokens[chosen[0]] @ dequantize_weights(call.w13[expert], call.w13_scale[expert]).mT
        gate, up = both.chunk(2, dim=1)
        active = dequantize_rows(*quantize(activate(gate, up, call.activation)))
        rows[chosen] = (active @ dequantize_weights(call.w2[expert], call.w2_scale[expert]).mT).to(dtype)
    has_row = ((ids >= 0) & (ids < experts)).unsqueeze(-1)
    total = torch.zeros(x.shape, device=x.device) if call.shared is None else call.shared.float()
    for choice in range(ids.shape[1]):
        weighted = call.topk_weights[:, choice, None].float() * rows[:, choice].float()
        total = total + torch.where(has_row[:, choice], weighted, 0.0)
    return total.to(dtype)


def call_in_torch(*arguments: Any) -> Tensor:
    """Calls the operator of :func:`in_torch`, so that other transforms see it."""
    result: Tensor = torch.ops.flashmoe._fused_moe_scaled_torch.default(*arguments)
    return result
