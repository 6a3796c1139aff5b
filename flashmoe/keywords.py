"""The error for an unknown keyword argument: it names the keyword that was probably meant.

flashmoe has two signatures, and other libraries' names differ from both. The two causal masks differ when Sq != Sk, so a
message that only said "unexpected keyword" would invite the wrong correction.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from torch.compiler import is_compiling

from flashmoe.errors import ArgumentTypeError

_SCALE = dict.fromkeys(("softmax_scale", "sm_scale", "scaling", "scale_factor"), "write scale=")
_LSE = dict.fromkeys(("return_softmax_lse", "return_attn_probs", "need_lse"), "write return_lse=True")
_RAGGED = {
    "is_causal": "write causal=, whose mask is aligned bottom-right",
    **dict.fromkeys(
        ("attn_mask", "attention_mask", "mask"), "masks are not supported; flashmoe.attention takes attn_mask"
    ),
    **dict.fromkeys(("page_table", "block_tables"), "write block_table="),
    "deterministic": "remove it: results and gradients are always deterministic",
    "s_aux": "write sinks=",
    **dict.fromkeys(("q_descale", "k_descale", "v_descale"), "8-bit keys are not supported; convert them to q's dtype"),
}
_CACHE = {
    "seqused_k": "write cache_seqlens=, the keys before the new ones",
    **dict.fromkeys(
        ("dropout_p", "dropout"), "dropout is not supported with a cache; flashmoe.attention takes dropout_p"
    ),
    **dict.fromkeys(("k", "v"), "write k_new= and v_new="),
    **dict.fromkeys(("rotary_cos", "rotary_sin", "rotary_interleaved"), "rotate q and k_new before the call"),
    **dict.fromkeys(
        ("cache_batch_idx", "cache_leftpad"), "sequence b uses cache b; with block_table, pages may be anywhere"
    ),
}
_SDPA = "flashmoe.scaled_dot_product_attention takes it"
_ATTENTION = "flashmoe.attention takes it"

HINTS: Mapping[str, Mapping[str, str]] = {
    "attention": {
        **_SCALE,
        **_LSE,
        "is_causal": "write causal=, whose mask is aligned bottom-right; is_causal, aligned top-left, belongs to "
        "flashmoe.scaled_dot_product_attention; they differ where Sq != Sk",
        **{name: f"write {ours}=" for name, ours in (("query", "q"), ("key", "k"), ("value", "v"))},
        **dict.fromkeys(("mask", "attention_mask"), "write attn_mask="),
        "window_size": "write window=",
        "dropout": "write dropout_p=",
        "enable_gqa": "remove it: grouped heads follow from the shapes",
    },
    "scaled_dot_product_attention": {
        **_SCALE,
        **dict.fromkeys((*_LSE, "return_lse"), f"as return_lse {_ATTENTION}"),
        "causal": "write is_causal=, whose mask is aligned top-left; causal, aligned bottom-right, belongs to "
        "flashmoe.attention; they differ where Sq != Sk",
        **{name: f"write {ours}=" for name, ours in (("q", "query"), ("k", "key"), ("v", "value"))},
        **dict.fromkeys(("mask", "attention_mask"), "write attn_mask="),
        "dropout": "write dropout_p=",
    },
    "fused_moe": {
        "bias": "write b13= or b2=",
        "inplace": "write out=x",
        **dict.fromkeys(("w1", "w3"), "w13 holds both, the gate's rows first: torch.cat((w1, w3), 1)"),
        **dict.fromkeys(("top_k", "topk"), "it is the last dimension of topk_ids; topk_route takes k"),
        **dict.fromkeys(
            ("global_num_experts", "num_experts"), "they are counted from the weights; expert_map names others"
        ),
    },
    "attention_varlen": {**_SCALE, **_LSE, **_RAGGED, "dropout": "write dropout_p="},
    "attention_with_kvcache": {**_SCALE, **_LSE, **_RAGGED, **_CACHE},
}


def raise_extra_positional(function: str, given: Sequence[Any], names: Sequence[str], first: int) -> NoReturn:
    """Raise for arguments after the ``first`` ones, the only positional arguments; ``names``: some keywords for the rest."""
    found = ", ".join(
        repr(one) if isinstance(one, (bool, int, float, str, type(None))) else f"a {type(one).__name__}"
        for one in given
    )
    options = ", ".join(f"{name}=" for name in names)
    msg = f"{function}() takes {first} arguments by position; found {found} after them; name what follows: {options}"
    raise ArgumentTypeError(msg)


def raise_unknown(function: str, given: Iterable[str], known: Iterable[str], like: str = "") -> NoReturn:
    """Raise for the first keyword of ``given``; ``like``: the function in ``HINTS`` with the same arguments."""
    name, known = next(iter(given)), tuple(known)
    # torch.compile cannot trace difflib, and would report that instead of this message.
    near = [] if is_compiling() else difflib.get_close_matches(name, known, 1)
    hint = HINTS.get(like or function, {}).get(name) or (f"write {near[0]}=" if near else f"it has {', '.join(known)}")
    msg = f"{function}() has no argument {name!r}: {hint}"
    raise ArgumentTypeError(msg)
