"""Which probabilities dropout keeps; csrc/attention/params/dropout.h defines how seed, offset, sequence, head, row and key decide."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_UNITS = 1 << 16  # p is a multiple of 1 / _UNITS
_MULTIPLIERS, _WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_WORD = (1 << 32) - 1
# The step of the limit's lattice for each word of the counter
_LATTICE = (0xBBE05633, 0xA0F2EC75, 0xDB4F0B91, 0x89E18285)
ROUNDS = 7


def keep_mask(rng_state: Tensor, dropout_p: float, sequences: range, heads: range, rows: int, keys: int) -> Tensor:
    """bool [sequences, heads, rows, keys] on ``rng_state``'s device, True where a probability is kept."""
    threshold = min(_UNITS - 1, math.floor(dropout_p * _UNITS + 0.5))
    row_groups, key_groups, device = -(-rows // 16), -(-keys // 32), rng_state.device
    whole, rest = divmod(threshold, 256)

    def axis(numbers: range, position: int) -> Tensor:
        shape = [1, 1, 1, 1]
        shape[position] = len(numbers)
        return torch.arange(numbers.start, numbers.stop, device=device).view(shape)

    seed, offset = rng_state.unbind()
    zero = torch.zeros_like(seed)
    *key, start, _ = philox((offset & _WORD, offset >> 32 & _WORD, zero, zero), (seed & _WORD, seed >> 32 & _WORD))
    counter = (axis(range(4 * key_groups), 3), axis(heads, 1), axis(range(8 * row_groups), 2), axis(sequences, 0))
    point = start + sum(step * word for step, word in zip(_LATTICE, counter, strict=True)) & _WORD
    limit = whole + (point < rest << 24).int()
    # One word at a time, because each takes eight bytes in memory.
    keep = torch.stack(
        [torch.stack([word >> 8 * byte & 0xFF >= limit for byte in range(4)]) for word in philox(counter, tuple(key))]
    )
    # [16 keys, column of a pair, 8 keys, 8 rows, sequence, head, row group, 8, key group, 4]
    shape = (2, 2, 2, 2, len(sequences), len(heads), row_groups, 8, key_groups, 4)
    rows_and_keys = keep.view(shape).permute(4, 5, 6, 3, 7, 8, 0, 2, 9, 1)
    return rows_and_keys.reshape(len(sequences), len(heads), 16 * row_groups, 32 * key_groups)[..., :rows, :keys]


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Philox4x32-7 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3) on 32-bit words held in int64; products wrap and are
    masked to 32 bits."""
    a, b, c, d = counter
    left, right = key
    for _ in range(ROUNDS):
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, c = second >> 32 & _WORD ^ b ^ left, first >> 32 & _WORD ^ d ^ right
        b, d = second & _WORD, first & _WORD
        left, right = left + _WEYL[0] & _WORD, right + _WEYL[1] & _WORD
    words: tuple[Tensor, ...] = tuple(torch.broadcast_tensors(a, b, c, d))
    return words
