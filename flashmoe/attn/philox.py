"""Which probabilities dropout keeps: csrc/attention/params/dropout.h says how seed, offset, sequence, head, row and key decide."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_UNITS = 1 << 16  # p is a multiple of 1 / _UNITS
_MULTIPLIERS, _WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_WORD = (1 << 32) - 1
ROUNDS = 10


def kept(rng_state: Tensor, dropout_p: float, sequences: range, heads: range, rows: int, keys: int) -> Tensor:
    """bool [sequences, heads, rows, keys] on ``rng_state``'s device."""
    threshold = min(_UNITS - 1, math.floor(dropout_p * _UNITS + 0.5))
    row_groups, key_groups, device = -(-rows // 16), -(-keys // 32), rng_state.device

    def axis(numbers: range, position: int) -> Tensor:
        shape = [1, 1, 1, 1]
        shape[position] = len(numbers)
        return torch.arange(numbers.start, numbers.stop, device=device).view(shape)

    seed, offset = rng_state.unbind()
    zero = torch.zeros_like(seed)
    key = philox((offset & _WORD, offset >> 32 & _WORD, zero, zero), (seed & _WORD, seed >> 32 & _WORD))[:2]
    counter = (axis(range(8 * key_groups), 3), axis(range(8 * row_groups), 2), axis(heads, 1), axis(sequences, 0))
    words = philox(counter, key)
    halves = torch.stack([torch.stack([word >> 16 * half & 0xFFFF for half in (0, 1)]) for word in words])
    # [word, half, sequence, head, row group, 8, key group, 8]: row 16 * group + 8 * half + i, key 32 * group + 8 * word + j
    values = halves.view(4, 2, len(sequences), len(heads), row_groups, 8, key_groups, 8).permute(2, 3, 4, 1, 5, 6, 0, 7)
    return values.reshape(len(sequences), len(heads), 16 * row_groups, 32 * key_groups)[..., :rows, :keys] >= threshold


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3) on words in int64; products wrap, bits above are dropped."""
    a, b, c, d = counter
    left, right = key
    for _ in range(ROUNDS):
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, c = second >> 32 & _WORD ^ b ^ left, first >> 32 & _WORD ^ d ^ right
        b, d = second & _WORD, first & _WORD
        left, right = left + _WEYL[0] & _WORD, right + _WEYL[1] & _WORD
    words: tuple[Tensor, ...] = tuple(torch.broadcast_tensors(a, b, c, d))
    return words
