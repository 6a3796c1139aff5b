// What becomes of a score where a band changes scores, for both gradients.
#pragma once

#include "attention/params/backward.h"
#include "attention/scores.cuh"
#include "ptx/math.cuh"

namespace flashmoe {
namespace attention {
namespace backward {

// P of one score, times what dS has of it beside dP - row_dot: with a softcap 1 - tanh^2.
struct Weight {
  float probability;
  float derivative;
};

// mask_at: the score's element of the mask tensor. Without a branch, for there are many of these.
template <typename Element>
__device__ __forceinline__ Weight band_weight(const BackwardParams& params, float score, float lse_log2,
                                              bool is_visible, int64_t mask_at) {
  const Band& band = params.band;
  const bool is_capped = band.score_factor > 0.0f;
  const float capped = capped_score(band, score);
  score = (is_capped ? capped : score) + mask_term<Element>(band, mask_at, is_visible);
  // No weight is above 1; but of scores near the lowest float, as a mask gives them, the difference is a rounding error.
  const float exponent = min(ptx::fma_rn(score, params.scale_log2, -lse_log2), 0.0f);
  const float probability = ptx::exp2_approx(exponent);
  return Weight{is_visible ? probability : 0.0f, is_capped ? ptx::fma_rn(-capped, capped, 1.0f) : 1.0f};
}

// Whether a band asks for more than ranges of keys.
__device__ __forceinline__ bool changes_scores(const Band& band) {
  return band.score_factor > 0.0f || band.mask_type != MaskTensor::kNone;
}

}  // namespace backward
}  // namespace attention
}  // namespace flashmoe
