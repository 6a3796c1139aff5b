"""Rotary embedding, with the names and signatures of flash_attn.layers.rotary.

A pair (x1, x2) of a row at position p becomes (x1 cos[p] - x2 sin[p], x2 cos[p] + x1 sin[p]) (Su et al., RoFormer, section 3.4), computed in
float32 and rounded once. Torch operations, differentiable in x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashmoe.errors import ArgumentError, ShapeError

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
]


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
    """Rotate the first R columns of x [B, S, H, D], or of ragged x [N, H, D] with cu_seqlens int32 [B + 1]; returns a tensor like x, or x
    itself with ``inplace``.

    cos and sin [L, R / 2]: row i of sequence b has position seqlen_offsets (an int, or int [B]) + i, which must be below L. Pairs are columns
    2c and 2c + 1 if ``interleaved``, otherwise c and c + R / 2. max_seqlen is not used. Raises ShapeError for shapes that do not fit.
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


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """:func:`apply_rotary_emb` of x [B, S, H, D] from position 0 on; cos and sin may also be [B, S, R / 2], separate for each row."""
    if cos.dim() == 2:
        return apply_rotary_emb(x, cos, sin, interleaved)
    positions = torch.arange(cos.shape[0] * cos.shape[1], device=x.device).view(cos.shape[:2])
    return rotate(x, cos.flatten(0, 1), sin.flatten(0, 1), positions[:, : x.shape[1]], interleaved)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate q and k of qkv [B, S, 3, H, D], or [B, S, Hq + 2 Hkv, D] with num_heads_q, in place; returns qkv. cos_k and sin_k: tables for
    k, if they differ. Otherwise as :func:`apply_rotary_emb`."""
    if qkv.dim() == 5:
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    elif num_heads_q is not None and qkv.dim() == 4 and (qkv.shape[2] - num_heads_q) % 2 == 0:
        q, k, _ = qkv.split((num_heads_q, *[(qkv.shape[2] - num_heads_q) // 2] * 2), 2)
    else:
        msg = (
            f"qkv has shape {list(qkv.shape)} and num_heads_q is {num_heads_q}; needed: [batch, length, 3, heads, head_dim], or "
            "[batch, length, query heads + 2 * key heads, head_dim] with num_heads_q"
        )
        raise ShapeError(msg)
    apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
    own = (cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)
    apply_rotary_emb(k, *own, interleaved, True, seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotate k of kv [B, S, 2, H, D] in place; returns kv. Otherwise as :func:`apply_rotary_emb`."""
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


class RotaryEmbedding(torch.nn.Module):
    """Rotates, in place, by the angles p * base ** (-2 c / dim) for position p and pair c.

    scale_base: XPos (Sun et al., A Length-Extrapolatable Transformer): q's pairs are multiplied by z ** ((p - L // 2) / scale_base) and k's
    divided by it, with z = (2 c + 0.4 dim) / (1.4 dim) and L the length of the tables. The tables grow with the longest call.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        columns = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        self.register_buffer("inv_freq", self.base ** (-columns / dim), persistent=False)
        self.register_buffer(
            "scale", None if scale_base is None else (columns + 0.4 * dim) / (1.4 * dim), persistent=False
        )
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None  # these two only with scale_base
        self._sin_k_cached: Tensor | None = None

    def _update_cos_sin_cache(
        self, seqlen: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        known = self._cos_cached
        if (
            known is not None
            and seqlen <= self._seq_len_cached
            and (known.device, known.dtype) == (device, dtype)
            and not (self.training and known.is_inference())
        ):
            return
        self._seq_len_cached = seqlen
        # Recomputed, because .half() rounds the buffers
        columns = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        position = torch.arange(seqlen, device=device, dtype=torch.float32).unsqueeze(1)
        angle = position * self.base ** (-columns / self.dim)
        cos, sin = angle.cos(), angle.sin()
        if self.scale_base is not None:
            scale = ((columns + 0.4 * self.dim) / (1.4 * self.dim)) ** ((position - seqlen // 2) / self.scale_base)
            self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)
            cos, sin = cos * scale, sin * scale
        self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """qkv as in :func:`apply_rotary_emb_qkv_`, or q [B, S, H, D] with kv [B, S, 2, H, D]. If seqlen_offset is a tensor [B], max_seqlen is
        the table length that is needed, unless the tables are long enough. Returns its inputs."""
        if max_seqlen is None and isinstance(seqlen_offset, int):
            max_seqlen = qkv.shape[1] + seqlen_offset
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, qkv.device, qkv.dtype)
        cos, sin = self._cos_cached, self._sin_cached
        if cos is None or sin is None:
            msg = "seqlen_offset is a tensor; pass max_seqlen, the largest offset plus the rows after it, in the first call"
            raise ArgumentError(msg)
        cos_k = cos if self._cos_k_cached is None else self._cos_k_cached
        sin_k = sin if self._sin_k_cached is None else self._sin_k_cached
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x [..., H, D] rotated at ``positions`` [...]; returns a new tensor."""
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
    """x [B, S, H, D], or ragged [N, H, D] with cu_seqlens [B + 1], rotated; a sequence's first row is at position ``first`` [B]. Without
    ``step`` all its rows are at that position, as in flash_attn without a causal mask or window."""
    if cu_seqlens is None:
        index = torch.arange(x.shape[1], device=x.device)
        return rotate(x, cos, sin, first.unsqueeze(1) + index * int(step), interleaved)
    sequence, index = positions_of(x.shape[0], cu_seqlens)
    return rotate(x, cos, sin, first[sequence] + index * int(step), interleaved)


def positions_of(rows: int, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of a ragged batch: its sequence, and its index in the sequence."""
    index = torch.arange(rows, device=cu_seqlens.device)
    sequence = torch.bucketize(index, cu_seqlens[1:], right=True, out_int32=True).clamp_(max=cu_seqlens.shape[0] - 2)
    return sequence, index - cu_seqlens[sequence]
