// The dq kernel and the dk, dv kernel with mma.m16n8k8 for Turing, in fp16. With the default kMask a tile belongs to a
// sequence, and its lengths and score options are known at run time.
#pragma once

#include "attention/backward/mma_sync/bias_gradient.cuh"
#include "attention/backward/mma_sync/key_value_gradient.cuh"
#include "attention/backward/mma_sync/query_gradient.cuh"
#include "attention/backward/sm75/spec.cuh"
#include "attention/backward/sm75/stream.cuh"

namespace flashmoe::attention::backward::sm75 {

template <typename Spec, MaskKind kMask = MaskKind::kRuntime>
__device__ __forceinline__ void query_gradient(const BackwardParams& params) {
  mma_sync::query_gradient<Spec, Stream<Spec>, kMask>(params);
}

template <typename Spec, MaskKind kMask = MaskKind::kRuntime>
__device__ __forceinline__ void key_value_gradient(const BackwardParams& params) {
  mma_sync::key_value_gradient<Spec, Stream<Spec>, kMask>(params);
}

template <typename Spec>
__device__ __forceinline__ void query_gradient_dropout(const DropoutBackwardParams& params) {
  static_assert(Spec::kHasDropout, "kernels without dropout take BackwardParams");
  query_gradient<Spec>(params.backward);
}

template <typename Spec>
__device__ __forceinline__ void key_value_gradient_dropout(const DropoutBackwardParams& params) {
  static_assert(Spec::kHasDropout, "kernels without dropout take BackwardParams");
  key_value_gradient<Spec>(params.backward);
}

template <typename Spec>
__device__ __forceinline__ void bias_gradient(const BiasGradientParams& params) {
  mma_sync::bias_gradient<Spec, Stream<Spec>>(params);
}

}  // namespace flashmoe::attention::backward::sm75
