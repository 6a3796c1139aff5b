"""What the rules for arguments of multi-head latent attention are told as; csrc/mla/host/ decides (see flashmoe/rules.py)."""

from __future__ import annotations

from flashmoe.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from flashmoe.rules import by_error

RULES = by_error(
    {
        DeviceError: {
            "mla.devices": "{name} must be on q's device; found {found} and {q}; move it with .to(q.device)",
        },
        DtypeError: {
            "mla.dtype": "no kernel for torch.{dtype} on {device}; supported: {supported}; convert with .to(torch.bfloat16)",
            "mla.dtypes": "q and kv_cache must share one dtype; found torch.{q} and torch.{kv_cache}; convert q with "
            ".to(kv_cache.dtype)",
            "mla.companion_dtype": "{name} must be torch.{needed}; found torch.{found}; convert it with .to(torch.{needed})",
        },
        ShapeError: {
            "mla.q": "q must be [batch, tokens, heads, 576] with 1 to {heads} heads and at most {tokens} tokens; found {found}; "
            "concatenate the absorbed query (512) and its rotary part (64)",
            "mla.cache": "kv_cache must be [{batch}, keys, 576], one row for each sequence of q; found {found}; for pages give "
            "block_table",
            "mla.pages": "kv_cache must be [pages, page_size, 576] with block_table; found {found}; drop the dimension of its one "
            "head with .squeeze(2)",
            "mla.page_size": "page_size must be a multiple of {unit}; found {found}; allocate the cache in such pages",
            "mla.companion_shape": "{name} must be {needed}; found {found}; give one for each sequence, or head",
        },
        ArgumentError: {
            "mla.scale": "scale must be above zero and finite in float32; found {found}; models trained with head_dim 192 use "
            "192 ** -0.5",
            "mla.num_splits": "num_splits must be from 0 to {most} (0 lets the kernels choose); found {found}",
            "mla.max_keys": "a sequence's pages hold {found} keys; at most {most}; give a narrower block_table",
            "mla.value_dim": "value_dim must be 512, the latent; found {found}; a value is the first 512 columns of its key",
            "mla.length": "cache_seqlens[{sequence}] is {found}; sequence {sequence} has memory for 0 to {most} keys",
            "mla.page": "block_table[{sequence}, {index}] is {found}, but there are {pages} pages; those in use must be below that",
        },
    }
)
