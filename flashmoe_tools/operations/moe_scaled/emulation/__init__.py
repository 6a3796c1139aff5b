"""The kernels of a layer with e4m3 weights on the emulated machine."""

from flashmoe_tools.operations.moe_scaled.emulation import gemm, quantize

RUNNERS = {**dict.fromkeys(gemm.PRODUCTS, gemm.RUNNER), "moe_quantize": quantize.RUNNER}
