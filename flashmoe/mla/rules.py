"""The messages for the argument rules of multi-head latent attention; csrc/mla/host/ checks them (see flashmoe/rules.py)."""

from __future__ import annotations

from flashmoe.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from flashmoe.rules import by_error

RULES = by_error(
    {
        DeviceError: {
            "mla.devices": "{name} must be on {base}'s device; found {found} and {needed}; move it with .to({base}.device)",
        },
        DtypeError: {
            "mla.dtype": "no kernel for torch.{dtype} on {device}; supported: {supported}; convert with .to(torch.bfloat16)",
            "mla.dtypes": "q and kv_cache must share one dtype, or kv_cache must be an FP8 cache (torch.uint8 or torch.float8_e4m3fn); found "
            "torch.{q} and torch.{kv_cache}; convert q with .to(kv_cache.dtype)",
            "mla.coded_q": "with an FP8 kv_cache, q must be float16 or bfloat16, like its rotary values; found torch.{q}; "
            "convert q",
            "mla.latents_dtype": "latents must be float16 or bfloat16; found torch.{found}; convert them with .to(torch.bfloat16)",
            "mla.append_cache": "kv_cache must be an FP8 cache, torch.uint8 or torch.float8_e4m3fn; found torch.{found}; write a "
            "16-bit cache by indexing, or with flashmoe.MLA",
            "mla.companion_dtype": "{name} must be torch.{needed}; found torch.{found}; convert it with .to(torch.{needed})",
        },
        ShapeError: {
            "mla.q": "q must be [batch, tokens, heads, 576] with 1 to {heads} heads and at most {tokens} tokens; found {found}; "
            "concatenate the absorbed query (512) and its rotary part (64)",
            "mla.cache": "kv_cache must be [{batch}, keys, 576], one row for each sequence of q; found {found}; for pages pass block_table",
            "mla.pages": "kv_cache must be [pages, page_size, 576] with block_table; found {found}; remove its head dimension with .squeeze(2)",
            "mla.coded_cache": "an FP8 kv_cache must be [{batch}, keys, 656], one row for each sequence; found {found}; for pages "
            "pass block_table or slots",
            "mla.coded_pages": "an FP8 kv_cache must be [pages, page_size, 656]: 512 FP8 values, 4 float32 scales and 64 rotary values; found "
            "{found}; remove its head dimension with .squeeze(2)",
            "mla.coded_alignment": "an FP8 kv_cache must have rows at multiples of 16 bytes; found strides {strides} and an "
            "address {address} bytes past such a multiple; allocate it contiguous",
            "mla.indices": "indices must be [{batch}, {tokens}, keys], one row per token of q; found {found}; pad rows with -1",
            "mla.latents": "latents must be [batch, tokens, 576]: the latent (512) and its rotary part (64); found {found}; concatenate the "
            "two",
            "mla.slots": "slots must be [{batch}, {tokens}], one row of the cache for each token; found {found}; reshape them",
            "mla.page_size": "page_size must be a multiple of {unit}; found {found}; allocate the cache in such pages",
            "mla.companion_shape": "{name} must be {needed}; found {found}; pass one per sequence or head",
        },
        ArgumentError: {
            "mla.scale": "scale must be above zero and finite in float32; found {found}; models trained with head_dim 192 use "
            "192 ** -0.5",
            "mla.num_splits": "num_splits must be from 0 to {most} (0 lets the kernels choose); found {found}",
            "mla.max_keys": "a sequence's pages hold {found} keys; supported: up to {most}; pass a narrower block_table",
            "mla.value_dim": "value_dim must be 512, the latent; found {found}; a value is the first 512 columns of its key",
            "mla.no_lengths": "cache_seqlens is None; pass it, or indices instead",
            "mla.indices_alone": "indices select rows among all pages; {name} must be None",
            "mla.index": "indices[{sequence}, {token}, {index}] is {found}; the cache has rows 0 to {most}, and -1 means no row",
            "mla.append_rows": "pass exactly one of cache_seqlens and slots; found {found}",
            "mla.append_table": "block_table is only used with cache_seqlens; do not pass it with slots",
            "mla.append_slot": "slots[{sequence}, {token}] is {found}; the cache has rows 0 to {most}, and -1 means no row",
            "mla.append_room": "cache_seqlens[{sequence}] is {found}, appending {tokens} tokens; sequence {sequence} has memory for 0 to "
            "{most} keys",
            "mla.length": "cache_seqlens[{sequence}] is {found}; sequence {sequence} has memory for 0 to {most} keys",
            "mla.page": "block_table[{sequence}, {index}] is {found}, but there are {pages} pages; page numbers must be below that",
        },
    }
)
