// The grouped products of a mixture-of-experts layer: entry functions of the sm_80 family.
#pragma once

#include "moe/grouped_gemm/mma_sync/kernel.cuh"
#include "moe/grouped_gemm/sm80/pipeline.cuh"
#include "moe/grouped_gemm/sm80/spec.cuh"

namespace flashmoe::moe::sm80 {

template <typename Spec, typename Product>
__device__ __forceinline__ void run(const GemmParams& params) {
  mma_sync::run_tiles<Spec, Product>(
      params, [](auto& operands, mma_sync::Accumulator<Spec>& sums, ptx::SmemPointer ring_smem, auto while_loading) {
        multiply(operands, sums, ring_smem, while_loading);
      });
}

template <typename Spec, Weights kWeights>
__device__ __forceinline__ void grouped_gemm(const GemmParams& params) {
  run<Spec, mma_sync::RowProduct<Spec, kWeights, mma_sync::Result::kSums>>(params);
}

template <typename Spec, Weights kWeights>
__device__ __forceinline__ void grouped_gemm_gated(const GemmParams& params) {
  run<Spec, mma_sync::RowProduct<Spec, kWeights, mma_sync::Result::kActivation>>(params);
}

template <typename Spec, Weights kWeights>
__device__ __forceinline__ void grouped_gemm_gated_backward(const GemmParams& params) {
  run<Spec, mma_sync::RowProduct<Spec, kWeights, mma_sync::Result::kGradient>>(params);
}

template <typename Spec>
__device__ __forceinline__ void grouped_gemm_weight_gradient(const GemmParams& params) {
  run<Spec, mma_sync::WeightGradient<Spec>>(params);
}

}  // namespace flashmoe::moe::sm80
