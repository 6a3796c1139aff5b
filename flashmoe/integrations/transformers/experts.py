"""The experts of transformers' models as one ``fused_moe`` call: weights in 16 bits, e4m3 (FP8Experts) and mxfp4 (gpt-oss)."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from flashmoe import fallback
from flashmoe.errors import ArgumentError, FlashmoeError
from flashmoe.moe.api import fused_moe
from flashmoe.moe.options import CLAMPED_ALPHA, CLAMPED_LIMIT, Activation, Layout
from flashmoe.moe.packed import can_pack, is_packed, pack_mxfp4, unpack_mxfp4

_PROBE_ROWS = 64
_PROBE_WIDTH = 8
_BLOCK = 32  # mxfp4 weights of a row per scale
_GATED: dict[str, Layout | None] = {"gate_up_proj": "interleaved", "down_proj": None}
_FP8 = ((128, 128), "dynamic", torch.float8_e4m3fn)  # block_size, activation_scheme and dtype of the weights
_OTHER = "use experts_implementation='grouped_mm' for this model"
_DEQUANTISED = (
    "load the model without packed_config: transformers then dequantises its experts, or runs them on its own kernels"
)


def _gates() -> dict[Activation, Callable[[Tensor, Tensor], Tensor]]:
    """The activations of fused_moe as torch operations on gate and up values."""
    functional = nn.functional

    def clamped(gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=CLAMPED_LIMIT), up.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT)
        return gate * torch.sigmoid(CLAMPED_ALPHA * gate) * (up + 1.0)

    return {
        "swiglu": lambda gate, up: functional.silu(gate) * up,
        "geglu": lambda gate, up: functional.gelu(gate) * up,
        "geglu_tanh": lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
        "reglu": lambda gate, up: functional.relu(gate) * up,
        "clamped_swiglu": clamped,
    }


GATES = MappingProxyType(_gates())


def recognise_gate(experts: Any) -> Activation:
    """The activation of fused_moe that matches the module's own gate, found by comparing values.

    Raises ArgumentError, with the module's name, if none matches.
    """
    if not getattr(experts, "has_gate", True):
        msg = f"{type(experts).__name__} has no gate; fused_moe supports only gated experts; use another experts implementation"
        raise ArgumentError(msg)
    generator = torch.Generator().manual_seed(0)
    gate, up = (8 * torch.randn(_PROBE_ROWS, _PROBE_WIDTH, generator=generator) for _ in range(2))
    if getattr(experts, "is_concatenated", True):
        joined = torch.cat((gate, up), dim=-1)
    else:
        joined = torch.stack((gate, up), dim=-1).flatten(-2)
    with torch.no_grad():
        found = experts._apply_gate(joined)
    for name, function in GATES.items():
        if torch.allclose(found, function(gate, up), rtol=1e-4, atol=1e-4):
            return name
    msg = f"the gate of {type(experts).__name__} is not one that fused_moe supports ({', '.join(GATES)}); {_OTHER}"
    raise ArgumentError(msg)


def experts_forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states [T, H], top_k_index and top_k_weights [T, k]; an index of num_experts or more means no expert here."""
    w2 = experts.down_proj
    if getattr(experts, "has_post_expert_norm", False):
        msg = f"{type(experts).__name__} normalises each expert's output, which fused_moe does not; {_OTHER}"
        raise ArgumentError(msg)
    if w2.dtype == torch.float32 and w2.device.type == "cuda":
        from transformers.integrations.moe import grouped_mm_experts_forward

        fallback.note_fallback("float32 experts have no CUDA kernel")
        slow: Tensor = grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
        return slow
    activation = _gate_of(experts)  # rejects experts without a gate, which have no gate_up_proj
    has_bias = getattr(experts, "has_bias", False)
    return _call(
        experts,
        hidden_states,
        (experts.gate_up_proj, w2),
        w2.dtype,
        top_k_index,
        top_k_weights,
        b13=experts.gate_up_proj_bias if has_bias else None,
        b2=experts.down_proj_bias if has_bias else None,
        activation=activation,
        layout="concat" if getattr(experts, "is_concatenated", True) else "interleaved",
        transposed=getattr(experts, "is_transposed", False),
    )


def fp8_experts_forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' ``FP8Experts``: e4m3 weights with a scale per 128 by 128 block; activations are quantised in the call."""
    activation = _gate_of(experts)
    weights = experts.gate_up_proj
    found = (experts.block_size and tuple(experts.block_size), experts.activation_scheme, weights.dtype)
    if found != _FP8:
        msg = (
            f"{type(experts).__name__} has block_size {found[0]}, activation_scheme {found[1]!r} and weights of {found[2]}; fused_moe takes "
            f"{_FP8[0]}, {_FP8[1]!r} and {_FP8[2]}; {_OTHER}"
        )
        raise ArgumentError(msg)
    return _call(
        experts,
        hidden_states,
        (weights, experts.down_proj),
        hidden_states.dtype if hidden_states.dtype == torch.float16 else torch.bfloat16,
        top_k_index,
        top_k_weights,
        activation=activation,
        w13_scale=experts.gate_up_proj_scale_inv.float(),  # converts float8_e8m0fnu too
        w2_scale=experts.down_proj_scale_inv.float(),
    )


class Mxfp4Experts(nn.Module):
    """Replaces gpt-oss's experts: an mxfp4 checkpoint's tensors unchanged, under the checkpoint's names.

    On GPUs of compute capability 9.0 they are repacked in place (:func:`flashmoe.pack_mxfp4`) when the checkpoint is loaded, or in the
    first call; the bits of results and of a state dict do not change.
    """

    def __init__(self, experts: Any) -> None:
        """``experts``: the module to replace, whose sizes and gate are read."""
        super().__init__()
        count, hidden, intermediate = experts.num_experts, experts.hidden_size, experts.intermediate_size
        if (experts.alpha, experts.limit) != (CLAMPED_ALPHA, CLAMPED_LIMIT):
            msg = (
                f"the gate of {type(experts).__name__} has alpha {experts.alpha} and limit {experts.limit}; fused_moe computes "
                f"{CLAMPED_ALPHA} and {CLAMPED_LIMIT}; {_DEQUANTISED}"
            )
            raise ArgumentError(msg)
        self._sizes = (hidden, intermediate)
        for name, rows, columns in (("gate_up_proj", 2 * intermediate, hidden), ("down_proj", hidden, intermediate)):
            tensors = {
                "blocks": torch.empty(count, rows, columns // _BLOCK, _BLOCK // 2, dtype=torch.uint8),
                "scales": torch.empty(count, rows, columns // _BLOCK, dtype=torch.uint8),
                "bias": torch.empty(count, rows, dtype=torch.bfloat16),
            }
            for kind, tensor in tensors.items():
                self.register_parameter(f"{name}_{kind}", nn.Parameter(tensor, requires_grad=False))

    @property
    def is_packed(self) -> bool:
        return is_packed(self.gate_up_proj_blocks)

    def pack(self) -> None:
        """Reorder the tensors for the device's kernels, or back to the checkpoint's order if there are none."""
        wanted = can_pack(self.get_parameter("gate_up_proj_blocks").device, *self._sizes)
        if wanted == self.is_packed:
            return
        for name, gated in _GATED.items():
            blocks, scales = (self.get_parameter(f"{name}_{kind}") for kind in ("blocks", "scales"))
            if wanted:
                blocks.data = pack_mxfp4(blocks.data, scales.data, gated=gated)
                scales.data = scales.data.new_empty(0)
            else:
                blocks.data, scales.data = _checkpoint_form(blocks.data, gated)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_packed:
            for name, gated in _GATED.items():
                found = _checkpoint_form(destination[f"{prefix}{name}_blocks"], gated)
                destination[f"{prefix}{name}_blocks"], destination[f"{prefix}{name}_scales"] = found

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if not is_compiling() and not _is_capturing(hidden_states):
            self.pack()
        scales = (None, None) if self.is_packed else (self.gate_up_proj_scales, self.down_proj_scales)
        return _call(
            self,
            hidden_states,
            (self.gate_up_proj_blocks, self.down_proj_blocks),
            torch.bfloat16,
            top_k_index,
            top_k_weights,
            b13=self.gate_up_proj_bias.to(torch.bfloat16),
            b2=self.down_proj_bias.to(torch.bfloat16),
            w13_scale=scales[0],
            w2_scale=scales[1],
            activation="clamped_swiglu",
            layout="interleaved",
            instead=_DEQUANTISED,
        )


def _checkpoint_form(packed: Tensor, gated: Layout | None) -> tuple[Tensor, Tensor]:
    """The checkpoint's blocks [E, N, K / 32, 16] and scales [E, N, K / 32]."""
    codes, scales = unpack_mxfp4(packed, gated=gated)
    return codes.unflatten(-1, (-1, _BLOCK // 2)), scales


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _gate_of(experts: Any) -> Activation:
    activation: Activation | None = getattr(experts, "_flashmoe_gate", None)
    if activation is None:
        activation = recognise_gate(experts)
        experts._flashmoe_gate = activation
    return activation


def _call(
    experts: Any,
    hidden_states: Tensor,
    weights: tuple[Any, Any],
    dtype: torch.dtype,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    instead: str = _OTHER,
    **options: Any,
) -> Tensor:
    """``fused_moe`` in ``dtype``; its errors name the module, and ``instead`` says what to do."""
    routing = top_k_weights if top_k_weights.dtype == dtype else top_k_weights.float()
    try:
        out = fused_moe(hidden_states.to(dtype), *weights, routing, top_k_index, **options)
    except FlashmoeError as error:
        msg = f"{type(experts).__name__} cannot run on flashmoe: {error}; {instead}"
        raise type(error)(msg) from error
    return out.to(hidden_states.dtype)
