"""8-bit keys or values and their scales as one tensor, which transformers passes from its cache to flashmoe's attention; nothing else reads it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmoe.errors import ArgumentError


class ScaledCodes(Tensor):
    """Keys or values [B, Hkv, S, D] in float8_e4m3fn that looks like a 16-bit tensor. Every operation on it is an error."""

    codes: Tensor
    scale: Tensor  # float32 [B, Hkv]
    lengths: Tensor  # int32 [B]; all are S

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, lengths: Tensor, dtype: torch.dtype) -> ScaledCodes:
        made: ScaledCodes = Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=dtype, device=codes.device
        )
        made.codes, made.scale, made.lengths = codes, scale, lengths
        return made

    def dequantized(self) -> Tensor:
        """[B, Hkv, S, D] in ``dtype``; exact if the scales are powers of two that it can hold."""
        values: Tensor = (self.codes.float() * self.scale[:, :, None, None]).to(self.dtype)
        return values

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ScaledCodes(shape={list(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        msg = (
            f"an E4m3Cache holds keys and values in float8_e4m3fn, which only the attention 'fmoe' reads; {function} was called on them; "
            "use attn_implementation='fmoe', or another cache for a model that computes with what it caches (DeepSeek's latents)"
        )
        raise ArgumentError(msg)
