// Common to the lists with products of e4m3 operands.
#pragma once

#include "moe/host/launch.h"

namespace flashmoe::moe {

// Chooses the kernel for at most `slots` rows and sets the weights [experts, n, k]; two of them are one element of the
// kernel's 16-bit type.
ScaledGemm make_scaled_gemm(Product product, host::KernelRequest request, int64_t slots, int64_t experts,
                            const Tensor& weights, const Tensor& scales);

void set_scaled_operands(ScaledGemmParams& params, const Rows& values, const float* scales, void* d, int64_t d_stride);

}  // namespace flashmoe::moe
