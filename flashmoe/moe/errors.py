"""The rules for the arguments of a mixture-of-experts layer, stated once in Python, and why a call failed.

The compiled operators check every call themselves. Eager calls therefore run no check here: :func:`explain` looks for the
reason only after a call has failed. Fake tensors have no C++ behind them, so their rules call the functions here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from flashmoe.checks import check_flag, has_names, is_number, shape_of
from flashmoe.errors import ArgumentError, ArgumentTypeError, DeviceError, DtypeError, FlashmoeError, ShapeError
from flashmoe.moe.options import ACTIVATIONS, LAYOUTS, SCORINGS
from flashmoe.rules import translate

MAX_EXPERTS = 1024
MAX_TOP_K = 32
MAX_GROUPS = 32
MAX_SCALE = torch.finfo(torch.float32).max
MAX_SIZE = 2**31 - 1  # the kernels hold sizes, and the number of rows, in 32 bits
GPU_MULTIPLE = 8  # of sizes that a product sums over or gives: 16 bytes
BLOCK = 128
E4M3 = torch.float8_e4m3fn
NEXT_STEP = "convert it with .to(torch.float8_e4m3fn) and its scales, or give bfloat16 weights without scales"
DTYPES: Mapping[str, tuple[torch.dtype, ...]] = MappingProxyType(
    {
        "cpu": (torch.float16, torch.bfloat16, torch.float32),
        "cuda": (torch.float16, torch.bfloat16),
        "meta": (torch.float16, torch.bfloat16, torch.float32),
    }
)
_ANY_FLOAT = (torch.float16, torch.bfloat16, torch.float32)


def validate_layer(
    x: Any,
    w13: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    b13: Any,
    b2: Any,
    expert_map: Any,
    shared: Any,
    activation: Any,
    layout: Any,
    transposed: Any,
) -> None:
    """Raise the typed error that says what is wrong, or return when the operators take these arguments.

    x [T, H], w13 [E, 2I, H] and w2 [E, H, I] (transposed: [E, H, 2I] and [E, I, H]), topk_weights and topk_ids [T, k], b13
    [E, 2I], b2 [E, H], expert_map int32 [any], shared [T, H]. 1 <= E <= 1024, 1 <= k <= 32, T * k < 2^31; on a GPU H and I are
    multiples of 8. Sizes may be symbolic.
    """
    needed = {"x": x, "w13": w13, "w2": w2, "topk_weights": topk_weights, "topk_ids": topk_ids}
    optional = {"b13": b13, "b2": b2, "expert_map": expert_map, "shared": shared}
    tensors = _dense_tensors(needed, optional)
    check_word("activation", activation, ACTIVATIONS)
    check_word("layout", layout, LAYOUTS)
    check_flag("transposed", transposed)
    _check_devices("x", tensors)
    _check_layer_dtypes(tensors)
    tokens, hidden, intermediate, experts = _layer_sizes(x, w13, w2, transposed)
    _check_shape(tensors, "b13", (experts, 2 * intermediate), "[experts, 2 * intermediate]")
    _check_shape(tensors, "b2", (experts, hidden), "[experts, hidden]")
    _check_shape(tensors, "shared", (tokens, hidden), "[tokens, hidden]")
    _check_rank("topk_ids", topk_ids, 2, "[tokens, top_k]")
    top_k = topk_ids.shape[1]
    _check_shape(tensors, "topk_ids", (tokens, top_k), "[tokens, top_k]")
    _check_between("the number of experts of a token", top_k, MAX_TOP_K, "split the choices over several calls")
    _check_slots(tokens, top_k)
    _check_shape(tensors, "topk_weights", tuple(topk_ids.shape), "[tokens, top_k], as topk_ids")
    if expert_map is not None:
        _check_rank("expert_map", expert_map, 1, "[experts of the model]")


def _check_layer_dtypes(tensors: Mapping[str, Tensor]) -> None:
    dtype = tensors["x"].dtype
    _check_supported("x", tensors["x"])
    for name in ("w13", "w2", "b13", "b2", "shared"):
        if name in tensors and tensors[name].dtype != dtype:
            msg = f"{name} is {_word(tensors[name].dtype)}; x's {_word(dtype)} is needed; convert it with .to(x.dtype)"
            raise DtypeError(msg)
    if tensors["topk_weights"].dtype not in (torch.float32, dtype):
        found = _word(tensors["topk_weights"].dtype)
        msg = f"topk_weights is {found}; float32 or x's {_word(dtype)} is needed; convert it with .to()"
        raise DtypeError(msg)
    _check_ids(tensors["topk_ids"])
    _check_expert_map(tensors)


def _layer_sizes(x: Tensor, w13: Tensor, w2: Tensor, transposed: bool) -> tuple[int, int, int, int]:
    """(tokens, hidden, intermediate, experts), once the three tensors agree on them."""
    names = {"w13": ("experts", "2 * intermediate", "hidden"), "w2": ("experts", "hidden", "intermediate")}
    if transposed:
        names = {name: (axes[0], axes[2], axes[1]) for name, axes in names.items()}
    axes = {name: f"[{', '.join(sizes)}]" for name, sizes in names.items()}
    _check_rank("x", x, 2, "[tokens, hidden]")
    _check_rank("w13", w13, 3, axes["w13"])
    _check_rank("w2", w2, 3, axes["w2"])
    tokens, hidden = x.shape
    experts, intermediate = w13.shape[0], w2.shape[1 if transposed else 2]
    _check_between("the number of experts", experts, MAX_EXPERTS, "divide them over several layers by expert_map")
    _check_between("the hidden size", hidden, MAX_SIZE, "check x")
    _check_between("the intermediate size", intermediate, MAX_SIZE // 2, "check w2")
    sizes = {"experts": experts, "hidden": hidden, "intermediate": intermediate, "2 * intermediate": 2 * intermediate}
    for name, tensor in (("w2", w2), ("w13", w13)):
        wanted, axis = tuple(sizes[axis] for axis in names[name]), names[name].index("hidden")
        if tensor.shape[axis] != hidden and tensor.shape[3 - axis] == hidden:
            msg = f"{name} has shape {shape_of(tensor)}; {list(wanted)} {axes[name]} is needed; give {name}.mT"
            raise ShapeError(msg)
        _check_shape({name: tensor}, name, wanted, axes[name])
    _check_gpu_multiples(x, {"the hidden size": hidden, "the intermediate size": intermediate})
    return tokens, hidden, intermediate, experts


def validate_scaled(
    x: Any,
    w13: Any,
    w2: Any,
    w13_scale: Any,
    w2_scale: Any,
    topk_weights: Any,
    topk_ids: Any,
    x_scale: Any,
    expert_map: Any,
    shared: Any,
    activation: Any,
) -> None:
    """Raise the typed error that says what is wrong, or return when the operators take these arguments.

    w13 [E, 2I, H] and w2 [E, H, I] e4m3 with float32 w13_scale [E, ceil(2I / 128), ceil(H / 128)] and w2_scale
    [E, ceil(H / 128), ceil(I / 128)]; x [T, H] in 16 bits, or e4m3 with float32 x_scale [T, ceil(H / 128)]. The rest as in
    ``validate_layer``.
    """
    for name, scale in (("w13_scale", w13_scale), ("w2_scale", w2_scale)):
        if scale is None:
            msg = f"{name} is None; float8_e4m3fn weights need w13_scale and w2_scale; give both, or bfloat16 weights"
            raise ArgumentError(msg)
    needed = {"x": x, "w13": w13, "w2": w2, "w13_scale": w13_scale, "w2_scale": w2_scale}
    needed |= {"topk_weights": topk_weights, "topk_ids": topk_ids}
    optional = {"x_scale": x_scale, "expert_map": expert_map, "shared": shared}
    tensors = _dense_tensors(needed, optional)
    check_word("activation", activation, ACTIVATIONS)
    _check_devices("x", tensors)
    _check_dtypes(tensors)
    _check_expert_map(tensors)
    _check_ids(topk_ids)
    tokens, hidden, intermediate, experts = _layer_sizes(x, w13, w2, False)
    halves = 2 * intermediate
    w13_blocks, w2_blocks = (blocks(halves), blocks(hidden)), (blocks(hidden), blocks(intermediate))
    _check_shape(
        tensors, "w13_scale", (experts, *w13_blocks), "[experts, ceil(2 * intermediate / 128), ceil(hidden / 128)]"
    )
    _check_shape(tensors, "w2_scale", (experts, *w2_blocks), "[experts, ceil(hidden / 128), ceil(intermediate / 128)]")
    _check_shape(tensors, "x_scale", (tokens, blocks(hidden)), "[tokens, ceil(hidden / 128)]")
    _check_shape(tensors, "shared", (tokens, hidden), "[tokens, hidden]")
    _check_rank("topk_ids", topk_ids, 2, "[tokens, top_k]")
    top_k = topk_ids.shape[1]
    _check_shape(tensors, "topk_ids", (tokens, top_k), "[tokens, top_k]")
    _check_between("the number of experts of a token", top_k, MAX_TOP_K, "split the choices")
    _check_slots(tokens, top_k)
    _check_shape(tensors, "topk_weights", (tokens, top_k), "[tokens, top_k], as topk_ids")
    if expert_map is not None:
        _check_rank("expert_map", expert_map, 1, "[experts of the model]")


def blocks(size: int) -> int:
    return (size + BLOCK - 1) // BLOCK


def _check_dtypes(tensors: Mapping[str, Tensor]) -> None:
    x, word = tensors["x"], _word
    for name in ("w13", "w2"):
        if tensors[name].dtype is not E4M3:
            found = word(tensors[name].dtype)
            msg = f"{name} is {found}, and there are scales; supported with scales: float8_e4m3fn; {NEXT_STEP}"
            raise DtypeError(msg)
    if x.dtype not in (torch.float16, torch.bfloat16, E4M3):
        msg = (
            f"x is {word(x.dtype)}; supported with float8_e4m3fn weights: float16, bfloat16, float8_e4m3fn with x_scale; "
            "convert it with .to()"
        )
        raise DtypeError(msg)
    if (x.dtype is E4M3) != ("x_scale" in tensors):
        msg = "x_scale goes with x in float8_e4m3fn, and x in float8_e4m3fn with x_scale; " + (
            "x_scale is None: give it" if x.dtype is E4M3 else f"x is {word(x.dtype)}: leave x_scale away"
        )
        raise ArgumentError(msg)
    for name in ("w13_scale", "w2_scale", "x_scale"):
        if name in tensors and tensors[name].dtype is not torch.float32:
            msg = f"{name} is {word(tensors[name].dtype)}; float32 is needed; convert it with .float()"
            raise DtypeError(msg)
    out = torch.bfloat16 if x.dtype is E4M3 else x.dtype
    if "shared" in tensors and tensors["shared"].dtype is not out:
        msg = f"shared is {word(tensors['shared'].dtype)}; the output's {word(out)} is needed; convert it with .to()"
        raise DtypeError(msg)
    if tensors["topk_weights"].dtype not in (torch.float32, torch.float16, torch.bfloat16):
        found = word(tensors["topk_weights"].dtype)
        msg = f"topk_weights is {found}; float32, float16 or bfloat16 is needed; convert it with .float()"
        raise DtypeError(msg)


def check_blocks(x: Tensor, w2: Tensor) -> None:
    """What the kernels need beside the"""
    for what, size in (("the hidden size", x.shape[1]), ("the intermediate size", w2.shape[2])):
        if size % BLOCK != 0:
            msg = (
                f"{what} is {size}; with float8_e4m3fn weights on a GPU it must be a multiple of {BLOCK}; pad the weights "
                "with zeros, or use CPU tensors"
            )
            raise ShapeError(msg)


def validate_for_kernels(x: Any, w13: Any, w2: Any, *others: Any) -> None:
    validate_scaled(x, w13, w2, *others)
    check_blocks(x, w2)


def validate_sort(ids: Any, topk_weights: Any, expert_map: Any, experts: Any) -> None:
    """ids and topk_weights of one shape, expert_map int32 of one dimension, 1 <= experts <= 1024."""
    tensors = _dense_tensors({"topk_weights": topk_weights, "topk_ids": ids}, {"expert_map": expert_map})
    _check_devices("topk_weights", tensors)
    if topk_weights.dtype not in _ANY_FLOAT:
        msg = (
            f"topk_weights is {_word(topk_weights.dtype)}; supported: float16, bfloat16, float32; convert it with .to()"
        )
        raise DtypeError(msg)
    _check_ids(ids)
    _check_shape(tensors, "topk_weights", tuple(ids.shape), "as topk_ids")
    _check_slots(ids.numel(), 1)
    _check_between("the number of experts", experts, MAX_EXPERTS, "divide them over several layers by expert_map")
    _check_expert_map(tensors)
    if expert_map is not None:
        _check_rank("expert_map", expert_map, 1, "[experts of the model]")


def validate_route(
    logits: Any, k: Any, scoring: Any, bias: Any, groups: Any, topk_groups: Any, renormalize: Any, scale: Any
) -> None:
    """logits [T, E] of a floating type, bias float32 [E], 1 <= k <= 32 and at most the experts that can be chosen."""
    tensors = _dense_tensors({"logits": logits}, {"bias": bias})
    check_word("scoring", scoring, SCORINGS)
    check_flag("renormalize", renormalize)
    for name, value in (("k", k), ("groups", groups), ("topk_groups", topk_groups)):
        check_integer(name, value)
    check_scale(scale)
    _check_devices("logits", tensors)
    if logits.dtype not in _ANY_FLOAT:
        msg = f"logits is {_word(logits.dtype)}; supported: float16, bfloat16, float32; convert it with .to()"
        raise DtypeError(msg)
    _check_rank("logits", logits, 2, "[tokens, experts]")
    tokens, experts = logits.shape
    _check_between("the number of experts", experts, MAX_EXPERTS, "use torch.topk")
    if bias is not None and bias.dtype is not torch.float32:
        msg = f"bias is {_word(bias.dtype)}; float32 is needed; convert it with .float()"
        raise DtypeError(msg)
    _check_shape(tensors, "bias", (experts,), "[experts]")
    check_choices(experts, k, groups, topk_groups, "k")
    _check_slots(tokens, k)


def check_choices(experts: Any, k: Any, groups: Any, topk_groups: Any, name: str = "top_k") -> None:
    """1 <= k <= 32 and at most the experts of the groups that stay; ``name`` is what the caller calls k. None: one group, all."""
    for option, value in (("groups", groups), ("topk_groups", topk_groups)):
        if value is not None:
            check_integer(option, value)
    groups = 1 if groups is None else groups
    topk_groups = groups if topk_groups is None else topk_groups
    if groups < 1 or groups > MAX_GROUPS or experts % groups != 0:
        msg = f"groups is {groups}; a divisor of the {experts} experts is needed, at most {MAX_GROUPS}"
        raise ArgumentError(msg)
    if topk_groups < 1 or topk_groups > groups:
        msg = f"topk_groups is {topk_groups}; 1 to the number of groups, {groups}, is needed"
        raise ArgumentError(msg)
    eligible = experts // groups * topk_groups
    if k < 1 or k > eligible or k > MAX_TOP_K:
        msg = f"{name} is {k}; supported: 1 to {MAX_TOP_K}, and at most the {eligible} experts that can be chosen"
        raise ArgumentError(msg)


def check_scale(scale: Any) -> None:
    if not is_number(scale):
        msg = f"scale must be a number; found {type(scale).__name__}; multiply the weights by a tensor afterwards"
        raise ArgumentTypeError(msg)
    if not isinstance(scale, (torch.SymFloat, torch.SymInt)) and not abs(scale) <= MAX_SCALE:
        msg = f"scale is {scale}; a number that is finite in float32 is needed; 1.0 leaves the weights as they are"
        raise ArgumentError(msg)


def check_out(out: Any, x: Tensor, dtype: torch.dtype | None = None) -> None:
    """``out`` can take the result for ``x`` [T, H]: of its shape and device, of ``dtype`` or its own, rows contiguous and apart."""
    if not isinstance(out, Tensor):
        msg = f"out must be a torch.Tensor or None; found {type(out).__name__}; pass torch.empty_like(x)"
        raise ArgumentTypeError(msg)
    _check_devices("x", _dense_tensors({"x": x, "out": out}, {}))
    dtype = x.dtype if dtype is None else dtype
    if out.dtype != dtype:
        msg = f"out is {_word(out.dtype)}; {_word(dtype)} is needed; make it with torch.empty"
        raise DtypeError(msg)
    _check_shape({"out": out}, "out", tuple(x.shape), "[tokens, hidden]")
    rows_overlap = out.shape[0] > 1 and out.stride(0) < out.shape[1]
    if rows_overlap or (out.shape[1] > 1 and out.stride(1) != 1):
        msg = f"out has strides {list(out.stride())}; rows that are contiguous and apart are needed; pass a contiguous tensor"
        raise ShapeError(msg)


def check_integer(name: str, value: Any) -> None:
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        msg = f"{name} must be an integer; found {value!r} ({type(value).__name__})"
        raise ArgumentTypeError(msg)


def validate_grouped(a: Any, b: Any, offsets: Any) -> None:
    """a [M, K], b [E, K, N] of one dtype; offsets int32 [E]; on a GPU K and N are multiples of 8."""
    tensors = _check_grouped_tensors(a, b, offsets)
    _check_rank("a", a, 2, "[rows, k]")
    _check_rank("b", b, 3, "[experts, k, n]")
    _check_shape(tensors, "b", (b.shape[0], a.shape[1], b.shape[2]), "[experts, k, n]")
    _check_between("the number of experts", b.shape[0], MAX_EXPERTS, "divide them over several calls")
    _check_between("k", b.shape[1], MAX_SIZE, "check a")
    _check_between("n", b.shape[2], MAX_SIZE, "check b")
    _check_shape(tensors, "offsets", (b.shape[0],), "[experts]")
    _check_gpu_multiples(a, {"k": b.shape[1], "n": b.shape[2]})


def validate_grouped_gradient(a: Any, b: Any, offsets: Any) -> None:
    """a [N, M], b [M, K] of one dtype; offsets int32 [E]; on a GPU N and K are multiples of 8."""
    tensors = _check_grouped_tensors(a, b, offsets)
    _check_rank("a", a, 2, "[n, rows]")
    _check_rank("b", b, 2, "[rows, k]")
    _check_rank("offsets", offsets, 1, "[experts]")
    _check_shape(tensors, "b", (a.shape[1], b.shape[1]), "[rows, k]")
    _check_between("the number of experts", offsets.shape[0], MAX_EXPERTS, "divide them over several calls")
    _check_between("n", a.shape[0], MAX_SIZE, "check a")
    _check_between("k", b.shape[1], MAX_SIZE, "check b")
    _check_gpu_multiples(a, {"n": a.shape[0], "k": b.shape[1]})


def _check_grouped_tensors(a: Any, b: Any, offsets: Any) -> dict[str, Tensor]:
    tensors = _dense_tensors({"a": a, "b": b, "offsets": offsets}, {})
    _check_devices("a", tensors)
    _check_supported("a", a)
    if b.dtype != a.dtype:
        msg = f"b is {_word(b.dtype)}; a's {_word(a.dtype)} is needed; convert it with .to(a.dtype)"
        raise DtypeError(msg)
    if offsets.dtype is not torch.int32:
        msg = f"offsets is {_word(offsets.dtype)}; int32 is needed; convert it with .to(torch.int32)"
        raise DtypeError(msg)
    return tensors


def check_word(name: str, value: Any, words: Sequence[str]) -> None:
    if not isinstance(value, str):
        msg = f"{name} must be text; found {type(value).__name__}; use one of {', '.join(words)}"
        raise ArgumentTypeError(msg)
    if value not in words:
        msg = f"{name} is {value!r}; supported: {', '.join(words)}; use one of them"
        raise ArgumentError(msg)


def _dense_tensors(needed: Mapping[str, Any], optional: Mapping[str, Any]) -> dict[str, Tensor]:
    given = {**needed, **{name: tensor for name, tensor in optional.items() if tensor is not None}}
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            msg = f"{name} must be a torch.Tensor; found {type(tensor).__name__}; convert it with torch.as_tensor"
            raise ArgumentTypeError(msg)
        if tensor.is_nested or tensor.layout is not torch.strided:
            found = "nested" if tensor.is_nested else str(tensor.layout)
            msg = f"{name} must be a dense (strided) tensor; found a {found} tensor; pad or densify it"
            raise ArgumentError(msg)
        if has_names(tensor):
            msg = f"{name} has named dimensions {tensor.names}; no operator here knows names; drop them with .rename(None)"
            raise ArgumentError(msg)
    return given


def _check_devices(first: str, tensors: Mapping[str, Tensor]) -> None:
    device = tensors[first].device
    for name, tensor in tensors.items():
        if tensor.device != device:
            msg = (
                f"all tensors must be on one device; found {first} on {device} and {name} on {tensor.device}; "
                f"move it with .to({first}.device)"
            )
            raise DeviceError(msg)
    if device.type not in DTYPES:
        msg = f"no kernel for tensors on {device}; supported: cpu, cuda; move them with .to('cpu') or .to('cuda')"
        raise DeviceError(msg)


def _check_supported(name: str, tensor: Tensor) -> None:
    supported = DTYPES[tensor.device.type]
    if tensor.dtype not in supported:
        names = ", ".join(map(_word, supported))
        msg = (
            f"{name} is {_word(tensor.dtype)}, which has no kernel on {tensor.device.type}; supported: {names}; convert the "
            "tensors, or call under torch.autocast"
        )
        raise DtypeError(msg)


def _check_ids(ids: Tensor) -> None:
    if ids.dtype not in (torch.int32, torch.int64):
        msg = f"topk_ids is {_word(ids.dtype)}; int32 or int64 is needed; convert it with .to()"
        raise DtypeError(msg)


def _check_expert_map(tensors: Mapping[str, Tensor]) -> None:
    if "expert_map" in tensors and tensors["expert_map"].dtype is not torch.int32:
        msg = f"expert_map is {_word(tensors['expert_map'].dtype)}; int32 is needed; convert it with .to(torch.int32)"
        raise DtypeError(msg)


def _check_rank(name: str, tensor: Tensor, rank: int, axes: str) -> None:
    if tensor.dim() != rank:
        msg = f"{name} has shape {shape_of(tensor)}; {axes} is needed; reshape it"
        raise ShapeError(msg)
    if any(size > MAX_SIZE for size in tensor.shape):
        msg = f"{name} has shape {shape_of(tensor)}; each size must be below 2^31"
        raise ShapeError(msg)


def _check_shape(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], axes: str) -> None:
    if name in tensors and tuple(tensors[name].shape) != shape:
        msg = f"{name} has shape {shape_of(tensors[name])}; {list(shape)} {axes} is needed"
        raise ShapeError(msg)


def _check_between(what: str, value: int, most: int, next_step: str) -> None:
    if value < 1 or value > most:
        msg = f"{what} is {value}; supported: 1 to {most}; {next_step}"
        raise ShapeError(msg)


def _check_gpu_multiples(tensor: Tensor, sizes: Mapping[str, int]) -> None:
    for what, value in sizes.items() if tensor.device.type == "cuda" else ():
        if value % GPU_MULTIPLE != 0:
            msg = (
                f"{what} is {value}; on a GPU it must be a multiple of {GPU_MULTIPLE}; pad the weights and x with zeros, "
                "or use CPU tensors"
            )
            raise ShapeError(msg)


def _check_slots(tokens: int, top_k: int) -> None:
    if tokens * top_k > MAX_SIZE:
        msg = (
            f"{tokens} tokens of {top_k} experts each are {tokens * top_k} rows; below 2^31 is needed: split the tokens"
        )
        raise ShapeError(msg)


def raise_cause(error: Exception, validate: Callable[..., None], arguments: Sequence[Any]) -> None:
    """Raise the typed error for the rule that these arguments break; return where none is broken.

    Out of memory and other errors of torch are not explained.
    """
    if isinstance(error, (FlashmoeError, torch.OutOfMemoryError)):
        return
    coded = translate(error)
    try:
        validate(*arguments)
    except FlashmoeError as broken_rule:
        raise broken_rule from error
    if coded is not None:
        raise coded from error


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
