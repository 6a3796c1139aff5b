"""What a type checker infers for results that depend on a flag. Checked by `./nox -s lint`, never run."""

from torch import Tensor

import flashmoe

Both = tuple[Tensor, Tensor]


def attention(q: Tensor, flag: bool) -> tuple[Tensor, Both, Tensor | Both]:
    return (
        flashmoe.attention(q, q, q),
        flashmoe.attention(q, q, q, return_lse=True),
        flashmoe.attention(q, q, q, return_lse=flag),
    )


def varlen(q: Tensor, ends: Tensor, flag: bool) -> tuple[Tensor, Both, Tensor | Both]:
    return (
        flashmoe.attention_varlen(q, q, q, ends, ends, 5, 5),
        flashmoe.attention_varlen(q, q, q, ends, ends, 5, 5, return_lse=True),
        flashmoe.attention_varlen(q, q, q, ends, ends, 5, 5, return_lse=flag),
    )


def cache(q: Tensor, lengths: Tensor, flag: bool) -> tuple[Tensor, Both, Tensor | Both]:
    return (
        flashmoe.attention_with_kvcache(q, q, q, cache_seqlens=lengths),
        flashmoe.attention_with_kvcache(q, q, q, cache_seqlens=lengths, return_lse=True),
        flashmoe.attention_with_kvcache(q, q, q, cache_seqlens=lengths, return_lse=flag),
    )


def route(logits: Tensor, flag: bool) -> tuple[Both, tuple[Tensor, Tensor, Tensor], tuple[Tensor, ...]]:
    return (
        flashmoe.topk_route(logits, 2),
        flashmoe.topk_route(logits, 2, return_counts=True),
        flashmoe.topk_route(logits, 2, return_counts=flag),
    )
