// The kernel of dk and dv with mma.m16n8k8 for Turing, in fp16.
#pragma once

#include "attention/backward/mma_sync/key_value_gradient.cuh"
#include "attention/backward/sm75/spec.cuh"
#include "attention/backward/sm75/stream.cuh"

namespace flashmoe {
namespace attention {
namespace backward {
namespace sm75 {

template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void key_value_gradient(const BackwardParams& params) {
  mma_sync::key_value_gradient<Spec, Stream<Spec>, kMask>(params);
}

template <typename Spec>
__device__ __forceinline__ void varlen_key_value_gradient(const BackwardParams& params) {
  key_value_gradient<Spec, MaskKind::kRuntime>(params);
}

}  // namespace sm75
}  // namespace backward
}  // namespace attention
}  // namespace flashmoe
