// The gradient of a mask that sequences or heads share, from the scores' (MaskBackwardParams): matrices added in ascending order, in float32.
// Grid: a thread for every eight elements of the sums. The last matrices are in the second-level cache still, as the fused kernel has stored them:
// what is read makes room first, so that they stay until their turn.
#pragma once

#include "attention/params/scores_sum.h"
#include "device/convert.cuh"
#include "ptx/memory.cuh"
#include "ptx/read_once.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention::backward::sm90 {

template <typename Element_, int kNumWarps_>
struct ScoresSumSpec {
  using Element = Element_;
  static constexpr int kNumThreads = 32 * kNumWarps_;
  static constexpr int kSharedBytes = 0;
};

template <typename Spec>
__device__ __forceinline__ void scores_sum(const ScoresSumParams& params) {
  using Element = typename Spec::Element;
  const int64_t at = (static_cast<int64_t>(ptx::block_index()) * Spec::kNumThreads + ptx::thread_index()) * 8;
  const int64_t number = at / params.size;
  if (number >= params.num_sums) return;
  const Element* scores_gmem =
      static_cast<const Element*>(params.scores) + number * params.first * params.size + (at - number * params.size);
  const int64_t step = params.step * params.size;
  const ptx::CachePolicy policy = ptx::evict_first();
  float2 sums[4] = {};
#pragma unroll 4
  for (int i = 0; i < params.count; ++i) {
    uint32_t words[4];
    ptx::ld_global_128(words, scores_gmem + i * step, policy);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 pair = unpack<Element>(words[w]);
      sums[w].x += pair.x;
      sums[w].y += pair.y;
    }
  }
  uint32_t words[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) words[w] = pack<Element>(sums[w].x, sums[w].y);
  ptx::st_global_128(static_cast<Element*>(params.sums) + at, words);
}

}  // namespace flashmoe::attention::backward::sm90
