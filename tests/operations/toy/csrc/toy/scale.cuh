#pragma once

#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"
#include "toy/params.h"

namespace flashmoe::toy {

template <typename Element, int kPerThread_, int kBlockM_, int kNumWarps, int kStaged>
struct ScaleSpec {
  static constexpr int kPerThread = kPerThread_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kSharedBytes = kStaged * kBlockM * static_cast<int>(sizeof(Element));
  static_assert(kPerThread * kNumThreads == kBlockM, "a block works on whole passes of its threads");
  static_assert(kStaged == 1, "each value goes through shared memory");
};

template <typename Spec, bool kIsClamped>
__device__ __forceinline__ void scale(const ScaleParams& params) {
  const ptx::SmemPointer staged_smem(ptx::dynamic_shared_memory());
  for (int pass = 0; pass < Spec::kPerThread; ++pass) {
    const int element = pass * Spec::kNumThreads + ptx::thread_index();
    const int index = ptx::block_index() * Spec::kBlockM + element;
    if (index >= params.count) return;
    ptx::st_shared_float(staged_smem + 4 * element, ptx::ld_global_float(params.x + index) * params.scale);
    const float value = ptx::ld_shared_float(staged_smem + 4 * element);
    ptx::st_global_float(params.out + index, kIsClamped && value < 0.0f ? 0.0f : value);
  }
}

}  // namespace flashmoe::toy
