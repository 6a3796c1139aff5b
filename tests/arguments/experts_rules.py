"""An independent statement of the rules for the arguments of a mixture-of-experts layer's operators, in the order in which they are checked."""

import math
from typing import Any

from .described import HUGE, BrokenError, Call, T, need

FLOATS = ("float16", "bfloat16", "float32")
E4M3 = "float8_e4m3fn"
MOST = HUGE - 1
ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "reglu", "clamped_swiglu")
WORDS = {
    "activation": ACTIVATIONS,
    "layout": ("concat", "interleaved"),
    "scoring": ("softmax", "topk_softmax", "sigmoid"),
}
KEPT = "of the forward pass with keep=True"
LAYER = ("x", "w13", "w2", "topk_weights", "topk_ids")
SORTED = ("expert_offsets", "row_slots", "slot_rows", "row_weights")


def given(c: Call, *names: str) -> None:
    for name in names:
        need(c[name] is not None, "tensor.missing", name=name)


def word(c: Call, *names: str) -> None:
    for name in names:
        need(c[name] in WORDS[name], "moe.word", name=name, found=c[name], supported=", ".join(WORDS[name]))


def first_of(c: Call, name: str, float32: bool = False) -> None:
    """The tensor whose dtype and device the others must have."""
    one: T = c[name]
    need(not one.device.startswith("xpu"), "moe.device", device=one.device)
    kernels = FLOATS if float32 or not one.is_cuda else FLOATS[:2]
    need(
        one.dtype in kernels,
        "moe.kernel_dtype",
        name=name,
        found=one.dtype,
        device=one.device,
        supported=", ".join(kernels),
    )


def place(c: Call, name: str, first: str) -> None:
    one, other = c[name], c[first]
    where = {"first": first, "first_device": other.device, "name": name, "device": one.device}
    need(one.device == other.device, "moe.devices", **where)


def kind(c: Call, name: str, first: str, dtype: str = "") -> None:
    """The tensor must have this dtype, or the first tensor's."""
    if c[name] is None:
        return
    place(c, name, first)
    needed = dtype or f"{first}'s {c[first].dtype}"
    target = f"torch.{dtype}" if dtype else f"{first}.dtype"
    need(
        c[name].dtype == (dtype or c[first].dtype),
        "moe.dtype",
        name=name,
        found=c[name].dtype,
        needed=needed,
        target=target,
    )


def rank(c: Call, name: str, axes: str) -> None:
    need(c[name].rank == axes.count(",") + 1, "moe.rank", name=name, sizes=c[name].sizes, axes=axes)
    need(max(c[name].sizes) <= MOST, "tensor.size", name=name, sizes=c[name].sizes)


def shape(c: Call, name: str, sizes: tuple[int, ...], axes: str) -> None:
    if c[name] is not None:
        need(c[name].sizes == sizes, "moe.shape", name=name, sizes=c[name].sizes, needed=sizes, axes=axes)


def counted(value: int, what: str, most: int = MOST) -> None:
    need(1 <= value <= most, "moe.size", what=what, value=value, most=most)


def experts_of(count: int, rule: str = "moe.experts") -> None:
    need(1 <= count <= 1024, rule, experts=count, most=1024)


def multiple(value: int, what: str, of: int, rule: str) -> None:
    need(value % of == 0, rule, what=what, value=value, multiple=of)


def weights(c: Call) -> tuple[int, int, int, int]:
    """(tokens, hidden, experts, intermediate)"""
    swapped = c.get("transposed", False)
    axes = ("[experts, hidden, 2 * intermediate]", "[experts, intermediate, hidden]")
    if not swapped:
        axes = ("[experts, 2 * intermediate, hidden]", "[experts, hidden, intermediate]")
    rank(c, "x", "[tokens, hidden]")
    rank(c, "w13", axes[0])
    rank(c, "w2", axes[1])
    (tokens, hidden), w13, w2 = c["x"].sizes, c["w13"].sizes, c["w2"].sizes
    experts, inner = w13[0], w2[1 if swapped else 2]
    experts_of(experts)
    counted(hidden, "the hidden size")
    counted(inner, "the intermediate size", MOST // 2)

    def fits(name: str, rows: int, columns: int, hidden_axis: int, text: str) -> None:
        needed, axis = (experts, rows, columns), hidden_axis
        if swapped:
            needed, axis = (experts, columns, rows), 3 - hidden_axis
        sizes = c[name].sizes
        if sizes[axis] != hidden and sizes[3 - axis] == hidden:
            other = "False" if swapped else "True"
            raise BrokenError("moe.transposed", name=name, sizes=sizes, needed=needed, axes=text, other=other)
        shape(c, name, needed, text)

    fits("w2", hidden, inner, 1, axes[1])
    rows, columns = (w13[2], w13[1]) if swapped else (w13[1], w13[2])
    if rows != 2 * inner and columns == hidden:
        found = {"w13": w13, "w2": w2, "rows": rows, "intermediate": inner, "w13_axes": axes[0], "w2_axes": axes[1]}
        raise BrokenError("moe.intermediate", **found)
    fits("w13", 2 * inner, hidden, 2, axes[0])
    if c["x"].is_cuda:
        multiple(hidden, "the hidden size", 8, "moe.gpu_multiple")
        multiple(inner, "the intermediate size", 8, "moe.gpu_multiple")
    return tokens, hidden, experts, inner


def biases(c: Call, experts: int, hidden: int, inner: int) -> None:
    for name, columns, axes in (("b13", 2 * inner, "2 * intermediate"), ("b2", hidden, "hidden")):
        kind(c, name, "x")
        shape(c, name, (experts, columns), f"[experts, {axes}]")


def routing(c: Call, first: str, experts: int, ids: str = "topk_ids") -> None:
    for name in (ids, "topk_weights"):
        place({**c, "topk_ids": c[ids]}, "topk_ids" if name == ids else name, first)
    found = {"name": "topk_ids", "found": c[ids].dtype, "needed": "int32 or int64", "target": "torch.int32"}
    need(c[ids].dtype in ("int32", "int64"), "moe.dtype", **found)
    need(c[ids].sizes == c["topk_weights"].sizes, "moe.topk_shapes", weights=c["topk_weights"].sizes, ids=c[ids].sizes)
    slots = math.prod(c[ids].sizes)
    need(slots <= MOST, "moe.slots", tokens=slots, top_k=1, slots=slots)
    experts_of(experts)
    if c["expert_map"] is not None:
        kind(c, "expert_map", first, "int32")
        rank(c, "expert_map", "[experts of the model]")


def tokens_of(c: Call, tokens: int, hidden: int, experts: int) -> None:
    shape(c, "shared", (tokens, hidden), "[tokens, hidden]")
    rank(c, "topk_ids", "[tokens, top_k]")
    top_k = c["topk_ids"].sizes[1]
    shape(c, "topk_ids", (tokens, top_k), "[tokens, top_k]")
    need(1 <= top_k <= 32, "moe.top_k", top_k=top_k, most=32)
    need(tokens * top_k <= MOST, "moe.slots", tokens=tokens, top_k=top_k, slots=tokens * top_k)
    routing(c, "x", experts)


def written(c: Call, dtype: str) -> None:
    out, (tokens, hidden) = c["out"], c["x"].sizes
    given(c, "out")
    kind(c, "out", "x", dtype)
    shape(c, "out", (tokens, hidden), "[tokens, hidden]")
    is_aligned = out.strides[0] % 8 == 0 or not out.is_cuda
    rows = (out.strides[1] == 1 or hidden == 1) and out.strides[0] >= hidden
    need(tokens == 0 or (rows and is_aligned), "moe.out_strides", strides=out.strides)


def layer(c: Call, _: Any = None) -> None:
    word(c, "activation", "layout")
    given(c, *LAYER)
    first_of(c, "x")
    for name in ("w13", "w2", "shared"):
        kind(c, name, "x")
    wanted, ids, x = c["topk_weights"].dtype, c["topk_ids"].dtype, c["x"].dtype
    whole = ("int32", "int64")
    need(wanted not in whole or ids in whole, "moe.swapped_routing", weights=wanted, ids=ids)
    found = {"name": "topk_weights", "found": wanted, "needed": f"float32 or x's {x}", "target": "torch.float32"}
    need(wanted in ("float32", x), "moe.dtype", **found)
    tokens, hidden, experts, inner = weights(c)
    biases(c, experts, hidden, inner)
    tokens_of(c, tokens, hidden, experts)
    if "out" in c:
        written(c, x)


def saved_slots(c: Call, tokens: int) -> int:
    rank(c, "row_slots", "[slots]")
    slots: int = c["row_slots"].sizes[0]
    top_k = slots // tokens if tokens else 1
    need(slots == tokens * top_k and (tokens == 0 or top_k >= 1), "moe.saved_slots", slots=slots, tokens=tokens)
    return slots


def kept(c: Call, experts: int, slots: int, axes: str) -> None:
    for name, count in zip(SORTED, (experts + 1, slots, slots, slots), strict=True):
        kind(c, name, "x", "float32" if name == "row_weights" else "int32")
        shape(c, name, (count,), axes)


def layer_backward(c: Call, _: Any = None) -> None:
    word(c, "activation", "layout")
    given(c, "grad_out", "x", "w13", "w2", "preactivation", *SORTED)
    first_of(c, "x")
    for name in ("grad_out", "w13", "w2", "preactivation"):
        kind(c, name, "x")
    tokens, hidden, experts, inner = weights(c)
    biases(c, experts, hidden, inner)
    shape(c, "grad_out", (tokens, hidden), "[tokens, hidden]")
    slots = saved_slots(c, tokens)
    kept(c, experts, slots, KEPT)
    shape(c, "preactivation", (slots, 2 * inner), "[slots, 2 * intermediate]")


def blocks(size: int) -> int:
    return -(-size // 128)


def scaled(c: Call, _: Any = None) -> None:
    word(c, "activation")
    given(c, "x", "w13", "w2", "w13_scale", "w2_scale", "topk_weights", "topk_ids")
    for name in ("w13", "w2"):
        place(c, name, "x")
        need(c[name].dtype == E4M3, "moe.scaled_weights", name=name, found=c[name].dtype)
    is_scaled = c["x"].dtype == E4M3
    dtype = "bfloat16" if is_scaled else c["x"].dtype
    need(dtype in FLOATS[:2], "moe.scaled_x", found=dtype)
    need(not is_scaled or c["x_scale"] is not None, "moe.no_x_scale")
    need(is_scaled or c["x_scale"] is None, "moe.x_scale", found=dtype)
    kind(c, "shared", "x", dtype)
    found = {"name": "topk_weights", "found": c["topk_weights"].dtype, "target": "torch.float32"}
    need(c["topk_weights"].dtype in FLOATS, "moe.dtype", **found, needed="float32, float16 or bfloat16")
    tokens, hidden, experts, inner = weights(c)
    scales = {
        "w13_scale": (
            (experts, blocks(2 * inner), blocks(hidden)),
            "[experts, ceil(2 * intermediate / 128), ceil(hidden / 128)]",
        ),
        "w2_scale": (
            (experts, blocks(hidden), blocks(inner)),
            "[experts, ceil(hidden / 128), ceil(intermediate / 128)]",
        ),
        "x_scale": ((tokens, blocks(hidden)), "[tokens, ceil(hidden / 128)]"),
    }
    for name, (sizes, axes) in scales.items():
        kind(c, name, "x", "float32")
        shape(c, name, sizes, axes)
    tokens_of(c, tokens, hidden, experts)
    if "out" in c:
        written(c, dtype)


def whole_blocks(c: Call, _: Any = None) -> None:
    scaled(c)
    for size, what in ((c["x"].sizes[1], "the hidden size"), (c["w2"].sizes[2], "the intermediate size")):
        multiple(size, what, 128, "moe.scaled_multiple")


def scaled_kept(c: Call, _: Any = None) -> None:
    whole_blocks(c)
    need(c["x"].dtype == "bfloat16", "moe.fp8_dtype", name="x", found=c["x"].dtype)


def whole(value: int, what: str) -> None:
    counted(value, what, MOST // 2)
    multiple(value, what, 128, "moe.fp8_multiple")


def scaled_backward(c: Call, _: Any = None) -> None:
    word(c, "activation")
    given(c, "grad_out", "x", "w13", "w2", "w13_scale", "w2_scale", "preactivation", *SORTED)
    need(c["x"].dtype == "bfloat16", "moe.fp8_dtype", name="x", found=c["x"].dtype)
    rank(c, "x", "[tokens, hidden]")
    rank(c, "w2", "[experts, intermediate, hidden]")
    (tokens, hidden), (experts, inner) = c["x"].sizes, c["w2"].sizes[:2]
    slots = saved_slots(c, tokens)
    experts_of(experts)
    whole(hidden, "the hidden size")
    whole(inner, "the intermediate size")
    h, b, i = hidden // 128, inner // 64, inner // 128
    needed = {
        "w13": (E4M3, (experts, hidden, 2 * inner), "[experts, hidden, 2 * intermediate]"),
        "w2": (E4M3, (experts, inner, hidden), "[experts, intermediate, hidden]"),
        "w13_scale": ("float32", (experts, h, b), "[experts, hidden / 128, 2 * intermediate / 128]"),
        "w2_scale": ("float32", (experts, i, h), "[experts, intermediate / 128, hidden / 128]"),
        "preactivation": ("bfloat16", (slots, 2 * inner), "[slots, 2 * intermediate]"),
    }
    for name, (dtype, sizes, axes) in needed.items():
        kind(c, name, "x", dtype)
        shape(c, name, sizes, axes)
    kept(c, experts, slots, "of the forward pass")
    kind(c, "grad_out", "x", "bfloat16")
    shape(c, "grad_out", (tokens, hidden), "[tokens, hidden]")


def quantize_weights(c: Call, _: Any = None) -> None:
    given(c, "weights")
    need(c["weights"].dtype == "bfloat16", "moe.fp8_dtype", name="weights", found=c["weights"].dtype)
    rank(c, "weights", "[experts, n, k]")
    experts_of(c["weights"].sizes[0])
    whole(c["weights"].sizes[1], "the number of rows")
    whole(c["weights"].sizes[2], "the number of columns")


def mxfp4(c: Call, _: Any = None) -> None:
    word(c, "activation", "layout")
    given(c, *LAYER)
    need(c["x"].dtype == "bfloat16", "moe.mxfp4_x", found=c["x"].dtype)
    kind(c, "shared", "x", "bfloat16")
    found = {"name": "topk_weights", "found": c["topk_weights"].dtype, "target": "torch.float32"}
    need(c["topk_weights"].dtype in ("float32", "bfloat16"), "moe.dtype", **found, needed="float32 or x's bfloat16")
    rank(c, "x", "[tokens, hidden]")
    tokens, hidden = c["x"].sizes
    packed = c["w13_scale"] is None and c["w2_scale"] is None
    axes = ("[experts, 2 * intermediate, hidden / 2]", "[experts, hidden, intermediate / 2]")
    unit = 64 if packed else 32
    if packed:
        axes = (
            "[experts, 2 * intermediate / 64, hidden / 64, 2176]",
            "[experts, hidden / 64, intermediate / 64, 2176]",
        )
    rank(c, "w13", axes[0])
    rank(c, "w2", axes[1])
    experts, inner = c["w13"].sizes[0], c["w2"].sizes[2] * (64 if packed else 2)
    experts_of(experts)
    for size, what in ((hidden, "the hidden size"), (inner, "the intermediate size")):
        counted(size, what, MOST // 2)
        multiple(size, what, unit, "moe.mxfp4_packed_multiple" if packed else "moe.mxfp4_multiple")
    h, i = hidden // unit, inner // unit
    needed: dict[str, tuple[tuple[int, ...], str]] = {
        "w2": ((experts, hidden, inner // 2), axes[1]),
        "w13": ((experts, 2 * inner, hidden // 2), axes[0]),
        "w13_scale": ((experts, 2 * inner, h), "[experts, 2 * intermediate, hidden / 32]"),
        "w2_scale": ((experts, hidden, i), "[experts, hidden, intermediate / 32]"),
    }
    if packed:
        needed = {"w2": ((experts, h, i, 2176), axes[1]), "w13": ((experts, 2 * i, h, 2176), axes[0])}
    for name, (sizes, text) in needed.items():
        if not packed:
            given(c, name)
        kind(c, name, "x", "uint8")
        shape(c, name, sizes, text)
    need(not packed or c["x"].device != "cpu", "moe.mxfp4_packed_cpu")
    biases(c, experts, hidden, inner)
    tokens_of(c, tokens, hidden, experts)
    if "out" in c:
        written(c, "bfloat16")


def sort(c: Call, _: Any = None) -> None:
    for name, told in (("ids", "topk_ids"), ("topk_weights", "topk_weights")):
        need(c[name] is not None, "tensor.missing", name=told)
    first_of(c, "topk_weights", float32=True)
    routing(c, "topk_weights", c["experts"], ids="ids")


def route(c: Call, _: Any = None) -> None:
    word(c, "scoring")
    given(c, "logits")
    first_of(c, "logits", float32=True)
    need(abs(c["scale"]) <= 3.4028234663852886e38, "moe.scale", scale=c["scale"])
    rank(c, "logits", "[tokens, experts]")
    tokens, experts = c["logits"].sizes
    experts_of(experts, "moe.route_experts")
    kind(c, "bias", "logits", "float32")
    shape(c, "bias", (experts,), "[experts]")
    groups, chosen, k = c["groups"], c["topk_groups"], c["k"]
    need(1 <= groups <= 32 and experts % groups == 0, "moe.groups", groups=groups, experts=experts, most=32)
    need(1 <= chosen <= groups, "moe.topk_groups", topk_groups=chosen, groups=groups)
    eligible = experts // groups * chosen
    need(1 <= k <= min(eligible, 32), "moe.k", k=k, most=32, eligible=eligible)
    need(tokens * k <= MOST, "moe.slots", tokens=tokens, top_k=k, slots=tokens * k)


def grouped_kinds(c: Call) -> None:
    given(c, "a", "b", "offsets")
    first_of(c, "a")
    kind(c, "b", "a")
    kind(c, "offsets", "a", "int32")


def grouped_sizes(c: Call, experts: int, n: int, k: int) -> None:
    experts_of(experts, "moe.grouped_experts")
    for value, what in ((k, "k"), (n, "n")):
        counted(value, what)
    for value, what in ((k, "k"), (n, "n")) if c["a"].is_cuda else ():
        multiple(value, what, 8, "moe.gpu_multiple")


def grouped(c: Call, values: dict[str, Any] | None = None) -> None:
    grouped_kinds(c)
    rank(c, "a", "[rows, k]")
    rank(c, "b", "[experts, k, n]")
    rows, k = c["a"].sizes
    experts, _, n = c["b"].sizes
    shape(c, "b", (experts, k, n), "[experts, k, n]")
    grouped_sizes(c, experts, n, k)
    shape(c, "offsets", (experts,), "[experts]")
    ascending(values, rows)


def ascending(values: dict[str, Any] | None, rows: int) -> None:
    least = 0
    for index, end in enumerate(values["offsets"] if values and rows else ()):
        need(least <= end <= rows, "moe.offsets", index=index, end=end, least=least, most=rows)
        least = end


def grouped_gradient(c: Call, values: dict[str, Any] | None = None) -> None:
    grouped_kinds(c)
    rank(c, "a", "[n, rows]")
    rank(c, "b", "[rows, k]")
    rank(c, "offsets", "[experts]")
    n, rows = c["a"].sizes
    k = c["b"].sizes[1]
    shape(c, "b", (rows, k), "[rows, k]")
    grouped_sizes(c, c["offsets"].sizes[0], n, k)
    ascending(values, rows)
