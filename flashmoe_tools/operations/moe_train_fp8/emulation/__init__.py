"""The kernels that train a layer in e4m3 on the emulated machine."""

from flashmoe_tools.operations.moe_train_fp8.emulation import gemm, quantize

RUNNERS = {
    "grouped_gemm_weight_gradient_scaled": gemm.RUNNER,
    "moe_quantize_tiles": quantize.TILES,
    "moe_gated_gradient": quantize.GATED,
}
