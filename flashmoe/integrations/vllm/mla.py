"""Latent attention (MLA) of vLLM's engine: ``flashmoe.mla_decode`` decodes, ragged attention runs prompts, vLLM itself appends new keys.

Experimental. The cache is vLLM's 16-bit one, [blocks, block_size, 576]: the latent (512), then its rotary part (64).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from flashmoe.attn.varlen import attention_varlen
from flashmoe.errors import ArgumentError
from flashmoe.integrations.vllm.attention import BLOCK, CACHES, unsupported_cache
from flashmoe.mla.api import mla_decode

HEAD_SIZE, MAX_HEADS = 576, 128
MAX_PROMPT_HEAD_SIZE = (
    256  # models with latent attention need 192; attention_varlen supports up to 512, untested in this engine
)
CAPABILITY = (8, 0)


class FlashmoeMLABackend(MLACommonBackend):  # type: ignore[misc]
    """What vLLM queries before it builds a model."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", *CACHES]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FlashmoeMLAImpl]:
        return FlashmoeMLAImpl

    @staticmethod
    def get_builder_cls() -> type[FlashmoeMLAMetadataBuilder]:
        return FlashmoeMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(BLOCK)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [HEAD_SIZE]

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False  # where a prompt's context is split into chunks depends on the batch

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False  # untested

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        # A CPU has no capability, and vLLM no MLA there
        return capability is not None and tuple(capability) >= CAPABILITY

    @classmethod
    def validate_configuration(cls, *arguments: Any, **configuration: Any) -> list[str]:
        """vLLM's reasons, and those that vLLM does not check itself."""
        reasons: list[str] = super().validate_configuration(*arguments, **configuration)
        unsupported_reason = unsupported_cache(configuration.get("kv_cache_dtype"), configuration.get("dtype"))
        return [*reasons, *([unsupported_reason] if unsupported_reason else [])]


def unsupported_heads(num_heads: int | None) -> str | None:
    """Why this number of heads is not supported. vLLM passes it to the function that chooses a backend, not to the backend."""
    if num_heads is not None and num_heads > MAX_HEADS:
        return f"{num_heads} heads of latent attention; at most {MAX_HEADS}"
    return None


class FlashmoeMLAPrefill(MLAPrefillBackend):  # type: ignore[misc]
    """Prompts, for which vLLM expands the latents to keys and values: the new tokens among themselves, then with each chunk of the cache.

    q and k [T, H, D], v [T, H, Dv], D and Dv at most 256; results [T, H, Dv], their log-sum-exp float32 [H, T].
    """

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """vLLM passes ``out`` and ``output_scale`` only to backends that declare that they write quantised results."""
        given = self._prefill_metadata
        starts, longest = given.query_start_loc, given.max_query_len
        return attention_varlen(
            q, k, v, starts, starts, longest, longest, causal=True, scale=self.scale, return_lse=return_softmax_lse
        )

    def run_prefill_context_chunk(self, **given: Any) -> tuple[Tensor, Tensor]:
        """Called with keywords: q, k, v and ``chunk_idx``, an index into 0.24's tensors of all chunks, or ``chunk``."""
        chunk, whole = given.get("chunk"), self._prefill_metadata
        if chunk is None:
            at, context = given["chunk_idx"], whole.chunked_context
            starts, longest = whole.query_start_loc, whole.max_query_len
            starts_k, longest_k = context.cu_seq_lens[at], context.max_seq_lens[at]
        else:
            starts, longest = chunk.query_start_loc, chunk.max_query_len
            starts_k, longest_k = chunk.cu_seq_lens, chunk.max_seq_len
        q, k, v = given["q"], given["k"], given["v"]
        return attention_varlen(q, k, v, starts, starts_k, longest, longest_k, scale=self.scale, return_lse=True)


def prompts_of(layer: Any, vllm_config: Any) -> Any:
    """flashmoe's backend instead of the one that vLLM chose for a layer's prompts, unless one was named or a head is too wide."""
    named = vllm_config.attention_config.mla_prefill_backend is not None
    if named or max(layer.qk_nope_head_dim + layer.qk_rope_head_dim, layer.v_head_dim) > MAX_PROMPT_HEAD_SIZE:
        return layer
    sizes = ("num_heads", "scale", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return FlashmoeMLAPrefill(**{name: getattr(layer, name) for name in sizes}, vllm_config=vllm_config)


class FlashmoeMLAMetadataBuilder(MLACommonMetadataBuilder):  # type: ignore[misc]
    """vLLM's own: requests of one query length come first and are decoded; prompts follow."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[Any] = QueryLenSupport.UNIFORM
    _prefill_backend: Any

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any, **more: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, **more)
        self._prefill_backend = prompts_of(self._prefill_backend, vllm_config)


class FlashmoeMLAImpl(MLACommonImpl):  # type: ignore[misc]
    """Decoding on the latents; everything else is the base class's, with the builder's prompt backend."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **latent: Any,
    ) -> None:
        """Raises ArgumentError for options that latent attention lacks."""
        given: dict[str, Any] = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
        }
        given["attn_type"] = None if attn_type == AttentionType.DECODER else attn_type
        for name, value in given.items():
            if value:
                msg = f"{name} is {value}; flashmoe's latent attention does not support it; remove --attention-backend"
                raise ArgumentError(msg)
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap, attn_type,
            kv_sharing_target_layer_name, **latent,
        )  # fmt: skip

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Absorbed queries [T, H, 576], the same number for each request, or their two parts as a tuple; returns [T, H, 512].

        Requests that pad a batch for a CUDA graph have length 0, and their result is 0.
        """
        decode = attn_metadata.decode
        rows = q if isinstance(q, Tensor) else torch.cat(q, dim=-1)
        out = mla_decode(
            rows.unflatten(0, (decode.seq_lens.shape[0], -1)),
            kv_c_and_k_pe_cache,
            cache_seqlens=decode.seq_lens,
            scale=self.scale,
            block_table=decode.block_table,
        )
        return out.flatten(0, 1), None
