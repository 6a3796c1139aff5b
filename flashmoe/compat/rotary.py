"""Rotary embedding, under the names and with the signatures of flash_attn.layers.rotary.

A pair (x1, x2) of a row at position p becomes (x1 cos[p] - x2 sin[p], x2 cos[p] + x1 sin[p]) (Su et al., RoFormer, section 3.4), computed in
float32 and rounded once. Torch operations, differentiable in x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashmoe.errors import ArgumentError, ShapeError

__all__ = ["apply_rotary_emb", "apply_rotary_emb_func"]


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate the first R columns of x [B, S, H, D], or of ragged x [N, H, D] with cu_seqlens int32 [B + 1]; as x, and x itself with
    ``inplace``.

    cos and sin [L, R / 2]: row i of sequence b has position seqlen_offsets (an int, or int [B]) + i, and none may reach L. Pairs are columns
    2c and 2c + 1 where ``interleaved``, else c and c + R / 2. max_seqlen is not needed. Raises ShapeError for what does not fit.
    """
    del max_seqlen
    if cu_seqlens is not None:
        sequence, index = positions_of(x.shape[0], cu_seqlens)
        index = index + (seqlen_offsets[sequence] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets)
    else:
        first = seqlen_offsets.unsqueeze(1) if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
        index = (torch.arange(x.shape[1], device=x.device) + first).expand(x.shape[0], -1)
    rotated = rotate(x, cos, sin, index, interleaved)
    return x.copy_(rotated) if inplace else rotated


apply_rotary_emb_func = apply_rotary_emb  # its older name


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x [..., H, D] whose rows are at ``positions`` [...]; a new tensor."""
    width = 2 * cos.shape[-1]
    if cos.dim() != 2 or cos.shape != sin.shape or width > x.shape[-1]:
        msg = (
            f"rotary cos and sin must be [positions, half of the rotated columns], at most {x.shape[-1]} columns; found "
            f"{list(cos.shape)} and {list(sin.shape)}"
        )
        raise ShapeError(msg)
    if width == 0:
        return x.clone()
    if (
        x.device.type == "cpu"
        and positions.numel()
        and not torch.compiler.is_compiling()
        and int(positions.max()) >= cos.shape[0]
    ):
        msg = (
            f"rotary cos and sin have {cos.shape[0]} positions; {int(positions.max()) + 1} are needed: make them longer"
        )
        raise ArgumentError(msg)
    at = positions.clamp(max=cos.shape[0] - 1)
    c, s = (table.float()[at].unsqueeze(-2) for table in (cos, sin))
    turned = x[..., :width].float()
    pairs = turned.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else turned.unflatten(-1, (2, -1)).unbind(-2)
    both = (pairs[0] * c - pairs[1] * s, pairs[1] * c + pairs[0] * s)
    result = torch.stack(both, -1 if interleaved else -2).flatten(-2).to(x.dtype)
    return torch.cat((result, x[..., width:]), -1)


def rotate_rows(
    x: Tensor, cos: Tensor, sin: Tensor, first: Tensor, interleaved: bool, cu_seqlens: Tensor | None, *, step: bool
) -> Tensor:
    """x [B, S, H, D], or ragged [N, H, D] with cu_seqlens [B + 1], of sequences whose first row is at position ``first`` [B]; where not
    ``step``, all of a sequence's rows are, as there without a causal mask or window."""
    if cu_seqlens is None:
        index = torch.arange(x.shape[1], device=x.device)
        return rotate(x, cos, sin, first.unsqueeze(1) + index * int(step), interleaved)
    sequence, index = positions_of(x.shape[0], cu_seqlens)
    return rotate(x, cos, sin, first[sequence] + index * int(step), interleaved)


def positions_of(rows: int, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of a ragged batch: its sequence, and its number there."""
    index = torch.arange(rows, device=cu_seqlens.device)
    sequence = torch.bucketize(index, cu_seqlens[1:], right=True, out_int32=True).clamp_(max=cu_seqlens.shape[0] - 2)
    return sequence, index - cu_seqlens[sequence]
