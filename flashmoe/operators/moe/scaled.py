"""The layer with e4m3 weights, which have a scale for each 128 by 128 of them, and activations with one for each 128 of a row.

``_fused_moe_scaled`` is the compiled operator, for GPUs that have its kernels. ``_fused_moe_scaled_torch`` computes the same in
torch's operators, on the CPU and other GPUs: both quantise x (unless it comes quantised) and, between the two products, the
activation; sums are float32 and each row's result is rounded to the output's dtype before a token's rows are added up in float32.
Neither has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flashmoe.errors import ArgumentError, DtypeError, ShapeError
from flashmoe.operator import Operator
from flashmoe.operators.moe import arguments as rules
from flashmoe.operators.moe.quantize import BLOCK, E4M3, quantize

SCHEMA = (
    "_fused_moe_scaled_torch(Tensor x, Tensor w13, Tensor w2, Tensor w13_scale, Tensor w2_scale, Tensor topk_weights, "
    "Tensor topk_ids, Tensor? x_scale, Tensor? expert_map, Tensor? shared, str activation) -> Tensor"
)
NEXT_STEP = "convert it with .to(torch.float8_e4m3fn) and its scales, or give bfloat16 weights without scales"


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
    tensors = rules._dense_tensors(needed, optional)
    rules.check_word("activation", activation, rules.ACTIVATIONS)
    rules._check_devices("x", tensors)
    _check_dtypes(tensors)
    rules._check_expert_map(tensors)
    rules._check_ids(topk_ids)
    tokens, hidden, intermediate, experts = rules._layer_sizes(x, w13, w2, False)
    halves = 2 * intermediate
    w13_blocks, w2_blocks = (blocks(halves), blocks(hidden)), (blocks(hidden), blocks(intermediate))
    shape = rules._check_shape
    shape(tensors, "w13_scale", (experts, *w13_blocks), "[experts, ceil(2 * intermediate / 128), ceil(hidden / 128)]")
    shape(tensors, "w2_scale", (experts, *w2_blocks), "[experts, ceil(hidden / 128), ceil(intermediate / 128)]")
    shape(tensors, "x_scale", (tokens, blocks(hidden)), "[tokens, ceil(hidden / 128)]")
    shape(tensors, "shared", (tokens, hidden), "[tokens, hidden]")
    rules._check_rank("topk_ids", topk_ids, 2, "[tokens, top_k]")
    top_k = topk_ids.shape[1]
    shape(tensors, "topk_ids", (tokens, top_k), "[tokens, top_k]")
    rules._check_between("the number of experts of a token", top_k, rules.MAX_TOP_K, "split the choices")
    rules._check_slots(tokens, top_k)
    shape(tensors, "topk_weights", (tokens, top_k), "[tokens, top_k], as topk_ids")
    if expert_map is not None:
        rules._check_rank("expert_map", expert_map, 1, "[experts of the model]")


def blocks(size: int) -> int:
    return (size + BLOCK - 1) // BLOCK


def _check_dtypes(tensors: Mapping[str, Tensor]) -> None:
    x, word = tensors["x"], rules._word
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
    out = output_dtype(x)
    if "shared" in tensors and tensors["shared"].dtype is not out:
        msg = f"shared is {word(tensors['shared'].dtype)}; the output's {word(out)} is needed; convert it with .to()"
        raise DtypeError(msg)
    if tensors["topk_weights"].dtype not in (torch.float32, torch.float16, torch.bfloat16):
        found = word(tensors["topk_weights"].dtype)
        msg = f"topk_weights is {found}; float32, float16 or bfloat16 is needed; convert it with .float()"
        raise DtypeError(msg)


def check_blocks(x: Tensor, w2: Tensor) -> None:
    """What the kernels need beside the rules."""
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


def output_dtype(x: Tensor) -> torch.dtype:
    return torch.bfloat16 if x.dtype is E4M3 else x.dtype


def fake(x: Tensor, *others: Any) -> Tensor:
    validate_for_kernels(x, *others)
    return x.new_empty(x.shape, dtype=output_dtype(x))


def fake_torch(x: Tensor, *others: Any) -> Tensor:
    validate_scaled(x, *others)
    return x.new_empty(x.shape, dtype=output_dtype(x))


def _clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


_ACTIVATIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": lambda gate, up: functional.silu(gate) * up,
    "geglu": lambda gate, up: functional.gelu(gate) * up,
    "geglu_tanh": lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
    "reglu": lambda gate, up: functional.relu(gate) * up,
    "clamped_swiglu": _clamped_swiglu,
}


def dequantize_rows(values: Tensor, scales: Tensor) -> Tensor:
    """float32 of [rows, columns] with [rows, ceil(columns / 128)]."""
    return values.float() * scales.repeat_interleave(BLOCK, 1)[:, : values.shape[1]]


def dequantize_weights(values: Tensor, scales: Tensor) -> Tensor:
    """float32 of one expert's [n, k] with [ceil(n / 128), ceil(k / 128)]."""
    wide = scales.repeat_interleave(BLOCK, 0)[: values.shape[0]]
    return dequantize_rows(values, wide)


def in_torch(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor,
    w2_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    x_scale: Tensor | None,
    expert_map: Tensor | None,
    shared: Tensor | None,
    activation: str,
) -> Tensor:
    """The layer; only weights of experts that somebody chose are looked at. Reads ids on the host."""
    validate_scaled(x, w13, w2, w13_scale, w2_scale, topk_weights, topk_ids, x_scale, expert_map, shared, activation)
    ids = topk_ids.long()
    if expert_map is not None:
        known = (ids >= 0) & (ids < expert_map.shape[0])
        mapped = expert_map.long()[torch.where(known, ids, 0)] if expert_map.shape[0] else torch.full_like(ids, -1)
        ids = torch.where(known, mapped, -1)
    tokens = dequantize_rows(*(quantize(x) if x_scale is None else (x, x_scale)))
    dtype = output_dtype(x)
    rows = torch.zeros((*ids.shape, x.shape[1]), dtype=dtype, device=x.device)
    for expert in ids.unique().tolist():
        if not 0 <= expert < w13.shape[0]:
            continue
        chosen = (ids == expert).nonzero(as_tuple=True)
        both = tokens[chosen[0]] @ dequantize_weights(w13[expert], w13_scale[expert]).mT
        active = dequantize_rows(*quantize(_ACTIVATIONS[activation](*both.chunk(2, dim=1))))
        rows[chosen] = (active @ dequantize_weights(w2[expert], w2_scale[expert]).mT).to(dtype)
    has_row = ((ids >= 0) & (ids < w13.shape[0])).unsqueeze(-1)
    total = torch.zeros(x.shape, device=x.device) if shared is None else shared.float()
    for choice in range(ids.shape[1]):
        part = topk_weights[:, choice, None].float() * rows[:, choice].float()
        total = total + torch.where(has_row[:, choice], part, 0.0)
    return total.to(dtype)


def flops(
    x: Any, w13: Any, w2: Any, w13_scale: Any, w2_scale: Any, weights: Any, topk_ids: Any, *_: Any, **__: Any
) -> int:
    """Of shapes: gate, up and down for every slot, two operations for a multiply-add."""
    return 6 * int(topk_ids[0] * topk_ids[1] * w2[1] * w2[2])


def _vmap(call: str) -> Callable[..., tuple[Tensor, int]]:
    def one_by_one(info: Any, in_dims: tuple[int | None, ...], *values: Any) -> tuple[Tensor, int]:
        """One call for each."""
        operator = getattr(torch.ops.flashmoe, call).default
        parts = (
            [value if dim is None else value.select(dim, index) for value, dim in zip(values, in_dims, strict=True)]
            for index in range(info.batch_size)
        )
        return torch.stack([operator(*part) for part in parts]), 0

    return one_by_one


_CAST = (0, 9)  # x, which is left alone where it has 8 bits, and shared

OPERATORS = (
    Operator("_fused_moe_scaled", fake=fake, flops=flops, autocast=_CAST, vmap=_vmap("_fused_moe_scaled")),
    Operator(
        "_fused_moe_scaled_torch",
        fake=fake_torch,
        flops=flops,
        autocast=_CAST,
        vmap=_vmap("_fused_moe_scaled_torch"),
        impls={"CPU": in_torch, "CUDA": in_torch},
        schema=SCHEMA,
    ),
)
