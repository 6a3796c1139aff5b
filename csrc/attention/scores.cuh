// How ScoreOptions modify single scores: softcap, additive or boolean mask, ALiBi. Which keys a row sees at all is in
// masks.cuh.
#pragma once

#include "attention/params/forward.h"
#include "device/convert.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"

namespace flashmoe::attention {

constexpr float kLog2E = 1.44269504088896341f;

// 2^120, the largest value that a mask adds to a score. A power of two, because then its product with the scale is
// exact: an exponent minus the rounded product that it refers to is 0, while any other number leaves 1e28 or -1e28.
constexpr float kLargestTerm = 0x1p120f;

// tanh(score_factor * score) as 1 - 2 / (1 + e^2x), which is right for both infinities; absolute error 3e-7.
__device__ __forceinline__ float capped_score(const ScoreOptions& options, float score) {
  const float power = ptx::exp2_approx(score * (options.score_factor * (2.0f * kLog2E)));
  return ptx::fma_rn(-2.0f, ptx::rcp_approx(1.0f + power), 1.0f);
}

// Returns the score with the mask applied. `index`: element offset in the mask.
template <typename Element>
__device__ __forceinline__ float masked_score(const ScoreOptions& options, float score, int64_t index) {
  if (options.mask_type == MaskTensor::kBool) {
    const bool is_visible = ptx::ld_global_8(static_cast<const unsigned char*>(options.mask) + index) != 0;
    return is_visible ? score : ptx::negative_infinity();
  }
  const float value = unpack<Element>(ptx::ld_global_16(static_cast<const Element*>(options.mask) + index)).x;
  const float term = value * options.mask_factor;
  // A finite value and its exponent stay finite, so a row whose keys all have the lowest value averages them. -inf
  // hides a key.
  const bool is_finite = value > ptx::negative_infinity() && value < -ptx::negative_infinity();
  return score + (is_finite ? max(-kLargestTerm, min(kLargestTerm, term)) : term);
}

// ALiBi (Press et al., Train Short, Test Long). Returns the factor of the distance between a key and the row's own key
// in the value that is added to a score. `factor` converts natural exponents to the unit of the scores (mask_factor).
// `row`: of the sequence, or the folded head.
__device__ __forceinline__ float alibi_slope(const ScoreOptions& options, float factor, int sequence, int head,
                                             int row) {
  const int64_t at =
      sequence * options.mask_stride_batch + head * options.mask_stride_head + row * options.mask_stride_row;
  const float slope = ptx::ld_global_float(static_cast<const float*>(options.mask) + at) * -factor;
  // A slope of 88 gives the adjacent key the weight e^-88, which is too small to change any sum. Steeper slopes would
  // make scores so large that their rounding errors overflow an exponential. NaN stays NaN.
  const float most = 88.0f * fabsf(factor);
  return slope > most ? most : slope < -most ? -most : slope;
}

// Adds ALiBi to a thread's scores in the accumulator layout of wgmma and mma.sync: rows r = 0 and 1, eight apart;
// columns count from the thread's first. Distances are exact integers, so every kernel adds the same values. Row 1 has
// in column 8j + c the distance of row 0 in column 8 (j - 1) + c, so it is computed once.
struct Alibi {
  float slope;
  float distance;  // of row 0 and column 0

  __device__ __forceinline__ float add(float score, int r, int column) const {
    return ptx::fma_rn(slope, fabsf(distance - static_cast<float>(column - 8 * r)), score);
  }
};

// A head's sink as an exponent to base 2; -inf without one. With folded heads each row has its own sink.
__device__ __forceinline__ float sink_log2(const ScoreOptions& options, int head, int row) {
  if (options.sinks == nullptr) return ptx::negative_infinity();
  return ptx::ld_global_float(options.sinks + (options.folded_heads > 1 ? head * options.folded_heads + row : head)) *
         kLog2E;
}

}  // namespace flashmoe::attention
