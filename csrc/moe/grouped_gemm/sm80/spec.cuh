// Compile-time description of a grouped product's kernel of the sm_80 family.
#pragma once

#include "moe/grouped_gemm/mma_sync/spec.cuh"
#include "ptx/mma.cuh"
#include "ptx/types.cuh"

namespace flashmoe::moe::sm80 {

// kNumStages: tiles of A and B in the ring, of which kNumStages - 1 are in flight or complete while one is multiplied.
template <typename Element, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kWarpsN>
struct GemmSpec : mma_sync::TileSpec<Element, kBlockM, kBlockN, kNumStages, kNumWarps, kWarpsN> {
  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_m16n8k16<Element>(d, a, b0, b1);
  }

  static_assert(kNumStages >= 2, "one tile is loaded while another is multiplied");
};

}  // namespace flashmoe::moe::sm80
