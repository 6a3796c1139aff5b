"""The messages for a mixture-of-experts layer's argument rules; csrc/moe/host/arguments.cpp checks them, by these names (see flashmoe/rules.py)."""

from __future__ import annotations

from flashmoe.errors import ArgumentError, DeviceError, DtypeError, ShapeError, UnsupportedGpuError
from flashmoe.rules import by_error

_SHAPE = "{name} has shape {sizes}; {needed} {axes} is needed"
_EXPERTS = "the number of experts is {experts}; supported: 1 to {most}; "
_MULTIPLE = "it must be a multiple of {multiple}; pad the weights and x with zeros, or use CPU tensors"
RULES = by_error(
    {
        DeviceError: {
            "moe.device": "no kernel for tensors on {device}; supported: cpu, cuda; move them with .to('cpu') or .to('cuda')",
            "moe.devices": "all tensors must be on one device; found {first} on {first_device} and {name} on {device}; move it "
            "with .to({first}.device)",
        },
        DtypeError: {
            "moe.dtype": "{name} is {found}; {needed} is needed; convert it with {name}.to({target})",
            "moe.kernel_dtype": "{name} is {found}, which has no kernel on {device}; supported: {supported}; convert the "
            "tensors, or call under torch.autocast",
            "moe.swapped_routing": "topk_weights is {weights} and topk_ids {ids}: they are swapped; the order is x, w13, w2, "
            "topk_weights, topk_ids, as topk_route returns them",
            "moe.scaled_weights": "{name} is {found}, and there are scales; supported with scales: float8_e4m3fn; convert it "
            "with .to(torch.float8_e4m3fn) and its scales, or pass bfloat16 weights without scales",
            "moe.scaled_x": "x is {found}; supported with float8_e4m3fn weights: float16, bfloat16, float8_e4m3fn with "
            "x_scale; convert it with x.to(torch.bfloat16)",
            "moe.fp8_dtype": "{name} is {found}; supported with precision='fp8': bfloat16; convert it with .to(torch.bfloat16), or call "
            "under torch.autocast",
            "moe.mxfp4_x": "x is {found}; supported with mxfp4 (uint8) weights: bfloat16; convert it "
            "with .to(torch.bfloat16)",
        },
        ShapeError: {
            "moe.rank": "{name} has shape {sizes}; {axes} is needed; reshape it",
            "moe.shape": _SHAPE,
            "moe.transposed": _SHAPE + "; pass {name}.mT, or transposed={other} if both w13 and w2 have this layout",
            "moe.intermediate": "w13 and w2 disagree on the intermediate size: w13 {w13} is {w13_axes}, where 2 * intermediate is "
            "{rows}, and w2 {w2} is {w2_axes}, where intermediate is {intermediate}; check that both belong to one layer",
            "moe.topk_shapes": "topk_weights has shape {weights} and topk_ids {ids}; one shape is needed: [tokens, top_k]",
            "moe.size": "{what} is {value}; supported: 1 to {most}; check the shapes of the tensors",
            "moe.experts": _EXPERTS + "split them over several layers with expert_map",
            "moe.grouped_experts": _EXPERTS + "split them over several calls",
            "moe.route_experts": _EXPERTS + "use torch.topk",
            "moe.top_k": "the number of experts per token is {top_k}; supported: 1 to {most}; split the choices over several "
            "calls",
            "moe.slots": "{tokens} tokens of {top_k} experts each are {slots} rows; the number of rows must be below 2^31; split the tokens",
            "moe.gpu_multiple": "{what} is {value}; on a GPU " + _MULTIPLE,
            "moe.scaled_multiple": "{what} is {value}; with float8_e4m3fn weights on a GPU " + _MULTIPLE,
            "moe.fp8_multiple": "{what} is {value}; with precision='fp8' it must be a multiple of {multiple}, the number of "
            "values that share a scale; pad the weights and x with zeros, or remove precision=",
            "moe.mxfp4_multiple": "{what} is {value}; with mxfp4 (uint8) weights it must be a multiple of {multiple}, the number "
            "of weights that share a scale; pad the weights, their scales and x with zeros",
            "moe.mxfp4_packed_multiple": "{what} is {value}; with packed mxfp4 weights it must be a multiple of {multiple}; pad the weights and "
            "their scales with zeros before they are packed, and x",
            "moe.out_strides": "out must have contiguous rows that do not overlap, 16-byte aligned on a GPU; found strides "
            "{strides}; pass a contiguous tensor",
            "moe.out_overlap": "out overlaps a part of shared, which would change while it is read; pass shared itself as out, or a separate tensor",
            "moe.saved_slots": "row_slots has {slots} elements, which is not a multiple of the {tokens} tokens; pass what the "
            "forward pass returned with keep=True",
        },
        UnsupportedGpuError: {
            "moe.mxfp4_packed_gpu": "packed mxfp4 weights are on {gpu}, compute capability {major}.{minor}; supported: 9.0; pass "
            "the unpacked weights and scales",
        },
        ArgumentError: {
            "moe.word": "{name} is {found!r}; supported: {supported}; use one of them",
            "moe.mxfp4_packed_cpu": "packed mxfp4 weights are on the CPU, which supports only unpacked ones; pass the unpacked "
            "weights and scales, or move everything to a GPU of compute capability 9.0",
            "moe.groups": "groups is {groups}; a divisor of the {experts} experts is needed, at most {most}",
            "moe.topk_groups": "topk_groups is {topk_groups}; 1 to the number of groups, {groups}, is needed",
            "moe.k": "the number of experts per token is {k}; supported: 1 to {most}, and at most the {eligible} experts that "
            "can be chosen",
            "moe.scale": "scale is {scale}; a number that is finite in float32 is needed; 1.0 leaves the weights as they are",
            "moe.expert_id": "topk_ids[{row}, {column}] is {id}; supported: 0 to {last}, unless expert_map says what ids mean; "
            "unset FLASHMOE_CHECK_VALUES if such ids are padding",
            "moe.offsets": "offsets[{index}] is {end}; the ends of the experts' rows must increase from {least} to at most "
            "{most}, the number of rows",
            "moe.x_scale": "x_scale is only used with x in float8_e4m3fn; x is {found}; remove x_scale=",
            "moe.no_x_scale": "x is float8_e4m3fn, which needs its scales; x_scale is None; pass it",
        },
    }
)
