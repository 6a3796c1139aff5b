// Compile-time description of a grouped product's kernel for Turing: mma.m16n8k8, fp16.
#pragma once

#include "moe/grouped_gemm/mma_sync/spec.cuh"
#include "ptx/mma.cuh"
#include "ptx/types.cuh"

namespace flashmoe::moe::sm75 {

// kNumStages is 2: one tile is multiplied while the next, loaded through registers, is stored.
template <typename Element, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kWarpsN>
struct GemmSpec : mma_sync::TileSpec<Element, kBlockM, kBlockN, kNumStages, kNumWarps, kWarpsN> {
  // 16x8x16 in two halves of k: Turing's largest 16-bit product is 16x8x8.
  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_m16n8k8<Element>(d, a[0], a[1], b0);
    ptx::mma_m16n8k8<Element>(d, a[2], a[3], b1);
  }

  static_assert(kNumStages == 2, "tiles in flight are in registers, so there is no use for a third stage");
};

}  // namespace flashmoe::moe::sm75
