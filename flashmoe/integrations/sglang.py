"""flashmoe as an SGLang plug-in: ``--attention-backend flashmoe``. Experimental: docs/integrations.md says what was run.

SGLang calls :func:`register` in each of its processes, through the entry point group ``sglang.srt.plugins``. Supported: decoder attention
with prefixes, windows, softcap, sinks and fp8 caches, eager and in CUDA graphs of decoding. Anything else is rejected by name, for the
whole model, because SGLang cannot choose a backend per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashmoe.errors import ArgumentError

NAME = "flashmoe"
INSTEAD = "use another --attention-backend"


def register() -> None:
    """Make flashmoe known to SGLang as an attention backend; a second call changes nothing.

    Raises ArgumentError if SGLang cannot be imported. Does not use the GPU.
    """
    try:
        from sglang.srt import server_args
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    except ImportError as error:
        msg = (
            f"SGLang cannot be used ({error}); install SGLang 0.5.19 or later, or exclude flashmoe with SGLANG_PLUGINS"
        )
        raise ArgumentError(msg) from error
    if NAME not in ATTENTION_BACKENDS:
        register_attention_backend(NAME)(create_backend)
    if NAME not in server_args.ATTENTION_BACKEND_CHOICES:
        server_args.add_attention_backend_choices([NAME])


def create_backend(runner: Any) -> Any:
    """Called by SGLang once per model; raises ArgumentError for an unsupported model."""
    if reason := unsupported_reason(runner):
        msg = f"SGLang's attention backend {NAME!r}: {reason}; {INSTEAD}"
        raise ArgumentError(msg)
    return _backend_class()(runner)


def unsupported_reason(runner: Any) -> str | None:
    """Why models of this kind are not supported; None if they may be."""
    if runner.use_mla_backend:
        return "latent attention (MLA) is not supported"
    if runner.model_config.is_encoder_decoder:
        return "encoder-decoder models are not supported"
    if hasattr(runner.token_to_kv_pool, "swa_layer_nums"):
        return "a separate cache for layers with a window is not supported; --disable-hybrid-swa-memory uses one cache for all layers"
    return None


@dataclass(frozen=True)
class Batch:
    """The metadata of one forward pass. lengths int32 [sequences], table int32 [sequences, pages]."""

    starts: Any  # int32 [sequences + 1]; None: each sequence has one query
    lengths: Any
    table: Any
    longest_q: int
    longest_k: int


def pages_of(req_to_token: Any, requests: Any, longest: int, page_size: int) -> Any:
    """The pages of each request, int32 [requests, pages]: SGLang stores a slot per token, in full consecutive pages."""
    return req_to_token[:, :longest:page_size][requests] // page_size


def _backend_class() -> Any:  # its base class is SGLang's
    import torch
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    from flashmoe.attn.options import Varlen
    from flashmoe.attn.out_variant import attention_out

    class FlashmoeBackend(AttentionBackend):  # type: ignore[misc]
        def __init__(self, runner: Any) -> None:
            super().__init__()
            self.forward_metadata: Batch | None = None
            self.req_to_token = runner.req_to_token_pool.req_to_token
            self.token_to_kv_pool = runner.token_to_kv_pool
            self.page_size = runner.page_size
            self.one = torch.ones((), device=self.req_to_token.device)  # the scale for an 8-bit cache without scales
            self.captured: tuple[Any, Any] | None = None  # lengths and table that graphs read

        def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
            requests = torch.zeros(max_bs, dtype=torch.long, device=self.req_to_token.device)
            table = pages_of(self.req_to_token, requests, self.req_to_token.shape[1], self.page_size)
            self.captured = (requests.int(), torch.zeros_like(table))

        def get_cuda_graph_seq_len_fill_value(self) -> int:
            return 1

        def init_forward_metadata(self, forward_batch: Any) -> None:
            mode, lengths = forward_batch.forward_mode, forward_batch.seq_lens
            if mode.is_idle():
                return
            _check_batch(forward_batch)
            longest = _longest(forward_batch)
            starts, longest_q = None, 1
            if not mode.is_decode():
                starts = torch.nn.functional.pad(forward_batch.extend_seq_lens.cumsum(0), (1, 0)).int()
                longest_q = max(forward_batch.extend_seq_lens_cpu)
            table = pages_of(self.req_to_token, forward_batch.req_pool_indices, longest, self.page_size)
            self.forward_metadata = Batch(starts, lengths.int(), table, longest_q, longest)

        def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
            """For decoding, before a graph is captured or replayed: copies lengths and pages to the tensors that the graph reads."""
            _check_captured(forward_batch)
            assert self.captured is not None
            size, capacity = forward_batch.batch_size, self.req_to_token.shape[1]
            lengths, table = (each[:size] for each in self.captured)
            lengths.copy_(forward_batch.seq_lens)
            longest = 1 if in_capture else _longest(forward_batch)
            pages = pages_of(self.req_to_token, forward_batch.req_pool_indices, longest, self.page_size)
            table[:, : pages.shape[1]].copy_(pages)
            self.forward_metadata = Batch(None, lengths, table, 1, capacity)

        def forward_extend(
            self,
            q: Any,
            k: Any,
            v: Any,
            layer: Any,
            forward_batch: Any,
            save_kv_cache: bool = True,
            sinks: Any = None,
            **others: Any,
        ) -> Any:
            """q [T, H * D] or [T, H, D]; returns [T, H * Dv]."""
            batch = self.forward_metadata
            assert batch is not None
            _check_layer(layer, others)
            if save_kv_cache and k is not None:
                where = KVWriteLoc(forward_batch.out_cache_loc, None)
                self.token_to_kv_pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
            keys, values = (
                cache.view(-1, self.page_size, *cache.shape[1:])
                for cache in (
                    self.token_to_kv_pool.get_key_buffer(layer.layer_id),
                    self.token_to_kv_pool.get_value_buffer(layer.layer_id),
                )
            )
            scales: tuple[Any, ...] = ()
            if keys.dtype is torch.float8_e4m3fn:
                scales = (_scale(layer.k_scale, self.one), _scale(layer.v_scale, self.one))
            q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
            out = q.new_empty(*q.shape[:2], layer.v_head_dim)
            written = out
            if batch.starts is None:  # [sequences, H, 1, D]
                q, written = q.unsqueeze(2), out.unsqueeze(2)
            left, softcap = _left(layer.sliding_window_size), float(layer.logit_cap or 0.0)
            operands = (q, keys, values, batch.starts, None, batch.lengths, batch.table)
            given = Varlen(
                *operands,
                sinks=sinks if sinks is None else sinks.float(),
                mask=None,
                max_seqlen_q=batch.longest_q,
                max_seqlen_k=batch.longest_k,
                scale=float(layer.scaling),
                window_left=left,
                window_right=0,
                softcap=softcap,
                num_splits=0,
            )
            attention_out(written, given, *scales)
            return out.flatten(1)

        forward_decode = forward_extend

    return FlashmoeBackend


def _longest(forward_batch: Any) -> int:
    return max(1, int(forward_batch.seq_lens_cpu.max()))


def _scale(scale: Any, one: Any) -> Any:
    return one if scale is None else scale.float().reshape(())


def _left(window: int | None) -> int:
    """The number of keys before a query's own: SGLang has already subtracted 1, and a negative number means no window."""
    return -1 if window is None else max(window, -1)


def _check_batch(forward_batch: Any) -> None:
    if forward_batch.forward_mode.is_target_verify() or forward_batch.spec_info is not None:
        msg = f"speculative decoding is not supported by SGLang's attention backend {NAME!r}; {INSTEAD}"
        raise ArgumentError(msg)


def _check_captured(forward_batch: Any) -> None:
    _check_batch(forward_batch)
    if not forward_batch.forward_mode.is_decode():
        msg = (
            f"SGLang's attention backend {NAME!r} does not support CUDA graphs of prompts; start with "
            f"--cuda-graph-backend-prefill disabled, or {INSTEAD}"
        )
        raise ArgumentError(msg)


def _check_layer(layer: Any, others: dict[str, Any]) -> None:
    kind = getattr(layer.attn_type, "value", layer.attn_type)
    given = sorted(name for name, value in others.items() if value is not None and value is not False)
    if layer.is_cross_attention or kind != "decoder" or given or getattr(layer, "xai_temperature_len", -1) > 0:
        what = (
            f"the arguments {', '.join(given)}"
            if given
            else f"{'cross' if layer.is_cross_attention else kind} attention"
        )
        msg = (
            f"layer {layer.layer_id} uses {what}, which SGLang's attention backend {NAME!r} does not support; {INSTEAD}"
        )
        raise ArgumentError(msg)
