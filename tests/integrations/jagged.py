"""Ragged problems for torch's attention: packed rows with lengths, and the same data as jagged nested tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

RAGGED_FORWARD = "flashmoe::attention_varlen_forward"
LENGTHS = (10, 1, 13)


def ragged(device: str, requires_grad: bool = False) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """(q, k, v), each [tokens, H, D], and the cumulative lengths."""
    torch.manual_seed(3)
    dtype = torch.float16 if device == "cuda" else torch.float32
    given = (torch.randn(sum(LENGTHS), 4, 64, device=device, dtype=dtype) for _ in range(3))
    lengths = torch.tensor([0, 10, 11, 24], dtype=torch.int32, device=device)
    q, k, v = (tensor.requires_grad_(requires_grad) for tensor in given)
    return (q, k, v), lengths


def jagged(tensors: tuple[Tensor, ...], lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, H, {S}, D], as scaled_dot_product_attention expects."""
    longest: dict[str, Any] = {"min_seqlen": min(LENGTHS), "max_seqlen": max(LENGTHS)}
    make = torch.nested.nested_tensor_from_jagged
    q, k, v = (make(tensor, lengths.long(), **longest).transpose(1, 2) for tensor in tensors)
    return q, k, v


def operators(call: Callable[[], object]) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        call()
    return {event.name for event in profile.events()}
