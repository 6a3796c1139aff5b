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
            ".to(torch.bfloat16), or use flashmoe.scaled_dot_product_attention, which hands it to torch",
            "attention.companion_dtype": "{name} must be torch.{needed}; found torch.{found}; convert it with "
            ".to(torch.{needed})",
            "attention.e4m3_dtypes": "k and v of torch.float8_e4m3fn go together, with q (or k_new and v_new) of torch.float16 or "
            "torch.bfloat16; found torch.{q}, torch.{k} and torch.{v}; convert q with .to(torch.bfloat16)",
            "attention.fp8_dtypes": "q of torch.float8_e4m3fn goes with k and v of the same; found torch.{q}, torch.{k} and torch.{v}; "
            "quantise all three, or dequantise q",
            "attention.mask_dtype": "attn_mask must be torch.bool or q's torch.{q}; found torch.{found}; convert ones "
            "and zeros with .bool() (True: the key is seen), numbers that are added to the scores with .to(q.dtype)",
            "attention.append_dtype": _NOT_LIKE_THE_CACHE,
        },
        ShapeError: {
            "attention.too_few_dimensions": "{name} must be {layout}; found {sizes}, {rank} dimensions; add the missing"
            " ones with .unsqueeze(0); [tokens, heads, head_dim] of several sequences goes to flashmoe.attention_varlen",
            "attention.too_many_dimensions": "{name} must be {layout}; found {sizes}, {rank} dimensions; merge the "
            "leading ones with .flatten(0, {merged}), once heads and length stand in that order (.transpose(1, 2) exchanges "
            "them)",
            "attention.head_dims": "q and k must share head_dim; found {q} in q and {k} in k; check the projections",
            "attention.head_dim": "head_dim of {name} is {head_dim}; supported: 1 to {most}; use more heads of a "
            "smaller size, or flashmoe.scaled_dot_product_attention, which hands larger ones to torch",
            "attention.wide": "{what} has head dims up to {most} on a GPU; found {head_dim}; use more heads of a smaller size, CPU tensors, or "
            "flashmoe.scaled_dot_product_attention, which hands such calls to torch",
            "attention.heads": "the number of query heads must be a multiple of the number of key heads; found {q} and "
            "{k}; repeat or drop key heads so that it is; the layout is [batch, heads, length, head_dim], ragged "
            "[tokens, heads, head_dim]",
            "attention.transposed_heads": "the number of query heads must be a multiple of the number of key heads; found "
            "{q} and {k} in [batch, heads, length, head_dim]; if these are [batch, length, heads, head_dim], give "
            ".transpose(1, 2) of q, k and v",
            "attention.key_value_sizes": "k and v may differ in head_dim alone; found k {k} and v {v}; cut or pad "
            "one of them",
            "attention.out_shape": "out must have q's sizes with v's head_dim, which here is {needed}; found {found}; give torch.empty of that",
            "attention.out_strides": "out has strides {strides}; memory without gaps, head_dim contiguous, is needed; give a contiguous tensor",
            "attention.batch": "q, k and v must share the batch size; found {q} in q and {k} in k; expand one of them",
            "attention.companion_rank": "{name} must be {rank}-dimensional; found {found}; reshape it",
            "attention.cu_seqlens_q": "cu_seqlens_q is empty; it has one element more than there are sequences",
            "attention.cu_seqlens_k": "cu_seqlens_k must have {needed} elements, one more than there are sequences of "
            "q; found {found}",
            "attention.seqused_k": "seqused_k must have {needed} elements, one for each sequence of q; found {found}",
            "attention.block_table": "block_table must have {needed} rows, one for each sequence of q; found {found}",
            "attention.sinks": "sinks must have {needed} elements, one for each query head; found {found}",
            "attention.alibi_slopes": "alibi_slopes must be [query heads] or [batch, query heads], which here is {needed}; found {found}",
            "attention.rng_state": "rng_state must have 2 elements, seed and offset; found {found}; use torch.tensor((seed, offset), "
            "device=q.device)",
            "attention.page_size": "a page must hold at least one key; found k {k}",
            "attention.e4m3_scale_shape": "{name} must be a number or float32 [], [{heads}] (heads) or [{batch}, {heads}] "
            "(sequences, heads), or be broadcast to the tensor {cache} by four dimensions; found {found}; one of each page is "
            "{name}[:, None, :, None]",
            "attention.fp8_scale_shape": "{name} of blocks of rows must be float32 [{batch}, {heads}, blocks], blocks of {block} "
            "of {rows} rows; found {found}; give one for each head, [{batch}, {heads}], or as many as ceil({rows} / 128)",
            "attention.mask_shape": _MASK_SHAPE + "reshape it",
            "attention.padding_mask": _MASK_SHAPE + "of a padding mask [batch, keys] give mask[:, None, None]",
            "attention.append_batch": "k_new and k_cache must share the batch size; found {k_new} and {k_cache}; give "
            "every sequence new keys, and block_table where k_cache holds pages",
            "attention.append_shape": "{name} must be [batch, heads, new keys, head_dim] of the cache's heads; found "
            "{found} for a cache of {cache}; give .transpose(1, 2) of [batch, new keys, heads, head_dim]",
            "attention.expanded_cache": "{name} is expanded, so that new keys would overwrite each other; found {sizes}"
            " with strides {strides}; give it memory with .clone()",
            "attention.shared_memory": "{name} shares memory with {cache}, which would change while it is read; give it"
            " memory of its own with .clone()",
            "attention.same_cache": "k_cache and v_cache are the same memory, but k_new and v_new are not, and would "
            "overwrite each other; give v_cache memory of its own, or a v_new that is a view of k_new",
            "attention.backward_shape": "{name} must be {needed}, as the forward pass was given and returned it; found "
            "{found}",
            "attention.backward_strides": "{name} must be contiguous; found strides {strides}; call .contiguous() on it"
            "",
        },
        ArgumentError: {
            "attention.out_alignment": "out must begin at a multiple of {multiple} bytes on a GPU; it begins within another tensor's row; give it "
            "memory of its own",
            "attention.out_overlap": "out shares memory with {name}, which would change while it is read; give it memory of its own",
            "attention.scale": "scale must be finite in float32; found {scale}; the default is 1 / sqrt(head_dim)",
            "attention.e4m3_alibi": "alibi_slopes with keys of torch.float8_e4m3fn run on a copy of them in 16 bits, of dense keys or pages, and of "
            "at most 2 GiB for one key head of a ragged batch; dequantise k and v, or leave the slopes out",
            "attention.e4m3_page_scales": "{name} has a scale for each page, so pages must be a multiple of {multiple} keys; found "
            "{page_size}; use larger pages, or one scale for a sequence's keys",
            "attention.dropout_p": "dropout_p must be from 0 up to, but not including, 1; found {found}; it is the share of "
            "probabilities that are dropped",
            "attention.dropout_pages": "dropout_p with block_table; pages serve inference, without dropout; gather the keys, or leave it out",
            "attention.pages_and_cu_seqlens": "cu_seqlens_k and block_table are both given; pages take seqused_k for "
            "the lengths, and cu_seqlens_k=None",
            "attention.pages_without_lengths": "block_table is given without seqused_k; give the number of keys of each"
            " sequence, int32 [sequences]",
            "attention.max_seqlen": "{name} must be from 0 to {most} (the longest sequence's length, known to the "
            "host); found {found}",
            "attention.window": "each side of window must be a number of keys from 0 on, or -1 for no limit; found "
            "({left}, {right})",
            "attention.softcap": "softcap must be positive and finite in float32, as scale / softcap must be, or 0.0 "
            "for none; found {softcap}",
            "attention.softcap_too_large": "softcap must be at most {most}: it multiplies the rounding of tanh; found "
            "{softcap}; use 0.0 for none",
            "attention.num_splits": "num_splits must be from 0 to {most} (0 lets the kernels choose); found {found}",
            "attention.first_length": "{name} starts at {first}; it must start at 0 and go on with the sum of the lengths so"
            " far; from plain lengths: torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))",
            "attention.decreasing_lengths": "{name} goes from {first} to {end} at sequence {sequence}; it holds the sum of "
            "the lengths so far, which never decreases; from plain lengths: torch.nn.functional.pad(lengths.cumsum(0, "
            "dtype=torch.int32), (1, 0))",
            "attention.lengths_past_tokens": "{name} reaches {end} at sequence {sequence}, but there are {tokens} "
            "tokens; its last element is at most that",
            "attention.sequence_too_long": "sequence {sequence} has {found} tokens by {name}, but {max_name} is "
            "{max_seqlen}; give the longest sequence's length",
            "attention.used_past_room": "seqused_k[{sequence}] is {used}; sequence {sequence} has room for 0 to {room} "
            "keys",
            "attention.used_past_max_seqlen": "seqused_k[{sequence}] is {used}; sequence {sequence} has room for 0 to "
            "{room} keys by max_seqlen_k",
            "attention.page": "block_table[{sequence}, {index}] is {page}, but there are {pages} pages; those in use "
            "must be 0 to {last}",
            "attention.negative_cache": "cache_seqlens[{sequence}] is {found}; a cache holds 0 keys or more",
            "attention.full_cache": "the cache of sequence {sequence} has room for {room} keys; {used} are there and "
            "{added} are new; give it a larger cache",
            "attention.backward_scale": "scale must be above zero for this operator; found {scale}; call "
            "attention_varlen_backward",
        },
    }
)
