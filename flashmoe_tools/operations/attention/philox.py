"""Dropout's mask from its definition (csrc/attention/params/dropout.h), one position at a time, in Python integers."""

import math
from functools import lru_cache

import torch

_WORD = 0xFFFFFFFF
Words = tuple[int, int, int, int]


def philox4x32(counter: Words, key: tuple[int, int], rounds: int = 7) -> Words:
    """Random123's function of the same name (Salmon et al., 2011)."""
    for number in range(rounds):
        left, right = (key[0] + number * 0x9E3779B9) & _WORD, (key[1] + number * 0xBB67AE85) & _WORD
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = (
            (second >> 32) ^ counter[1] ^ left,
            second & _WORD,
            (first >> 32) ^ counter[3] ^ right,
            first & _WORD,
        )
    return counter


@lru_cache(maxsize=1 << 18)
def _draw(seed: int, offset: int, sequence: int, head: int, row_slot: int, key_slot: int) -> Words:
    left, right, *_ = _first(seed, offset)
    return philox4x32((key_slot, head, row_slot, sequence), (left, right))


@lru_cache(maxsize=64)
def _first(seed: int, offset: int) -> Words:
    return philox4x32((offset & _WORD, offset >> 32 & _WORD, 0, 0), (seed & _WORD, seed >> 32 & _WORD))


def is_kept(seed: int, offset: int, least: int, sequence: int, head: int, row: int, key: int) -> bool:
    """Whether a probability is kept: its eight random bits are not below its limit. ``least``: the threshold, in 2^-16."""
    row_slot, key_slot = row // 16 * 8 + row % 8, key // 32 * 4 + key % 8 // 2
    words = _draw(seed, offset, sequence, head, row_slot, key_slot)
    value = words[key // 16 % 2 * 2 + key % 2] >> 8 * (key // 8 % 2 * 2 + row // 8 % 2) & 0xFF
    point = _first(seed, offset)[2]
    for step, at in ((0xDB4F0B91, row_slot), (0xBBE05633, key_slot), (0xA0F2EC75, head), (0x89E18285, sequence)):
        point += step * at
    return value >= least // 256 + ((point & _WORD) < least % 256 << 24)


def threshold(p: float) -> int:
    """The threshold, in 2^-16, below which values are dropped."""
    return min(65535, math.floor(p * 65536 + 0.5))


def factors(seed: int, offset: int, p: float, sequence: int, heads: int, rows: int, keys: int) -> torch.Tensor:
    """What probabilities are multiplied by: [heads, rows, keys] in float64, 0 or 1 / (1 - p)."""
    least = threshold(p)
    kept = [
        is_kept(seed, offset, least, sequence, head, row, key)
        for head in range(heads)
        for row in range(rows)
        for key in range(keys)
    ]
    return torch.tensor(kept, dtype=torch.float64).view(heads, rows, keys) / (1.0 - p)
