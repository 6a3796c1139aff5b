"""The operators of multi-head latent attention, as data for torch's dispatcher (see flashmoe/operator.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashmoe.attn.operators import raise_no_vmap_append
from flashmoe.mla import codes, cpu
from flashmoe.mla.codes import LATENT_DIM
from flashmoe.operator import Operator
from flashmoe.rules import check


def _fake(q: Tensor, kv_cache: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """out [B, Sq, H, 512] and lse [B, H, Sq], contiguous."""
    check("mla_decode", (q, kv_cache, *rest))
    batch, tokens, heads, _ = q.shape
    return q.new_empty(batch, tokens, heads, LATENT_DIM), q.new_empty(batch, heads, tokens, dtype=torch.float32)


def _flops(
    q: Sequence[int], kv_cache: Sequence[int], _: Any, block_table: Sequence[int] | None, *rest: Any, **__: Any
) -> int:
    """From shapes, as if each sequence filled its memory, or every index named a key: q k^T over 576 columns, P v over 512."""
    batch, tokens, heads, head_dim = q
    *_, indices = rest
    own = kv_cache[1] if block_table is None else block_table[1] * kv_cache[1]
    keys = own if indices is None else int(indices[2])
    return 2 * batch * tokens * heads * keys * (head_dim + LATENT_DIM)


def _fake_append(*arguments: Any) -> None:
    check("mla_append_", arguments)


OPERATORS = (
    Operator("mla_decode", fake=_fake, flops=_flops, autocast=2, impls={"CPU": cpu.decode}),
    Operator(
        "mla_append_",
        fake=_fake_append,
        flops=lambda *_, **__: 0,
        impls={"CPU": codes.append},
        vmap=raise_no_vmap_append,
    ),
)
