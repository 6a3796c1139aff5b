"""The kernels of a layer with mxfp4 weights on the emulated machine."""

from flashmoe_tools.operations.moe_mxfp4.emulation import gemm

RUNNERS = dict.fromkeys(gemm.PRODUCTS, gemm.RUNNER)
