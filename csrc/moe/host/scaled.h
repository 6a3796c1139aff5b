// What lists with products of e4m3 operands have in common.
#pragma once

#include "moe/host/launch.h"

namespace flashmoe::moe {

// The kernel for so many rows, and the weights [experts, n, k], two of which are one element of the kernel's 16-bit type.
ScaledGemm make_scaled_gemm(Product product, host::KernelRequest request, int64_t slots, int64_t experts,
                            const Tensor& weights, const Tensor& scales);

void set_scaled_operands(ScaledGemmParams& params, const Rows& values, const float* scales, void* d, int64_t d_stride);

}  // namespace flashmoe::moe
