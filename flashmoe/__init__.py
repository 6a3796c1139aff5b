"""Fused attention and mixture-of-experts kernels for PyTorch, on any NVIDIA GPU from compute capability 7.5 on and on the CPU.

    import flashmoe
    out = flashmoe.attention(q, k, v, causal=True)
    out = flashmoe.fused_moe(x, w13, w2, *flashmoe.topk_route(logits, k))

Importing the package imports neither torch nor the compiled extension; the first use of an operator does.
"""

from __future__ import annotations

import sys

from flashmoe._path import is_started_as_program, leave_current_folder

if is_started_as_program(sys.orig_argv):  # before any other import, which might be found in the current folder
    leave_current_folder()

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flashmoe._version import __version__

if TYPE_CHECKING:
    from flashmoe.attn.api import attention
    from flashmoe.attn.dropout import dropout_mask
    from flashmoe.attn.kvcache import attention_with_kvcache
    from flashmoe.attn.merge import merge_attention
    from flashmoe.attn.module import Attention
    from flashmoe.attn.sdpa import scaled_dot_product_attention
    from flashmoe.attn.sdpa_dispatch import explain
    from flashmoe.attn.smoothing import smooth_keys
    from flashmoe.attn.varlen import attention_varlen
    from flashmoe.integrations.torch_attention import activate, activated, deactivate, is_active
    from flashmoe.layers.api import linear, patch_linear
    from flashmoe.mla.api import mla_decode
    from flashmoe.mla.append import mla_append
    from flashmoe.mla.module import MLA
    from flashmoe.moe.api import fused_moe, grouped_mm, quantize_weights, topk_route
    from flashmoe.moe.module import MoE
    from flashmoe.moe.packed import pack_mxfp4

_LAZY = {
    "attention": "flashmoe.attn.api",
    "attention_varlen": "flashmoe.attn.varlen",
    "attention_with_kvcache": "flashmoe.attn.kvcache",
    "dropout_mask": "flashmoe.attn.dropout",
    "merge_attention": "flashmoe.attn.merge",
    "mla_append": "flashmoe.mla.append",
    "mla_decode": "flashmoe.mla.api",
    "scaled_dot_product_attention": "flashmoe.attn.sdpa",
    "smooth_keys": "flashmoe.attn.smoothing",
    "Attention": "flashmoe.attn.module",
    "explain": "flashmoe.attn.sdpa_dispatch",
    "activate": "flashmoe.integrations.torch_attention",
    "activated": "flashmoe.integrations.torch_attention",
    "deactivate": "flashmoe.integrations.torch_attention",
    "is_active": "flashmoe.integrations.torch_attention",
    "linear": "flashmoe.layers.api",
    "patch_linear": "flashmoe.layers.api",
    "MLA": "flashmoe.mla.module",
    "MoE": "flashmoe.moe.module",
    "fused_moe": "flashmoe.moe.api",
    "grouped_mm": "flashmoe.moe.api",
    "pack_mxfp4": "flashmoe.moe.packed",
    "quantize_weights": "flashmoe.moe.api",
    "topk_route": "flashmoe.moe.api",
}
# Found as attributes, too, without an import of their own
_MODULES = ("compat", "distributed", "errors", "integrations")

__all__ = [
    "MLA",
    "Attention",
    "MoE",
    "__version__",
    "activate",
    "activated",
    "attention",
    "attention_varlen",
    "attention_with_kvcache",
    "deactivate",
    "dropout_mask",
    "explain",
    "fused_moe",
    "grouped_mm",
    "is_active",
    "linear",
    "merge_attention",
    "mla_append",
    "mla_decode",
    "pack_mxfp4",
    "patch_linear",
    "quantize_weights",
    "scaled_dot_product_attention",
    "smooth_keys",
    "topk_route",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"flashmoe.{name}")
    if name not in _LAZY:
        msg = f"module 'flashmoe' has no attribute {name!r}; it has {', '.join(sorted(__all__))}"
        if name.startswith("flash_attn"):
            msg += "; flash_attn's names are in flashmoe.compat.flash_attn"
        raise AttributeError(msg)
    import_module("flashmoe._extension").require_torch()  # raises a typed error for a bad torch before importing it
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
