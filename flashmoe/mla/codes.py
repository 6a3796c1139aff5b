"""The 8-bit cache on the CPU: 656 bytes per key, which are 512 codes (e4m3), 4 float32 scales, and 64 rotary values of 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmoe.rules import broken, check

E4M3 = torch.float8_e4m3fn
KEY_BYTES = 656
LATENT_DIM, SCALES = 512, 4
ROTARY = LATENT_DIM + 4 * SCALES  # byte offset of the rotary values
LARGEST, LEAST_SCALE = 448.0, 1e-4
NAN_CODE = 0x7F
_FRACTION, _LARGEST_SCALE = 0x7FFFFF, 254 << 23  # bits of a float32: 2^127


def is_fp8(cache: Tensor) -> bool:
    """Whether a cache holds 8-bit floats, as bytes or as float8_e4m3fn."""
    return cache.dtype in (torch.uint8, E4M3)


def quantize(latents: Tensor) -> Tensor:
    """[..., 656] uint8 from 16-bit latents [..., 576]. Each scale is the smallest power of two that keeps its values within 448."""
    values = latents[..., :LATENT_DIM].float().unflatten(-1, (SCALES, -1))
    most = values.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1)
    wanted = (most / LARGEST).clamp(min=LEAST_SCALE).view(torch.int32)
    scales = ((wanted + _FRACTION) & ~_FRACTION).clamp(max=_LARGEST_SCALE).view(torch.float32)
    divided = (values / scales[..., None]).flatten(-2)
    codes = divided.clamp(-LARGEST, LARGEST).to(E4M3).view(torch.uint8).masked_fill(divided.isnan(), NAN_CODE)
    rotary = latents[..., LATENT_DIM:].contiguous().view(torch.uint8)
    return torch.cat([codes, scales.contiguous().view(torch.uint8), rotary], dim=-1)


def dequantize(coded: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., 576] in ``dtype``, the 16-bit type of the rotary values in the bytes [..., 656]: codes times scales, in float32, rounded to it."""
    coded = coded.view(torch.uint8)
    codes = coded[..., :LATENT_DIM].view(E4M3).float().unflatten(-1, (SCALES, -1))
    scales = coded[..., LATENT_DIM:ROTARY].contiguous().view(torch.float32)
    rotary = coded[..., ROTARY:].contiguous().view(dtype)
    return torch.cat([(codes * scales[..., None]).flatten(-2).to(dtype), rotary], dim=-1)


def append(
    latents: Tensor, kv_cache: Tensor, cache_seqlens: Tensor | None, block_table: Tensor | None, slots: Tensor | None
) -> None:
    """``mla_append`` for CPU tensors; checks lengths, pages and slots before it writes anything."""
    check("mla_append_", (latents, kv_cache, cache_seqlens, block_table, slots))
    tokens = latents.shape[1]
    page_size = kv_cache.shape[1]
    if slots is None:
        assert cache_seqlens is not None
        rows = _rows(kv_cache, cache_seqlens, block_table, tokens)
    else:
        rows = _checked(slots, kv_cache.shape[0] * page_size)
    written = rows >= 0
    where = rows[written]
    kv_cache.view(torch.uint8)[where // max(1, page_size), where % max(1, page_size)] = quantize(latents[written])


def _checked(slots: Tensor, count: int) -> Tensor:
    outside = (slots < -1) | (slots >= count)
    if outside.any():
        sequence, token = (int(index) for index in outside.nonzero()[0])
        rule = "mla.append_slot"
        raise broken(rule, sequence=sequence, token=token, found=int(slots[sequence, token]), most=count - 1)
    return slots


def _rows(kv_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None, tokens: int) -> Tensor:
    """[batch, tokens], row numbers that count through all pages."""
    pages, page_size, _ = kv_cache.shape
    most = page_size if block_table is None else page_size * block_table.shape[1]
    rows = torch.empty(len(cache_seqlens), tokens, dtype=torch.int64)
    for sequence, held in enumerate(cache_seqlens.tolist()):
        if held < 0 or held + tokens > most:
            rule = "mla.append_room"
            raise broken(rule, sequence=sequence, found=held, tokens=tokens, most=most)
        keys = torch.arange(held, held + tokens)
        if block_table is None:
            rows[sequence] = sequence * page_size + keys
            continue
        own = block_table[sequence, keys // page_size].long()
        outside = (own < 0) | (own >= pages)
        if outside.any():
            first = int(outside.int().argmax())
            rule = "mla.page"
            index = int(keys[first]) // page_size
            raise broken(rule, sequence=sequence, index=index, found=int(own[first]), pages=pages)
        rows[sequence] = own * page_size + keys % page_size
    return rows
