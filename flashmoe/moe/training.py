"""Training in 8 bits: ``fused_moe(..., precision="fp8")``, whose weights stay in bfloat16.

All six products of a step have e4m3 operands and float32 sums. q divides a block's values by its scale, largest magnitude / 448:

    z = q(x) q(W13)^T, y = q(h) q(W2)^T        h = activation(z); x and h: a scale per 128 values of a row; weights: per 128 by 128
    s = q(dout) q(W2), dx = q(dz) q(W13)       dout and dz: per 128 values of a row; z is saved in bfloat16
    dW13 = q'(dz)^T q"(x), dW2 = q'(dout)^T q"(w h)
                                               over an expert's rows, 128 at a time: q' has a scale per 128 rows of a column, q" per
                                               128 rows of 128 columns; w: the rows' router weights

The operators have kernels on compute capability 9.0. ``kept``, ``backward`` and ``quantize_in_torch`` do the same with torch's
operators, on the CPU and other GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as transforms_are_active
from torch.compiler import is_compiling

from flashmoe.errors import ArgumentError, ArgumentTypeError, ShapeError
from flashmoe.fallback import note_fallback
from flashmoe.moe import autograd, errors, scaled
from flashmoe.moe.fake import Gradients
from flashmoe.moe.options import CLAMPED_ALPHA, CLAMPED_LIMIT, PRECISIONS, Layer, ScaledLayer, Scales
from flashmoe.moe.scaled import BLOCK, activate, dequantize_rows, dequantize_weights, quantize
from flashmoe.rules import check
from flashmoe.transforms import autocasted

_CAST = ("x", "w13", "w2", "shared")


class QuantizedWeights(NamedTuple):
    """The result of :func:`flashmoe.quantize_weights` for weights [E, n, k]: float8_e4m3fn values and float32 scales [E, n / 128, k / 128],
    and the same of the transpose, [E, k, n] and [E, k / 128, n / 128].
    """

    values: Tensor
    scales: Tensor
    transposed: Tensor
    transposed_scales: Tensor


def quantize_weights(weights: Tensor) -> QuantizedWeights:
    """Quantises experts' weights for ``fused_moe(..., precision="fp8")``: one scale per 128 by 128 block, largest magnitude / 448.

    Call it once after each optimizer step, for all forward calls until the next (micro-batches, activation recomputation):
    ``fused_moe(x, w13, w2, ..., precision="fp8", quantized=(quantize_weights(w13), quantize_weights(w2)))`` returns the same bits as
    without ``quantized``, which quantises in every call. Nothing detects that weights have changed since.

    Args:
        weights: bfloat16 [E, n, k], contiguous, n and k multiples of 128: w13 or w2. Under autocast to bfloat16 also float32.

    Returns:
        values float8_e4m3fn [E, n, k], scales float32 [E, n / 128, k / 128], and both transposed: 2 bytes per weight. No gradient is recorded.

    Raises:
        ShapeError, DtypeError, ArgumentTypeError: an argument breaks a rule above; the message says which.
    """
    if not is_compiling():
        errors.check_tensor("weights", weights)
    return _quantized(*autocasted(weights))


def call_fp8(
    layer: Layer, scales: Scales, out: Tensor | None, *, precision: Any, weights_on_input: bool, quantized: Any = None
) -> Tensor:
    """``fused_moe`` with ``precision``."""
    if precision not in PRECISIONS:
        msg = f"precision is {precision!r}; supported: {', '.join(map(repr, PRECISIONS))}, or None for x's dtype"
        raise ArgumentError(msg)
    given = {"b13": layer.b13, "b2": layer.b2, "w13_scale": scales.w13, "w2_scale": scales.w2, "x_scale": scales.x}
    unsupported = {name: value is not None for name, value in (*given.items(), ("out", out))}
    unsupported |= {"layout": layer.layout != "concat", "transposed": layer.transposed}
    for name, is_given in {**unsupported, "weights_on_input": weights_on_input}.items():
        if is_given:
            msg = f"{name} is given with precision='fp8', which does not support it; remove it, or remove precision="
            raise ArgumentError(msg)
    if transforms_are_active() and not is_compiling():
        msg = "precision='fp8' does not support torch.func's transforms; use torch.autograd, or remove precision="
        raise ArgumentError(msg)
    autograd.check_no_tangents("fused_moe", *layer)
    casted = autocasted(*(getattr(layer, name) for name in _CAST))
    layer = layer._replace(**dict(zip(_CAST, casted, strict=True)))
    if not is_compiling():
        for name in ("x", "w13", "w2"):
            errors.check_tensor(name, getattr(layer, name))
    reason = scaled._why_torch(layer.x)
    if reason is not None:
        note_fallback(reason, "fused_moe with precision='fp8'")
    w13, w2 = _given(layer, quantized) if quantized is not None else (_quantized(layer.w13), _quantized(layer.w2))
    call = ScaledLayer(
        layer.x,
        w13.values,
        w2.values,
        w13.scales,
        w2.scales,
        layer.topk_weights,
        layer.topk_ids,
        None,
        layer.expert_map,
        layer.shared,
        layer.activation,
    )
    if not (torch.is_grad_enabled() and layer.requires_grad()):
        return scaled._compute(call)
    result: Tensor = _Layer.apply(layer.w13, layer.w2, *w13[2:], *w2[2:], *call)  # type: ignore[no-untyped-call]
    return result


def _operator(name: str, x: Tensor) -> Any:
    """The operator, or its equivalent in torch's operators on a GPU without its kernels."""
    is_elsewhere = x.device.type == "cuda" and scaled._why_torch(x) is not None
    return _IN_TORCH[name] if is_elsewhere else getattr(torch.ops.flashmoe, name).default


def _run(name: str, *arguments: Any) -> Any:
    operator = _operator(name, arguments[0])
    if is_compiling():
        return operator(*arguments)
    try:
        return operator(*arguments)
    except Exception as error:
        errors.raise_cause(error, name, arguments)
        raise


def _given(layer: Layer, quantized: Any) -> tuple[QuantizedWeights, QuantizedWeights]:
    pair = tuple(quantized) if isinstance(quantized, (tuple, list)) else ()
    if len(pair) != 2 or not all(isinstance(one, QuantizedWeights) for one in pair):
        msg = (
            f"quantized is {type(quantized).__name__}; a pair (quantize_weights(w13), quantize_weights(w2)) of "
            f"flashmoe.quantize_weights is needed, or None"
        )
        raise ArgumentTypeError(msg)
    for name, weights, one in zip(("w13", "w2"), (layer.w13, layer.w2), pair, strict=True):
        if one.values.shape != weights.shape or one.values.device != weights.device:
            msg = (
                f"quantized holds {list(one.values.shape)} on {one.values.device} for {name}, which is {list(weights.shape)} on "
                f"{weights.device}; pass flashmoe.quantize_weights({name})"
            )
            raise ShapeError(msg)
    return pair


def _quantized(weights: Tensor) -> QuantizedWeights:
    """Quantises in every call: code that gathers or updates weights need not bump their version counters (FSDP preserves them)."""
    return QuantizedWeights(*_run("_quantize_weights", weights.detach()))


class _Layer(torch.autograd.Function):
    """w13 and w2 are arguments only for their gradients."""

    @staticmethod
    def forward(ctx: Any, w13: Tensor, w2: Tensor, *given: Any) -> Tensor:
        t13, t13_scale, t2, t2_scale, *arguments = given  # transposed
        call = ScaledLayer(*arguments)
        out, *kept = _run("_fused_moe_scaled_kept", *call)
        ctx.save_for_backward(call.x, t13, t2, t13_scale, t2_scale, *kept)
        ctx.activation, ctx.weights_dtype, ctx.top_k = call.activation, call.topk_weights.dtype, call.topk_ids.shape[1]
        ctx.set_materialize_grads(False)
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (grad_out,) = grads
        needed = ctx.needs_input_grad
        positions = {name: 6 + position for position, name in enumerate(ScaledLayer._fields)}
        wanted = (needed[positions["x"]], needed[0], needed[1], needed[positions["topk_weights"]])
        found: list[Tensor | None] = [None] * len(needed)
        if grad_out is None:
            return tuple(found)
        needs = sum(is_wanted << bit for bit, is_wanted in enumerate(wanted))
        if needs:
            gradients = _run("_fused_moe_scaled_backward", grad_out, *ctx.saved_tensors, ctx.activation, needs)
            found[positions["x"]], found[0], found[1], dweights = gradients
            if dweights is not None:
                dweights = dweights.to(ctx.weights_dtype).reshape(grad_out.shape[0], ctx.top_k)
            found[positions["topk_weights"]] = dweights
        if needed[positions["shared"]]:
            found[positions["shared"]] = grad_out
        return tuple(found)


# The same in torch's operators. An expert's rows are those of the sort.


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*arguments: Any) -> Any:
        with torch.autocast(arguments[0].device.type, enabled=False):
            return function(*arguments)

    return call


@_without_autocast
def quantize_in_torch(weights: Tensor) -> tuple[Tensor, ...]:
    """``_quantize_weights``."""
    check("_quantize_weights", (weights,))
    values, scales = zip(*(_quantize_tiles(one) for one in weights.unbind()), strict=True)
    both = torch.stack(values), torch.stack(scales)
    # Never views: the transpose of a single scale is already contiguous, so .contiguous() would return a view.
    return (*both, *(one.mT.clone(memory_format=torch.contiguous_format) for one in both))


def _quantize_tiles(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values [rows, columns] and float32 scales [rows / 128, columns / 128] of x, one scale per 128 by 128."""
    rows, columns = x.shape
    tiles = x.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).transpose(1, 2)  # [., ., 128, 128]
    largest = tiles.abs().float().nan_to_num(nan=0.0, posinf=torch.inf).amax((2, 3), keepdim=True)
    scales = largest.clamp(min=scaled._LEAST) * (1.0 / scaled.LARGEST)
    values = (tiles.float() * (1.0 / scales)).clamp(-scaled.LARGEST, scaled.LARGEST).to(scaled.E4M3)
    return values.transpose(1, 2).reshape(rows, columns), scales.flatten(1)


@_without_autocast
def kept(*arguments: Any) -> tuple[Tensor, ...]:
    """``_fused_moe_scaled_kept``. Reads counts on the host."""
    check("_fused_moe_scaled_kept", arguments)
    call = ScaledLayer(*arguments)
    x, experts = call.x, call.w13.shape[0]
    order = torch.ops.flashmoe.moe_sort(call.topk_ids, call.topk_weights, call.expert_map, experts)
    offsets, row_slots, slot_rows, row_weights = order
    tokens = dequantize_rows(*quantize(x))
    slots = row_slots.shape[0]
    z = x.new_zeros((slots, call.w13.shape[1]))
    rows = x.new_zeros((slots + 1, x.shape[1]))  # the last row is for slots without a row
    for expert, one in _ranges(offsets):
        both = tokens[row_slots[one].long() // call.topk_ids.shape[1]] @ _weights(call.w13, call.w13_scale, expert).mT
        z[one] = both.to(x.dtype)
        active = dequantize_rows(*quantize(_activated(both, call.activation)))
        rows[one] = (active @ _weights(call.w2, call.w2_scale, expert).mT).to(x.dtype)
    weighted = rows.float() * torch.nn.functional.pad(row_weights, (0, 1)).unsqueeze(1)
    total = torch.zeros(x.shape, device=x.device) if call.shared is None else call.shared.float()
    for choice in slot_rows.view(call.topk_ids.shape).long().unbind(1):
        total = total + weighted[choice]  # index -1 is the last row
    return total.to(x.dtype), z, offsets, row_slots, slot_rows, row_weights


@_without_autocast
def backward(
    grad_out: Tensor,
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor,
    w2_scale: Tensor,
    preactivation: Tensor,
    expert_offsets: Tensor,
    row_slots: Tensor,
    slot_rows: Tensor,
    row_weights: Tensor,
    activation: str,
    needs: int,
) -> Gradients:
    """``_fused_moe_scaled_backward``."""
    given = (preactivation, expert_offsets, row_slots, slot_rows, row_weights, activation, needs)
    check("_fused_moe_scaled_backward", (grad_out, x, w13, w2, w13_scale, w2_scale, *given))
    (slots, both), (experts, inner, hidden) = preactivation.shape, w2.shape
    top_k = slots // x.shape[0] if x.shape[0] > 0 else 1
    dx_rows, dots = x.new_zeros((slots + 1, hidden)), torch.zeros(slots + 1, device=x.device)
    dw13, dw2 = x.new_zeros((experts, both, hidden)), x.new_zeros((experts, hidden, inner))
    for expert, one in _ranges(expert_offsets):
        tokens = row_slots[one].long() // top_k
        dout, z = grad_out[tokens], preactivation[one].float()
        s = (dequantize_rows(*quantize(dout)) @ _weights(w2, w2_scale, expert).mT).to(x.dtype).float()
        weights = row_weights[one].unsqueeze(1)
        active = _activated(z, activation)
        by_gate, by_up = _slopes(z, activation)
        dz = torch.cat((weights * s * by_gate, weights * s * by_up), 1).to(x.dtype)
        dots[one] = (active * s).sum(1)
        dx_rows[one] = (dequantize_rows(*quantize(dz)) @ _weights(w13, w13_scale, expert).mT).to(x.dtype)
        dw2[expert] = (_by_columns(dout).mT @ _by_tiles((weights * active).to(x.dtype))).to(x.dtype)
        dw13[expert] = (_by_columns(dz).mT @ _by_tiles(x[tokens])).to(x.dtype)
    choices = slot_rows.view(-1, top_k).long()
    dx = torch.zeros(x.shape, device=x.device)
    for choice in choices.unbind(1):
        dx = dx + dx_rows[choice].float()
    found = (dx.to(x.dtype), dw13, dw2, dots[choices])
    return tuple(one if needs >> bit & 1 else None for bit, one in enumerate(found))


def _activated(z: Tensor, activation: str) -> Tensor:
    gate, up = z.chunk(2, dim=1)
    return activate(gate, up, activation)


def _slopes(z: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The derivatives of ``activate`` with respect to gate and up."""
    gate, up = z.chunk(2, dim=1)
    one, aten = torch.ones_like(gate), torch.ops.aten
    if activation == "clamped_swiglu":
        low, factor = gate.clamp(max=CLAMPED_LIMIT), up.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT) + 1
        share = torch.sigmoid(CLAMPED_ALPHA * low)
        slope = torch.where(gate <= CLAMPED_LIMIT, share + CLAMPED_ALPHA * low * share * (1 - share), 0.0)
        return slope * factor, torch.where(up.abs() <= CLAMPED_LIMIT, low * share, 0.0)
    if activation == "swiglu":
        slope = aten.silu_backward(one, gate)
    elif activation == "reglu":
        slope = (gate > 0).to(gate.dtype)
    else:
        slope = aten.gelu_backward(one, gate, approximate="tanh" if activation == "geglu_tanh" else "none")
    return slope * up, activate(gate, one, activation)


def _ranges(offsets: Tensor) -> list[tuple[int, slice]]:
    """(expert, range of rows) for each expert that has rows."""
    ends = offsets.tolist()
    return [(e, slice(ends[e], ends[e + 1])) for e in range(len(ends) - 1) if ends[e + 1] > ends[e]]


def _weights(values: Tensor, scales: Tensor, expert: int) -> Tensor:
    return dequantize_weights(values[expert], scales[expert])


def _by_columns(rows: Tensor) -> Tensor:
    """float32 of rows that are quantised 128 at a time, each column separately."""
    return dequantize_rows(*quantize(rows.mT)).mT


def _by_tiles(rows: Tensor) -> Tensor:
    """float32 of rows that are quantised in blocks of 128 rows by 128 columns."""
    padded = torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[0] % BLOCK))
    return dequantize_weights(*_quantize_tiles(padded))[: rows.shape[0]]


_IN_TORCH = {
    "_quantize_weights": quantize_in_torch,
    "_fused_moe_scaled_kept": kept,
    "_fused_moe_scaled_backward": backward,
}
