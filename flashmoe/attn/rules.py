"""What attention's rules for arguments are told as; csrc/attention/host/ decides, by these names (see flashmoe/rules.py)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flashmoe.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from flashmoe.rules import Rule

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        # q, k and v
        "attention.devices": Rule(
            DeviceError, "q, k and v must be on one device; found {q}, {k} and {v}; move them with .to(q.device)"
        ),
        "attention.device": Rule(
            DeviceError,
            "no kernel for tensors on {device}; supported: cpu, cuda; move them with .to('cpu') or .to('cuda')",
        ),
        "attention.dtypes": Rule(
            DtypeError,
            "q, k and v must share one dtype; found torch.{q}, torch.{k} and torch.{v}; convert them with .to(q.dtype)",
        ),
        "attention.dtype": Rule(
            DtypeError,
            "no kernel for torch.{dtype} on {device}; supported: {supported}; convert with .to(torch.bfloat16), or use "
            "flashmoe.scaled_dot_product_attention, which hands it to torch",
        ),
        "attention.too_few_dimensions": Rule(
            ShapeError,
            "{name} must be {layout}; found {sizes}, {rank} dimensions; add the missing ones with .unsqueeze(0), or give the "
            "lengths that go with this layout",
        ),
        "attention.too_many_dimensions": Rule(
            ShapeError,
            "{name} must be {layout}; found {sizes}, {rank} dimensions; merge the leading ones with .flatten(0, {merged})",
        ),
        "attention.head_dims": Rule(
            ShapeError, "q and k must share head_dim; found {q} in q and {k} in k; check the projections"
        ),
        "attention.head_dim": Rule(
            ShapeError,
            "head_dim of {name} is {head_dim}; supported: 1 to {most}; use more heads of a smaller size, or "
            "flashmoe.scaled_dot_product_attention, which hands larger ones to torch",
        ),
        "attention.heads": Rule(
            ShapeError,
            "the number of query heads must be a multiple of the number of key heads; found {q} and {k}; repeat or drop key "
            "heads so that it is; the layout is [batch, heads, length, head_dim], ragged [tokens, heads, head_dim]",
        ),
        "attention.key_value_shapes": Rule(
            ShapeError, "k and v must have one shape [batch, kv_heads, keys, head_dim]; found k {k} and v {v}"
        ),
        "attention.key_value_sizes": Rule(ShapeError, "k and v may differ in head_dim alone; found k {k} and v {v}"),
        "attention.batch": Rule(
            ShapeError, "q, k and v must share the batch size; found {q} in q and {k} in k; expand one of them"
        ),
        "attention.scale": Rule(
            ArgumentError, "scale must be finite in float32; found {scale}; the default is 1 / sqrt(head_dim)"
        ),
        # what goes with them
        "attention.companion_device": Rule(
            DeviceError, "{name} must be on q's device; found {found} and {q}; move it with .to(q.device)"
        ),
        "attention.companion_dtype": Rule(
            DtypeError, "{name} must be torch.{needed}; found torch.{found}; convert it with .to(torch.{needed})"
        ),
        "attention.companion_rank": Rule(ShapeError, "{name} must be {rank}-dimensional; found {found}; reshape it"),
        "attention.cu_seqlens_q": Rule(
            ShapeError, "cu_seqlens_q is empty; it has one element more than there are sequences"
        ),
        "attention.cu_seqlens_k": Rule(
            ShapeError,
            "cu_seqlens_k must have {needed} elements, one more than there are sequences of q; found {found}",
        ),
        "attention.seqused_k": Rule(
            ShapeError, "seqused_k must have {needed} elements, one for each sequence of q; found {found}"
        ),
        "attention.block_table": Rule(
            ShapeError, "block_table must have {needed} rows, one for each sequence of q; found {found}"
        ),
        "attention.sinks": Rule(
            ShapeError, "sinks must have {needed} elements, one for each query head; found {found}"
        ),
        "attention.pages_and_cu_seqlens": Rule(
            ArgumentError,
            "cu_seqlens_k and block_table are both given; pages take seqused_k for the lengths, and cu_seqlens_k=None",
        ),
        "attention.pages_without_lengths": Rule(
            ArgumentError,
            "block_table is given without seqused_k; give the number of keys of each sequence, int32 [sequences]",
        ),
        "attention.page_size": Rule(ShapeError, "a page must hold at least one key; found k {k}"),
        "attention.mask_dtype": Rule(
            DtypeError,
            "attn_mask must be torch.bool or q's torch.{q}; found torch.{found}; convert it with .to(q.dtype)",
        ),
        "attention.mask_shape": Rule(
            ShapeError,
            "attn_mask must broadcast to [batch, query heads, queries, keys] = {needed}; found {found}; reshape it",
        ),
        "attention.padding_mask": Rule(
            ShapeError,
            "attn_mask must broadcast to [batch, query heads, queries, keys] = {needed}; found {found}; of a padding mask "
            "[batch, keys] give mask[:, None, None]",
        ),
        # numbers
        "attention.max_seqlen": Rule(
            ArgumentError,
            "{name} must be from 0 to {most} (the longest sequence's length, known to the host); found {found}",
        ),
        "attention.window": Rule(
            ArgumentError,
            "each side of window must be a number of keys from 0 on, or -1 for no limit; found ({left}, {right})",
        ),
        "attention.softcap": Rule(
            ArgumentError,
            "softcap must be positive and finite in float32, as scale / softcap must be, or 0.0 for none; found {softcap}",
        ),
        "attention.softcap_too_large": Rule(
            ArgumentError,
            "softcap must be at most {most}: it multiplies the rounding of tanh; found {softcap}; use 0.0 for none",
        ),
        "attention.num_splits": Rule(
            ArgumentError, "num_splits must be from 0 to {most} (0 lets the kernels choose); found {found}"
        ),
        # what only the numbers in lengths and tables can tell
        "attention.decreasing_lengths": Rule(
            ArgumentError,
            "{name} goes from {first} to {end} at sequence {sequence}; it must start at 0 or more and never decrease",
        ),
        "attention.lengths_past_tokens": Rule(
            ArgumentError,
            "{name} reaches {end} at sequence {sequence}, but there are {tokens} tokens; its last element is at most that",
        ),
        "attention.sequence_too_long": Rule(
            ArgumentError,
            "sequence {sequence} has {found} tokens by {name}, but {max_name} is {max_seqlen}; give the longest sequence's "
            "length",
        ),
        "attention.used_past_room": Rule(
            ArgumentError, "seqused_k[{sequence}] is {used}; sequence {sequence} has room for 0 to {room} keys"
        ),
        "attention.used_past_max_seqlen": Rule(
            ArgumentError,
            "seqused_k[{sequence}] is {used}; sequence {sequence} has room for 0 to {room} keys by max_seqlen_k",
        ),
        "attention.page": Rule(
            ArgumentError,
            "block_table[{sequence}, {index}] is {page}, but there are {pages} pages; those in use must be 0 to {last}",
        ),
        "attention.captured_lengths": Rule(
            ArgumentError, "{name} is 1, but no lengths can be read while a CUDA graph is captured; unset it"
        ),
        # new keys for a cache
        "attention.append_dtype": Rule(
            DtypeError,
            "{name} must have the dtype and device of k_cache; found {dtype} on {device} and {cache_dtype} on {cache_device}; "
            "convert it with .to(k_cache)",
        ),
        "attention.append_device": Rule(
            DeviceError,
            "{name} must have the dtype and device of k_cache; found {dtype} on {device} and {cache_dtype} on {cache_device}; "
            "convert it with .to(k_cache)",
        ),
        "attention.append_batch": Rule(
            ShapeError,
            "k_new and k_cache must share the batch size; found {k_new} and {k_cache}; give every sequence new keys",
        ),
        "attention.append_shape": Rule(
            ShapeError,
            "{name} must be [batch, heads, new keys, head_dim] of the cache's heads; found {found} for a cache of {cache}",
        ),
        "attention.expanded_cache": Rule(
            ShapeError,
            "{name} is expanded, so that new keys would overwrite each other; found {sizes} with strides {strides}; give it "
            "memory with .clone()",
        ),
        "attention.shared_memory": Rule(
            ShapeError,
            "{name} shares memory with {cache}, which would change while it is read; give it memory of its own with .clone()",
        ),
        "attention.same_cache": Rule(
            ShapeError,
            "k_cache and v_cache are the same memory, but k_new and v_new are not, and would overwrite each other; give "
            "v_cache memory of its own, or a v_new that is a view of k_new",
        ),
        "attention.negative_cache": Rule(
            ArgumentError, "cache_seqlens[{sequence}] is {found}; a cache holds 0 keys or more"
        ),
        "attention.full_cache": Rule(
            ArgumentError,
            "the cache of sequence {sequence} has room for {room} keys; {used} are there and {added} are new; give it a larger "
            "cache",
        ),
        # the backward operators
        "attention.backward_shape": Rule(
            ShapeError, "{name} must be {needed}, as the forward pass was given and returned it; found {found}"
        ),
        "attention.backward_strides": Rule(
            ShapeError, "{name} must be contiguous; found strides {strides}; call .contiguous() on it"
        ),
        "attention.backward_scale": Rule(
            ArgumentError, "scale must be above zero for this operator; found {scale}; call attention_varlen_backward"
        ),
    }
)
