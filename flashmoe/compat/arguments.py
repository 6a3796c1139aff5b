"""Conversions of arguments from flash_attn's signatures to flashmoe's."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashmoe.errors import ArgumentError

UNBOUNDED = (-1, -1)


class BlockTableError(ArgumentError, RuntimeError):
    """Lengths exceed what block_table can address: a RuntimeError, as in flash_attn."""


class RawCallError(ArgumentError, RuntimeError):
    """flash_attn's extension functions raise RuntimeError for any error."""


def refuse(interface: str, **given: Any) -> None:
    """Raise ArgumentError for the first argument that is set: not None, not 0, not empty."""
    for name, value in given.items():
        if value is not None and (isinstance(value, Tensor) or value != 0):
            shown = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            msg = f"{name} is {shown}; flashmoe does not support {name} ({interface}); remove it, or use that package itself"
            raise ArgumentError(msg)


def integer(value: Any) -> Any:
    """An integer of any kind (NumPy's, a tensor of one element) as an int; reading a GPU tensor waits for the GPU."""
    if isinstance(value, (int, torch.SymInt)):
        return value
    try:
        return operator.index(value)
    except TypeError as error:
        msg = f"each side of window_size must be an integer; found {value!r}"
        raise ArgumentError(msg) from error


def window_of(window_size: Iterable[Any] | None) -> tuple[int, int]:
    """(left, right), each a number of keys; any negative number becomes -1, no limit."""
    if window_size is None:
        return UNBOUNDED
    sides = tuple(integer(side) for side in window_size)
    if len(sides) != 2:
        msg = f"window_size must be (left, right), two numbers of keys, -1 for no limit; found {window_size!r}"
        raise ArgumentError(msg)
    left, right = (-1 if side < 0 else side for side in sides)
    return left, right


def score_options(
    causal: bool,
    window_size: Iterable[Any] | None,
    softcap: float,
    scale: float | None,
    alibi_slopes: Tensor | None = None,
) -> dict[str, Any]:
    """flashmoe's keywords. In flash_attn a softcap only has an effect above 0."""
    window, capped = window_of(window_size), max(float(softcap), 0.0)
    scale = scale if scale is None else float(scale)
    return {
        "causal": bool(causal),
        "window": None if window == UNBOUNDED else window,
        "softcap": capped,
        "scale": scale,
        "alibi_slopes": alibi_slopes,
    }


def lengths_of(value: Any, batch: int, otherwise: int, device: torch.device) -> Tensor:
    """cache_seqlens as int32 [batch]: an int applies to all sequences, None means ``otherwise``."""
    if isinstance(value, Tensor) and value.dim() > 0:
        return value
    count = otherwise if value is None else integer(value)
    return torch.full((batch,), count, dtype=torch.int32, device=device)


class Keys(NamedTuple):
    """Keys and values as arguments of ``flashmoe.attn.varlen.attend``."""

    k: Tensor
    v: Tensor
    options: dict[str, Any]  # cu_seqlens_k, seqused_k, block_table, max_seqlen_k


def keys_after_padding(k: Tensor, v: Tensor, used: Tensor, leftpad: Tensor, block_table: Tensor | None) -> Keys:
    """The keys of caches [B, S, H, D], or of pages [P, page_size, H, D], from leftpad[b] up to used[b].

    Dense caches become one ragged tensor, whose sequence b begins after its padding. Pages become pages of one key, whose table leaves
    the padding out.
    """
    left = used - leftpad
    if block_table is None:
        batch, room = k.shape[:2]
        first = torch.arange(batch, dtype=torch.int32, device=k.device) * room + leftpad
        cu_seqlens = torch.nn.functional.pad(first, (0, 1), value=batch * room)
        longest = 2 * room  # by cu_seqlens, which counts the next sequence's padding to this one
        ragged = {"cu_seqlens_k": cu_seqlens, "seqused_k": left, "max_seqlen_k": longest}
        return Keys(k.flatten(0, 1), v.flatten(0, 1), ragged)
    page_size = k.shape[1]
    room = block_table.shape[1] * page_size
    key = (torch.arange(room, device=k.device) + leftpad.unsqueeze(1)).clamp_(max=room - 1)
    page = block_table.gather(1, key // page_size)
    paged = {"block_table": (page * page_size + key % page_size).int(), "seqused_k": left, "max_seqlen_k": room}
    return Keys(k.flatten(0, 1).unsqueeze(1), v.flatten(0, 1).unsqueeze(1), paged)


def check_table(lengths: Tensor, added: int, block_table: Tensor, page_size: int) -> None:
    """Raise BlockTableError if a sequence is longer than its row of block_table. As in flash_attn this waits for the GPU; during CUDA graph
    capture and under torch.compile, lengths cannot be read, and keys past the table are clamped to it."""
    if torch.compiler.is_compiling() or (lengths.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    room = block_table.shape[1] * page_size
    longest = int(lengths.max()) + added if lengths.numel() else 0
    if longest > room:
        new = f", {added} of them new," if added else ""
        msg = (
            f"a sequence has {longest} keys{new} but a row of block_table has {block_table.shape[1]} pages of {page_size}, "
            f"room for {room}; pass a block_table with more columns"
        )
        raise BlockTableError(msg)
