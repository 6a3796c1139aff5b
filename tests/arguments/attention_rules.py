"""An independent statement of the rules for the arguments of attention's operators, in the order in which they are checked."""

import itertools
import math
from typing import Any

from .described import HUGE, BrokenError, Call, T, need

HALVES = ("float16", "bfloat16")
FLOATS = (*HALVES, "float32")
E4M3 = "float8_e4m3fn"
MOST_SCALE = 3.4028234663852886e38 / 1.4426950408889634
LENGTH = 2**30 - 1
DENSE, RAGGED, PAGES = (
    "[batch, heads, length, head_dim]",
    "[tokens, heads, head_dim]",
    "[pages, page_size, heads, head_dim]",
)

OPTIONS: Call = {
    **dict.fromkeys(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table", "sinks", "mask")),
    "max_seqlen_q": 0,
    "max_seqlen_k": 0,
    "scale": 0.25,
    "window_left": -1,
    "window_right": -1,
    "softcap": 0.0,
    "num_splits": 0,
}


def places(c: Call) -> None:
    q, k, v = c["q"], c["k"], c["v"]
    for name in "qkv":
        need(c[name] is not None, "tensor.missing", name=name)
    need(q.device == k.device == v.device, "attention.devices", q=q.device, k=k.device, v=v.device)
    need(not q.device.startswith("xpu"), "attention.device", device=q.device)


def dtypes(c: Call, codes: bool = False) -> None:
    q, k, v = c["q"], c["k"], c["v"]
    found = {"q": q.dtype, "k": k.dtype, "v": v.dtype}
    if codes:
        need(k.dtype == v.dtype == E4M3 and q.dtype in HALVES, "attention.e4m3_dtypes", **found)
    need(codes or q.dtype == k.dtype == v.dtype, "attention.dtypes", **found)
    kernels = HALVES if q.is_cuda else FLOATS
    need(q.dtype in kernels, "attention.dtype", dtype=q.dtype, device=q.device, supported=", ".join(kernels))


def last_stride(tensor: T, name: str) -> None:
    need(tensor.strides[-1] == 1 or tensor.sizes[-1] <= 1, "tensor.stride", name=name, strides=tensor.strides)


def layout(tensor: T, name: str, text: str) -> None:
    rank = text.count(",") + 1
    few = "few" if tensor.rank < rank else "many"
    found = {"name": name, "layout": text, "sizes": tensor.sizes, "rank": tensor.rank, "merged": -rank}
    need(tensor.rank == rank, f"attention.too_{few}_dimensions", **found)
    need(max(tensor.sizes) < HUGE, "tensor.size", name=name, sizes=tensor.sizes)
    last_stride(tensor, name)


def heads(c: Call, heads_kv: int) -> None:
    q, k, _v = c["q"], c["k"], c["v"]
    need(q.sizes[-1] == k.sizes[-1], "attention.head_dims", q=q.sizes[-1], k=k.sizes[-1])
    for name in "qv":
        size = c[name].sizes[-1]
        need(1 <= size <= 512, "attention.head_dim", name=name, head_dim=size, most=512)
    heads_q = q.sizes[1]
    if heads_q % heads_kv if heads_kv else heads_q:
        rule = "attention.heads"
        if q.rank == k.rank == 4 and k.sizes[1] == heads_kv and heads_q < heads_kv:
            rows, keys = q.sizes[2], k.sizes[2]
            if keys > 0 and rows >= keys and rows % keys == 0:
                rule = "attention.transposed_heads"
        raise BrokenError(rule, q=heads_q, k=heads_kv)


def key_value_sizes(c: Call, alike: int) -> None:
    k, v = c["k"].sizes, c["v"].sizes
    need(k[:alike] == v[:alike], "attention.key_value_sizes", k=k, v=v)


def possible(scale: float) -> bool:
    return abs(scale) <= MOST_SCALE


def dense(c: Call) -> None:
    q, k, v = c["q"], c["k"], c["v"]
    if q and v and q.rank == v.rank == 4 and q.sizes[3] != v.sizes[3]:
        scale = c["scale"] if c["scale"] is not None else 1 / math.sqrt(q.sizes[3]) if q.sizes[3] else math.inf
        varlen({**OPTIONS, "q": q, "k": k, "v": v, "scale": scale})
        return
    places(c)
    dtypes(c)
    for name in "qkv":
        layout(c[name], name, DENSE)
    heads(c, k.sizes[1])
    key_value_sizes(c, 4)
    need(q.sizes[0] == k.sizes[0], "attention.batch", q=q.sizes[0], k=k.sizes[0])
    need(c["scale"] is None or possible(c["scale"]), "attention.scale", scale=c["scale"])


def drop_in(c: Call, _: Any = None) -> None:
    """A call that scaled_dot_product_attention would broadcast or mask differently is accepted and returns None."""
    if is_sdpa(c):
        dense(c)


def is_sdpa(c: Call) -> bool:
    q, k = c["q"].sizes, c["k"].sizes
    alike = len(q) == len(k) == 4 and q[0] == k[0] and (c["enable_gqa"] or q[1] == k[1])
    return alike and not (c["causal"] and q[2] != k[2])


def on_device(tensor: T, name: str, q: T) -> None:
    need(tensor.device == q.device, "attention.companion_device", name=name, found=tensor.device, q=q.device)


def companion(tensor: T, name: str, q: T, dtype: str, rank: int) -> None:
    on_device(tensor, name, q)
    need(tensor.dtype == dtype, "attention.companion_dtype", name=name, found=tensor.dtype, needed=dtype)
    need(tensor.rank == rank, "attention.companion_rank", name=name, rank=rank, found=tensor.sizes)
    if 0 not in tensor.sizes:
        last_stride(tensor, name)


def lengths(c: Call) -> int:
    """The number of sequences."""
    q, k = c["q"], c["k"]
    batch: int = q.sizes[0]

    def counted(name: str, rank: int, needed: int) -> None:
        companion(c[name], name, q, "int32", rank)
        need(c[name].sizes[0] == needed, f"attention.{name}", found=c[name].sizes[0], needed=needed)

    if c["cu_seqlens_q"]:
        companion(c["cu_seqlens_q"], "cu_seqlens_q", q, "int32", 1)
        batch = c["cu_seqlens_q"].sizes[0] - 1
        need(batch >= 0, "attention.cu_seqlens_q")
    if c["cu_seqlens_k"]:
        counted("cu_seqlens_k", 1, batch + 1)
    if c["seqused_k"]:
        counted("seqused_k", 1, batch)
    if c["block_table"]:
        counted("block_table", 2, batch)
        need(k.sizes[1] >= 1, "attention.page_size", k=k.sizes)
    elif not c["cu_seqlens_k"]:
        need(batch == k.sizes[0], "attention.batch", q=batch, k=k.sizes[0])
    return batch


def numbers(c: Call, longest: dict[str, int]) -> None:
    for name, value in longest.items():
        need(0 <= value <= LENGTH, "attention.max_seqlen", name=name, found=value, most=LENGTH)
    left, right, softcap = c["window_left"], c["window_right"], c["softcap"]
    need(left >= -1 and right >= -1, "attention.window", left=left, right=right)
    need(possible(c["scale"]), "attention.scale", scale=c["scale"])
    fits = softcap >= 0 and possible(softcap) and (softcap == 0 or possible(c["scale"] / softcap))
    need(fits, "attention.softcap", softcap=softcap)
    need(softcap <= 4096, "attention.softcap_too_large", softcap=softcap, most=4096)
    need(-1 <= c["num_splits"] <= 32, "attention.num_splits", found=c["num_splits"], most=32)


def scores(c: Call, batch: int, longest: dict[str, int]) -> None:
    q, mask = c["q"], c["mask"]
    if c["sinks"]:
        companion(c["sinks"], "sinks", q, "float32", 1)
        need(c["sinks"].sizes[0] == q.sizes[1], "attention.sinks", found=c["sinks"].sizes[0], needed=q.sizes[1])
    if mask is None:
        return
    if mask.dtype == "float32" and mask.rank == 2:
        on_device(mask, "alibi_slopes", q)
        needed: tuple[int, ...] = (batch, q.sizes[1])
        need(mask.sizes == needed, "attention.alibi_slopes", found=mask.sizes, needed=needed)
        return
    on_device(mask, "attn_mask", q)
    need(mask.dtype in ("bool", q.dtype), "attention.mask_dtype", found=mask.dtype, q=q.dtype)
    needed = (batch, q.sizes[1], *longest.values())
    fits = mask.rank == 4 and all(size in (1, full) for size, full in zip(mask.sizes, needed, strict=True))
    rule = "padding_mask" if mask.sizes == (needed[0], needed[3]) else "mask_shape"
    need(fits, f"attention.{rule}", found=mask.sizes, needed=needed)


def cumulative(values: list[int], name: str, tokens: int, most: int, later: bool = False) -> None:
    most_name = name.replace("cu_seqlens", "max_seqlen")
    if values:
        first = values[0]
        need(first == 0 or (later and first > 0), "attention.first_length", name=name, first=first)
    for sequence, (begin, end) in enumerate(itertools.pairwise(values)):
        at = {"name": name, "end": end, "sequence": sequence}
        need(begin <= end, "attention.decreasing_lengths", **at, first=begin)
        need(end <= tokens, "attention.lengths_past_tokens", **at, tokens=tokens)
        long = {"name": name, "found": end - begin, "sequence": sequence}
        need(end - begin <= most, "attention.sequence_too_long", **long, max_name=most_name, max_seqlen=most)


def pages_of(row: list[int], sequence: int, begin: int, end: int, k: T) -> None:
    pages, size = k.sizes[:2]
    for index in range(begin // size, -(-end // size)):
        values = {"sequence": sequence, "index": index, "page": row[index], "pages": pages, "last": pages - 1}
        need(0 <= row[index] < pages, "attention.page", **values)


def contents(c: Call, values: dict[str, Any], longest: dict[str, int]) -> None:
    """Checks the values of tensors with data."""
    most_q, most_k = longest.values()
    cu_q, cu_k, used, table = (
        values.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table")
    )
    if cu_q is not None:
        cumulative(cu_q, "cu_seqlens_q", c["q"].sizes[0], most_q)
    if cu_k is not None:
        cumulative(cu_k, "cu_seqlens_k", c["k"].sizes[0], most_k, later=used is not None)
    for sequence, count in enumerate(used or ()):
        room, rule = most_k, "attention.used_past_room"
        if cu_k is not None:
            room = cu_k[sequence + 1] - cu_k[sequence]
        elif table is not None and len(table[sequence]) * c["k"].sizes[1] > most_k:
            rule = "attention.used_past_max_seqlen"
        elif table is not None:
            room = len(table[sequence]) * c["k"].sizes[1]
        need(0 <= count <= room, rule, sequence=sequence, used=count, room=room)
        if table is not None:
            rows = most_q if cu_q is None else cu_q[sequence + 1] - cu_q[sequence]
            left = c["window_left"]
            first = 0 if left < 0 else min(max(count - rows - left, 0), count)
            pages_of(table[sequence], sequence, first, count, c["k"])


def varlen(c: Call, values: dict[str, Any] | None = None, codes: bool = False, code_queries: bool = False) -> int:
    need(c.get("rng_state", True) is not None, "tensor.missing", name="rng_state")
    places(c)
    if code_queries:
        fp8_dtypes(c)
    else:
        dtypes(c, codes)
    need(not (c["cu_seqlens_k"] and c["block_table"]), "attention.pages_and_cu_seqlens")
    need(not c["block_table"] or c["seqused_k"] is not None, "attention.pages_without_lengths")
    keys = RAGGED if c["cu_seqlens_k"] else PAGES if c["block_table"] else DENSE
    layout(c["q"], "q", RAGGED if c["cu_seqlens_q"] else DENSE)
    layout(c["k"], "k", keys)
    layout(c["v"], "v", keys)
    batch = lengths(c)
    key_value_sizes(c, c["k"].rank - 1)
    heads(c, c["k"].sizes[2 if keys == PAGES else 1])
    longest = {
        "max_seqlen_q": c["max_seqlen_q"] if c["cu_seqlens_q"] else c["q"].sizes[2],
        "max_seqlen_k": c["k"].sizes[2] if keys == DENSE else c["max_seqlen_k"],
    }
    numbers(c, longest)
    scores(c, batch, longest)
    if "dropout_p" in c:
        need(0 <= c["dropout_p"] < 1, "attention.dropout_p", found=c["dropout_p"])
        need(not c["block_table"], "attention.dropout_pages")
        companion(c["rng_state"], "rng_state", c["q"], "int64", 1)
        need(c["rng_state"].sizes[0] == 2, "attention.rng_state", found=c["rng_state"].sizes[0])
    if values is not None:
        contents(c, values, longest)
    return batch


def out(c: Call, values: dict[str, Any] | None = None, codes: bool = False) -> None:
    batch = varlen(c, values, codes)
    if codes:
        cache_scales(c, c["q"], batch)
    given, q = c["out"], c["q"]
    need(given is not None, "tensor.missing", name="out")
    companion(given, "out", q, q.dtype, q.rank)
    needed = (*q.sizes[:-1], c["v"].sizes[-1])
    need(given.sizes == needed, "attention.out_shape", needed=needed, found=given.sizes)
    step, whole = 1, True
    for axis in (q.rank - 1, *sorted(range(q.rank - 1), key=lambda axis: (given.strides[axis], -axis))):
        whole = whole and (needed[axis] <= 1 or given.strides[axis] == step)
        step *= needed[axis]
    need(whole or step == 0, "attention.out_strides", strides=given.strides)


def scale_values(c: Call, name: str, cache: T, batch: int, q: T) -> None:
    given = c[name]
    if given is None:
        return
    axis = 2 if c.get("block_table") else 1
    heads_kv = cache.sizes[axis]
    on_device(given, name, q)
    need(given.dtype == "float32", "attention.companion_dtype", name=name, found=given.dtype, needed="float32")
    fits = given.sizes in ((), (heads_kv,), (batch, heads_kv))
    if given.rank == cache.rank == 4:
        fits = all(size == 1 or (at in (0, axis) and size == cache.sizes[at]) for at, size in enumerate(given.sizes))
    shape = {"name": name, "found": given.sizes, "batch": batch, "heads": heads_kv, "cache": cache.sizes}
    need(fits, "attention.e4m3_scale_shape", **shape)
    of_pages = given.rank == 4 and axis == 2 and given.sizes[0] > 1
    page = {"name": name, "page_size": cache.sizes[1] if cache.rank > 1 else 0, "multiple": 16}
    need(not of_pages or cache.sizes[1] % 16 == 0, "attention.e4m3_page_scales", **page)


def cache_scales(c: Call, q: T, batch: int) -> None:
    is_alibi = c["mask"] and c["mask"].rank == 2
    need(not is_alibi or c["cu_seqlens_k"] is None, "attention.e4m3_alibi")
    scale_values(c, "k_scale", c["k"], batch, q)
    scale_values(c, "v_scale", c["v"], batch, q)


def e4m3(c: Call, values: dict[str, Any] | None = None) -> None:
    cache_scales(c, c["q"], varlen(c, values, codes=True))


def backward(c: Call, values: dict[str, Any] | None = None) -> None:
    c = {"block_table": None, "num_splits": 0, **c}
    q = c["q"]
    varlen(c, values)
    need(c["scale"] >= 2.0**-126, "attention.backward_scale", scale=c["scale"])
    sizes = (*q.sizes[:-1], c["v"].sizes[-1])
    rows = sizes[:-1] if q.rank == 4 else (sizes[1], sizes[0])
    for name in ("out", "grad_out"):
        companion(c[name], name, q, q.dtype, q.rank)
        need(c[name].sizes == sizes, "attention.backward_shape", name=name, found=c[name].sizes, needed=sizes)
    for name in ("lse", "grad_lse"):
        given, stride = c[name], 1
        if given is None:
            continue
        companion(given, name, q, "float32", q.rank - 1)
        need(given.sizes == rows, "attention.backward_shape", name=name, found=given.sizes, needed=rows)
        for size, found in reversed(list(zip(rows, given.strides, strict=True))):
            is_dense = size <= 1 or found == stride or 0 in rows
            need(is_dense, "attention.backward_strides", name=name, strides=given.strides)
            stride *= size


def append(c: Call, values: dict[str, Any] | None = None, codes: bool = False) -> None:
    k_cache, v_cache, k_new, v_new = (c[name] for name in ("k_cache", "v_cache", "k_new", "v_new"))
    for name in ("k_cache", "v_cache", "k_new", "v_new"):
        need(c[name] is not None, "tensor.missing", name=name)
        of, like = c[name], k_new if codes and name.endswith("new") else k_cache
        if like is None:
            raise BrokenError("tensor.missing", name="k_new")
        found = {
            "name": name,
            "dtype": of.dtype,
            "device": of.device,
            "cache_dtype": like.dtype,
            "cache_device": like.device,
        }
        need(of.dtype == like.dtype, "attention.append_dtype", **found)
        need(of.device == like.device, "attention.append_device", **found)
    need(c["cache_seqlens"] is not None, "tensor.missing", name="cache_seqlens")
    paged = c["block_table"] is not None
    as_call = {
        **OPTIONS,
        "q": k_new,
        "k": k_cache,
        "v": v_cache,
        "block_table": c["block_table"],
        "seqused_k": c["cache_seqlens"],
    }
    places(as_call)
    dtypes(as_call, codes)
    layout(k_new, "k_new", DENSE)
    layout(v_new, "v_new", DENSE)
    layout(k_cache, "k_cache", PAGES if paged else DENSE)
    layout(v_cache, "v_cache", PAGES if paged else DENSE)
    batch = k_new.sizes[0]
    need(paged or k_cache.sizes[0] == batch, "attention.append_batch", k_new=batch, k_cache=k_cache.sizes[0])
    lengths(as_call)
    heads_kv = k_cache.sizes[2 if paged else 1]
    for name, rows, cache in (("k_new", k_new, k_cache), ("v_new", v_new, v_cache)):
        fits = rows.sizes == (*k_new.sizes[:3], cache.sizes[3]) and rows.sizes[1] == heads_kv
        need(fits, "attention.append_shape", name=name, found=rows.sizes, cache=cache.sizes)
    key_value_sizes(as_call, 3)
    heads(as_call, heads_kv)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)) if k_new.sizes[2] else ():
        over = any(size > 1 and stride == 0 for size, stride in zip(cache.sizes, cache.strides, strict=True))
        need(not over, "attention.expanded_cache", name=name, sizes=cache.sizes, strides=cache.strides)
    if values is not None:
        room = c["block_table"].sizes[1] * k_cache.sizes[1] if paged else k_cache.sizes[2]
        added = k_new.sizes[2]
        for sequence, used in enumerate(values["cache_seqlens"]):
            need(used >= 0, "attention.negative_cache", sequence=sequence, found=used)
            need(used + added <= room, "attention.full_cache", sequence=sequence, room=room, used=used, added=added)
            if paged and added:
                pages_of(values["block_table"][sequence], sequence, used, used + added, k_cache)
    for name, cache in (("k_scale", k_cache), ("v_scale", v_cache)) if codes else ():
        scale_values(c, name, cache, batch, k_new)


def fp8_dtypes(c: Call) -> None:
    q, k, v = c["q"], c["k"], c["v"]
    need(q.dtype == k.dtype == v.dtype == E4M3, "attention.fp8_dtypes", q=q.dtype, k=k.dtype, v=v.dtype)


def fp8_varlen(c: Call, values: dict[str, Any] | None = None) -> None:
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        need(c[name] is not None, "tensor.missing", name=name)
    batch = varlen({**OPTIONS, **c}, values, code_queries=True)
    for name in "qkv":
        scale_values(c, f"{name}_scale", c[name], batch, c["q"])


def fp8(c: Call) -> None:
    q, k, v = c["q"], c["k"], c["v"]
    places(c)
    fp8_dtypes(c)
    for name in "qkv":
        layout(c[name], name, DENSE)
    heads(c, k.sizes[1])
    key_value_sizes(c, 3)
    need(q.sizes[0] == k.sizes[0], "attention.batch", q=q.sizes[0], k=k.sizes[0])
    need(possible(c["scale"]), "attention.scale", scale=c["scale"])
    for name, of, least in (("q_scale", q, 64), ("k_scale", k, 64), ("v_scale", v, 128)):
        given = c[name]
        if given is None or given.rank != 3:
            scale_values(c, name, of, of.sizes[0], q)
            continue
        on_device(given, name, q)
        need(given.dtype == "float32", "attention.companion_dtype", name=name, found=given.dtype, needed="float32")
        batch, count, rows = of.sizes[:3]
        fits = given.sizes[:2] == (batch, count) and given.sizes[2] in (-(-rows // 128), -(-rows // least))
        block = {"rows": rows, "block": "128" if least == 128 else "128 or 64"}
        need(fits, "attention.fp8_scale_shape", name=name, found=given.sizes, batch=batch, heads=count, **block)
