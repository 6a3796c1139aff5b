"""The arguments of attention by name, in the form in which they are passed to the operators.

Dense rows and keys are [B, H, S, D]; ragged ones [N, H, D] with cu_seqlens; pages [P, page_size, H, D] with block_table and seqused_k.
"""

from __future__ import annotations

from typing import NamedTuple, TypedDict

from torch import Tensor

Window = tuple[int, int]
# num_splits value for the operators that means: a row's bits depend only on its query, its visible keys and its options.
CONSISTENT = -1


class ScoreOptions(TypedDict, total=False):
    """Keywords that every attention function has. Only for type checkers: each function's own signature has the defaults."""

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
    """The arguments of ``attention_varlen_forward``, in order. Windows count keys; -1 means no limit."""

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
    """The arguments of ``attention_varlen_backward``, in order. ``needs``: see ``fake.py``."""

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
    """The arguments of ``flash_attention_forward``, in order."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    causal: bool


class DenseBackward(NamedTuple):
    """The arguments of ``flash_attention_backward``, in order."""

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
    """Whether the tensor passed as a mask holds ALiBi's slopes."""
    return mask is not None and mask.dim() == 2


def positions(fields: tuple[str, ...], names: str) -> tuple[int, ...]:
    """The indices of the named arguments, for torch's rules that take arguments by position."""
    return tuple(fields.index(name) for name in names.split())
