"""A warning for tensors that look like [batch, length, heads, head_dim], which attention would compute without complaint.

Where the heads do not fit together, the call is refused and says so (attention.transposed_heads). Where they do, only the sizes tell:
as many heads as a sequence has tokens, and fewer tokens than any model has heads. The first calls of a process are looked at, since a
program that has the layout wrong has it wrong from the start, and every further call would pay for the look.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor
from torch._C import _is_tracing as is_tracing

# Key heads of models: up to 128 where every query head has its own, 16 elsewhere. A prompt of fewer tokens than that is usual.
SUSPICIOUS_HEADS = 64
calls_left = 16


def look_at(q: Any, k: Any) -> None:
    """Warn, once in a process, where q and k have at least 64 heads and fewer rows than heads, and as many rows each."""
    global calls_left
    calls_left -= 1
    if is_tracing() or not (isinstance(q, Tensor) and isinstance(k, Tensor) and q.dim() == k.dim() == 4):
        return
    heads, rows = k.shape[1], k.shape[2]
    if heads < SUSPICIOUS_HEADS or rows >= heads or rows < 2 or q.shape[2] != rows or q.shape[1] < heads:
        return
    calls_left = 0
    message = (
        f"attention has q {list(q.shape)} and k {list(k.shape)}: {heads} heads of {rows} rows. The layout is [batch, heads, length, "
        "head_dim]; if these are [batch, length, heads, head_dim], call .transpose(1, 2) on q, k, v and the result. Said once."
    )
    warnings.warn(message, stacklevel=3)
