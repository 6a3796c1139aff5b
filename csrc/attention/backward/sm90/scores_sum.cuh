// The gradient of a mask that sequences or heads share, from that of the scores (MaskBackwardParams): matrices are
// added in float32, the last one first, because the L2 cache holds those that the fused kernel stored last. They are
// loaded as evict-first.
// Grid: a thread block has kScoresSumChunks chunks, in each of which every thread has eight elements of the sums. With
// one chunk, 16 matrices of 512 rows and 12 heads would take 1.5 waves of blocks, and the second wave would find the
// cache overwritten.
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
  int64_t at[kScoresSumChunks];
  const Element* scores_gmem[kScoresSumChunks];
#pragma unroll
  for (int c = 0; c < kScoresSumChunks; ++c) {
    const int64_t chunk = static_cast<int64_t>(ptx::block_index()) * kScoresSumChunks + c;
    at[c] = (chunk * Spec::kNumThreads + ptx::thread_index()) * 8;
    const int64_t number = at[c] / params.size;
    const bool is_inside = number < params.num_sums;
    scores_gmem[c] = !is_inside ? nullptr
                                : static_cast<const Element*>(params.scores) + number * params.first * params.size +
                                      (at[c] - number * params.size);
  }
  const int64_t step = params.step * params.size;
  const ptx::CachePolicy policy = ptx::evict_first();
  float2 sums[kScoresSumChunks][4] = {};
#pragma unroll 4
  for (int i = params.count - 1; i >= 0; --i) {
#pragma unroll
    for (int c = 0; c < kScoresSumChunks; ++c) {
      if (scores_gmem[c] == nullptr) continue;
      uint32_t words[4];
      ptx::ld_global_128(words, scores_gmem[c] + i * step, policy);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 pair = unpack<Element>(words[w]);
        sums[c][w].x += pair.x;
        sums[c][w].y += pair.y;
      }
    }
  }
#pragma unroll
  for (int c = 0; c < kScoresSumChunks; ++c) {
    if (scores_gmem[c] == nullptr) continue;
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) words[w] = pack<Element>(sums[c][w].x, sums[c][w].y);
    ptx::st_global_128(static_cast<Element*>(params.sums) + at[c], words);
  }
}

}  // namespace flashmoe::attention::backward::sm90
