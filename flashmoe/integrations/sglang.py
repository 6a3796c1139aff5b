"""flashmoe in SGLang, by its plug-ins: ``--attention-backend flashmoe --disable-cuda-graph``. Not yet run inside of SGLang: experimental.

SGLang calls :func:`register` in each of its processes, by the entry point group ``sglang.srt.plugins``. Covered: decoder attention with
prefixes, windows, softcap, sinks and fp8 caches, eager. What is not covered is refused by name; SGLang has no way to choose for one layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashmoe.errors import ArgumentError

NAME = "flashmoe"
INSTEAD = "use another --attention-backend"


def register() -> None:
    """Make flashmoe known to SGLang as an attention backend; a second call changes nothing.

    Raises ArgumentError where SGLang cannot be imported. Touches no GPU.
    """
    try:
        from sglang.srt import server_args
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    except ImportError as error:
        msg = (
            f"SGLang cannot be used ({error}); install SGLang 0.5.19 or later, or leave flashmoe out by SGLANG_PLUGINS"
        )
        raise ArgumentError(msg) from error
    if NAME not in ATTENTION_BACKENDS:
        register_attention_backend(NAME)(create_backend)
    if NAME not in server_args.ATTENTION_BACKEND_CHOICES:
        server_args.add_attention_backend_choices([NAME])


def create_backend(runner: Any) -> Any:
    """What SGLang calls once for a model; raises ArgumentError for a model that it cannot compute."""
    if reason := obstacle(runner):
        msg = f"SGLang's attention backend {NAME!r}: {reason}; {INSTEAD}"
        raise ArgumentError(msg)
    return _backend_class()(runner)


def obstacle(runner: Any) -> str | None:
    """Why no model of this kind runs; None where one may."""
    if runner.use_mla_backend:
        return "latent attention (MLA) is not covered"
    if runner.model_config.is_encoder_decoder:
        return "encoder-decoder models are not covered"
    if hasattr(runner.token_to_kv_pool, "swa_layer_nums"):
        return "a cache of its own for layers with a window is not covered; --disable-hybrid-swa-memory keeps one"
    return None


@dataclass(frozen=True)
class Batch:
    """Of one forward pass. starts int32 [sequences + 1], lengths int32 [sequences], table int32 [sequences, pages]."""

    starts: Any
    lengths: Any
    table: Any
    longest_q: int
    longest_k: int


def pages_of(req_to_token: Any, requests: Any, longest: int, page_size: int) -> Any:
    """The pages of each request, int32 [requests, pages]: SGLang gives the slot of each token, whole pages one after another."""
    return (req_to_token[requests][:, :longest:page_size] // page_size).int().contiguous()


def _backend_class() -> Any:  # its base class is SGLang's
    import torch
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    from flashmoe.attn.varlen import attention_varlen

    class FlashmoeBackend(AttentionBackend):  # type: ignore[misc]
        def __init__(self, runner: Any) -> None:
            super().__init__()
            self.forward_metadata: Batch | None = None
            self.req_to_token = runner.req_to_token_pool.req_to_token
            self.token_to_kv_pool = runner.token_to_kv_pool
            self.page_size = runner.page_size

        def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
            msg = f"SGLang's attention backend {NAME!r} runs eager only; start with --disable-cuda-graph, or {INSTEAD}"
            raise ArgumentError(msg)

        def init_forward_metadata(self, forward_batch: Any) -> None:
            mode, lengths = forward_batch.forward_mode, forward_batch.seq_lens
            if mode.is_idle():
                return
            if mode.is_target_verify() or forward_batch.spec_info is not None:
                msg = f"speculative decoding is not covered by SGLang's attention backend {NAME!r}; {INSTEAD}"
                raise ArgumentError(msg)
            longest = max(1, int(forward_batch.seq_lens_cpu.max()))
            if mode.is_decode():
                starts = torch.arange(lengths.shape[0] + 1, dtype=torch.int32, device=lengths.device)
                longest_q = 1
            else:
                starts = torch.nn.functional.pad(forward_batch.extend_seq_lens.cumsum(0), (1, 0)).int()
                longest_q = max(forward_batch.extend_seq_lens_cpu)
            table = pages_of(self.req_to_token, forward_batch.req_pool_indices, longest, self.page_size)
            self.forward_metadata = Batch(starts, lengths.int(), table, longest_q, longest)

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
            has_codes = keys.dtype is torch.float8_e4m3fn
            window = layer.sliding_window_size  # SGLang has taken 1 off already
            out = attention_varlen(
                q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
                keys,
                values,
                batch.starts,
                None,
                batch.longest_q,
                batch.longest_k,
                seqused_k=batch.lengths,
                block_table=batch.table,
                causal=True,
                window=None if window is None or window < 0 else (window, 0),
                softcap=float(layer.logit_cap or 0.0),
                sinks=sinks,
                scale=float(layer.scaling),
                **({"k_scale": layer.k_scale, "v_scale": layer.v_scale} if has_codes else {}),
            )
            return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

        forward_decode = forward_extend

    return FlashmoeBackend


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
            f"layer {layer.layer_id} wants {what}, which SGLang's attention backend {NAME!r} does not cover; {INSTEAD}"
        )
        raise ArgumentError(msg)
