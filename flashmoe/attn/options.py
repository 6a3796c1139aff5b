"""The arguments of attention by name, as they travel from a call to the operators.

Dense rows and keys are [B, H, S, D]; ragged ones [N, H, D] with cu_seqlens; pages [P, page_size, H, D] with block_table and seqused_k.
"""

from __future__ import annotations

from typing import NamedTuple, TypedDict

from torch import Tensor

Window = tuple[int, int]
# As num_splits of an operator: a row's bits depend on its query, its visible keys and its options alone.
CONSISTENT = -1


class ScoreOptions(TypedDict, total=False):
    """Keywords that every attention function has. A type checker's alone: each function's own signature has the defaults."""

    causal: bool
    scale: float | None
    window: Window | None
    softcap: float
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    consistent: bool


class VarlenOptions(ScoreOptions, total=False):
    """Keywords of ragged and cached attention."""

    block_table: Tensor | None
    num_splits: int
    k_scale: Tensor | float | None
    v_scale: Tensor | float | None


class Varlen(NamedTuple):
    """What ``attention_varlen_forward`` takes, in its order. Windows count keys; -1 is no limit."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_k: Tensor | None
    block_table: Tensor | None
    sinks: Tensor | None
    mask: Tensor | None  # [B, Hq, Sq, Sk], or the slopes of ALiBi: float32 [B, Hq]
    max_seqlen_q: int
    max_seqlen_k: int
    scale: float
    window_left: int
    window_right: int
    softcap: float
    num_splits: int


class VarlenBackward(NamedTuple):
    """What ``attention_varlen_backward`` takes, in its order. ``needs``: see ``fake.py``."""

    grad_out: Tensor | None
    grad_lse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_k: Tensor | None
    sinks: Tensor | None
    mask: Tensor | None
    out: Tensor
    lse: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    scale: float
    window_left: int
    window_right: int
    softcap: float
    needs: int = 15


class Dense(NamedTuple):
    """What ``flash_attention_forward`` takes, in its order."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    causal: bool


class DenseBackward(NamedTuple):
    """What ``flash_attention_backward`` takes, in its order."""

    grad_out: Tensor | None
    grad_lse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    scale: float
    causal: bool
    needs: int = 7


def is_slopes(mask: Tensor | None) -> bool:
    """Whether what travels as a mask is ALiBi's slopes."""
    return mask is not None and mask.dim() == 2


def positions(fields: tuple[str, ...], names: str) -> tuple[int, ...]:
    """Where those arguments are, for torch's rules that count them."""
    return tuple(fields.index(name) for name in names.split())
