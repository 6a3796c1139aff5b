"""Valid arguments of attention_varlen_forward, by name."""

from typing import Any

import torch
from torch import Tensor

import flashmoe

from .varlen_reference import Ragged, to_pages

NAMES = (
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table", "sinks", "mask"),
    *("max_seqlen_q", "max_seqlen_k", "scale", "window_left", "window_right", "softcap", "num_splits"),
)
SIZES = Ragged((5, 0, 9), (7, 3, 9), 4, 2, 16, 24)


def ints(device: str, *numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def ragged(device: str) -> dict[str, Any]:
    """The operator's arguments by name: ragged rows and keys."""
    q, k, v = SIZES.tensors(device, torch.float16)
    cu_seqlens_q, cu_seqlens_k = SIZES.cu_seqlens(device)
    given = (q, k, v, cu_seqlens_q, cu_seqlens_k, None, None, None, None, 9, 9, 0.25, -1, 0, 0.0, 0)
    return dict(zip(NAMES, given, strict=True))


def banded(device: str) -> dict[str, Any]:
    """Dense, with every option."""
    q, k, v = (torch.randn(2, h, s, d, device=device).half() for h, s, d in ((4, 5, 16), (2, 7, 16), (2, 7, 24)))
    mask = torch.ones(5, 7, dtype=torch.bool, device=device).expand(2, 4, 5, 7)
    sinks = torch.zeros(4, device=device)
    given = (q, k, v, None, None, ints(device, 7, 4), None, sinks, mask, 0, 0, 0.25, 3, 2, 5.0, 0)
    return dict(zip(NAMES, given, strict=True))


def paged(device: str) -> dict[str, Any]:
    dense = banded(device)
    pages = to_pages(dense["k"], dense["v"], (7, 4), 4)
    changed = {"k": pages.k, "v": pages.v, "block_table": pages.block_table, "mask": None, "max_seqlen_k": 8}
    return {**dense, **changed}


def call_operator(**arguments: Any) -> tuple[Tensor, Tensor]:
    assert flashmoe.attention_varlen  # loads the extension
    result: tuple[Tensor, Tensor] = torch.ops.flashmoe.attention_varlen_forward(*arguments.values())
    return result
