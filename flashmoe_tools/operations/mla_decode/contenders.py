"""Decoding of latent attention: ours, FlashMLA and FlashAttention-3 on the same pages, torch's products on dense keys."""

from importlib import import_module

import torch

from flashmoe.errors import ArgumentError
from flashmoe_tools.bench.contenders import Contender, Prepared, always, family, flashmoe_available, installed
from flashmoe_tools.operations.attention.contenders import FA3, FLASH_ATTN_3
from flashmoe_tools.operations.mla_decode.problem import HEAD_DIM, LATENT_DIM
from flashmoe_tools.operations.mla_decode.reference import Inputs

FAMILIES = ("sm80", "sm90")
FLASH_MLA = "flash_mla"
FLASH_MLA_PAGE = 64


def _flashmoe(inputs: Inputs) -> Prepared:
    import flashmoe

    p = inputs.problem

    def call() -> torch.Tensor:
        if inputs.indices is not None:
            named: torch.Tensor = flashmoe.mla_decode(inputs.q, inputs.cache, indices=inputs.indices, scale=p.scale)
            return named
        out: torch.Tensor = flashmoe.mla_decode(
            inputs.q, inputs.cache, cache_seqlens=inputs.lengths, block_table=inputs.table, scale=p.scale
        )
        return out

    return Prepared(call)


def _torch(inputs: Inputs) -> Prepared:
    """Two batched products and a softmax."""
    p = inputs.problem
    if p.tokens != 1:
        msg = f"{p.key}: this composition has no mask; tokens is 1"
        raise ArgumentError(msg)
    keys = torch.stack([inputs.keys_of(sequence) for sequence in range(p.batch)])
    q = inputs.q[:, 0]

    def call() -> torch.Tensor:
        weights = torch.softmax(torch.bmm(q, keys.mT).float() * p.scale, dim=-1)
        return torch.bmm(weights.to(q.dtype), keys[..., :LATENT_DIM]).unsqueeze(1)

    return Prepared(call)


def _flash_mla(inputs: Inputs) -> Prepared:
    p, module = inputs.problem, import_module(FLASH_MLA)
    if p.page_size != FLASH_MLA_PAGE:
        msg = f"{p.key}: FlashMLA has pages of {FLASH_MLA_PAGE}"
        raise ArgumentError(msg)
    if p.has_codes != (p.topk > 0):
        msg = f"{p.key}: FlashMLA is called on all keys of 16-bit caches, or on keys that indices name of fp8 caches"
        raise ArgumentError(msg)
    cache, options = inputs.cache.unsqueeze(2), dict[str, object](softmax_scale=p.scale, causal=not p.topk)
    sizes: tuple[object, ...] = (inputs.lengths, p.tokens * p.heads, 1)
    if p.topk:
        cache, sizes = cache.view(torch.float8_e4m3fn), (*sizes, p.heads, True, p.topk)
        options |= {"is_fp8_kvcache": True, "indices": inputs.indices}
    plan = module.get_mla_metadata(*sizes)

    def call() -> torch.Tensor:
        out: torch.Tensor = module.flash_mla_with_kvcache(
            inputs.q, cache, inputs.table, inputs.lengths, LATENT_DIM, *plan, **options
        )[0]
        return out

    return Prepared(call)


def _flash_attn_3(inputs: Inputs) -> Prepared:
    """Passes the latent as the values of one head, with their queries as qv; the rotary columns are its keys."""
    p, function = inputs.problem, import_module(FLASH_ATTN_3).flash_attn_with_kvcache
    if p.has_codes or p.topk:
        msg = f"{p.key}: FlashAttention-3 reads all keys of 16-bit caches"
        raise ArgumentError(msg)
    (qv, q), (v, k) = (
        tensor.split([LATENT_DIM, HEAD_DIM - LATENT_DIM], -1) for tensor in (inputs.q, inputs.cache.unsqueeze(2))
    )
    options = {"cache_seqlens": inputs.lengths, "page_table": inputs.table, "softmax_scale": p.scale, "causal": True}

    def call() -> torch.Tensor:
        result = function(q, k, v, qv=qv, **options)
        out: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return out

    return Prepared(call)


def contenders() -> tuple[Contender, ...]:
    both, gpu = ("cpu", "cuda"), ("cuda",)
    return (
        Contender("flashmoe", "flashmoe", both, flashmoe_available, _flashmoe, ours=True),
        *(
            Contender(f"flashmoe-{one}", f"flashmoe {one}", gpu, flashmoe_available, _flashmoe, family(one), ours=True)
            for one in FAMILIES
        ),
        Contender("torch", "torch, dense keys", both, always, _torch),
        Contender("flash-mla", "FlashMLA", gpu, installed(FLASH_MLA), _flash_mla),
        Contender(FA3, "FA3", gpu, installed(FLASH_ATTN_3), _flash_attn_3),
    )
