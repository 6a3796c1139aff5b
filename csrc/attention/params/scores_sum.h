// What the host passes to the kernel that adds up the dS matrices of a shared mask. Plain C types only.
#pragma once

#include "attention/params/forward.h"

namespace flashmoe::attention {

constexpr int32_t kScoresSumChunks = 2;  // chunks of eight elements per thread

// sums[i] = scores[i * first] + scores[i * first + step] + ...: `count` matrices of `size` elements (a multiple of
// eight), added in float32.
struct ScoresSumParams {
  const void* scores;
  void* sums;
  int64_t size;
  int32_t num_sums;
  int32_t count;
  int32_t first;
  int32_t step;
};

}  // namespace flashmoe::attention
