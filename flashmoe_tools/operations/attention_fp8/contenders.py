"""Attention in 8-bit floats: ours, our 16-bit kernels on dequantised tensors, FlashAttention-3 and cuDNN."""

from importlib import import_module
from typing import Any

import torch

from flashmoe.errors import ArgumentError
from flashmoe_tools.bench.contenders import Contender, Prepared, flashmoe_available, installed
from flashmoe_tools.operations.attention.contenders import FA3, FLASH_ATTN_3
from flashmoe_tools.operations.attention_fp8 import cudnn
from flashmoe_tools.operations.attention_fp8.reference import Fp8Inputs

BOTH = ("cpu", "cuda")


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, **options: Any) -> Prepared:
    import flashmoe

    attention = flashmoe.attention

    def call() -> torch.Tensor:
        result: torch.Tensor = attention(q, k, v, causal=causal, **options)
        return result

    return Prepared(call)


def _ours(inputs: Fp8Inputs) -> Prepared:
    dtype = inputs.dequantized.q.dtype
    options = {"scale": inputs.scale, "out_dtype": dtype, **inputs.scales}
    return _attend(inputs.q, inputs.k, inputs.v, inputs.problem.causal, **options)


def _ours_in_16_bits(inputs: Fp8Inputs) -> Prepared:
    wide = inputs.dequantized
    return _attend(wide.q, wide.k, wide.v, inputs.problem.causal, scale=inputs.scale)


def _ragged(inputs: Fp8Inputs) -> tuple[torch.Tensor, ...]:
    """q, k, v and both cu_seqlens: ragged tensors of equal sequences."""
    p = inputs.problem
    tensors = (
        tensor.transpose(1, 2).reshape(-1, tensor.shape[1], tensor.shape[3]).contiguous()
        for tensor in (inputs.q, inputs.k, inputs.v)
    )
    ends = (
        torch.arange(p.batch + 1, device=inputs.q.device, dtype=torch.int32) * length for length in (p.seq_q, p.seq_k)
    )
    return (*tensors, *ends)


def _refuse_block_scales(inputs: Fp8Inputs) -> None:
    if inputs.problem.scales.startswith("blocks"):
        msg = f"{inputs.problem.key}: it has no scales of blocks"
        raise ArgumentError(msg)


def _ours_ragged(inputs: Fp8Inputs) -> Prepared:
    import flashmoe

    _refuse_block_scales(inputs)
    p, dtype, attention_varlen = inputs.problem, inputs.dequantized.q.dtype, flashmoe.attention_varlen
    q, k, v, rows, keys = _ragged(inputs)
    options: dict[str, Any] = {"scale": inputs.scale, "out_dtype": dtype, **inputs.scales}

    def call() -> torch.Tensor:
        out: torch.Tensor = attention_varlen(q, k, v, rows, keys, p.seq_q, p.seq_k, causal=p.causal, **options)
        return out.view(p.batch, p.seq_q, p.heads_q, p.head_dim).transpose(1, 2)

    return Prepared(call)


def _flash_attn_3(inputs: Fp8Inputs) -> Prepared:
    """Uses ragged tensors, which every build of FlashAttention-3 accepts."""
    function = import_module(FLASH_ATTN_3).flash_attn_varlen_func
    p = inputs.problem
    if inputs.dequantized.q.dtype is not torch.bfloat16:
        msg = f"{p.key}: its result of e4m3 is bfloat16"
        raise ArgumentError(msg)
    _refuse_block_scales(inputs)
    q, k, v, rows, keys = _ragged(inputs)
    one = torch.ones(p.batch, p.heads_kv, device=q.device)
    scales = {f"{name}_descale": inputs.scales.get(f"{name}_scale", one) for name in "qkv"}
    scales["q_descale"] = scales["q_descale"][
        :, :: scales["q_descale"].shape[1] // p.heads_kv
    ].contiguous()  # per key head

    def call() -> torch.Tensor:
        out: torch.Tensor = function(
            q, k, v, rows, keys, p.seq_q, p.seq_k, softmax_scale=inputs.scale, causal=p.causal, **scales
        )
        return out.view(p.batch, p.seq_q, p.heads_q, p.head_dim).transpose(1, 2)

    return Prepared(call)


def contenders() -> tuple[Contender, ...]:
    return (
        Contender("flashmoe", "flashmoe", BOTH, flashmoe_available, _ours, ours=True),
        Contender("flashmoe-16-bit", "flashmoe, 16 bits", BOTH, flashmoe_available, _ours_in_16_bits),
        Contender("flashmoe-ragged", "flashmoe, ragged", BOTH, flashmoe_available, _ours_ragged),
        Contender(FA3, "FA3", ("cuda",), installed(FLASH_ATTN_3), _flash_attn_3),
        Contender("cudnn", "cuDNN, result in e4m3", ("cuda",), installed(cudnn.MODULE), cudnn.prepare),
    )
