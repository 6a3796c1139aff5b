"""The layer with mxfp4 weights as a problem: the sizes of the layer with e4m3 weights, but 4-bit weights."""

from dataclasses import dataclass
from typing import ClassVar

from flashmoe_tools.operations.moe_mxfp4.formats import BLOCK
from flashmoe_tools.operations.moe_scaled.problem import MoeScaledProblem


@dataclass(frozen=True)
class MoeMxfp4Problem(MoeScaledProblem):
    """w13 and w2 in mxfp4, x and the result in bfloat16; gpt-oss's biases, interleaved gate and up, and clamped swiglu."""

    operation: ClassVar[str] = "moe_mxfp4"
    heaviest_kernel: ClassVar[str] = "grouped_gemm_gated_mxfp4"
    weight_dtype: ClassVar[str] = "mxfp4"
    block: ClassVar[int] = BLOCK
    least: ClassVar[tuple[int, int]] = (128, 64)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the active experts' weights, half a byte each, and of their scales."""
        weights = 3 * self.active_experts * self.hidden * self.intermediate
        return weights // 2 + weights // BLOCK


PROBLEM = MoeMxfp4Problem
