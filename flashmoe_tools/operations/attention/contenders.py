"""Attention contenders: our operator (also each kernel family), torch's backends selected by name, other libraries."""

from importlib import import_module
from typing import Any

import torch

from flashmoe.errors import ArgumentError
from flashmoe_tools.bench.contenders import Contender, Prepared, always, family, flashmoe_available, forced, installed
from flashmoe_tools.operations import flex
from flashmoe_tools.operations.attention.reference import Inputs, ScoreOptions

FAMILIES = ("sm75", "sm80", "sm90")
FA3, FLASH_ATTN_3 = "flash-attn-3", "flash_attn_interface"  # a contender, and the module that loads its operators


def _sdpa(inputs: Inputs) -> Prepared:
    problem = inputs.problem
    grouped = problem.heads_q != problem.heads_kv
    is_causal, mask = problem.causal, None
    if (
        problem.causal and problem.seq_q != problem.seq_k
    ):  # is_causal means top-left; torch expresses bottom-right with this bias
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
    """Our function with torch's signature; its causal mask is top-left, so only square causal problems can be compared."""
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


def _flash_attn(inputs: Inputs) -> Prepared:
    """flash-attn's function takes [B, S, H, D]; the transposed views need no copy."""
    function = import_module("flash_attn").flash_attn_func
    q, k, v = (tensor.transpose(1, 2) for tensor in (inputs.q, inputs.k, inputs.v))

    def call() -> torch.Tensor:
        out: torch.Tensor = function(q, k, v, softmax_scale=inputs.scale, causal=inputs.problem.causal)
        return out.transpose(1, 2)

    return Prepared(call)


def in_rows(inputs: Inputs, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Contiguous copies [B, S, H, D] of tensors [B, H, S, D]: the layout that FlashAttention-3 is designed for."""
    return tuple(tensor.transpose(1, 2).contiguous() for tensor in (inputs.q, inputs.k, inputs.v, *tensors))


def fa3_operators() -> Any:
    """FlashAttention-3's raw operators: its Python functions go through autograd, which costs up to 0.1 ms per call."""
    import_module(FLASH_ATTN_3)
    return torch.ops.flash_attn_3


def fa3_forward(operators: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, inputs: Inputs) -> Any:
    """(out [B, S, H, D], log-sum-exp [B, H, S], ...) of q, k, v [B, S, H, D], with as many rows as keys."""
    return operators.fwd(q, k, v, softmax_scale=inputs.scale, is_causal=inputs.problem.causal, num_splits=1)


def _flash_attn_3(inputs: Inputs) -> Prepared:
    """Uses FlashAttention-3's function for caches if rows and keys differ in number.

    That function is for few rows over many keys: it splits the keys, which not every build's operator does.
    """
    (q, k, v), problem = in_rows(inputs), inputs.problem
    if problem.seq_q != problem.seq_k:
        function = import_module(FLASH_ATTN_3).flash_attn_with_kvcache
        options = {"softmax_scale": inputs.scale, "causal": problem.causal, "num_splits": 0}

        def over_caches() -> torch.Tensor:
            result = function(q, k, v, **options)
            out: torch.Tensor = result[0] if isinstance(result, tuple) else result
            return out.transpose(1, 2)

        return Prepared(over_caches)
    operators = fa3_operators()
    return Prepared(lambda: fa3_forward(operators, q, k, v, inputs)[0].transpose(1, 2))


def _flex_attention(inputs: Inputs) -> Prepared:
    options = ScoreOptions(inputs.problem.causal, scale=inputs.scale)
    return Prepared(flex.attend(inputs.q, inputs.k, inputs.v, options))


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
        Contender("flex-attention", "FlexAttention", ("cuda",), always, _flex_attention),
        Contender("flash-attn", "flash-attn", ("cuda",), installed("flash_attn"), _flash_attn),
        Contender(FA3, "FA3", ("cuda",), installed(FLASH_ATTN_3), _flash_attn_3),
    )
