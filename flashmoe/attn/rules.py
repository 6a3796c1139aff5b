"""The messages for attention's argument rules; csrc/attention/host/ checks them, by these names (see flashmoe/rules.py)."""

from __future__ import annotations

from flashmoe.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from flashmoe.rules import by_error

_NOT_LIKE_THE_CACHE = (
    "{name} must have the dtype and device of k_cache; found {dtype} on {device} and {cache_dtype} on {cache_device}; convert it with "
    ".to(k_cache)"
)
_MASK_SHAPE = "attn_mask must broadcast to [batch, query heads, queries, keys] = {needed}; found {found}; "
RULES = by_error(
    {
        DeviceError: {
            "attention.devices": "q, k and v must be on one device; found {q}, {k} and {v}; move them with "
            ".to(q.device)",
            "attention.device": "no kernel for tensors on {device}; supported: cpu, cuda; move them with .to('cpu') or "
            ".to('cuda')",
            "attention.companion_device": "{name} must be on q's device; found {found} and {q}; move it with "
            ".to(q.device)",
            "attention.append_device": _NOT_LIKE_THE_CACHE,
        },
        DtypeError: {
            "attention.dtypes": "q, k and v must share one dtype; found torch.{q}, torch.{k} and torch.{v}; convert "
            "them with .to(q.dtype)",
            "attention.dtype": "no kernel for torch.{dtype} on {device}; supported: {supported}; convert with "
            ".to(torch.bfloat16), or use flashmoe.scaled_dot_product_attention, which falls back to torch",
            "attention.companion_dtype": "{name} must be torch.{needed}; found torch.{found}; convert it with "
            ".to(torch.{needed})",
            "attention.e4m3_dtypes": "k and v must both be torch.float8_e4m3fn, with q (or k_new and v_new) torch.float16 or "
            "torch.bfloat16; found torch.{q}, torch.{k} and torch.{v}; convert q with .to(torch.bfloat16)",
            "attention.fp8_dtypes": "with q of torch.float8_e4m3fn, k and v must have that dtype too; found torch.{q}, torch.{k} and torch.{v}; "
            "quantise all three, or dequantise q",
            "attention.mask_dtype": "attn_mask must be torch.bool or q's torch.{q}; found torch.{found}; convert a 0/1 mask with "
            ".bool() (True: attend to the key), an additive mask with .to(q.dtype)",
            "attention.append_dtype": _NOT_LIKE_THE_CACHE,
        },
        ShapeError: {
            "attention.too_few_dimensions": "{name} must be {layout}; found {sizes}, {rank} dimensions; add the missing"
            " ones with .unsqueeze(0); for packed sequences [tokens, heads, head_dim] use flashmoe.attention_varlen",
            "attention.too_many_dimensions": "{name} must be {layout}; found {sizes}, {rank} dimensions; merge the "
            "leading ones with .flatten(0, {merged}), with heads before length (.transpose(1, 2) swaps them)",
            "attention.head_dims": "q and k must share head_dim; found {q} in q and {k} in k; check the projections",
            "attention.head_dim": "head_dim of {name} is {head_dim}; supported: 1 to {most}; use a smaller head_dim with more "
            "heads, or flashmoe.scaled_dot_product_attention, which falls back to torch",
            "attention.wide": "{what} supports head dims up to {most} on a GPU; found {head_dim}; use a smaller head_dim with "
            "more heads, CPU tensors, or "
            "flashmoe.scaled_dot_product_attention, which falls back to torch",
            "attention.heads": "the number of query heads must be a multiple of the number of key heads; found {q} and "
            "{k}; repeat or drop key heads; the layout is [batch, heads, length, head_dim], or [tokens, heads, head_dim] for packed sequences",
            "attention.transposed_heads": "the number of query heads must be a multiple of the number of key heads; found "
            "{q} and {k} in [batch, heads, length, head_dim]; if these are [batch, length, heads, head_dim], pass .transpose(1, 2) of q, k and v",
            "attention.key_value_sizes": "k and v may differ only in head_dim; found k {k} and v {v}; slice or pad one of them",
            "attention.out_shape": "out must have q's shape with v's head_dim, here {needed}; found {found}; allocate it with torch.empty",
            "attention.out_strides": "out must be dense in memory, with head_dim contiguous; found strides {strides}; pass a contiguous tensor",
            "attention.batch": "q, k and v must share the batch size; found {q} in q and {k} in k; expand one of them",
            "attention.companion_rank": "{name} must be {rank}-dimensional; found {found}; reshape it",
            "attention.cu_seqlens_q": "cu_seqlens_q is empty; it has one element more than there are sequences",
            "attention.cu_seqlens_k": "cu_seqlens_k must have {needed} elements, one more than there are sequences of "
            "q; found {found}",
            "attention.seqused_k": "seqused_k must have {needed} elements, one for each sequence of q; found {found}",
            "attention.block_table": "block_table must have {needed} rows, one for each sequence of q; found {found}",
            "attention.sinks": "sinks must have {needed} elements, one for each query head; found {found}",
            "attention.alibi_slopes": "alibi_slopes must be [query heads] or [batch, query heads], here {needed}; found {found}",
            "attention.rng_state": "rng_state must have 2 elements, seed and offset; found {found}; use torch.tensor((seed, offset), "
            "device=q.device)",
            "attention.page_size": "a page must hold at least one key; found k {k}",
            "attention.e4m3_scale_shape": "{name} must be a number or float32 [], [{heads}] (heads) or [{batch}, {heads}] "
            "(sequences, heads), or four-dimensional and broadcastable to the cache {cache}; found {found}; for one scale per "
            "page pass {name}[:, None, :, None]",
            "attention.fp8_scale_shape": "{name} with a scale per block must be float32 [{batch}, {heads}, blocks], with {block} "
            "of the {rows} rows per block; found {found}; pass one scale per head, [{batch}, {heads}], or ceil({rows} / 128) blocks",
            "attention.mask_shape": _MASK_SHAPE + "reshape it",
            "attention.padding_mask": _MASK_SHAPE + "for a padding mask [batch, keys] pass mask[:, None, None]",
            "attention.append_batch": "k_new and k_cache must share the batch size; found {k_new} and {k_cache}; pass new keys "
            "for every sequence, and block_table if k_cache holds pages",
            "attention.append_shape": "{name} must be [batch, heads, new keys, head_dim] of the cache's heads; found "
            "{found} for a cache of {cache}; pass .transpose(1, 2) of [batch, new keys, heads, head_dim]",
            "attention.expanded_cache": "{name} is expanded, so new keys would overwrite each other; found {sizes}"
            " with strides {strides}; copy it with .clone()",
            "attention.shared_memory": "{name} shares memory with {cache}, which would change while it is read; give it separate "
            "memory with .clone()",
            "attention.same_cache": "k_cache and v_cache are the same memory, but k_new and v_new are not, and would "
            "overwrite each other; give v_cache separate memory, or pass a v_new that is a view of k_new",
            "attention.backward_shape": "{name} must be {needed}, the shape used in the forward pass; found {found}",
            "attention.backward_strides": "{name} must be contiguous; found strides {strides}; call .contiguous() on it"
            "",
        },
        ArgumentError: {
            "attention.out_alignment": "out must start at a multiple of {multiple} bytes on a GPU, but it starts inside another "
            "tensor's row; give it separate memory",
            "attention.out_overlap": "out shares memory with {name}, which would change while it is read; give it separate memory",
            "attention.scale": "scale must be finite in float32; found {scale}; the default is 1 / sqrt(head_dim)",
            "attention.e4m3_alibi": "alibi_slopes with torch.float8_e4m3fn keys need a 16-bit copy of the keys, which is limited "
            "to 2 GiB per key head and to batches without cu_seqlens_k; dequantise k and v, or remove alibi_slopes",
            "attention.e4m3_page_scales": "{name} has one scale per page, so the page size must be a multiple of {multiple} keys; found "
            "{page_size}; use larger pages, or one scale per sequence",
            "attention.dropout_p": "dropout_p must be at least 0 and less than 1; found {found}; it is the fraction of "
            "probabilities that are dropped",
            "attention.dropout_pages": "dropout_p is not supported with block_table, because pages are for inference; gather the "
            "keys, or remove dropout_p",
            "attention.pages_and_cu_seqlens": "cu_seqlens_k and block_table are both given; for pages pass seqused_k as the "
            "lengths, and cu_seqlens_k=None",
            "attention.pages_without_lengths": "block_table is given without seqused_k; pass the number of keys of each sequence, int32 [sequences]",
            "attention.max_seqlen": "{name} must be from 0 to {most} (the longest sequence's length); found {found}",
            "attention.window": "each side of window must be 0 or more keys, or -1 for no limit; found "
            "({left}, {right})",
            "attention.softcap": "softcap must be positive and finite in float32, as scale / softcap must be, or 0.0 "
            "for none; found {softcap}",
            "attention.softcap_too_large": "softcap must be at most {most}, because it multiplies the rounding error of tanh; found "
            "{softcap}; use 0.0 for none",
            "attention.num_splits": "num_splits must be from 0 to {most} (0 lets the kernels choose); found {found}",
            "attention.first_length": "{name} starts at {first}; it must hold cumulative lengths, which start at 0; from plain "
            "lengths: torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))",
            "attention.decreasing_lengths": "{name} goes from {first} to {end} at sequence {sequence}; it must hold cumulative "
            "lengths, which never decrease; from plain lengths: torch.nn.functional.pad(lengths.cumsum(0, "
            "dtype=torch.int32), (1, 0))",
            "attention.lengths_past_tokens": "{name} reaches {end} at sequence {sequence}, but there are {tokens} "
            "tokens; its last element must not exceed that",
            "attention.sequence_too_long": "sequence {sequence} has {found} tokens according to {name}, but {max_name} is "
            "{max_seqlen}; pass the longest sequence's length",
            "attention.used_past_room": "seqused_k[{sequence}] is {used}; sequence {sequence} has room for 0 to {room} "
            "keys",
            "attention.used_past_max_seqlen": "seqused_k[{sequence}] is {used}; sequence {sequence} has room for 0 to "
            "{room} keys according to max_seqlen_k",
            "attention.page": "block_table[{sequence}, {index}] is {page}, but there are {pages} pages; page numbers must be 0 to {last}",
            "attention.negative_cache": "cache_seqlens[{sequence}] is {found}; a cache holds 0 keys or more",
            "attention.full_cache": "the cache of sequence {sequence} has room for {room} keys; it holds {used}, and {added} are "
            "appended; allocate a larger cache",
            "attention.backward_scale": "scale must be above zero for this operator; found {scale}; call "
            "attention_varlen_backward",
        },
    }
)
