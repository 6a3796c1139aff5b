"""The mixture-of-experts layer as functions.

Importing this module imports torch and loads the compiled extension.
"""

from __future__ import annotations

from typing import Literal, NoReturn, overload

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as transforms_are_active
from torch._C import _is_tracing as is_tracing
from torch.compiler import is_compiling

from flashmoe import _extension, keywords
from flashmoe.checks import check_flag
from flashmoe.errors import ArgumentError
from flashmoe.moe import autograd, errors, mxfp4, scaled, training
from flashmoe.moe.options import Activation, Layer, Layout, Precision, Routing, Scales, Scoring
from flashmoe.moe.training import QuantizedWeights

# Imported from here, because this module loads the extension
from flashmoe.moe.training import quantize_weights as quantize_weights
from flashmoe.transforms import autocasted

_extension.load()
_operators = torch.ops.flashmoe
_LAYER_ARGUMENTS = (
    *Layer._fields,
    "weights_on_input",
    "w13_scale",
    "w2_scale",
    "x_scale",
    "precision",
    "quantized",
    "out",
)
_ROUTE_ARGUMENTS = (*Routing._fields, "return_counts")


def fused_moe(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *misplaced: NoReturn,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    activation: Activation = "swiglu",
    layout: Layout = "concat",
    transposed: bool = False,
    expert_map: Tensor | None = None,
    shared: Tensor | None = None,
    weights_on_input: bool = False,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    precision: Precision | None = None,
    quantized: tuple[QuantizedWeights, QuantizedWeights] | None = None,
    out: Tensor | None = None,
    **misspelt: NoReturn,
) -> Tensor:
    """A mixture-of-experts layer: for each token, the weighted sum of its experts' outputs.

    out[t] = shared[t] + sum over j of topk_weights[t, j] * (activation(x[t] W13_e^T + b13_e) W2_e^T + b2_e), e = topk_ids[t, j].
    Sums are float32, in an order that does not depend on the batch: a token's result has the same bits whatever else is in x, and on
    every run. The host never waits for the GPU, so the call can be captured in a CUDA graph.

    Args:
        x: [T, H], float16 or bfloat16 (on the CPU also float32). T may be 0.
        w13: [E, 2I, H], gate and up of E experts, 1 <= E <= 1024, in x's dtype. On a GPU H and I are multiples of 8. A
            transposed view of [E, H, 2I] memory is read without a copy.
        w2: [E, H, I].
        topk_weights: [T, k], float32 or x's dtype, 1 <= k <= 32.
        topk_ids: [T, k], int32 or int64. An id outside [0, E) contributes nothing.
        b13: [E, 2I], in the order of w13's rows; b2: [E, H]; both in x's dtype.
        activation: with gate g and up u: "swiglu" g sigmoid(g) u; "geglu" gelu(g) u with the error function, "geglu_tanh" with its
            tanh approximation; "reglu" max(g, 0) u; "clamped_swiglu", as in gpt-oss, g' sigmoid(1.702 g') (u' + 1) with
            g' = min(g, 7) and u' = u clamped to [-7, 7].
        layout: the order of w13's rows: "concat", all gate rows first; "interleaved", gate and up alternating.
        transposed: w13 is [E, H, 2I] and w2 [E, I, H].
        expert_map: int32 [experts of the model]: maps a global expert id to one of this layer's E experts; a value outside [0, E), such
            as -1, for experts that are not here. For expert parallelism.
        shared: [T, H] in x's dtype, added to the result: a shared expert's output, or the residual.
        weights_on_input: multiply the experts' inputs by the weights, instead of their outputs (Llama 4).
        w13_scale, w2_scale: with w13 and w2 in float8_e4m3fn, float32 [E, ceil(2I / 128), ceil(H / 128)] and
            [E, ceil(H / 128), ceil(I / 128)]: a weight is its 8-bit value times the scale of its 128 by 128 block (DeepSeek's and
            transformers' weight_scale_inv). x and the activation between the products are quantised too, with one scale per 128 values
            of a row: the largest magnitude / 448. Forward only; no biases, layout "interleaved", transposed or
            weights_on_input. The kernels need compute capability 9.0, and H and I multiples of 128; elsewhere torch
            computes the layer, as FLASHMOE_FALLBACK allows.
            With w13 and w2 in mxfp4, uint8 [E, 2I, H / 2] and [E, H, I / 2] (or a checkpoint's blocks [..., K / 32, 16]): e2m1 codes, two
            per byte, the first in the low four bits, and uint8 scales [E, 2I, H / 32] and [E, H, I / 32], each 2^(b - 127) for 32 values
            of a row, 255 meaning NaN (OCP Microscaling Formats 1.0). The result is that of the bfloat16 layer on dequantised weights,
            bit for bit. x is bfloat16, H and I are multiples of 32; forward only, no transposed or weights_on_input.
            Or both as :func:`flashmoe.pack_mxfp4` returns them, without scales: the same result, faster, only on compute capability 9.0.
        x_scale: with x in float8_e4m3fn, float32 [T, ceil(H / 128)].
        precision: "fp8": x, w13 and w2 stay in bfloat16, and every matrix product of both passes has float8_e4m3fn operands, with float32
            scales per 128 values or per 128 by 128 block and float32 sums; gradients are bfloat16. Every call quantises the weights.
            For the backward pass it saves the quantised transposed weights (1 byte per value), x, and [T * k, 2I] in bfloat16.
            H and I are multiples of 128; no biases, layout "interleaved", transposed, weights_on_input, scales or out. The
            kernels need compute capability 9.0; elsewhere torch computes the layer, as FLASHMOE_FALLBACK allows.
        quantized: with precision "fp8", the results of :func:`flashmoe.quantize_weights` for w13 and w2, made since they last changed, so
            that this call does not quantise them again. w13 and w2 must still be passed, and receive the gradients.
        out: [T, H] in x's dtype, rows contiguous, to write the result to; then no gradient can be recorded. It may be x
            or shared itself, but must not partially overlap shared.

    Returns:
        [T, H] in x's dtype; bfloat16 if x is float8_e4m3fn. Differentiable once, in x, w13, w2, topk_weights, b13, b2, shared;
        x and [T * k, 2I] are saved for that, and the activation is recomputed.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentError: an argument breaks a rule above; the message says which.
        UnsupportedGpuError, DriverError: this build has no kernel for the GPU; the driver is absent or failed.
        DifferentiationError: forward-mode differentiation, or a second derivative (raised in the backward pass).
    """
    if misplaced:
        keywords.raise_extra_positional("fused_moe", misplaced, _LAYER_ARGUMENTS[5:], 5)
    if misspelt:
        keywords.raise_unknown("fused_moe", misspelt, _LAYER_ARGUMENTS)
    layer = Layer(x, w13, w2, topk_weights, topk_ids, b13, b2, expert_map, shared, activation, layout, transposed)
    check_flag("transposed", transposed)  # the dispatcher would take None as False
    check_flag("weights_on_input", weights_on_input)
    if out is not None and not (isinstance(out, Tensor) and out.device == getattr(x, "device", None)):  # type: ignore[redundant-expr]
        errors.check_tensor("out", out)
        errors.check("_fused_moe_out", (out, *layer))  # the dispatcher would follow a meta tensor and compute nothing
    scales = Scales(w13_scale, w2_scale, x_scale)
    if precision is not None:
        return training.call_fp8(
            layer, scales, out, precision=precision, weights_on_input=weights_on_input, quantized=quantized
        )
    if quantized is not None:
        msg = "quantized is given without precision='fp8'; pass both, or neither"
        raise ArgumentError(msg)
    if mxfp4.is_mxfp4(layer, scales):
        return mxfp4.call_mxfp4(layer, scales, out, weights_on_input=weights_on_input)
    if scaled.is_scaled(layer, scales):
        return scaled.call_scaled(layer, scales, out, weights_on_input=weights_on_input)
    if is_compiling():
        return _weigh_input(layer, out) if weights_on_input else _call(layer, out)
    try:
        return _weigh_input(layer, out) if weights_on_input else _call(layer, out)
    except Exception as error:
        errors.raise_cause(error, "_fused_moe_inference", layer)
        raise


def _call(layer: Layer, out: Tensor | None) -> Tensor:
    if transforms_are_active() and not is_compiling():
        _check_out_without_gradient(out, is_needed=True)
        return autograd.layer_under_transforms(layer)
    autograd.check_no_tangents("fused_moe", *layer)
    needs_gradient = torch.is_grad_enabled() and layer.requires_grad()
    if out is not None:
        _check_out_without_gradient(out, is_needed=needs_gradient or (torch.is_grad_enabled() and out.requires_grad))
        _operators._fused_moe_out.default(out, *layer)
        return out
    if needs_gradient or (
        not is_compiling() and is_tracing()
    ):  # a traced graph with the inference operator could not be trained
        result: Tensor = _operators._fused_moe.default(*layer, True)[0]
    else:
        result = _operators._fused_moe_inference.default(*layer)
    return result


def _check_out_without_gradient(out: Tensor | None, *, is_needed: bool) -> None:
    if out is not None and is_needed:
        msg = "out= is given, but a gradient is requested; remove out=, or call under torch.no_grad()"
        raise ArgumentError(msg)


def _weigh_input(layer: Layer, out: Tensor | None) -> Tensor:
    """Each (token, expert) slot becomes a token, x times its weight, with one expert and weight 1; a token's slots are then summed."""
    if out is None:  # with out=, nothing is cast
        names = ("x", "w13", "w2", "b13", "b2", "shared")
        casted = autocasted(*(getattr(layer, name) for name in names))
        layer = layer._replace(**dict(zip(names, casted, strict=True)))
    if not (is_compiling() or is_tracing()):  # a wrong shape might broadcast; a tracer's sizes are tensors
        errors.check("_fused_moe_inference", layer)
    if out is not None:
        errors.check("_fused_moe_out", (out, *layer))
        _check_out_without_gradient(
            out, is_needed=torch.is_grad_enabled() and (layer.requires_grad() or out.requires_grad)
        )
    ids, shared, dtype = layer.topk_ids.reshape(-1, 1), layer.shared, layer.x.dtype
    rows = (layer.x.unsqueeze(1) * layer.topk_weights.unsqueeze(2)).to(dtype).flatten(0, 1)
    ones = torch.ones(ids.shape, dtype=torch.float32, device=ids.device)
    top_k = layer.topk_ids.shape[1]
    slots = layer._replace(x=rows, topk_weights=ones, topk_ids=ids)
    if top_k == 1:
        return _call(slots, out)
    total = _call(slots._replace(shared=None), None).unflatten(0, (-1, top_k)).sum(1, dtype=torch.float32)
    total = (total if shared is None else total + shared).to(dtype)
    return total if out is None else out.copy_(total)


@overload
def topk_route(
    logits: Tensor,
    k: int,
    *,
    scoring: Scoring = ...,
    bias: Tensor | None = ...,
    groups: int | None = ...,
    topk_groups: int | None = ...,
    renormalize: bool = ...,
    scale: float = ...,
    return_counts: Literal[False] = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def topk_route(
    logits: Tensor,
    k: int,
    *,
    scoring: Scoring = ...,
    bias: Tensor | None = ...,
    groups: int | None = ...,
    topk_groups: int | None = ...,
    renormalize: bool = ...,
    scale: float = ...,
    return_counts: Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def topk_route(
    logits: Tensor,
    k: int,
    *,
    scoring: Scoring = ...,
    bias: Tensor | None = ...,
    groups: int | None = ...,
    topk_groups: int | None = ...,
    renormalize: bool = ...,
    scale: float = ...,
    return_counts: bool,
) -> tuple[Tensor, ...]: ...


def topk_route(
    logits: Tensor,
    k: int,
    *misplaced: NoReturn,
    scoring: Scoring = "softmax",
    bias: Tensor | None = None,
    groups: int | None = None,
    topk_groups: int | None = None,
    renormalize: bool = True,
    scale: float = 1.0,
    return_counts: bool = False,
    **misspelt: NoReturn,
) -> tuple[Tensor, ...]:
    """Choose the k experts of each token and their weights, in one kernel.

    Args:
        logits: [T, E], float16, bfloat16 or float32, 1 <= E <= 1024; computed in float32.
        k: the number of experts per token, 1 to 32.
        scoring: "softmax" over all experts, then the top k (Qwen3, Mixtral); "topk_softmax" over only the top k logits
            (gpt-oss); "sigmoid" of each logit (DeepSeek-V3).
        bias: [E] float32, added only for the choice; with "topk_softmax" added to the logits.
        groups, topk_groups: the experts form ``groups`` groups of equal size, at most 32, and only experts of the best ``topk_groups``
            can be chosen. Groups are ranked by the sum of their two largest scores with "sigmoid" (DeepSeek-V3), otherwise by their
            largest score (DeepSeek-V2).
        renormalize: divide a token's weights by their sum.
        scale: multiplies the final weights.
        return_counts: also return the number of tokens that chose each expert, for a load-balancing loss (see :class:`flashmoe.MoE`).

    Returns:
        weights float32 [T, k] and ids int32 [T, k], in order of decreasing score, the lower id first for equal scores; with
        ``return_counts`` also counts int32 [E]. The gradient of weights goes to logits (and, with "topk_softmax", to bias).

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentError: an argument breaks a rule above; the message says which.
        UnsupportedGpuError, DriverError: this build has no kernel for the GPU; the driver is absent or failed.
    """
    if misplaced:
        keywords.raise_extra_positional("topk_route", misplaced, _ROUTE_ARGUMENTS[2:], 2)
    if misspelt:
        keywords.raise_unknown("topk_route", misspelt, _ROUTE_ARGUMENTS)
    check_flag("renormalize", renormalize)
    check_flag("return_counts", return_counts)
    if bool in (type(k), type(groups), type(topk_groups)):  # the dispatcher would take a bool for a number
        for name, value in (("k", k), ("groups", groups), ("topk_groups", topk_groups)):
            errors.check_integer(name, 1 if value is None else value)
    if type(scale) is not float and not is_compiling():
        errors.check_number("scale", scale)  # the dispatcher would take a tensor's value and drop its gradient
    groups = 1 if groups is None else groups
    call = Routing(logits, k, scoring, bias, groups, groups if topk_groups is None else topk_groups, renormalize, scale)
    if is_compiling():
        weights, ids, counts = _operators.topk_route.default(*call)
    else:
        try:
            autograd.check_no_tangents("topk_route", *call)
            weights, ids, counts = autograd.call_route(*call)
        except Exception as error:
            errors.raise_cause(error, "topk_route", call)
            raise
    return (weights, ids, counts) if return_counts else (weights, ids)


def grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Multiplies each group of rows by its own matrix, like ``torch.nn.functional.grouped_mm``; differentiable.

    Args:
        a: [M, K], rows sorted by group, float16 or bfloat16 (on the CPU also float32); or [N, M] with columns sorted by group.
        b: [E, K, N], contiguous or transposed; or [M, K], for the second form of a.
        offsets: int32 [E], the end of each group's rows: ascending, at most M, with any alignment. The host does not read them.

    Returns:
        [M, N] with a[row] b[e] in group e's rows, and zeros in rows past the last end; or for the second form [E, N, K], the product
        of group e's columns of a and rows of b, zeros for a group without rows. On a GPU K and N must be multiples of 8.

    Raises:
        ShapeError, DtypeError, DeviceError: an argument breaks a rule above; the message says which.
        UnsupportedGpuError, DriverError: this build has no kernel for the GPU; the driver is absent or failed.
    """
    if is_compiling():
        return autograd.call_grouped(a, b, offsets)
    try:
        autograd.check_no_tangents("grouped_mm", a, b)
        return autograd.call_grouped(a, b, offsets)
    except Exception as error:
        operator = "_grouped_mm_2d2d" if getattr(b, "ndim", 3) == 2 else "grouped_mm"
        errors.raise_cause(error, operator, (a, b, offsets))
        raise
