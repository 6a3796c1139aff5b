"""A cache for ``generate`` that stores keys and values in float8_e4m3fn and passes them to flashmoe's attention in that form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from flashmoe.attn import e4m3
from flashmoe.errors import DtypeError
from flashmoe.integrations.transformers.codes import ScaledCodes

HEADROOM = 8  # the scale leaves room for values of this many times the largest magnitude of the first keys or values
LARGEST = 448.0
ROOM = 128  # keys
# With scales 2^a to 2^b every code times its scale is a number of the dtype.
EXPONENTS = {torch.float16: (-15, 7), torch.bfloat16: (-40, 40)}
FEW_ROWS = (
    16  # with up to this many query rows attention reads the 8-bit keys; for more, they are converted to 16 bits once
)


class E4m3Layer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values [B, Hkv, room, D] in float8_e4m3fn, with a scale per sequence and key head, chosen from the first ones.

    A sliding layer also keeps its old keys, and leaves the window to the attention.
    """

    keys: Any  # Tensor, None before the first ones
    values: Any

    def __init__(self, **_: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cumulative_length = 0  # the number of keys; the name is transformers'

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if key_states.dtype not in EXPONENTS:
            msg = f"keys are {key_states.dtype}; an E4m3Cache supports float16 and bfloat16; load the model with dtype=torch.bfloat16"
            raise DtypeError(msg)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.key_scale, self.value_scale = _scale(key_states), _scale(value_states)
        self.keys, self.values = (
            torch.empty((*states.shape[:2], 0, states.shape[3]), dtype=e4m3.E4M3, device=self.device)
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    @torch.no_grad()
    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append; return all keys and values: in 8 bits for up to 16 new rows, otherwise converted to 16 bits."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch, _heads, rows, _dim = key_states.shape
        before, after = self.cumulative_length, self.cumulative_length + rows
        if after > self.keys.shape[2]:
            room = -(-max(after, before + before // 2) // ROOM) * ROOM
            self.keys, self.values = (_grown(codes, before, room) for codes in (self.keys, self.values))
        lengths = torch.full((batch,), before, dtype=torch.int32, device=self.device)
        given = (self.keys, self.values, key_states, value_states, lengths, None)
        e4m3.append(given, self.key_scale, self.value_scale)
        self.cumulative_length = after
        found = tuple(
            ScaledCodes(codes[:, :, :after], scale, lengths + rows, self.dtype)
            for codes, scale in ((self.keys, self.key_scale), (self.values, self.value_scale))
        )
        keys, values = (one.dequantized() for one in found) if rows > FEW_ROWS else found
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        return self.cumulative_length

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last keys: a negative number says how many to drop, a positive one how many to keep."""
        kept = tokens_to_remove if tokens_to_remove > 0 else self.cumulative_length + tokens_to_remove
        self.cumulative_length = max(0, min(kept, self.cumulative_length))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self.keys.shape[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if not self.is_initialized:
            return
        chosen = indices.to(self.device)
        self.keys, self.values = (codes.view(torch.uint8)[chosen].view(e4m3.E4M3) for codes in (self.keys, self.values))
        self.key_scale, self.value_scale = self.key_scale[chosen], self.value_scale[chosen]

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized, self.cumulative_length = False, 0


class E4m3Cache(Cache):
    """Keys and values in 8 bits, for ``past_key_values`` of a model with ``attn_implementation='fmoe'`` in float16 or bfloat16::

        model.generate(tokens, past_key_values=E4m3Cache())

    Takes half of the memory of a 16-bit cache. Attention equals that over the dequantised cache: scales are powers of two, one per
    sequence and key head, chosen at the first call so that eight times its largest magnitude is still below saturation.
    Another attention implementation raises ArgumentError; a float32 model, DtypeError.
    """

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=E4m3Layer)


def _scale(states: Tensor) -> Tensor:
    """float32 [B, Hkv], powers of two."""
    largest = states.detach().abs().amax((2, 3)).float().nan_to_num(nan=0.0, posinf=LARGEST)
    _, exponent = torch.frexp(largest * (HEADROOM / LARGEST))  # 2^exponent is above the argument; 0 for zero
    return torch.ldexp(torch.ones_like(largest), exponent.clamp(*EXPONENTS[states.dtype]))


def _grown(codes: Tensor, used: int, room: int) -> Tensor:
    grown = codes.new_empty((*codes.shape[:2], room, codes.shape[3]))
    grown[:, :, :used] = codes[:, :, :used]
    return grown
