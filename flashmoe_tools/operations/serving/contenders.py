"""Attention over pages and ragged batches: ours, torch on dense copies of the same keys, flash-attn on pages."""

from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from flashmoe.errors import ArgumentError
from flashmoe_tools.bench.contenders import Contender, Prepared, always, family, flashmoe_available, forced, installed
from flashmoe_tools.operations import flex
from flashmoe_tools.operations.serving.reference import CODE_SCALE, Inputs, score_options

FAMILIES = ("sm75", "sm80", "sm90")
FLASH_ATTN_3 = "flash_attn_interface"
FAULTY_PLANS = 128  # with at least this many sequences vLLM 0.33's build reads out of bounds


def _score_options(inputs: Inputs) -> dict[str, Any]:
    """The case's score options as arguments of our functions."""
    problem = inputs.problem
    window = (problem.window - 1, 0) if problem.window else None
    own: dict[str, Any] = {"sinks": inputs.sinks, "alibi_slopes": inputs.slopes}
    if problem.dropout:
        own |= {"dropout_p": problem.dropout / 100, "rng_state": inputs.rng_state}
    return {"causal": problem.causal, "window": window, "softcap": float(problem.softcap), **own}


def _has_equal_rows(inputs: Inputs) -> bool:
    return len(set(inputs.problem.lengths_q)) == 1


def _dense_queries(inputs: Inputs) -> torch.Tensor:
    """A view [B, Hq, Sq, D]."""
    p = inputs.problem
    return inputs.q.view(p.batch, -1, p.heads_q, p.head_dim).transpose(1, 2)


def _flashmoe(inputs: Inputs, **options: Any) -> Prepared:
    """Decoding as a model calls it; otherwise ragged, or dense with a mask tensor.

    Decoding is a dense batch of queries on a paged cache; ``options`` apply only to it.
    """
    import flashmoe

    problem = inputs.problem
    if inputs.mask is not None:
        return _dense(inputs)
    if problem.page_size and _has_equal_rows(inputs):
        q, scores = _dense_queries(inputs), _score_options(inputs)
        k, v = inputs.codes or (inputs.k, inputs.v)
        if inputs.codes is not None:
            scale = torch.full((problem.heads_kv,), CODE_SCALE, device=q.device)
            scores |= {"k_scale": scale, "v_scale": scale}

        def decode() -> torch.Tensor:
            out: torch.Tensor = flashmoe.attention_with_kvcache(
                q,
                k,
                v,
                cache_seqlens=inputs.seqused_k,
                block_table=inputs.block_table,
                scale=inputs.scale,
                **scores,
                **options,
            )
            return out

        return Prepared(decode)
    return _flashmoe_ragged(inputs)


def _flashmoe_consistent(inputs: Inputs) -> Prepared:
    """With the same bits in every call."""
    return _flashmoe(inputs, consistent=True)


def _flashmoe_16_bit(inputs: Inputs) -> Prepared:
    """Runs on the dequantised cache of an e4m3 case."""
    if inputs.codes is None:
        msg = f"{inputs.problem.key}: the cache is one of 16 bits"
        raise ArgumentError(msg)
    return _flashmoe(replace(inputs, codes=None))


def _flashmoe_ragged(inputs: Inputs) -> Prepared:
    import flashmoe

    problem = inputs.problem
    is_paged = inputs.block_table is not None
    keys = {"seqused_k": inputs.seqused_k, "block_table": inputs.block_table} if is_paged else {}
    cu_seqlens_k = None if is_paged else inputs.cu_seqlens_k
    longest = (max(problem.lengths_q), max(problem.lengths_k))
    scores = _score_options(inputs)

    def both(*, return_lse: bool) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return flashmoe.attention_varlen(  # type: ignore[call-overload,no-any-return]
            *(inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_q, cu_seqlens_k, *longest),
            scale=inputs.scale,
            return_lse=return_lse,
            **scores,
            **keys,
        )

    return Prepared(lambda: both(return_lse=False), lambda: both(return_lse=True)[1])


def _dense_caches(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The same keys in dense caches [B, Hkv, Sk, D], as torch's attention and our dense kernels need them."""
    problem = inputs.problem
    if problem.spread != "equal":
        msg = f"{problem.key}: the sequences differ in length or share pages, which a dense call does not support"
        raise ArgumentError(msg)

    def dense(tensor: torch.Tensor) -> torch.Tensor:
        if inputs.block_table is None:  # a view: gradients pass through it without a copy
            return tensor.view(problem.batch, -1, *tensor.shape[1:]).transpose(1, 2)
        return torch.stack([inputs.keys_of(tensor, sequence) for sequence in range(problem.batch)]).transpose(1, 2)

    return dense(inputs.k), dense(inputs.v)


def _dense(inputs: Inputs) -> Prepared:
    import flashmoe

    q, (k, v) = _dense_queries(inputs), _dense_caches(inputs)
    options = {**_score_options(inputs), "attn_mask": inputs.mask, "scale": inputs.scale}
    return Prepared(lambda: flashmoe.attention(q, k, v, **options))


def _flashmoe_dense(inputs: Inputs) -> Prepared:
    """The dense kernels, which support no window, softcap, sinks or mask."""
    if inputs.problem == inputs.problem.plain:
        return _dense(inputs)
    return replace(_dense(inputs.plain), own=inputs.plain)


def _flashmoe_plain(inputs: Inputs) -> Prepared:
    """Our kernel for the case without its score options; refused if it has none."""
    if inputs.problem == inputs.problem.plain:
        msg = f"{inputs.problem.key}: the case is plain"
        raise ArgumentError(msg)
    return replace(_flashmoe(inputs.plain), own=inputs.plain)


def _sdpa(inputs: Inputs) -> Prepared:
    problem = inputs.problem
    q, (k, v) = _dense_queries(inputs), _dense_caches(inputs)
    if problem != replace(problem.plain, mask=problem.mask, dropout=problem.dropout):
        msg = f"{problem.describe_scores()[2:]}: torch's backends support only a mask and dropout"
        raise ArgumentError(msg)
    mask = inputs.mask
    is_causal = problem.causal and problem.seq_q > 1
    if is_causal and problem.seq_q != problem.seq_k:
        msg = f"{problem.key}: is_causal is aligned top-left, this problem bottom-right"
        raise ArgumentError(msg)
    is_grouped = problem.heads_q != problem.heads_kv
    if problem.dropout:
        return _sdpa_dropout(inputs, q, k, v)

    def call() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=is_causal, scale=inputs.scale, enable_gqa=is_grouped
        )

    return Prepared(call)


def _sdpa_dropout(inputs: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Prepared:
    """torch's FLASH backend with the dropout mask of its own generator.

    The mask is read from its debug output: the sign of the weights.
    """
    problem, p = inputs.problem, inputs.problem.dropout / 100
    if problem.heads_q != problem.heads_kv or problem.head_dim not in (64, 128, 256):
        msg = f"{problem.key}: its debug mask is for as many key heads as heads, of 64, 128 or 256 columns"
        raise ArgumentError(msg)
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    with torch.no_grad():
        torch.manual_seed(1)
        signed = flash(q, k, v, p, problem.causal, True, scale=inputs.scale)[8]

    def call() -> torch.Tensor:
        torch.manual_seed(1)
        result: torch.Tensor = flash(q, k, v, p, problem.causal, scale=inputs.scale)[0]
        return result

    return Prepared(call, own=replace(inputs, keep=signed[..., : problem.seq_q, : problem.seq_k] >= 0))


def _flex_attention(inputs: Inputs) -> Prepared:
    problem = inputs.problem
    if problem.dropout or problem.sinks:
        msg = f"{problem.describe_scores()[2:] or 'dropout'}: FlexAttention has neither dropout nor sinks"
        raise ArgumentError(msg)
    (k, v), q = _dense_caches(inputs), _dense_queries(inputs)
    return Prepared(flex.attend(q, k, v, score_options(problem), inputs.mask, inputs.slopes))


def _flash_options(inputs: Inputs) -> dict[str, Any]:
    """flash-attn's options; only those of plain attention if that is all, so that builds without the others take part."""
    problem = inputs.problem
    if problem.dropout:
        msg = "dropout: flash-attn 3 has none, and flash-attn 2 another mask"
        raise ArgumentError(msg)
    if inputs.mask is not None:
        msg = f"{problem.mask}: flash-attn takes no mask tensor"
        raise ArgumentError(msg)
    options: dict[str, Any] = {"softmax_scale": inputs.scale, "causal": problem.causal}
    if problem.window:
        options["window_size"] = (problem.window - 1, 0)
    if inputs.slopes is not None:
        options["alibi_slopes"] = inputs.slopes  # only in flash-attn 2
    if problem.softcap:
        options["softcap"] = float(problem.softcap)
    if inputs.sinks is not None:
        options["s_aux"] = inputs.sinks.to(inputs.q.dtype)  # only in vLLM's build
    return options


def _flash_attn(inputs: Inputs) -> Prepared:
    problem, module = inputs.problem, import_module("flash_attn")
    options = _flash_options(inputs)
    if problem.page_size and _has_equal_rows(inputs):
        q = inputs.q.unflatten(0, (problem.batch, -1))
        keys = {"cache_seqlens": inputs.seqused_k, "block_table": inputs.block_table}

        def decode() -> torch.Tensor:
            out: torch.Tensor = module.flash_attn_with_kvcache(q, inputs.k, inputs.v, **keys, **options)
            return out.transpose(1, 2)

        return Prepared(decode)
    lengths = (inputs.cu_seqlens_q, inputs.cu_seqlens_k, max(problem.lengths_q), max(problem.lengths_k))
    table = inputs.block_table

    def call() -> torch.Tensor:
        out: torch.Tensor = module.flash_attn_varlen_func(
            inputs.q, inputs.k, inputs.v, *lengths, block_table=table, **options
        )
        return out

    return Prepared(call)


def _flash_attn_3(inputs: Inputs) -> Prepared:
    """FlashAttention-3's own package; pages, with equal or ragged rows, use its function for caches."""
    problem, module = inputs.problem, import_module(FLASH_ATTN_3)
    options = _flash_options(inputs)
    if problem.window and problem.head_dim > 128:
        msg = f"window {problem.window}: wrong in vLLM 0.33's build, by 0.14 with 1024 of 16384 keys at head dim 256"
        raise ArgumentError(msg)
    rows: dict[str, Any] = {"cu_seqlens_q": inputs.cu_seqlens_q, "max_seqlen_q": max(problem.lengths_q)}
    keys: dict[str, Any] = {"cu_seqlens_k": inputs.cu_seqlens_k, "max_seqlen_k": max(problem.lengths_k)}
    if problem.page_size:
        keys = {"cache_seqlens": inputs.seqused_k, "page_table": inputs.block_table}
    function = module.flash_attn_with_kvcache if problem.page_size else module.flash_attn_varlen_func
    options |= _scheduled(inputs, module)

    def call() -> torch.Tensor:
        result = function(inputs.q, inputs.k, inputs.v, **keys, **rows, **options)
        out: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return out

    return Prepared(call)


def _flash_attn_3_in_8_bits(inputs: Inputs) -> Prepared:
    """Runs on the codes themselves.

    Then queries are codes too, and so are the weights: a different computation.
    """
    problem, module = inputs.problem, import_module(FLASH_ATTN_3)
    if inputs.codes is None or problem.dtype != "bf16":
        msg = f"{problem.key}: a cache in e4m3 and a result in bfloat16 are what it takes"
        raise ArgumentError(msg)
    q, (k, v), dtype = inputs.q.to(inputs.codes[0].dtype), inputs.codes, inputs.q.dtype
    scales = [torch.full((problem.batch, problem.heads_kv), one, device=q.device) for one in (1.0, *[CODE_SCALE] * 2)]
    options = {**_flash_options(inputs), **_scheduled(replace(inputs, q=q), module)}
    options |= {f"{name}_descale": scale for name, scale in zip("qkv", scales, strict=True)}
    options |= {"cu_seqlens_q": inputs.cu_seqlens_q, "max_seqlen_q": max(problem.lengths_q)}

    def call() -> torch.Tensor:
        result = module.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=inputs.seqused_k, page_table=inputs.block_table, **options
        )
        out: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return out

    return Prepared(call, own=replace(inputs, q=q.to(dtype), rounds_weights=True))


def _scheduled(inputs: Inputs, module: Any) -> dict[str, Any]:
    """FlashAttention-3's schedule of a decode; without it every call makes its own.

    A server makes it once for all layers.
    """
    problem = inputs.problem
    make_plan = getattr(module, "get_scheduler_metadata", None)  # not in every build
    if make_plan is None or not problem.page_size or not _has_equal_rows(inputs) or problem.batch >= FAULTY_PLANS:
        return {}
    rows, keys = max(problem.lengths_q), max(problem.lengths_k)
    heads = (problem.heads_q, problem.heads_kv, problem.head_dim)
    plan: dict[str, Any] = {
        "page_size": problem.page_size,
        "causal": problem.causal,
        "has_softcap": problem.softcap > 0,
    }
    window = (problem.window - 1, 0) if problem.window else (-1, -1)
    plan |= {"cu_seqlens_q": inputs.cu_seqlens_q, "window_size": window, "qkv_dtype": inputs.q.dtype}
    made = make_plan(problem.batch, rows, keys, *heads, inputs.seqused_k, **plan)
    return {"scheduler_metadata": made}


def contenders() -> tuple[Contender, ...]:
    both, gpu = ("cpu", "cuda"), ("cuda",)
    return (
        Contender("flashmoe", "flashmoe", both, flashmoe_available, _flashmoe, ours=True),
        Contender(
            "flashmoe-consistent", "flashmoe, same bits", both, flashmoe_available, _flashmoe_consistent, ours=True
        ),
        Contender("flashmoe-ragged", "flashmoe, ragged rows", both, flashmoe_available, _flashmoe_ragged, ours=True),
        Contender("flashmoe-16-bit", "flashmoe, 16-bit cache", both, flashmoe_available, _flashmoe_16_bit),
        # For comparison only: it cannot handle different lengths, which is no failure of ours.
        Contender("flashmoe-dense", "flashmoe, dense keys", both, flashmoe_available, _flashmoe_dense),
        Contender("flashmoe-plain", "flashmoe, plain scores", both, flashmoe_available, _flashmoe_plain),
        *(
            Contender(f"flashmoe-{one}", f"flashmoe {one}", gpu, flashmoe_available, _flashmoe, family(one), ours=True)
            for one in FAMILIES
        ),
        Contender("sdpa", "SDPA, dense keys", both, always, _sdpa),
        Contender("sdpa-flash", "SDPA FLASH, dense keys", gpu, always, _sdpa, forced("FLASH_ATTENTION")),
        Contender("sdpa-cudnn", "SDPA CUDNN, dense keys", gpu, always, _sdpa, forced("CUDNN_ATTENTION")),
        Contender("sdpa-efficient", "SDPA EFFICIENT, dense keys", gpu, always, _sdpa, forced("EFFICIENT_ATTENTION")),
        Contender("flex-attention", "FlexAttention, dense keys", gpu, always, _flex_attention),
        Contender("flash-attn", "flash-attn", gpu, installed("flash_attn"), _flash_attn),
        Contender("flash-attn-3", "FA3", gpu, installed(FLASH_ATTN_3), _flash_attn_3),
        Contender("flash-attn-3-e4m3", "FA3, all in e4m3", gpu, installed(FLASH_ATTN_3), _flash_attn_3_in_8_bits),
    )
