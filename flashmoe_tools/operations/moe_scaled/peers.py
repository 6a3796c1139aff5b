"""Other libraries' versions of the layer's two products.

The rest of the layer (sorting, quantisation, gating, the sum over choices) is not timed: it is done once, or when a
result is judged.
"""

from importlib import import_module

import torch
from torch import Tensor

from flashmoe_tools.bench.contenders import Prepared
from flashmoe_tools.operations.moe import vllm
from flashmoe_tools.operations.moe.reference import Products
from flashmoe_tools.operations.moe_scaled.formats import BLOCK, LARGEST
from flashmoe_tools.operations.moe_scaled.reference import ScaledInputs


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3, float32 scales [rows, columns / 128]) of x [rows, columns]."""
    blocks = x.float().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(2).clamp_min(1e-30) / LARGEST
    return (blocks / scales[..., None]).to(torch.float8_e4m3fn).view(x.shape), scales


def deep_gemm(inputs: ScaledInputs) -> Prepared:
    """DeepGEMM's grouped products. Rows are gathered and padded to 128 per expert in advance; always the first routing."""
    library = import_module("deep_gemm")
    ids = inputs.routings[0]
    slots, experts, rows = vllm.padded(ids, len(inputs.w13), BLOCK)
    expert_of_row = experts.int()
    aligned = getattr(library, "get_mn_major_tma_aligned_tensor", lambda scales: scales)

    def product(a: tuple[Tensor, Tensor], b: Tensor, scales: Tensor, out: Tensor) -> None:
        library.m_grouped_fp8_gemm_nt_contiguous(a, (b, scales), out, expert_of_row)

    values, scales = quantized(inputs.x)
    tokens = slots.clamp_min(0) // ids.shape[1]
    x = (values.view(torch.uint8)[tokens].view(torch.float8_e4m3fn), aligned(scales[tokens]))
    z = inputs.x.new_empty(len(slots), inputs.w13.shape[1])
    y = inputs.x.new_empty(len(slots), inputs.w2.shape[1])
    product(x, inputs.w13, inputs.w13_scale, z)
    values, scales = quantized(vllm.gated(z))
    h = values, aligned(scales)

    def call() -> Products:
        product(x, inputs.w13, inputs.w13_scale, z)
        product(h, inputs.w2, inputs.w2_scale, y)
        return Products(y, rows.view(ids.shape), inputs.topk_weights)

    return Prepared(call)


def vllm_triton(inputs: ScaledInputs) -> Prepared:
    weights = (inputs.w13, inputs.w13_scale), (inputs.w2, inputs.w2_scale)
    return vllm.products(inputs.x, vllm.Layer(*weights, inputs.topk_weights, quantized), inputs.routings)
