"""The operators of a mixture-of-experts layer, as data."""

from __future__ import annotations

from functools import partial

import torch

from flashmoe.moe import autograd, fake, mxfp4, scaled, training
from flashmoe.operator import Operator

OPERATORS = (
    Operator(
        "_fused_moe",
        fake=fake.layer_kept,
        flops=fake.layer_flops,
        autocast=autograd.CAST,
        gradient=autograd.layer_gradient,
        setup_context=autograd.save_for_layer,
    ),
    Operator(
        "_fused_moe_inference",
        fake=fake.layer,
        flops=fake.layer_flops,
        autocast=autograd.CAST,
        vmap=autograd.vmap_layer,
    ),
    Operator("_fused_moe_out", fake=fake.layer_into, flops=fake.layer_into_flops),
    Operator(
        "_fused_moe_backward",
        fake=fake.layer_backward,
        flops=fake.layer_backward_flops,
        gradient=autograd.raise_double_backward,
    ),
    Operator("_fused_moe_backward_consuming", fake=fake.layer_backward, flops=fake.layer_backward_flops),
    Operator(
        "_fused_moe_scaled",
        fake=fake.scaled,
        flops=fake.scaled_flops,
        autocast=scaled.CAST,
        # Looked up when called, so that a library without the operator fails with a clear error.
        vmap=autograd.one_by_one(lambda *given: torch.ops.flashmoe._fused_moe_scaled.default(*given)),  # noqa: PLW0108
    ),
    Operator(
        "_fused_moe_scaled_torch",
        fake=partial(fake.scaled, operator="_fused_moe_scaled_torch"),
        flops=fake.scaled_flops,
        autocast=scaled.CAST,
        vmap=autograd.one_by_one(scaled.call_in_torch),
        impls={"CPU": scaled.in_torch, "CUDA": scaled.in_torch},
        schema=scaled.SCHEMA,
    ),
    Operator("_fused_moe_scaled_kept", fake=fake.scaled_kept, flops=fake.scaled_flops, impls={"CPU": training.kept}),
    Operator(
        "_fused_moe_scaled_backward",
        fake=fake.scaled_backward,
        flops=fake.scaled_backward_flops,
        gradient=autograd.raise_double_backward,
        impls={"CPU": training.backward},
    ),
    Operator(
        "_quantize_weights", fake=fake.quantized_weights, flops=fake.no_flops, impls={"CPU": training.quantize_in_torch}
    ),
    Operator(
        "_fused_moe_mxfp4",
        fake=fake.mxfp4,
        flops=fake.mxfp4_flops,
        autocast=mxfp4.CAST,
        vmap=autograd.one_by_one(lambda *given: torch.ops.flashmoe._fused_moe_mxfp4.default(*given)),  # noqa: PLW0108
    ),
    Operator(
        "topk_route",
        fake=fake.route,
        flops=fake.no_flops,
        gradient=autograd.route_gradient,
        setup_context=autograd.save_for_route,
        vmap=autograd.vmap_route,
    ),
    Operator("moe_sort", fake=fake.sort, flops=fake.no_flops),
    Operator(
        "grouped_mm",
        fake=fake.grouped,
        flops=fake.grouped_flops,
        autocast=2,
        gradient=autograd.grouped_gradient,
        setup_context=autograd.save_for_grouped,
        vmap=autograd.vmap_grouped,
    ),
    Operator(
        "_grouped_mm_2d2d",
        fake=fake.grouped_2d2d,
        flops=fake.grouped_flops,
        autocast=2,
        gradient=autograd.grouped_2d2d_gradient,
        setup_context=autograd.save_for_grouped,
        vmap=autograd.vmap_grouped,
    ),
)
