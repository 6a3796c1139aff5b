"""Latent attention and linear: valid calls and an independent statement of their rules. Latent attention only as descriptions: its CPU path is Python."""

import math
from collections.abc import Callable
from typing import Any

from .attention_rules import last_stride
from .described import Call, T, need, t
from .experts_rules import FLOATS, first_of, given, grouped_sizes, kind, rank, shape

CODES = ("uint8", "float8_e4m3fn")
INT32_MOST, KEYS, LEAST = 2**31 - 1, 2**30 - 1, 2.0**-126


def place(c: Call, name: str, base: str) -> None:
    need(
        c[name].device == c[base].device,
        "mla.devices",
        name=name,
        base=base,
        found=c[name].device,
        needed=c[base].device,
    )


def companion(c: Call, name: str, base: str, dtype: str, length: int, axes: str = "]") -> None:
    need(c[name] is not None, "tensor.missing", name=name)
    place(c, name, base)
    one: T = c[name]
    need(one.dtype == dtype, "mla.companion_dtype", name=name, found=one.dtype, needed=dtype)
    fits = one.rank == (2 if "," in axes else 1) and one.sizes[0] == length
    need(fits, "mla.companion_shape", name=name, found=one.sizes, needed=f"[{length}{axes}")
    last_stride(one, name)


def coded(cache: T, pages: bool, batch: int) -> None:
    fits = cache.rank == 3 and cache.sizes[2] == 656 and (pages or cache.sizes[0] == batch)
    need(fits, "mla.coded_pages" if pages else "mla.coded_cache", found=cache.sizes, batch=batch)
    last_stride(cache, "kv_cache")
    fits = cache.strides[0] % 16 == 0 and cache.strides[1] % 16 == 0
    need(fits, "mla.coded_alignment", strides=cache.strides, address=0)


def page_size(c: Call) -> None:
    size = c["kv_cache"].sizes[1]
    need(c["block_table"] is None or (size >= 16 and size % 16 == 0), "mla.page_size", found=size, unit=16)


def decode(c: Call, _: Any = None) -> None:
    need(c["indices"] is not None or c["cache_seqlens"] is not None, "mla.no_lengths")
    given(c, "q", "kv_cache")
    q, cache, indices = c["q"], c["kv_cache"], c["indices"]
    place(c, "kv_cache", "q")
    need(not q.device.startswith("xpu"), "attention.device", device=q.device)
    kernels = FLOATS[:2] if q.is_cuda else FLOATS
    need(q.dtype in kernels, "mla.dtype", dtype=q.dtype, device=q.device, supported=", ".join(kernels))
    is_coded = cache.dtype in CODES
    need(not is_coded or q.dtype != "float32", "mla.coded_q", q=q.dtype)
    need(is_coded or cache.dtype == q.dtype, "mla.dtypes", q=q.dtype, kv_cache=cache.dtype)
    fits = q.rank == 4 and q.sizes[3] == 576 and 1 <= q.sizes[2] <= 128 and q.sizes[1] <= 4096
    need(fits, "mla.q", found=q.sizes, tokens=4096, heads=128)
    last_stride(q, "q")
    batch, tokens, heads, _ = q.sizes
    pages = c["block_table"] is not None or indices is not None
    if is_coded:
        coded(cache, pages, batch)
    else:
        fits = cache.rank == 3 and cache.sizes[2] == 576 and (pages or cache.sizes[0] == batch)
        need(fits, "mla.pages" if pages else "mla.cache", found=cache.sizes, batch=batch)
        last_stride(cache, "kv_cache")
    page_size(c)
    if indices is None:
        companion(c, "cache_seqlens", "q", "int32", batch)
        if c["block_table"] is not None:
            companion(c, "block_table", "q", "int32", batch, ", pages]")
    else:
        other = [name for name in ("cache_seqlens", "block_table") if c[name] is not None]
        need(not other, "mla.indices_alone", name=(other or [""])[0])
        place(c, "indices", "q")
        need(indices.dtype == "int32", "mla.companion_dtype", name="indices", found=indices.dtype, needed="int32")
        fits = indices.rank == 3 and indices.sizes[:2] == (batch, tokens)
        need(fits, "mla.indices", found=indices.sizes, batch=batch, tokens=tokens)
    if c["sinks"] is not None:
        companion(c, "sinks", "q", "float32", heads)
    need(LEAST <= c["scale"] <= 3.4028234663852886e38 / 2, "mla.scale", found=c["scale"])
    need(0 <= c["num_splits"] <= 128, "mla.num_splits", found=c["num_splits"], most=128)
    keys = indices.sizes[2] if indices is not None else cache.sizes[1]
    keys *= c["block_table"].sizes[1] if c["block_table"] is not None else 1
    need(keys <= KEYS and cache.sizes[0] <= INT32_MOST, "mla.max_keys", found=keys, most=KEYS)


def append(c: Call, _: Any = None) -> None:
    given(c, "latents")
    latents, slots = c["latents"], c["slots"]
    need(not latents.device.startswith("xpu"), "attention.device", device=latents.device)
    need(latents.dtype in FLOATS[:2], "mla.latents_dtype", found=latents.dtype)
    need(latents.rank == 3 and latents.sizes[2] == 576, "mla.latents", found=latents.sizes)
    last_stride(latents, "latents")
    given(c, "kv_cache")
    place(c, "kv_cache", "latents")
    need(c["kv_cache"].dtype in CODES, "mla.append_cache", found=c["kv_cache"].dtype)
    batch, tokens = latents.sizes[:2]
    coded(c["kv_cache"], c["block_table"] is not None or slots is not None, batch)
    page_size(c)
    both = slots is not None
    need(both != (c["cache_seqlens"] is not None), "mla.append_rows", found="both" if both else "neither")
    if slots is not None:
        need(c["block_table"] is None, "mla.append_table")
        place(c, "slots", "latents")
        need(slots.dtype == "int64", "mla.companion_dtype", name="slots", found=slots.dtype, needed="int64")
        need(slots.sizes == (batch, tokens), "mla.slots", found=slots.sizes, batch=batch, tokens=tokens)
        return
    companion(c, "cache_seqlens", "latents", "int32", batch)
    if c["block_table"] is not None:
        companion(c, "block_table", "latents", "int32", batch, ", pages]")


def linear(c: Call, _: Any = None) -> None:
    given(c, "x", "weight")
    first_of(c, "x")
    kind(c, "weight", "x")
    rank(c, "x", "[rows, k]")
    rank(c, "weight", "[n, k]")
    n, k = c["weight"].sizes
    shape(c, "x", (c["x"].sizes[0], k), "[rows, k]")
    grouped_sizes({"a": c["x"]}, 1, n, k)
    kind(c, "bias", "x")
    shape(c, "bias", (n,), "[n]")


def _decode(b: int = 2, tokens: int = 3, h: int = 4, keys: int = 32) -> Call:
    tensors = {
        "q": t("bfloat16", b, tokens, h, 576),
        "kv_cache": t("bfloat16", b, keys, 576),
        "cache_seqlens": t("int32", b),
    }
    numbers = {"scale": 0.05, "causal": True, "num_splits": 0}
    return {**tensors, "block_table": None, "sinks": t("float32", h), **numbers, "indices": None}


def _pages(b: int = 2, tokens: int = 3, h: int = 4, size: int = 16) -> Call:
    return {**_decode(b, tokens, h), "kv_cache": t("bfloat16", 5, size, 576), "block_table": t("int32", b, 3)}


def _sparse(b: int = 2, tokens: int = 3, h: int = 4, size: int = 16) -> Call:
    call = {**_decode(b, tokens, h), "kv_cache": t("uint8", 5, size, 656), "cache_seqlens": None}
    return {**call, "indices": t("int32", b, tokens, 7)}


def _append(b: int = 2, tokens: int = 3, keys: int = 32) -> Call:
    tensors = {"latents": t("bfloat16", b, tokens, 576), "kv_cache": t("float8_e4m3fn", b, keys, 656)}
    return {**tensors, "cache_seqlens": t("int32", b), "block_table": None, "slots": None}


def _append_pages(b: int = 2, size: int = 16) -> Call:
    return {**_append(b), "kv_cache": t("uint8", 5, size, 656), "block_table": t("int32", b, 3)}


def _append_slots(b: int = 2, tokens: int = 3) -> Call:
    call = {**_append(b, tokens), "kv_cache": t("uint8", 5, 7, 656), "cache_seqlens": None}
    return {**call, "slots": t("int64", b, tokens)}


def _linear(rows: int = 5, n: int = 24, k: int = 16) -> Call:
    return {"x": t("float32", rows, k), "weight": t("float32", n, k), "bias": t("float32", n), "tile": -1}


SIZES = {
    "h": (128, 129),
    "tokens": (4096, 4097),
    "size": (32, 24, 15),
    "keys": (2**30 - 1, 2**30),
    "n": (12,),
    "k": (12,),
}
NUMBERS: dict[str, tuple[Any, ...]] = {
    "scale": (math.nan, math.inf, 0.0, -1.0, LEAST, LEAST / 2, 1.7014117331926443e38, 1.8e38),
    "num_splits": (-1, 1, 128, 129),
}
ROWS: tuple[tuple[str, Callable[..., Call], Callable[..., Any]], ...] = (
    *(("mla_decode", make, decode) for make in (_decode, _pages, _sparse)),
    *(("mla_append_", make, append) for make in (_append, _append_pages, _append_slots)),
    ("_linear", _linear, linear),
)
ELSEWHERE: set[str] = set()
