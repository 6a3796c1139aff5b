"""vLLM's experts with fp8 (128 by 128 blocks) and mxfp4 weights on ``flashmoe.fused_moe``. Experimental.

vLLM has no registry for these: each of its quantisation methods calls one function that returns a backend and a class, and that function
is wrapped in the method's module. The backend decides how vLLM converts the loaded weights; those returned here leave them unchanged,
except for gpt-oss's weights, which are packed (``flashmoe.pack_mxfp4``) if the GPU has the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.quantization import fp8, mxfp4
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
    kMxfp4Static,
)
from vllm.platforms import current_platform

from flashmoe.errors import ArgumentError
from flashmoe.integrations.vllm.experts import ACTIVATIONS, FlashmoeExperts, admits, unsupported_reason
from flashmoe.moe import scaled
from flashmoe.moe.packed import BLOCK_BYTES, SIDE, can_pack, pack_mxfp4

MXFP4_CAPABILITY = (8, 0)


class FlashmoeFp8Experts(FlashmoeExperts):
    """e4m3 weights with a float32 scale per block; vLLM quantises x, with one scale per 128 values of a row."""

    multiple = scaled.BLOCK

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        super().__init__(moe_config, quant_config)
        block = quant_config.block_shape
        if block is None or list(block) != [scaled.BLOCK, scaled.BLOCK]:
            msg = f"fp8 experts have blocks of {block}; fused_moe's are 128 by 128: unset FLASHMOE_VLLM_EXPERTS for this model"
            raise ArgumentError(msg)

    @staticmethod
    def _supports_current_device() -> bool:
        return bool(current_platform.is_cuda()) and tuple(current_platform.get_device_capability()) == scaled.CAPABILITY

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return bool(weight_key == kFp8Static128BlockSym and activation_key == kFp8Dynamic128Sym)

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation in ACTIVATIONS and ACTIVATIONS[activation][1] == "concat"

    def scales(self, x_scale: Tensor | None) -> dict[str, Any]:
        quantised = {"w13_scale": self.quant_config.w1_scale, "w2_scale": self.quant_config.w2_scale}
        return {**quantised, "x_scale": None if x_scale is None else x_scale.contiguous()}


class FlashmoeMxfp4Experts(FlashmoeExperts):
    """The checkpoint's codes, two per byte, and a one-byte scale per 32 values, or both packed for the GPU; x stays bfloat16."""

    multiple = 32

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def _supports_current_device() -> bool:
        return bool(current_platform.is_cuda()) and bool(current_platform.has_device_capability(MXFP4_CAPABILITY))

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return bool(weight_key == kMxfp4Static and activation_key is None)

    def apply(self, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, *rest: Any, **options: Any) -> None:
        if self.is_packed:
            w1, w2 = _blocks(w1), _blocks(w2)
        super().apply(output, hidden_states, w1, w2, *rest, **options)

    @property
    def is_packed(self) -> bool:
        return bool(self.quant_config.w1_scale.numel() == 0)

    def scales(self, x_scale: Tensor | None) -> dict[str, Any]:
        if self.is_packed:
            return {}
        return {"w13_scale": self.quant_config.w1_scale, "w2_scale": self.quant_config.w2_scale}


def _as_rows(packed: Tensor) -> Tensor:
    """[E, N, bytes per row]: vLLM reads E and N from the weights' three dimensions."""
    experts, tiles = packed.shape[:2]
    return packed.view(experts, tiles * SIDE, -1)


def _blocks(rows: Tensor) -> Tensor:
    """The packed weights that ``_as_rows`` turned into ``rows``."""
    return rows.view(rows.shape[0], rows.shape[1] // SIDE, -1, BLOCK_BYTES)


def _pack_gpt_oss(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's conversion of the loaded weights; for the backend without a conversion they are packed if the GPU has the kernels."""

    def converted(*arguments: Any, **given: Any) -> Any:
        w13, w2, w13_scale, w2_scale, *biases = theirs(*arguments, **given)
        is_ours = given.get("mxfp4_backend") == Mxfp4MoeBackend.XPU and current_platform.is_cuda()
        if is_ours and can_pack(w13.device, w2.shape[1], w13.shape[1] // 2):
            empty = w13_scale.data.new_empty(0)
            w13 = _as_rows(pack_mxfp4(w13.data, w13_scale.data, gated="interleaved"))
            w2 = _as_rows(pack_mxfp4(w2.data, w2_scale.data))
            w13_scale = w2_scale = empty
        return w13, w2, w13_scale, w2_scale, *biases

    return converted


def unsupported_fp8(moe: Any, weight_key: Any, activation_key: Any) -> str | None:
    if moe.has_bias:
        return "fp8 experts with biases"
    return unsupported_reason(moe, FlashmoeFp8Experts, weight_key, activation_key)


def _choose_fp8(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def chosen(config: Any, weight_key: Any, activation_key: Any, *arguments: Any, **options: Any) -> Any:
        if config.moe_backend == "auto" and admits(unsupported_fp8(config, weight_key, activation_key), "fp8 experts"):
            return Fp8MoeBackend.TRITON, FlashmoeFp8Experts
        return theirs(config, weight_key, activation_key, *arguments, **options)

    return chosen


def _choose_mxfp4(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def chosen(config: Any, activation_key: Any = None) -> Any:
        reason = unsupported_reason(config, FlashmoeMxfp4Experts, kMxfp4Static, activation_key)
        if config.moe_backend == "auto" and admits(reason, "mxfp4 experts"):
            return Mxfp4MoeBackend.XPU, FlashmoeMxfp4Experts  # the backend that leaves the loaded weights unchanged
        return theirs(config, activation_key)

    return chosen


def register_quantised() -> None:
    """Wrap both choices, and the conversion of gpt-oss's weights if this vLLM has it; a second call changes nothing."""
    for module, name, choice in (
        (fp8, "select_fp8_moe_backend", _choose_fp8),
        (mxfp4, "select_mxfp4_moe_backend", _choose_mxfp4),
        (mxfp4, "convert_gpt_oss_weight_to_mxfp4_moe_kernel_format", _pack_gpt_oss),
    ):
        theirs = getattr(module, name, None)
        if theirs is not None and not getattr(theirs, "is_flashmoe", False):
            chosen: Any = choice(theirs)
            chosen.is_flashmoe = True
            setattr(module, name, chosen)
