"""Writing latents into a cache of 8-bit floats. Importing this module imports torch and loads the compiled extension."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as transforms_are_active

from flashmoe import _extension
from flashmoe.attn.operators import NO_TRANSFORM_APPENDS
from flashmoe.errors import ArgumentError, ArgumentTypeError, DifferentiationError, FlashmoeError
from flashmoe.rules import explain
from flashmoe.transforms import has_tangent

_extension.load()
_append = torch.ops.flashmoe.mla_append_.default


def mla_append(
    latents: Tensor,
    kv_cache: Tensor,
    *,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    slots: Tensor | None = None,
) -> None:
    """Quantise latents to 8 bits and write them into a cache, in place, for :func:`flashmoe.mla_decode`. For inference: no gradients.

    A key is 656 bytes: 512 codes (e4m3), 4 float32 scales of 128 codes each, and the 64 rotary values unchanged. A scale is the smallest
    power of two, at least 2 ** -13, that keeps its values within 448, as serving engines write them. Codes are rounded to nearest even; an
    infinity becomes the largest code with a scale of 2 ** 127, and NaN stays NaN.

    Args:
        latents: [B, S, 576], float16 or bfloat16: for each new token the latent (512, after its norm) and its rotary part (64).
        kv_cache: [P, page_size, 656] with block_table or slots, or [B, Smax, 656]; uint8, or float8_e4m3fn as a view of the same bytes;
            rows at multiples of 16 bytes.
        cache_seqlens: [B] int32, the number of keys of each sequence before the call; token i of sequence b becomes key
            cache_seqlens[b] + i. Not modified.
        block_table: [B, pages] int32: key j is row j % page_size of page block_table[b, j // page_size].
        slots: [B, S] int64, instead of cache_seqlens: token i of sequence b becomes row slots[b, i] % page_size of page
            slots[b, i] // page_size; a token with slot -1 is not written. No two may be equal.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentError, ArgumentTypeError: the message says what was found, what is supported, what to do.
            Lengths, pages and slots are checked only on the CPU; on a GPU tokens without a row in the cache are dropped.
        DifferentiationError: a gradient was requested.
        UnsupportedGpuError: compute capability below 8.0.
    """
    named = {"latents": latents, "kv_cache": kv_cache}
    optional = {"cache_seqlens": cache_seqlens, "block_table": block_table, "slots": slots}
    for name, tensor in (named | {key: one for key, one in optional.items() if one is not None}).items():
        if not isinstance(tensor, Tensor):
            msg = f"{name} must be a torch.Tensor; found {type(tensor).__name__}"
            raise ArgumentTypeError(msg)
    if (torch.is_grad_enabled() and latents.requires_grad) or has_tangent(latents):
        msg = "mla_append has no gradient; call it under torch.no_grad()"
        raise DifferentiationError(msg)
    given = (latents, kv_cache, cache_seqlens, block_table, slots)
    try:
        _append(*given)
    except Exception as error:
        cause = explain(error, "mla_append_", given)
        if cause is error and transforms_are_active() and not isinstance(error, FlashmoeError):
            cause = ArgumentError(NO_TRANSFORM_APPENDS)
        if cause is error:
            raise
        raise cause from error
