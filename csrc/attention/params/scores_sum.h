// What the host passes to the kernel that adds up matrices of dS for a mask that they share. Plain C types only.
#pragma once

#include "attention/params/forward.h"

namespace flashmoe::attention {

constexpr int32_t kScoresSumChunks = 2;  // of eight elements, of a thread

// sums[i] = scores[i * first] + scores[i * first + step] + ..., `count` matrices of `size` elements, a multiple of eight, in float32.
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
