// Products of a warpgroup (wgmma); the operands know their layout. Each call is one wgmma group, asynchronous until the
// wgmma_wait that covers it, and wgmma_fence_operands on its sums. N is twice a thread's sums; k is 16 per step.
#pragma once

#include "device/convert.cuh"
#include "device/shared_tile.cuh"
#include "ptx/wgmma.cuh"

namespace flashmoe {

// sums[64 x N] = A B, or += with kAdds. A and B: KMajorOperand or MnMajorOperand.
template <typename Element, int kSteps, bool kAdds = false, int kSums, typename A, typename B>
__device__ __forceinline__ void issue_product(float (&sums)[kSums], const A& a, const B& b) {
  if constexpr (kAdds) ptx::wgmma_fence_operands(sums);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    ptx::wgmma_ss<Element, 2 * kSums, B::kIsTransposed, A::kIsTransposed>(sums, a.k_step(step), b.k_step(step),
                                                                          step == 0 && !kAdds ? 0 : 1);
  }
  ptx::wgmma_commit();
}

// The same with A[64 x 4 * kPacked] in registers, four words per step (pack_operand).
template <typename Element, bool kAdds = false, int kSums, int kPacked, typename B>
__device__ __forceinline__ void issue_product(float (&sums)[kSums], uint32_t (&a)[kPacked], const B& b) {
  if constexpr (kAdds) ptx::wgmma_fence_operands(sums);
  ptx::wgmma_fence_operands(a);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kPacked / 4; ++step) {
    ptx::wgmma_rs<Element, 2 * kSums, B::kIsTransposed>(sums, a[4 * step], a[4 * step + 1], a[4 * step + 2],
                                                        a[4 * step + 3], b.k_step(step), step == 0 && !kAdds ? 0 : 1);
  }
  ptx::wgmma_commit();
}

// Sums as A of the next product: the accumulator layout is the operand layout; step j takes column blocks 2j, 2j + 1.
template <typename Element, int kPacked>
__device__ __forceinline__ void pack_operand(uint32_t (&a)[kPacked], const float (&sums)[2 * kPacked]) {
#pragma unroll
  for (int i = 0; i < kPacked; ++i) a[i] = pack<Element>(sums[2 * i], sums[2 * i + 1]);
}

}  // namespace flashmoe
