"""Rows of tokens as messages: with their ids and weights in one tensor, in x's dtype or as e4m3 codes with a scale per 128 columns."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmoe.moe.scaled import BLOCK, E4M3
from flashmoe.moe.scaled import quantize as quantize_blocks

__all__ = ["E4M3", "decode", "pack", "quantize", "unpack", "unpack_fp8"]
ALIGNMENT = 16  # bytes, of each of the two blocks of a row


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes [T, H] uint8, scales [T, H / 128] float32) of x [T, H]."""
    values, scales = quantize_blocks(x)
    return values.view(torch.uint8), scales


def decode(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Fill out [T, H] with the values of uint8 codes [T, H] and scales [T, H / 128]; codes' rows may be strided."""
    values = codes.view(E4M3).to(out.dtype)  # exact, because the target has more bits
    torch.mul(values.unflatten(1, (-1, BLOCK)), scales.unsqueeze(-1), out=out.unflatten(1, (-1, BLOCK)))


def pack(x: Tensor, weights: Tensor, ids: Tensor, *, is_fp8: bool) -> Tensor:
    """[T, C] in x's dtype, or uint8 with codes: the bits of ids and float32 weights (with codes also the scales), then x or the codes."""
    columns = [ids, weights.float().view(torch.int32)]
    if is_fp8:
        x, scales = quantize(x)
        columns.append(scales.view(torch.int32))
    blocks = []
    for block in (torch.cat(columns, dim=1).view(x.dtype), x):
        gap = -(block.shape[1] * block.element_size()) % ALIGNMENT // block.element_size()
        blocks += [block, block.new_empty((block.shape[0], gap))] if gap else [block]
    return torch.cat(blocks, dim=1)


def unpack(packed: Tensor, hidden: int, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(x, weights, ids), views of what :func:`pack` made without codes."""
    words, x = _split_words(packed, hidden, 2 * top_k)
    return x, words[:, top_k:].view(torch.float32), words[:, :top_k]


def unpack_fp8(packed: Tensor, hidden: int, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes, scales, weights, ids), views of what :func:`pack` made with codes."""
    words, codes = _split_words(packed, hidden, 2 * top_k + hidden // BLOCK)
    ids, weights, scales = words.tensor_split((top_k, 2 * top_k), dim=1)
    return codes, scales.view(torch.float32), weights.view(torch.float32), ids


def _split_words(packed: Tensor, hidden: int, words: int) -> tuple[Tensor, Tensor]:
    """The first ``words`` words of four bytes, and the ``hidden`` elements at the next multiple of 16 bytes."""
    size = packed.element_size()
    first = -(-4 * words // ALIGNMENT) * ALIGNMENT // size
    return packed[:, : 4 * words // size].view(torch.int32), packed[:, first : first + hidden]
