"""The backward kernels of a mixture-of-experts layer on the emulated machine."""

from flashmoe_build.emulation.runner import by_family
from flashmoe_tools.operations.moe.emulation.by_rows import MMA_SYNC
from flashmoe_tools.operations.moe_backward.emulation import bias_gradient, gemm

RUNNERS = {
    "grouped_gemm_gated_backward": by_family(sm90=gemm.GATED_BACKWARD, sm80=MMA_SYNC, sm75=MMA_SYNC),
    "grouped_gemm_weight_gradient": by_family(sm90=gemm.WEIGHT_GRADIENT, sm80=MMA_SYNC, sm75=MMA_SYNC),
    "moe_bias_gradient": bias_gradient.RUNNER,
}
