"""Attention of vLLM's engine (v1) over its paged cache, written into vLLM's own tensor.

vLLM passes a layer its cache as [blocks, kv heads, block_size, 2 head_size], keys before values in the last dimension, in any order of
memory: keys and values are read as views. Requests with one query are decoded in a separate call, like
:func:`flashmoe.attention_with_kvcache`: in one call with prompts each would take a tile of 64 rows or more. The rest is one call like
:func:`flashmoe.attention_varlen`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
import vllm.envs as envs
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from flashmoe.attn.options import CONSISTENT, Varlen
from flashmoe.attn.out_variant import attention_out
from flashmoe.errors import ArgumentError

MAX_HEAD_SIZE = 256
BLOCK = 16
F16_CAPABILITY, BF16_CAPABILITY, FP8_CAPABILITY = (7, 5), (8, 0), (8, 0)
FP8_CACHES = ("fp8", "fp8_e4m3")
CACHES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class FlashmoeBackend(AttentionBackend):  # type: ignore[misc]
    """What vLLM queries before it builds a model."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", *CACHES, *FP8_CACHES]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # a member of vLLM's enumeration, which looks backends up by this name

    @staticmethod
    def get_impl_cls() -> type[FlashmoeImpl]:
        return FlashmoeImpl

    @staticmethod
    def get_builder_cls() -> type[FlashmoeMetadataBuilder]:
        return FlashmoeMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Called up to 0.28; later versions have this shape for every backend."""
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(BLOCK)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 8 <= head_size <= MAX_HEAD_SIZE and head_size % 8 == 0

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False  # untested

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_ONLY)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability is None or tuple(capability) >= F16_CAPABILITY  # a CPU has none

    @classmethod
    def validate_configuration(cls, *arguments: Any, **configuration: Any) -> list[str]:
        """vLLM's reasons, and those that vLLM does not check itself."""
        reasons: list[str] = super().validate_configuration(*arguments, **configuration)
        dtype, cache = configuration.get("dtype"), configuration.get("kv_cache_dtype")
        capability = tuple(configuration.get("device_capability") or ())
        if capability and dtype is torch.float32:
            reasons.append("float32 has no CUDA kernel")
        if capability and dtype is torch.bfloat16 and capability < BF16_CAPABILITY:
            reasons.append(f"bfloat16 needs compute capability 8.0; this GPU has {_dotted(capability)}")
        if unsupported_reason := unsupported_cache(cache, dtype):
            reasons.append(f"{unsupported_reason}, or the cache fp8")
        if cache in FP8_CACHES:
            if capability and capability < FP8_CAPABILITY:
                reasons.append(f"an fp8 cache needs compute capability 8.0; this GPU has {_dotted(capability)}")
            if configuration.get("use_batch_invariant"):
                reasons.append("batch invariance is not supported for fp8 caches")
        return reasons


def unsupported_cache(cache: str | None, dtype: torch.dtype | None) -> str | None:
    """Why queries of this dtype cannot read a 16-bit cache."""
    if cache in CACHES and CACHES[cache] is not dtype:
        return f"a cache of {cache} with queries of {dtype}: both must be the same"
    return None


def _dotted(capability: tuple[int, ...]) -> str:
    return ".".join(map(str, capability))


class Span(NamedTuple):
    """The requests of one call: tokens ``first`` to ``end`` of the batch."""

    first: int
    end: int
    max_query_len: int
    starts: Tensor | None  # int32 [requests + 1], starting at 0; None: each request has one query
    lengths: Tensor  # int32 [requests]
    table: Tensor  # int32 [requests, blocks]


@dataclass
class FlashmoeMetadata(AttentionMetadata):  # type: ignore[misc]
    """One batch, with the field names of vLLM's own backends: its speculators read some of them."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor  # int32 [requests + 1]
    max_seq_len: int
    seq_lens: Tensor  # int32 [requests]
    block_table: Tensor  # int32 [requests, blocks]
    slot_mapping: Tensor
    causal: bool = True
    num_decodes: int = 0  # the first requests, of one query each
    spans: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        """Builds the spans once per step, for all layers."""
        decodes, requests = self.num_decodes, self.seq_lens.shape[0]
        self.spans = ()
        if decodes > 0:
            self.spans += (Span(0, decodes, 1, None, self.seq_lens[:decodes], self.block_table[:decodes]),)
        if decodes < requests:
            starts = self.query_start_loc if decodes == 0 else self.query_start_loc[decodes:] - decodes
            rest = (self.seq_lens[decodes:], self.block_table[decodes:])
            self.spans += (Span(decodes, self.num_actual_tokens, self.max_query_len, starts, *rest),)


def count_decodes(common: Any) -> int:
    """The number of leading requests with one query each; vLLM puts them first (reorder_batch_threshold)."""
    if common.max_query_len == 1 and common.num_actual_tokens == common.num_reqs:
        return int(common.num_reqs)
    starts = common.query_start_loc_cpu.tolist()
    others = (at for at, (first, end) in enumerate(pairwise(starts)) if end - first != 1)
    return int(next(others, common.num_reqs))


class FlashmoeMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Splits a batch into requests to decode and the others, using only what the host knows, without waiting for the GPU.

    A captured call may be replayed with other lengths up to its maxima. vLLM captures mixed batches with a maximum of one query token and
    replays them with more, so full graphs are only for batches of one query length (decoding, speculative decoding); vLLM captures the
    rest piecewise.
    """

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table: bool = True
    reorder_batch_threshold: int | None = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> FlashmoeMetadata:
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            msg = "causal is a tensor, one value for each request; flashmoe supports one for the batch; use another backend"
            raise ArgumentError(msg)
        return FlashmoeMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
            num_decodes=count_decodes(common),
        )

    def update_block_table(
        self, metadata: FlashmoeMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> FlashmoeMetadata:
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


class FlashmoeImpl(AttentionImpl):  # type: ignore[misc]
    """One layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.attn_type = attn_type
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window = sliding_window
        self.sinks = sinks
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.softcap = float(logits_soft_cap or 0.0)
        self.is_consistent = bool(envs.VLLM_BATCH_INVARIANT)
        if self.is_consistent and self.alibi_slopes is not None:
            msg = "VLLM_BATCH_INVARIANT=1 is not supported with ALiBi; use --attention-backend FLASH_ATTN"
            raise ArgumentError(msg)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashmoeMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query [T, H, D] and output [T, H, D], of which the first num_actual_tokens rows are real; the others are unchanged.

        The new keys are already in kv_cache, except for encoders, which have no cache.
        """
        if output_scale is not None or output_block_scale is not None:
            msg = "flashmoe's attention cannot quantise its output; disable the fusion of attention with quantisation"
            raise NotImplementedError(msg)
        if attn_metadata is None:  # vLLM is profiling memory
            return output.fill_(0)
        out = output.view(query.shape) if output.dim() == 2 else output
        if self.attn_type == AttentionType.ENCODER_ONLY:
            self._encode(query, key, value, attn_metadata, out)
            return output
        keys, values = self._caches(kv_cache)
        scales: tuple[Any, ...] = ()
        if self.kv_cache_dtype in FP8_CACHES:
            keys, values = keys.view(torch.float8_e4m3fn), values.view(torch.float8_e4m3fn)
            scales = (_scale(layer._k_scale), _scale(layer._v_scale))
        longest = min(attn_metadata.max_seq_len, attn_metadata.block_table.shape[1] * keys.shape[1])
        for span in attn_metadata.spans:
            q, written = query[span.first : span.end], out[span.first : span.end]
            if span.starts is None:  # [requests, H, 1, D]
                q, written = q.unsqueeze(2), written.unsqueeze(2)
            lengths = (span.starts, None, span.lengths, span.table)
            longest_q = span.max_query_len
            attention_out(
                written, self._given((q, keys, values), lengths, longest_q, longest, attn_metadata.causal), *scales
            )
        return output

    def _encode(self, query: Tensor, key: Tensor, value: Tensor, batch: FlashmoeMetadata, out: Tensor) -> None:
        rows, starts, longest = batch.num_actual_tokens, batch.query_start_loc, batch.max_query_len
        operands = (query[:rows], key[:rows], value[:rows])
        attention_out(out[:rows], self._given(operands, (starts, starts, None, None), longest, longest, causal=False))

    def _given(
        self,
        operands: tuple[Tensor, Tensor, Tensor],
        lengths: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
        longest_q: int,
        longest_k: int,
        causal: bool,
    ) -> Varlen:
        """``lengths``: cu_seqlens_q, cu_seqlens_k, seqused_k and block_table."""
        reach = -1 if self.sliding_window is None else self.sliding_window - 1
        slopes = None
        if self.alibi_slopes is not None:
            q, starts = operands[0], lengths[0]
            self.alibi_slopes = self.alibi_slopes.to(q.device)  # vLLM may build a layer on another device
            slopes = self.alibi_slopes.expand(q.shape[0] if starts is None else starts.shape[0] - 1, -1)
        sinks = None if self.sinks is None else self.sinks.float()
        splits = CONSISTENT if self.is_consistent else 0
        sides = (reach, 0 if causal else reach)
        scores = (sinks, slopes)
        return Varlen(*operands, *lengths, *scores, longest_q, longest_k, self.scale, *sides, self.softcap, splits)

    def _caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [blocks, block_size, kv heads, head_size], views."""
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return keys, values

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write row t of key and value [T, kv heads, D] to slot slot_mapping[t], or nowhere if that is -1; rows past its length are padding.

        On a GPU with vLLM's own operator, which needs no transfer to the host; elsewhere with torch.
        """
        if self.attn_type == AttentionType.ENCODER_ONLY:
            return
        keys, values = self._caches(kv_cache)
        if kv_cache.is_cuda:
            from vllm._custom_ops import reshape_and_cache_flash

            reshape_and_cache_flash(
                key, value, keys, values, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale
            )
            return
        real = slot_mapping >= 0
        block, row = (slot_mapping[real] // keys.shape[1]).long(), (slot_mapping[real] % keys.shape[1]).long()
        for new, cache, scale in ((key, keys, layer._k_scale), (value, values, layer._v_scale)):
            rows = new[: slot_mapping.shape[0]][real]
            if self.kv_cache_dtype in FP8_CACHES:
                limit = torch.finfo(torch.float8_e4m3fn).max
                codes = (rows.float() / _per_head(scale)).clamp(-limit, limit).to(torch.float8_e4m3fn)
                rows = codes.view(cache.dtype)
            cache[block, row] = rows


def _scale(scale: Tensor) -> Tensor:
    """As [] or [kv heads]: vLLM passes either, and a tensor of one element for the first."""
    return scale.reshape(()) if scale.numel() == 1 else scale


def _per_head(scale: Tensor) -> Tensor:
    return scale.float().reshape(-1, 1)
