"""The layer with mxfp4 weights, unpacked and packed, our 16-bit layer with the weights in bfloat16, and triton_kernels.

triton_kernels takes part if it is installed. torch has no 4-bit product on this GPU, and its composition would read the
number of each expert's rows on the host.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from flashmoe_tools.bench.contenders import Contender, flashmoe_available, installed
from flashmoe_tools.operations.moe.contenders import BOTH, flashmoe_layer, round_robin
from flashmoe_tools.operations.moe_mxfp4.reference import ACTIVATION, LAYOUT, Mxfp4Inputs

Call = Callable[[torch.Tensor], Any]


def _ours(inputs: Mxfp4Inputs, *, weights: str) -> Call:
    own = inputs.weights
    w13, w2 = (own.w13, own.w2) if weights == "codes" else getattr(own, weights)
    scales = {"w13_scale": own.w13_scale, "w2_scale": own.w2_scale} if weights == "codes" else {}
    options = {"b13": own.b13, "b2": own.b2, "activation": ACTIVATION, "layout": LAYOUT}
    layer = partial(flashmoe_layer(), **options, **scales)
    return lambda ids: layer(inputs.x, w13, w2, inputs.topk_weights, ids)


def _before_zeros(scales: torch.Tensor) -> torch.Tensor:
    """A copy of swizzled scales followed by zeros.

    If k is not a multiple of 128, the kernel reads 64 bytes past the last expert's scales and multiplies what it finds
    by zero. That gives NaN if a byte is 255, and the activation's limit after the activation.
    """
    dense = scales.mT  # [E, n / 32, k]
    room = dense.new_zeros(dense.numel() + 128)
    room[: dense.numel()] = dense.flatten()
    return room[: dense.numel()].view(dense.shape).mT


def _triton(inputs: Mxfp4Inputs) -> Call:
    """Called like in vLLM, but without its sort (of logits, not ids), which is done once per routing."""
    ogs, tensor = import_module("triton_kernels.matmul_ogs"), import_module("triton_kernels.tensor")
    layout, swiglu = import_module("triton_kernels.tensor_details.layout"), import_module("triton_kernels.swiglu")
    route = import_module("triton_kernels.routing").routing
    import_module("triton_kernels.matmul_ogs_details.opt_flags").update_opt_flags_constraints({"split_k": 1})
    values, value_options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    scales, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)

    own = inputs.weights

    def converted(codes: torch.Tensor, scale: torch.Tensor) -> tuple[Any, Any]:
        wrapped = tensor.wrap_torch_tensor(codes.mT, dtype=tensor.FP4)
        weights = tensor.convert_layout(wrapped, values, **value_options)
        swizzled = tensor.convert_layout(tensor.wrap_torch_tensor(scale.mT), scales, **scale_options)
        swizzled.storage.data = _before_zeros(swizzled.storage.data)
        return weights, ogs.PrecisionConfig(weight_scale=swizzled)

    (w13, precision13), (w2, precision2) = (
        converted(own.w13, own.w13_scale),
        converted(own.w2, own.w2_scale),
    )
    b13, b2 = own.b13.float(), own.b2.float()
    gate = ogs.FusedActivation(ogs.FnSpecs("swiglu", swiglu.swiglu_fn, ("alpha", "limit")), (1.702, 7.0), 2)
    sorted_by = {}
    for ids in inputs.routings:
        logits = torch.full((len(ids), len(own.w13)), -1e4, device=ids.device)
        logits.scatter_(1, ids.long(), inputs.topk_weights.log())
        sorted_by[ids.data_ptr()] = route(logits, ids.shape[1])

    def layer(ids: torch.Tensor) -> torch.Tensor:
        data, gather, scatter = sorted_by[ids.data_ptr()]
        h = ogs.matmul_ogs(inputs.x, w13, b13, data, gather, precision_config=precision13, fused_activation=gate)
        out: torch.Tensor = ogs.matmul_ogs(
            h, w2, b2, data, scatter_indx=scatter, precision_config=precision2, gammas=data.gate_scal
        )
        return out.view(inputs.x.shape)

    return layer


def contenders() -> tuple[Contender, ...]:
    ours, packed = partial(_ours, weights="codes"), partial(_ours, weights="packed")
    in_sixteen_bits = partial(_ours, weights="dequantized")
    return (
        Contender("flashmoe", "flashmoe", BOTH, flashmoe_available, round_robin(ours), ours=True),
        Contender("flashmoe-packed", "flashmoe, packed", ("cuda",), flashmoe_available, round_robin(packed), ours=True),
        Contender("flashmoe-bf16", "flashmoe, bf16", BOTH, flashmoe_available, round_robin(in_sixteen_bits)),
        Contender("triton-kernels", "triton_kernels", ("cuda",), installed("triton_kernels"), round_robin(_triton)),
    )
