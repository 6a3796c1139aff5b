"""Attention: our operator (each kernel family too), torch's backends forced by name, other libraries."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from flashmoe.errors import ArgumentError
from flashmoe_tools.bench.contenders import Contender, Prepared, always, family, flashmoe_available, forced, installed
from flashmoe_tools.operations.attention.reference import Inputs

FAMILIES = ("sm75", "sm80", "sm90")


def _sdpa(inputs: Inputs) -> Prepared:
    problem = inputs.problem
    grouped = problem.heads_q != problem.heads_kv
    is_causal, mask = problem.causal, None
    if (
        problem.causal and problem.seq_q != problem.seq_k
    ):  # is_causal means top-left; this bias is what torch has for bottom-right
        is_causal, mask = (
            False,
            import_module("torch.nn.attention.bias").causal_lower_right(problem.seq_q, problem.seq_k),
        )

    def call() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            inputs.q, inputs.k, inputs.v, mask, is_causal=is_causal, scale=inputs.scale, enable_gqa=grouped
        )

    return Prepared(call)


def _flashmoe(inputs: Inputs) -> Prepared:
    import flashmoe

    problem = inputs.problem
    attention = flashmoe.attention

    def call() -> torch.Tensor:
        result: torch.Tensor = attention(inputs.q, inputs.k, inputs.v, causal=problem.causal, scale=inputs.scale)
        return result

    def lse() -> torch.Tensor:
        result: torch.Tensor = attention(
            inputs.q, inputs.k, inputs.v, causal=problem.causal, scale=inputs.scale, return_lse=True
        )[1]
        return result

    return Prepared(call, lse)


def _flashmoe_sdpa(inputs: Inputs) -> Prepared:
    """Our function with torch's signature; its causal mask is top-left, so square problems alone can be compared."""
    import flashmoe

    problem = inputs.problem
    if problem.causal and problem.seq_q != problem.seq_k:
        msg = f"{problem.key}: is_causal is aligned top-left, this problem bottom-right"
        raise ArgumentError(msg)
    attention = flashmoe.scaled_dot_product_attention
    grouped = problem.heads_q != problem.heads_kv

    def call() -> torch.Tensor:
        return attention(
            inputs.q, inputs.k, inputs.v, None, is_causal=problem.causal, scale=inputs.scale, enable_gqa=grouped
        )

    return Prepared(call)


def flash_attn(module: str, **options: Any) -> Callable[[Inputs], Prepared]:
    """flash-attn's functions take [B, S, H, D]; the transposed views cost no copy."""

    def prepare(inputs: Inputs) -> Prepared:
        function = import_module(module).flash_attn_func
        q, k, v = (tensor.transpose(1, 2) for tensor in (inputs.q, inputs.k, inputs.v))

        def call() -> torch.Tensor:
            result = function(q, k, v, softmax_scale=inputs.scale, causal=inputs.problem.causal, **options)
            out: torch.Tensor = result[0] if isinstance(result, tuple) else result
            return out.transpose(1, 2)

        return Prepared(call)

    return prepare


def _sdpa_backend(name: str, backend: str, title: str, devices: tuple[str, ...] = ("cuda",)) -> Contender:
    return Contender(name, title, devices, always, _sdpa, forced(backend))


def contenders() -> tuple[Contender, ...]:
    return (
        Contender("flashmoe", "flashmoe", ("cpu", "cuda"), flashmoe_available, _flashmoe, ours=True),
        *(
            Contender(
                f"flashmoe-{one}", f"flashmoe {one}", ("cuda",), flashmoe_available, _flashmoe, family(one), ours=True
            )
            for one in FAMILIES
        ),
        Contender("flashmoe-sdpa", "flashmoe's SDPA", ("cpu", "cuda"), flashmoe_available, _flashmoe_sdpa, ours=True),
        Contender("sdpa", "SDPA, its own choice", ("cpu", "cuda"), always, _sdpa),
        _sdpa_backend("sdpa-flash", "FLASH_ATTENTION", "SDPA FLASH"),
        _sdpa_backend("sdpa-cudnn", "CUDNN_ATTENTION", "SDPA CUDNN"),
        _sdpa_backend("sdpa-efficient", "EFFICIENT_ATTENTION", "SDPA EFFICIENT"),
        _sdpa_backend("sdpa-math", "MATH", "SDPA MATH", ("cpu", "cuda")),
        Contender("sdpa-cpu", "SDPA CPU", ("cpu",), always, _sdpa),
        Contender("flash-attn", "flash-attn", ("cuda",), installed("flash_attn"), flash_attn("flash_attn")),
        Contender(
            "flash-attn-3", "FA3", ("cuda",), installed("flash_attn_interface"), flash_attn("flash_attn_interface")
        ),
    )
