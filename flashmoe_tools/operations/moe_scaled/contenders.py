"""The layer with e4m3 weights: ours, our 16-bit layer in bfloat16, torch's composition, other libraries' products.

torch's 8-bit grouped product takes one scale per row instead of one per 128 values, so weights are dequantised to
bfloat16 in every call. Contenders that compute in 16 bits do not round activations to e4m3; they have their own
reference.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flashmoe_tools.bench.contenders import Contender, always, flashmoe_available, installed
from flashmoe_tools.operations.moe import vllm
from flashmoe_tools.operations.moe.contenders import BOTH, flashmoe_layer, grouped, round_robin
from flashmoe_tools.operations.moe_scaled import peers
from flashmoe_tools.operations.moe_scaled.reference import ScaledInputs, SixteenBits, dequantize


def _ours(inputs: ScaledInputs) -> Callable[[torch.Tensor], Any]:
    layer = partial(flashmoe_layer(), w13_scale=inputs.w13_scale, w2_scale=inputs.w2_scale)
    return lambda ids: layer(inputs.x, inputs.w13, inputs.w2, inputs.topk_weights, ids)


def _ours_in_sixteen_bits(inputs: ScaledInputs) -> Callable[[torch.Tensor], Any]:
    layer, (w13, w2) = flashmoe_layer(), inputs.dequantized
    return lambda ids: SixteenBits(layer(inputs.x, w13, w2, inputs.topk_weights, ids))


def _torch(inputs: ScaledInputs) -> Callable[[torch.Tensor], Any]:
    x, weights = inputs.x, inputs.topk_weights

    def call(ids: torch.Tensor) -> SixteenBits:
        w13, w2 = dequantize(inputs.w13, inputs.w13_scale), dequantize(inputs.w2, inputs.w2_scale)
        return SixteenBits(grouped(x, w13, w2, weights, ids))

    return call


def has_kernels(device: str) -> str:
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        return "the kernels are for GPUs of compute capability 9.0"
    return flashmoe_available(device)


def contenders() -> tuple[Contender, ...]:
    return (
        Contender("flashmoe", "flashmoe", BOTH, has_kernels, round_robin(_ours), ours=True),
        Contender("flashmoe-bf16", "flashmoe, bf16", BOTH, flashmoe_available, round_robin(_ours_in_sixteen_bits)),
        Contender("torch-grouped", "torch: dequantise, grouped_mm", BOTH, always, round_robin(_torch)),
        Contender("deepgemm", "DeepGEMM's products alone", ("cuda",), installed("deep_gemm"), peers.deep_gemm),
        Contender("vllm", "vLLM's Triton products alone", ("cuda",), installed(vllm.MODULE), peers.vllm_triton),
    )
