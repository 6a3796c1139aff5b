"""Other libraries' two products of the layer. What else the layer is, sorting, quantisation, gating and the sum over choices, is done off
the clock: once, or where a result is judged.
"""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashmoe_tools.bench.contenders import Prepared
from flashmoe_tools.operations.moe_scaled.formats import BLOCK, LARGEST
from flashmoe_tools.operations.moe_scaled.reference import Products, ScaledInputs

VLLM = "vllm.model_executor.layers.fused_moe.fused_moe"


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3, float32 scales [rows, columns / 128]) of x [rows, columns]."""
    blocks = x.float().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(2).clamp_min(1e-30) / LARGEST
    return (blocks / scales[..., None]).to(torch.float8_e4m3fn).view(x.shape), scales


def _gated(z: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = z.float().chunk(2, dim=1)
    return quantized(F.silu(gate) * up)


def _padded(ids: Tensor, experts: int, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    """(slots [M], -1 where there is none; expert [M]; row of each slot): rows sorted by expert, of each a multiple."""
    flat = ids.flatten().long()
    order, counts = flat.argsort(stable=True), torch.bincount(flat, minlength=experts)
    whole = (counts + multiple - 1) // multiple * multiple
    shift = (whole.cumsum(0) - whole) - (counts.cumsum(0) - counts)
    rows = torch.empty_like(flat)
    rows[order] = torch.arange(flat.numel(), device=flat.device) + shift[flat[order]]
    slots = torch.full((int(whole.sum()),), -1, dtype=torch.int64, device=flat.device)
    slots[rows] = torch.arange(flat.numel(), device=flat.device)
    return slots, torch.arange(experts, device=flat.device).repeat_interleave(whole), rows


def deep_gemm(inputs: ScaledInputs) -> Prepared:
    """DeepGEMM's grouped products: rows gathered, and padded to 128 for each expert, beforehand; the first routing in every call."""
    library = import_module("deep_gemm")
    ids = inputs.routings[0]
    slots, experts, rows = _padded(ids, len(inputs.w13), BLOCK)
    expert_of_row = experts.int()
    aligned = getattr(library, "get_mn_major_tma_aligned_tensor", lambda scales: scales)

    def product(a: tuple[Tensor, Tensor], b: Tensor, scales: Tensor, out: Tensor) -> None:
        library.m_grouped_fp8_gemm_nt_contiguous(a, (b, scales), out, expert_of_row)

    values, scales = quantized(inputs.x)
    tokens = slots.clamp_min(0) // ids.shape[1]
    x = (values.view(torch.uint8)[tokens].view(torch.float8_e4m3fn), aligned(scales[tokens]))
    z = inputs.x.new_empty(len(slots), inputs.w13.shape[1])
    y = inputs.x.new_empty(len(slots), inputs.w2.shape[1])
    product(x, inputs.w13, inputs.w13_scale, z)
    values, scales = _gated(z)
    h = values, aligned(scales)

    def call() -> Products:
        product(x, inputs.w13, inputs.w13_scale, z)
        product(h, inputs.w2, inputs.w2_scale, y)
        return Products(y, rows.view(ids.shape), inputs.topk_weights)

    return Prepared(call)


def vllm_triton(inputs: ScaledInputs) -> Prepared:
    """vLLM's Triton kernel with its tuned table, as version 0.33 launches it."""
    module = import_module(VLLM)
    count, (_, intermediate), top_k = len(inputs.w13), inputs.w2.shape[1:], inputs.topk_weights.shape[1]
    gpu = torch.cuda.get_device_name().replace(" ", "_")
    name = f"E={count},N={intermediate},device_name={gpu},dtype=fp8_w8a8,block_shape=[128,128].json"
    table = json.loads((Path(str(module.__file__)).parent / "configs" / name).read_text())
    tokens = len(inputs.x)
    config = table[min((size for size in table if size.isdigit()), key=lambda size: abs(int(size) - tokens))]
    slots = tokens * top_k
    aligned = [_aligned(ids, count, config["BLOCK_SIZE_M"]) for ids in inputs.routings]
    x, z = quantized(inputs.x), inputs.x.new_empty(slots, 2 * intermediate)
    y = inputs.x.new_empty(slots, inputs.x.shape[1])

    def product(
        turn: int, a: tuple[Tensor, Tensor], b: Tensor, b_scale: Tensor, out: Tensor, top_k: int, weigh: bool
    ) -> None:
        _launch(module.fused_moe_kernel, config, aligned[turn], a, b, b_scale, out, inputs.topk_weights, top_k, weigh)

    h = []
    for turn in range(len(aligned)):
        product(turn, x, inputs.w13, inputs.w13_scale, z, top_k, weigh=False)
        h.append(_gated(z))
    rows, ones = torch.arange(slots, device=z.device).view(tokens, top_k), torch.ones_like(inputs.topk_weights)
    turns = iter(range(1 << 62))

    def call() -> Products:
        turn = next(turns) % len(aligned)
        product(turn, x, inputs.w13, inputs.w13_scale, z, top_k, weigh=False)
        product(turn, h[turn], inputs.w2, inputs.w2_scale, y, 1, weigh=True)
        return Products(y, rows, ones)

    return Prepared(call)


Aligned = tuple[Tensor | None, Tensor, Tensor]  # rows' slots, an expert for each block of rows, how many rows


def _aligned(ids: Tensor, experts: int, block: int) -> Aligned:
    """As vLLM: few tokens have no list of rows, and a block for each of their choices."""
    if ids.numel() * 4 <= experts:
        return None, ids.flatten(), torch.tensor([ids.numel() * block], dtype=torch.int32, device=ids.device)
    slots, expert_of_row, _ = _padded(ids, experts, block)
    rows = torch.where(slots < 0, ids.numel(), slots).int()
    return rows, expert_of_row[::block].int(), torch.tensor([len(rows)], dtype=torch.int32, device=ids.device)


def _launch(
    kernel: Any,
    tuned: dict[str, int],
    aligned: Aligned,
    a: tuple[Tensor, Tensor],
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    weights: Tensor,
    top_k: int,
    weigh: bool,
) -> None:
    language = import_module("triton.language")
    rows, experts, count = aligned
    config = {**tuned, "BLOCK_SIZE_K": min(tuned["BLOCK_SIZE_K"], BLOCK)}
    block_m, block_n, slots = config["BLOCK_SIZE_M"], config["BLOCK_SIZE_N"], len(out)
    padded = slots * block_m if rows is None else min(rows.numel(), slots * block_m)
    grid = (-(-padded // block_m) * -(-b.shape[1] // block_n),)
    values, scales = a
    strides = (*values.stride(), b.stride(0), b.stride(2), b.stride(1), *out.stride(), *scales.stride())
    sizes = (b.shape[1], b.shape[2], padded, slots)
    of_scales = (b_scale.stride(0), b_scale.stride(2), b_scale.stride(1))
    kernel[grid](
        *(values, b, out, None, scales, b_scale, weights, rows, experts, count, *sizes, *strides, *of_scales),
        *(0, 0, BLOCK, BLOCK),
        MUL_ROUTED_WEIGHT=weigh,
        top_k=top_k,
        compute_type=language.bfloat16,
        use_fp8_w8a8=True,
        use_int8_w8a8=False,
        use_int8_w8a16=False,
        per_channel_quant=False,
        naive_block_assignment=rows is None,
        HAS_BIAS=False,
        SPLIT_K=1,
        SWAP_AB=block_m < 64 <= block_n,
        USE_TD=False,
        **config,
    )
