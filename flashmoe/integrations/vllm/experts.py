"""vLLM's 16-bit experts on ``flashmoe.fused_moe``, between vLLM's own prepare and finalise steps (data and expert parallel included).

Experimental. Enabled by FLASHMOE_VLLM_EXPERTS=1.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat, FusedMoEExpertsModular
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms import current_platform

from flashmoe.attn.arguments import DTYPES
from flashmoe.errors import ArgumentError
from flashmoe.fallback import fallback_policy
from flashmoe.integrations.vllm.selection import warn_once
from flashmoe.moe.api import fused_moe
from flashmoe.moe.options import CLAMPED_ALPHA, CLAMPED_LIMIT, Activation, Layout

# vLLM's name: (flashmoe's name, the order of gate and up in w13)
ACTIVATIONS: dict[Any, tuple[Activation, Layout]] = {
    MoEActivation.SILU: ("swiglu", "concat"),
    MoEActivation.GELU: ("geglu", "concat"),
    MoEActivation.GELU_TANH: ("geglu_tanh", "concat"),
    MoEActivation.SWIGLUOAI: ("clamped_swiglu", "interleaved"),
}
# What clamped_swiglu computes
CLAMPED = {"gemm1_alpha": CLAMPED_ALPHA, "gemm1_beta": 1.0, "gemm1_clamp_limit": CLAMPED_LIMIT}
MAX_EXPERTS, MAX_TOP_K = 1024, 32


class FlashmoeExperts(FusedMoEExpertsModular):  # type: ignore[misc]
    """w13 [E, 2I, H] and w2 [E, H, I], in the layout of vLLM's Triton kernels."""

    multiple: ClassVar[int] = 8  # H and I must be multiples of this

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        super().__init__(moe_config, quant_config)
        if reason := unsupported_gate(moe_config.activation, quant_config):
            msg = f"{reason}; unset FLASHMOE_VLLM_EXPERTS for this model"
            raise ArgumentError(msg)

    @staticmethod
    def activation_format() -> Any:
        return FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        if current_platform.is_cpu():
            return True
        return bool(current_platform.is_cuda() and current_platform.has_device_capability((7, 5)))

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key is None and activation_key is None

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation in ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return not moe_parallel_config.use_batched_activation_format

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self,
        M: int,  # noqa: N803
        N: int,  # noqa: N803
        K: int,  # noqa: N803
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return (0,), (0,), (M, K)  # fused_moe allocates its own workspaces

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Writes to output [T, H] the weighted sum over each token's experts; weights that apply to inputs are already in hidden_states."""
        if getattr(self, "post_gemm2_hook", None) is not None:
            msg = "post_gemm2_hook needs rows before they are weighted, which fused_moe does not store; unset FLASHMOE_VLLM_EXPERTS"
            raise ArgumentError(msg)
        name, layout = ACTIVATIONS[activation]
        with torch.no_grad():
            fused_moe(
                hidden_states,
                w1,
                w2,
                torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights,
                topk_ids,
                b13=self.w1_bias,
                b2=self.w2_bias,
                activation=name,
                layout=layout,
                expert_map=expert_map,
                out=output,
                **self.scales(a1q_scale),
            )

    def scales(self, x_scale: Tensor | None) -> dict[str, Any]:
        """The scale arguments of fused_moe, for weights of fewer than 16 bits."""
        return {}


def unsupported_gate(activation: Any, quant_config: Any) -> str | None:
    """Why the gate is not one of fused_moe's: compares the constants that vLLM takes from the model."""
    for name, expected in CLAMPED.items():
        found = getattr(quant_config, name, None)
        wanted = expected if activation is MoEActivation.SWIGLUOAI else None
        if found is not None and found != wanted:
            return f"{name} is {found}; fused_moe's {ACTIVATIONS[activation][0]} has {wanted or 'none'}"
    return None


def unsupported_reason(
    moe: Any, experts: type[FlashmoeExperts] = FlashmoeExperts, weight_key: Any = None, activation_key: Any = None
) -> str | None:
    """Why fused_moe cannot compute these experts; None if it can."""
    if current_platform.is_cpu() and "is_monolithic" in vars(UnquantizedFusedMoEMethod):  # up to 0.28 at the most
        return "on a CPU this vLLM fuses the experts with their router"
    is_supported, reason = experts.is_supported_config(
        experts, moe, weight_key, activation_key, FusedMoEActivationFormat.Standard
    )
    if not is_supported:
        return str(reason)
    sizes = {"hidden_dim": moe.hidden_dim, "intermediate_size_per_partition": moe.intermediate_size_per_partition}
    for name, size in sizes.items():
        if size % experts.multiple:
            return f"{name} is {size}, which is not a multiple of {experts.multiple}"
    if moe.num_experts > MAX_EXPERTS or moe.experts_per_token > MAX_TOP_K:
        found = f"{moe.num_experts} experts, {moe.experts_per_token} for a token"
        return f"{found}; at most {MAX_EXPERTS} and {MAX_TOP_K}"
    dtypes = DTYPES["cpu" if current_platform.is_cpu() else "cuda"] if weight_key is None else (torch.bfloat16,)
    if moe.in_dtype not in dtypes:
        return f"{moe.in_dtype} is not one of {', '.join(map(str, dtypes))}"
    given = {"gemm1_alpha": moe.swiglu_alpha, "gemm1_beta": moe.swiglu_beta, "gemm1_clamp_limit": moe.swiglu_limit}
    return unsupported_gate(moe.activation, _Gate(**given))


class _Gate:
    def __init__(self, **numbers: Any) -> None:
        self.__dict__.update(numbers)


class FlashmoeExpertsMethod(UnquantizedFusedMoEMethod):  # type: ignore[misc]
    """vLLM's own method with flashmoe's experts as its kernel."""

    def __init__(self, moe: Any) -> None:
        super().__init__(moe)
        if admits(unsupported_reason(moe)):
            self.unquantized_backend, self.experts_cls = UnquantizedMoeBackend.TRITON, FlashmoeExperts


def admits(reason: str | None, what: str = "experts") -> bool:
    """Whether there is no reason against flashmoe; otherwise warns with the reason, or raises with it."""
    if reason is not None and fallback_policy() == "error":
        msg = f"vLLM's {what} would not run on flashmoe: {reason}; unset FLASHMOE_VLLM_EXPERTS or FLASHMOE_FALLBACK"
        raise ArgumentError(msg)
    if reason is not None:
        warn_once(what, reason)
    return reason is None


def register_experts() -> None:
    """Replace vLLM's method; a second call changes nothing."""
    if UnquantizedFusedMoEMethod.__name__ not in op_registry_oot:
        UnquantizedFusedMoEMethod.register_oot(FlashmoeExpertsMethod)
