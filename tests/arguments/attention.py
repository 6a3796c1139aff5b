"""Valid calls of attention's operators, and the rules that each follows."""

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

from .attention_rules import (
    E4M3,
    LENGTH,
    MOST_SCALE,
    OPTIONS,
    append,
    backward,
    dense,
    drop_in,
    e4m3,
    fp8,
    fp8_varlen,
    out,
    varlen,
)
from .described import Call, ints, t

_DROPOUT: Call = {"dropout_p": 0.25, "rng_state": t("int64", 2, values=(7, 3))}
_SCALES: Call = {"k_scale": t("float32", 2), "v_scale": None, "k_factor": 1.0, "v_factor": 0.5}


def _dense(b: int = 2, h: int = 4, kv: int = 2, n: int = 5, m: int = 7, d: int = 16, dv: int = 16) -> Call:
    return {
        "q": t("float32", b, h, n, d),
        "k": t("float32", b, kv, m, d),
        "v": t("float32", b, kv, m, dv),
        "scale": 0.25,
        "causal": False,
    }


def _wide(d: int = 16, dv: int = 24) -> Call:
    return _dense(d=d, dv=dv)


def _drop_in(b: int = 2, h: int = 4, kv: int = 2, n: int = 7, m: int = 7, d: int = 16, dv: int = 16) -> Call:
    return {**_dense(b, h, kv, n, m, d, dv), "scale": None, "causal": True, "enable_gqa": True}


def _inference(b: int = 2, h: int = 4, kv: int = 2, n: int = 5, m: int = 7, d: int = 16, dv: int = 24) -> Call:
    return {**_dense(b, h, kv, n, m, d, dv), "scale": None}


def _masked(b: int = 2, h: int = 4, kv: int = 2, n: int = 5, m: int = 7, d: int = 16, dv: int = 24) -> Call:
    tensors = {name: value for name, value in _dense(b, h, kv, n, m, d, dv).items() if name in "qkv"}
    options = {
        "sinks": t("float32", h),
        "mask": t("bool", b, 1, n, m, values=(1, 1, 0)),
        "seqused_k": t("int32", b, values=(min(m, 6), 1)),
    }
    return {**OPTIONS, **tensors, **options, "softcap": 30.0, "window_left": 4}


def _ragged(h: int = 4, kv: int = 2, n: int = 9, m: int = 11, d: int = 16, dv: int = 24) -> Call:
    tensors = {"q": t("float32", n, h, d), "k": t("float32", m, kv, d), "v": t("float32", m, kv, dv)}
    lengths = {
        "cu_seqlens_q": ints(0, 4, min(n, 9)),
        "cu_seqlens_k": ints(0, 5, 11),
        "max_seqlen_q": 5,
        "max_seqlen_k": 7,
    }
    return {**OPTIONS, **tensors, **lengths, "mask": t("float32", 2, h)}


def _used(h: int = 4, kv: int = 2, b: int = 2) -> Call:
    """Dense rows, ragged keys of which only a part is used."""
    call = {
        **_ragged(h, kv),
        "q": t("float32", b, h, 3, 16),
        "cu_seqlens_q": None,
        "mask": None,
        "cu_seqlens_k": ints(1, 5, 11),
    }
    return {**call, "seqused_k": ints(4, 2), "num_splits": 1}


def _pages(h: int = 4, kv: int = 2, pages: int = 6, size: int = 16, d: int = 16, columns: int = 3) -> Call:
    tensors = {"q": t("float32", 9, h, d), "k": t("float32", pages, size, kv, d), "v": t("float32", pages, size, kv, d)}
    table = t("int32", 2, columns, values=(5, 0, 3, 1, 4, 2))
    lengths = {
        "cu_seqlens_q": ints(0, 4, 9),
        "seqused_k": ints(20, 33),
        "block_table": table,
        "max_seqlen_q": 5,
        "max_seqlen_k": 40,
    }
    return {**OPTIONS, **tensors, **lengths, "window_right": 0}


def _paged_codes(h: int = 4, kv: int = 2, pages: int = 6, size: int = 16) -> Call:
    """No row sees the first page, which may therefore be unassigned."""
    call = {**_pages(h, kv, pages, size), **_SCALES, "v_scale": t("float32", pages, 1, kv, 1), "window_left": 0}
    return {**call, "q": t("bfloat16", 9, h, 16), "k": t(E4M3, pages, size, kv, 16), "v": t(E4M3, pages, size, kv, 16)}


def _codes(b: int = 2, h: int = 4, kv: int = 2, m: int = 7) -> Call:
    tensors = {"q": t("bfloat16", b, h, 5, 16), "k": t(E4M3, b, kv, m, 16), "v": t(E4M3, b, kv, m, 16)}
    return {**OPTIONS, **tensors, **_SCALES, "v_scale": t("float32", b, kv), "mask": t("bool", 1, 1, 5, m, values=(1,))}


def _sizes_of_out(c: Call) -> tuple[int, ...]:
    return (*c["q"].sizes[:-1], c["v"].sizes[-1])


def _out(make: Callable[..., Call]) -> Callable[..., Call]:
    @wraps(make)  # callers see and change the same sizes
    def made(**sizes: int) -> Call:
        c = make(**sizes)
        return {"out": t(c["q"].dtype, *_sizes_of_out(c)), **c}

    return made


def _backward_of(make: Callable[..., Call]) -> Callable[..., Call]:
    @wraps(make)
    def made(**changed: int) -> Call:
        c = make(**changed)
        names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "sinks", "mask")
        numbers = ("max_seqlen_q", "max_seqlen_k", "scale", "window_left", "window_right", "softcap")
        sizes = _sizes_of_out(c)
        rows = sizes[:-1] if c["q"].rank == 4 else (sizes[1], sizes[0])
        results = {"out": t("float32", *sizes), "lse": t("float32", *rows)}
        given = {"grad_out": t("float32", *sizes), "grad_lse": t("float32", *rows), **{name: c[name] for name in names}}
        return {**given, **results, **{name: c[name] for name in numbers}, "needs": 7}

    return made


def _with_dropout(make: Callable[..., Call]) -> Callable[..., Call]:
    return wraps(make)(lambda **sizes: {**make(**sizes), **_DROPOUT})


def _append(b: int = 2, kv: int = 2, n: int = 3, d: int = 16, dv: int = 24, room: int = 9) -> Call:
    caches = {"k_cache": t("float32", b, kv, room, d), "v_cache": t("float32", b, kv, room, dv)}
    rows = {"k_new": t("float32", b, kv, n, d), "v_new": t("float32", b, kv, n, dv)}
    return {**caches, **rows, "cache_seqlens": t("int32", b, values=(6, 0)), "block_table": None}


def _append_nothing(b: int = 2, kv: int = 2) -> Call:
    """Without rows, caches may be expanded."""
    return _append(b, kv, n=0)


def _append_pages(b: int = 2, kv: int = 2, n: int = 3, pages: int = 6, size: int = 16) -> Call:
    caches = {"k_cache": t("float32", pages, size, kv, 16), "v_cache": t("float32", pages, size, kv, 24)}
    rows = {"k_new": t("float32", b, kv, n, 16), "v_new": t("float32", b, kv, n, 24)}
    table = t("int32", b, 3, values=(5, 0, 3, 1, 4, 2))
    return {**caches, **rows, "cache_seqlens": t("int32", b, values=(14, 45)), "block_table": table}


def _append_codes(make: Callable[..., Call]) -> Callable[[], Call]:
    def made() -> Call:
        codes = {name: t(E4M3, *value.sizes) for name, value in make().items() if name.endswith("cache")}
        rows = {name: t("bfloat16", *value.sizes) for name, value in make().items() if name.endswith("new")}
        return {**make(), **codes, **rows, **_SCALES}

    return made


def _fp8(b: int = 2, h: int = 4, kv: int = 2, n: int = 66, m: int = 140, d: int = 16, dv: int = 16) -> Call:
    tensors = {"q": t(E4M3, b, h, n, d), "k": t(E4M3, b, kv, m, d), "v": t(E4M3, b, kv, m, dv)}
    scales = {
        "q_scale": t("float32", b, h, -(-n // 64)),
        "k_scale": t("float32", b, kv),
        "v_scale": t("float32", b, kv, -(-m // 128)),
    }
    factors = {"q_factor": 1.0, "k_factor": 0.5, "v_factor": 2.0}
    return {**tensors, "scale": 0.25, "causal": False, "is_float16": True, **scales, **factors}


def _fp8_varlen(h: int = 4, kv: int = 2, n: int = 9, m: int = 11, d: int = 16, dv: int = 24) -> Call:
    ragged = _ragged(h, kv, n, m, d, dv)
    codes = {name: t(E4M3, *ragged[name].sizes) for name in "qkv"}
    ends, most = ({f"{name}_{of}": ragged[f"{name}_{of}"] for of in "qk"} for name in ("cu_seqlens", "max_seqlen"))
    scales = {"q_scale": t("float32", h), "k_scale": t("float32", 2, kv), "v_scale": None}
    return {**codes, **ends, "seqused_k": ints(4, 2), **most, **_fp8(), **codes, **scales}


SIZES = {"d": (512, 513), "dv": (512, 513), "h": (6, 3), "kv": (4, 8), "n": (14,), "size": (15, 17)}
_REALS = (math.nan, math.inf, -math.inf, MOST_SCALE, math.nextafter(MOST_SCALE, math.inf), -MOST_SCALE, 0.0, -0.5)
NUMBERS: dict[str, tuple[Any, ...]] = {
    "scale": (*_REALS, 2.0**-126, 2.0**-127),
    "softcap": (*_REALS, 4096.0, math.nextafter(4096.0, 5000.0), 1e-39, 5e-324),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), (-1, 0, 4, 33, 40, 48, 49, LENGTH, LENGTH + 1)),
    **dict.fromkeys(("window_left", "window_right"), (-2, -1, 0, 1, 20)),
    "num_splits": (-2, -1, 0, 1, 32, 33),
    "dropout_p": (math.nan, -1e-9, 0.0, math.nextafter(1.0, 0.0), 1.0),
    "cu_seqlens_q": ((1, 4, 9), (-1, 4, 9), (0, 4, 3), (0, 4, 10), (0, 3, 9), (0, 4, 8), (0, 0, 0), (0, 5, 5)),
    "cu_seqlens_k": ((1, 5, 11), (-1, 5, 11), (2, 5, 11), (0, 5, 4), (0, 5, 12), (0, 3, 11), (0, 5, 12), (0, 0, 0)),
    "seqused_k": (
        (-1, 1),
        (0, 0),
        (7, 7),
        (8, 1),
        (1, 8),
        (4, 6),
        (5, 6),
        (4, 7),
        (40, 40),
        (41, 1),
        (48, 48),
        (49, 1),
        (16, 17),
    ),
    "block_table": (
        (5, 0, 9, 1, 4, 2),
        (5, 6, 3, 1, 4, 2),
        (-1, 0, 3, 1, 4, 2),
        (5, 0, 3, 1, 4, 6),
        (6, 0, 3, 1, 4, 2),
        (5, 0, 3, -9, 4, 2),
        (6, 0, 3, 6, 4, 2),
    ),
    "cache_seqlens": ((-1, 0), (0, -1), (7, 0), (0, 6), (46, 0), (45, 45), (13, 14), (16, 32), (15, 31), (0, 0)),
    "causal": (True, False),
    "enable_gqa": (False,),
    "needs": (0, 1, 2, 4, 6),
}


# (operator, valid call, rules). For names in brackets the extension only checks descriptions, or the CPU has no kernel.
Row = tuple[str, Callable[..., Call], Callable[..., Any]]
ROWS: tuple[Row, ...] = (
    *(("flash_attention_forward", make, lambda c, _=None: dense(c)) for make in (_dense, _wide)),
    ("_flash_attention_inference", _inference, lambda c, _=None: dense(c)),
    ("_flash_attention_drop_in", _drop_in, drop_in),
    *(("attention_varlen_forward", make, varlen) for make in (_masked, _ragged, _used, _pages)),
    *(("_attention_varlen_inference", make, varlen) for make in (_masked, _ragged)),
    ("_attention_varlen_out", _out(_masked), out),
    ("_attention_varlen_out", _out(_ragged), out),
    *(("attention_dropout_forward", _with_dropout(make), varlen) for make in (_masked, _ragged, _pages)),
    ("_attention_varlen_backward", _backward_of(_masked), backward),
    ("_attention_varlen_backward", _backward_of(_ragged), backward),
    ("_attention_dropout_backward", _with_dropout(_backward_of(_ragged)), backward),
    *(("attention_e4m3_forward", make, e4m3) for make in (_codes, _paged_codes)),
    ("_attention_e4m3_inference", _codes, e4m3),
    ("_attention_e4m3_out", _out(_codes), lambda c, values=None: out(c, values, codes=True)),
    *(("attention_append_", make, append) for make in (_append, _append_nothing, _append_pages)),
    *(
        ("attention_append_e4m3_", _append_codes(make), lambda c, values=None: append(c, values, codes=True))
        for make in (_append, _append_pages)
    ),
    ("attention_fp8_forward", _fp8, lambda c, _=None: fp8(c)),
    ("attention_fp8_varlen_forward", _fp8_varlen, fp8_varlen),
)
ELSEWHERE = {  # tested elsewhere
    *("_flash_attention_backward", "_attention_bias_gradient", "_attention_mask_backward", "_attention_merge"),
}
