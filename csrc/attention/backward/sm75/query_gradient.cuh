// The kernel of dq with mma.m16n8k8 for Turing, in fp16.
#pragma once

#include "attention/backward/mma_sync/query_gradient.cuh"
#include "attention/backward/sm75/spec.cuh"
#include "attention/backward/sm75/stream.cuh"

namespace flashmoe {
namespace attention {
namespace backward {
namespace sm75 {

template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void query_gradient(const BackwardParams& params) {
  mma_sync::query_gradient<Spec, Stream<Spec>, kMask>(params);
}

template <typename Spec>
__device__ __forceinline__ void varlen_query_gradient(const BackwardParams& params) {
  query_gradient<Spec, MaskKind::kRuntime>(params);
}

}  // namespace sm75
}  // namespace backward
}  // namespace attention
}  // namespace flashmoe
