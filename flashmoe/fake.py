"""What the operators return when there is no data: shapes, dtypes and strides for meta and fake tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense

from flashmoe import checks


def register() -> None:
    """Called once by ``_extension.load``."""
    torch.library.register_fake("flashmoe::flash_attention_forward", flash_attention_forward)


def flash_attention_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """(out, lse) as the compiled operator allocates them; raises the same typed errors that eager mode raises."""
    checks.validate(q, k, v, scale, causal)
    batch, heads, rows, _ = q.shape
    out = torch.empty_like(q) if is_non_overlapping_and_dense(q) else q.new_empty(q.shape)
    return out, q.new_empty((batch, heads, rows), dtype=torch.float32)
