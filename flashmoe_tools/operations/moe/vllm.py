"""The layer's two products by vLLM's Triton kernel with its tuned table, launched as in version 0.33.

The rest of the layer (sorting, rounding, gating, the sum over choices) is not timed: it is done once, or when a result
is judged.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashmoe_tools.bench.contenders import Prepared
from flashmoe_tools.operations.moe.reference import Products

MODULE = "vllm.model_executor.layers.fused_moe.fused_moe"
BLOCK = 128  # values per scale

Scaled = tuple[Tensor, Tensor | None]  # values, and for 8 bits the float32 scales of their blocks
Aligned = tuple[Tensor | None, Tensor, Tensor]  # the rows' slots, an expert for each block of rows, the number of rows


@dataclass(frozen=True)
class Layer:
    """w13 [E, 2I, H] and w2 [E, H, I] with their scales; ``rounded`` converts rows to the products' input format."""

    w13: Scaled
    w2: Scaled
    topk_weights: Tensor
    rounded: Callable[[Tensor], Scaled] = lambda rows: (rows.bfloat16(), None)


def gated(z: Tensor) -> Tensor:
    """float32 [M, I]"""
    gate, up = z.float().chunk(2, dim=1)
    return F.silu(gate) * up


def products(x: Tensor, layer: Layer, routings: Sequence[Tensor]) -> Prepared:
    """Each call uses the next of ``routings`` [T, k]."""
    kernel, config = import_module(MODULE).fused_moe_kernel, _tuned(layer, len(x))
    top_k, slots = layer.topk_weights.shape[1], layer.topk_weights.numel()
    aligned = [_aligned(ids, len(layer.w13[0]), config["BLOCK_SIZE_M"]) for ids in routings]
    rows, z = layer.rounded(x), x.new_empty(slots, layer.w13[0].shape[1])
    y = x.new_empty(slots, x.shape[1])

    def product(turn: int, a: Scaled, b: Scaled, out: Tensor, top_k: int, weigh: bool) -> None:
        _launch(kernel, config, aligned[turn], a, b, out, layer.topk_weights, top_k, weigh)

    h = []
    for turn in range(len(aligned)):
        product(turn, rows, layer.w13, z, top_k, weigh=False)
        h.append(layer.rounded(gated(z)))
    row, ones = torch.arange(slots, device=z.device).view(len(x), top_k), torch.ones_like(layer.topk_weights)
    turns = iter(range(1 << 62))

    def call() -> Products:
        turn = next(turns) % len(aligned)
        product(turn, rows, layer.w13, z, top_k, weigh=False)
        product(turn, h[turn], layer.w2, y, 1, weigh=True)
        return Products(y, row, ones)

    return Prepared(call)


def _tuned(layer: Layer, tokens: int) -> dict[str, int]:
    """The row of the table for the nearest number of tokens."""
    w2, scale = layer.w2
    gpu = torch.cuda.get_device_name().replace(" ", "_")
    form = "" if scale is None else f",dtype=fp8_w8a8,block_shape=[{BLOCK},{BLOCK}]"
    name = f"E={len(w2)},N={w2.shape[2]},device_name={gpu}{form}.json"
    table = json.loads((Path(str(import_module(MODULE).__file__)).parent / "configs" / name).read_text())
    return dict(table[min((size for size in table if size.isdigit()), key=lambda size: abs(int(size) - tokens))])


def padded(ids: Tensor, experts: int, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows sorted by expert and padded to a multiple per expert.

    Returns (slots [M], -1 for padding; expert [M]; row of each slot).
    """
    flat = ids.flatten().long()
    order, counts = flat.argsort(stable=True), torch.bincount(flat, minlength=experts)
    whole = (counts + multiple - 1) // multiple * multiple
    shift = (whole.cumsum(0) - whole) - (counts.cumsum(0) - counts)
    rows = torch.empty_like(flat)
    rows[order] = torch.arange(flat.numel(), device=flat.device) + shift[flat[order]]
    slots = torch.full((int(whole.sum()),), -1, dtype=torch.int64, device=flat.device)
    slots[rows] = torch.arange(flat.numel(), device=flat.device)
    return slots, torch.arange(experts, device=flat.device).repeat_interleave(whole), rows


def _aligned(ids: Tensor, experts: int, block: int) -> Aligned:
    """Like vLLM: for few tokens there is no list of rows, and each of their choices gets a block."""
    if ids.numel() * 4 <= experts:
        return None, ids.flatten(), torch.tensor([ids.numel() * block], dtype=torch.int32, device=ids.device)
    slots, expert_of_row, _ = padded(ids, experts, block)
    rows = torch.where(slots < 0, ids.numel(), slots).int()
    return rows, expert_of_row[::block].int(), torch.tensor([len(rows)], dtype=torch.int32, device=ids.device)


def _launch(
    kernel: Any,
    tuned: dict[str, int],
    aligned: Aligned,
    a: Scaled,
    b: Scaled,
    out: Tensor,
    weights: Tensor,
    top_k: int,
    weigh: bool,
) -> None:
    language = import_module("triton.language")
    rows, experts, count = aligned
    (values, scales), (b_values, b_scales) = a, b
    config, block = dict(tuned), 0
    of_scales: tuple[int, ...] = (0,) * 5
    if scales is not None and b_scales is not None:
        block, config["BLOCK_SIZE_K"] = BLOCK, min(tuned["BLOCK_SIZE_K"], BLOCK)
        of_scales = (*scales.stride(), b_scales.stride(0), b_scales.stride(2), b_scales.stride(1))
    block_m, block_n, slots = config["BLOCK_SIZE_M"], config["BLOCK_SIZE_N"], len(out)
    most = slots * block_m if rows is None else min(rows.numel(), slots * block_m)
    grid = (-(-most // block_m) * -(-b_values.shape[1] // block_n),)
    strides = (*values.stride(), b_values.stride(0), b_values.stride(2), b_values.stride(1), *out.stride(), *of_scales)
    sizes = (*b_values.shape[1:], most, slots)
    kernel[grid](
        *(values, b_values, out, None, scales, b_scales, weights, rows, experts, count, *sizes, *strides),
        *(0, 0, block, block),
        MUL_ROUTED_WEIGHT=weigh,
        top_k=top_k,
        compute_type=language.bfloat16,
        use_fp8_w8a8=block > 0,
        use_int8_w8a8=False,
        use_int8_w8a16=False,
        per_channel_quant=False,
        naive_block_assignment=rows is None,
        HAS_BIAS=False,
        SPLIT_K=1,
        SWAP_AB=block > 0 and block_m < 64 <= block_n,
        USE_TD=False,
        **config,
    )
