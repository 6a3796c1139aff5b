"""The contract itself: every name of vLLM and SGLang that flashmoe/integrations/ uses."""

from flashmoe_build.engines.contract import Calls, Clause, Defines, Has, Implements

_OURS = "flashmoe.integrations"
_BACKEND = "vllm.v1.attention.backend"
_MOE = "vllm.model_executor.layers.fused_moe"
_SRT = "sglang.srt"


def _overrides(part: str, base: str, own: str, *methods: str, returns: tuple[str, ...] = ()) -> list[Clause]:
    return [Implements(part, f"{base}.{name}", ours=f"{own}.{name}", returns=returns) for name in methods]


_ATTENTION, _EXPERTS = f"{_OURS}.vllm.attention", f"{_OURS}.vllm.experts"
_LATENT, _OUR_LATENT = "vllm.model_executor.layers.attention.mla_attention", f"{_OURS}.vllm.mla"
_PROMPTS = "vllm.v1.attention.backends.mla.prefill.base"
_PROMPT_SIZES = ("num_heads", "scale", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_QUANTISATION = "vllm.model_executor.layers.quantization"
VLLM: tuple[Clause, ...] = (
    Defines("attention", f"{_BACKEND}:AttentionBackend", ours=f"{_ATTENTION}:FlashmoeBackend"),
    Defines("attention", f"{_BACKEND}:AttentionImplBase", ours=f"{_ATTENTION}:FlashmoeImpl"),
    Defines("attention", f"{_BACKEND}:AttentionImpl", ours=f"{_ATTENTION}:FlashmoeImpl"),
    Defines("attention", f"{_BACKEND}:AttentionMetadataBuilder", ours=f"{_ATTENTION}:FlashmoeMetadataBuilder"),
    Defines("experts", f"{_MOE}.modular_kernel:FusedMoEExperts", ours=f"{_EXPERTS}:FlashmoeExperts"),
    Defines("experts", f"{_MOE}.modular_kernel:FusedMoEExpertsModular", ours=f"{_EXPERTS}:FlashmoeExperts"),
    *_overrides(
        "attention", f"{_BACKEND}:AttentionBackend", f"{_ATTENTION}:FlashmoeBackend",
        *("supports_head_size", "supports_sink", "supports_batch_invariance", "supports_kv_connector"),
        *("supports_attn_type", "supports_compute_capability"),
        returns=("bool",),
    ),
    *_overrides("attention", f"{_BACKEND}:AttentionBackend", f"{_ATTENTION}:FlashmoeBackend", "get_name", returns=("str",)),
    *_overrides(
        "attention", f"{_BACKEND}:AttentionBackend", f"{_ATTENTION}:FlashmoeBackend",
        *("get_impl_cls", "get_builder_cls", "get_supported_kernel_block_sizes"),
    ),
    *_overrides(
        "attention", f"{_BACKEND}:AttentionBackend", f"{_ATTENTION}:FlashmoeBackend", "validate_configuration", returns=("list[str]",)
    ),
    Calls(
        "attention", f"{_BACKEND}:AttentionBackend.validate_configuration", positional=0,
        passes=(
            "head_size", "dtype", "kv_cache_dtype", "block_size", "use_mla", "has_sink", "use_sparse", "use_mm_prefix",
            "use_per_head_quant_scales", "attn_type", "device_capability",
        ),
    ),
    Implements(
        "attention", f"{_BACKEND}:AttentionBackend.get_kv_cache_shape", until=(0, 28), returns=("tuple[int, ...]",),
        ours=f"{_ATTENTION}:FlashmoeBackend.get_kv_cache_shape",
    ),
    Has("attention", f"{_BACKEND}:AttentionBackend", names=("supported_dtypes", "supported_kv_cache_dtypes", "forward_includes_kv_cache_update")),
    *_overrides("attention", f"{_BACKEND}:AttentionImpl", f"{_ATTENTION}:FlashmoeImpl", "__init__"),
    *_overrides("attention", f"{_BACKEND}:AttentionImpl", f"{_ATTENTION}:FlashmoeImpl", "forward", returns=("torch.Tensor",)),
    # Not in the base class: the layer calls it, and vLLM's own backends define it.
    Implements(
        "attention", "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.do_kv_cache_update",
        ours=f"{_ATTENTION}:FlashmoeImpl.do_kv_cache_update",
    ),
    Implements("attention", "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.__init__", ours=f"{_ATTENTION}:FlashmoeImpl.__init__"),
    *_overrides("attention", f"{_BACKEND}:AttentionMetadataBuilder", f"{_ATTENTION}:FlashmoeMetadataBuilder", "__init__", "build", "update_block_table"),
    Calls("attention", f"{_BACKEND}:AttentionMetadataBuilder.__init__", passes=("kv_cache_spec", "layer_names", "vllm_config", "device"), positional=4),
    Has("attention", f"{_BACKEND}:AttentionMetadataBuilder", names=("_cudagraph_support", "supports_update_block_table", "reorder_batch_threshold")),
    Has("attention", f"{_BACKEND}:AttentionCGSupport", names=("UNIFORM_BATCH",)),
    Has("attention", f"{_BACKEND}:AttentionType", names=("DECODER", "ENCODER_ONLY")),
    Calls("attention", f"{_BACKEND}:MultipleOf", passes=("base",), positional=1),
    Has(
        "attention", f"{_BACKEND}:CommonAttentionMetadata",
        names=(
            "query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len",
            "block_table_tensor", "slot_mapping", "causal",
        ),
    ),
    Has("attention", f"{_BACKEND}:AttentionLayer", names=("_k_scale", "_v_scale")),
    Has("attention", "vllm.v1.attention.backends.registry:AttentionBackendEnum", names=("CUSTOM", "is_overridden", "get_path")),
    Calls("attention", "vllm.v1.attention.backends.registry:register_backend", passes=("backend", "class_path"), positional=2),
    Has("attention", "vllm.v1.attention.backends.registry:AttentionBackendEnum", names=("register",), since=(0, 33)),
    Calls("attention", "vllm.v1.attention.selector:_cached_get_attn_backend", passes=("backend", "attn_selector_config", "num_heads"), positional=3),
    Implements(
        "attention", "vllm.v1.attention.selector:_cached_get_attn_backend", ours=f"{_OURS}.vllm.selection:fall_back.chosen"
    ),
    Calls("attention", "vllm.platforms.interface:Platform.get_device_capability", passes=()),
    Calls("attention", "vllm.platforms.interface:Platform.is_cpu", passes=()),
    Has("attention", "vllm.envs:", names=("VLLM_BATCH_INVARIANT",)),
    Calls(
        "attention", "vllm._custom_ops:reshape_and_cache_flash", positional=8,
        passes=("key", "value", "key_cache", "value_cache", "slot_mapping", "kv_cache_dtype", "k_scale", "v_scale"),
    ),
    Defines("attention", f"{_LATENT}:MLACommonImpl", ours=f"{_OUR_LATENT}:FlashmoeMLAImpl"),
    *_overrides("attention", f"{_LATENT}:MLACommonImpl", f"{_OUR_LATENT}:FlashmoeMLAImpl", "__init__"),
    *_overrides(
        "attention", f"{_LATENT}:MLACommonImpl", f"{_OUR_LATENT}:FlashmoeMLAImpl", "forward_mqa",
        returns=("tuple[torch.Tensor, torch.Tensor | None]",),
    ),
    Calls(
        "attention", f"{_LATENT}:MLACommonImpl.__init__", positional=10,
        passes=(
            "num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype", "logits_soft_cap", "attn_type",
            "kv_sharing_target_layer_name", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim",
            "kv_b_proj",
        ),
    ),
    *_overrides("attention", f"{_LATENT}:MLACommonBackend", f"{_OUR_LATENT}:FlashmoeMLABackend", "get_name", "get_supported_head_sizes"),
    *_overrides(
        "attention", f"{_BACKEND}:AttentionBackend", f"{_OUR_LATENT}:FlashmoeMLABackend",
        *("supports_batch_invariance", "supports_kv_connector", "supports_compute_capability"),
        returns=("bool",),
    ),
    Has("attention", f"{_LATENT}:MLACommonBackend", names=("is_mla",)),
    Has("attention", f"{_LATENT}:MLACommonMetadata", names=("decode",)),
    Has("attention", f"{_LATENT}:MLACommonDecodeMetadata", names=("block_table", "seq_lens")),
    Has("attention", f"{_LATENT}:MLACommonMetadataBuilder", names=("query_len_support",)),
    Has("attention", f"{_LATENT}:QueryLenSupport", names=("UNIFORM",)),
    Defines("attention", f"{_PROMPTS}:MLAPrefillBackend", ours=f"{_OUR_LATENT}:FlashmoeMLAPrefill"),
    *_overrides(
        "attention", f"{_PROMPTS}:MLAPrefillBackend", f"{_OUR_LATENT}:FlashmoeMLAPrefill",
        *("get_name", "run_prefill_new_tokens", "run_prefill_context_chunk"),
    ),
    Calls("attention", f"{_PROMPTS}:MLAPrefillBackend.__init__", passes=(*_PROMPT_SIZES, "vllm_config")),
    Has("attention", f"{_PROMPTS}:MLAPrefillBackend", names=(*_PROMPT_SIZES, "_prefill_metadata")),
    *_overrides("attention", f"{_LATENT}:MLACommonMetadataBuilder", f"{_OUR_LATENT}:FlashmoeMLAMetadataBuilder", "__init__"),
    Calls(
        "attention", f"{_LATENT}:MLACommonMetadataBuilder.__init__", passes=("kv_cache_spec", "layer_names", "vllm_config", "device"), positional=4
    ),
    Has("attention", f"{_LATENT}:MLACommonMetadataBuilder", names=("_prefill_backend",)),
    Has("attention", "vllm.config.attention:AttentionConfig", names=("mla_prefill_backend",)),
    Has("attention", f"{_LATENT}:MLACommonPrefillMetadata", names=("query_start_loc", "max_query_len", "chunked_context")),
    Has("attention", f"{_LATENT}:MLACommonPrefillMetadata.ChunkedContextMetadata", names=("cu_seq_lens", "max_seq_lens"), until=(0, 28)),
    Has(
        "attention", f"{_LATENT}:MLACommonPrefillMetadata.ContextChunk", since=(0, 29),
        names=("query_start_loc", "cu_seq_lens", "max_query_len", "max_seq_len"),
    ),
    *_overrides(
        "experts", f"{_MOE}.modular_kernel:FusedMoEExperts", f"{_EXPERTS}:FlashmoeExperts",
        *("activation_format", "_supports_current_device", "_supports_no_act_and_mul", "_supports_quant_scheme", "_supports_activation"),
        *("_supports_parallel_config", "_supports_batch_invariance"),
    ),
    *_overrides(
        "experts", f"{_MOE}.modular_kernel:FusedMoEExpertsModular", f"{_EXPERTS}:FlashmoeExperts", "workspace_shapes",
        returns=("tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]",),
    ),
    *_overrides(
        "experts", f"{_MOE}.modular_kernel:FusedMoEExpertsModular", f"{_EXPERTS}:FlashmoeExperts", "apply",
        returns=("None", "UnfinalizedMoEOutput | None"),
    ),
    *_overrides("experts", f"{_MOE}.modular_kernel:FusedMoEExpertsModular", f"{_EXPERTS}:FlashmoeExperts", "finalize_weight_and_reduce_impl"),
    Implements("experts", f"{_MOE}.experts.triton_moe:TritonExperts.__init__", ours=f"{_EXPERTS}:FlashmoeExperts.__init__"),
    Calls("experts", f"{_MOE}.modular_kernel:FusedMoEExperts.__init__", passes=("moe_config", "quant_config"), positional=2),
    Calls(
        "experts", f"{_MOE}.modular_kernel:FusedMoEExperts.is_supported_config", positional=4,
        passes=("moe_config", "weight_key", "activation_key", "activation_format"),
    ),
    Has("experts", f"{_MOE}.modular_kernel:FusedMoEExperts", names=("w1_bias", "w2_bias")),
    Has("experts", f"{_MOE}.modular_kernel:FusedMoEActivationFormat", names=("Standard",)),
    Has("experts", f"{_MOE}.activation:MoEActivation", names=("SILU", "GELU", "GELU_TANH", "SWIGLUOAI")),
    Has("experts", f"{_MOE}.oracle.unquantized:UnquantizedMoeBackend", names=("TRITON",)),
    Has("experts", f"{_MOE}.topk_weight_and_reduce:", names=("TopKWeightAndReduceNoOP",)),
    Has("experts", f"{_MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod", names=("unquantized_backend", "experts_cls")),
    Implements("experts", f"{_MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.__init__", ours=f"{_EXPERTS}:FlashmoeExpertsMethod.__init__"),
    Calls("experts", "vllm.model_executor.custom_op:CustomOp.register_oot", passes=("_decorated_op_cls",), positional=1),
    Has("experts", "vllm.model_executor.custom_op:", names=("op_registry_oot",)),
    Has(
        "experts", f"{_MOE}.config:FusedMoEConfig",
        names=(
            "num_experts", "experts_per_token", "hidden_dim", "intermediate_size_per_partition", "in_dtype", "activation", "moe_parallel_config",
            "swiglu_limit", "swiglu_alpha", "swiglu_beta", "has_bias", "moe_backend",
        ),
    ),
    Has("experts", f"{_MOE}.config:FusedMoEQuantConfig", names=("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "w1_scale", "w2_scale", "block_shape")),
    Has("experts", f"{_MOE}.oracle.fp8:Fp8MoeBackend", names=("TRITON",)),
    Has("experts", f"{_MOE}.oracle.mxfp4:Mxfp4MoeBackend", names=("XPU",)),
    Has("experts", f"{_QUANTISATION}.utils.quant_utils:", names=("kFp8Dynamic128Sym", "kFp8Static128BlockSym", "kMxfp4Static")),
    Has("experts", f"{_QUANTISATION}.fp8:", names=("select_fp8_moe_backend",)),
    Has("experts", f"{_QUANTISATION}.mxfp4:", names=("select_mxfp4_moe_backend",)),
    Calls("experts", f"{_MOE}.oracle.fp8:select_fp8_moe_backend", passes=("config", "weight_key", "activation_key"), positional=3),
    Implements("experts", f"{_MOE}.oracle.fp8:select_fp8_moe_backend", ours=f"{_OURS}.vllm.quantised:_choose_fp8.chosen"),
    Calls("experts", f"{_MOE}.oracle.mxfp4:select_mxfp4_moe_backend", passes=("config", "activation_key"), positional=2),
    Implements("experts", f"{_MOE}.oracle.mxfp4:select_mxfp4_moe_backend", ours=f"{_OURS}.vllm.quantised:_choose_mxfp4.chosen"),
    *_overrides("experts", f"{_MOE}.modular_kernel:FusedMoEExperts", f"{_OURS}.vllm.quantised:FlashmoeMxfp4Experts", "expects_unquantized_inputs"),
    Has("experts", f"{_MOE}.config:FusedMoEParallelConfig", names=("use_batched_activation_format",)),
)  # fmt: skip

_SGLANG = f"{_OURS}.sglang:_backend_class.FlashmoeBackend"
_BASE = f"{_SRT}.layers.attention.base_attn_backend:AttentionBackend"
SGLANG: tuple[Clause, ...] = (
    Defines("attention", _BASE, ours=_SGLANG),
    Calls("attention", f"{_SRT}.layers.attention.attention_registry:register_attention_backend", passes=("name",), positional=1),
    Has("attention", f"{_SRT}.layers.attention.attention_registry:", names=("ATTENTION_BACKENDS",)),
    Has("attention", f"{_SRT}.server_args:", names=("ATTENTION_BACKEND_CHOICES", "add_attention_backend_choices")),
    *_overrides(
        "attention", _BASE, _SGLANG,
        *("init_forward_metadata", "init_forward_metadata_out_graph", "init_cuda_graph_state", "get_cuda_graph_seq_len_fill_value"),
    ),
    # The base class passes **options on; SGLang's own backends show what they contain.
    *_overrides("attention", _BASE, _SGLANG, "forward_extend", "forward_decode"),
    Calls("attention", f"{_SRT}.mem_cache.memory_pool:KVWriteLoc", passes=("loc", "swa_loc"), positional=2),
    Calls(
        "attention", f"{_SRT}.mem_cache.memory_pool:MHATokenToKVPool.set_kv_buffer", positional=6,
        passes=("layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale"),
    ),
    Calls("attention", f"{_SRT}.mem_cache.memory_pool:MHATokenToKVPool.get_key_buffer", passes=("layer_id",), positional=1),
    Calls("attention", f"{_SRT}.mem_cache.memory_pool:MHATokenToKVPool.get_value_buffer", passes=("layer_id",), positional=1),
    Has("attention", f"{_SRT}.mem_cache.swa_memory_pool:SWAKVPool", names=("swa_layer_nums",)),
    Has(
        "attention", f"{_SRT}.model_executor.forward_batch_info:ForwardBatch",
        names=(
            "forward_mode", "spec_info", "batch_size", "req_pool_indices", "seq_lens", "seq_lens_cpu", "extend_seq_lens", "extend_seq_lens_cpu",
            "out_cache_loc",
        ),
    ),
    Has("attention", f"{_SRT}.model_executor.forward_batch_info:ForwardMode", names=("is_idle", "is_decode", "is_target_verify")),
    Has(
        "attention", f"{_SRT}.layers.radix_attention:RadixAttention",
        names=(
            "layer_id", "tp_q_head_num", "qk_head_dim", "v_head_dim", "scaling", "sliding_window_size", "logit_cap", "is_cross_attention",
            "attn_type", "k_scale", "v_scale",
        ),
    ),
    Has(
        "attention", f"{_SRT}.model_executor.model_runner:ModelRunner",
        names=("req_to_token_pool", "token_to_kv_pool", "page_size", "use_mla_backend", "model_config"),
    ),
    Has("attention", f"{_SRT}.plugins:", names=("GENERAL_PLUGINS_GROUP",)),
)  # fmt: skip

ENGINES: dict[str, tuple[Clause, ...]] = {"vllm": VLLM, "sglang": SGLANG}
