"""A warning for tensors that look like [batch, length, heads, head_dim], which attention would compute without complaint.

If the numbers of heads do not fit together, the call is rejected and says so (attention.transposed_heads). If they do, only the sizes
give a hint: at least as many heads as tokens per sequence, and fewer tokens than models have heads. Only the first calls of a process
are checked: a program with the wrong layout has it from the start, and a check on every call would cost time.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor
from torch._C import _is_tracing as is_tracing

# Key heads of models: up to 128 if every query head has its own, otherwise 16. Prompts of fewer tokens than that are common.
SUSPICIOUS_HEADS = 64
checks_left = 16


def warn_if_transposed(q: Any, k: Any) -> None:
    """Warn, once per process, if k has at least 64 heads and more heads than rows, q has as many rows as k, and at least as many heads."""
    global checks_left
    checks_left -= 1
    if is_tracing() or not (isinstance(q, Tensor) and isinstance(k, Tensor) and q.dim() == k.dim() == 4):
        return
    heads, rows = k.shape[1], k.shape[2]
    if heads < SUSPICIOUS_HEADS or rows >= heads or rows < 2 or q.shape[2] != rows or q.shape[1] < heads:
        return
    checks_left = 0
    message = (
        f"attention has q {list(q.shape)} and k {list(k.shape)}: {heads} heads of {rows} rows. The layout is [batch, heads, length, "
        "head_dim]; if these are [batch, length, heads, head_dim], call .transpose(1, 2) on q, k, v and the result. This warning is shown once."
    )
    warnings.warn(message, stacklevel=3)
