// What ScoreOptions do to single scores: the softcap and the additive or boolean mask. Which keys a row sees at all is in masks.cuh.
#pragma once

#include "attention/params/forward.h"
#include "device/convert.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"

namespace flashmoe {
namespace attention {

constexpr float kLog2E = 1.44269504088896341f;

// Absolute error 3e-7: 1 - 2 / (1 + e^2x), in which both infinities come out right.
__device__ __forceinline__ float tanh_of(float x) {
  return ptx::fma_rn(-2.0f, ptx::rcp_approx(1.0f + ptx::exp2_approx(x * (2.0f * kLog2E))), 1.0f);
}

__device__ __forceinline__ float capped_score(const ScoreOptions& options, float score) {
  return tanh_of(score * options.score_factor);
}

// The score with what the mask says of it; `index`: elements from the mask's first.
template <typename Element>
__device__ __forceinline__ float masked_score(const ScoreOptions& options, float score, int64_t index) {
  if (options.mask_type == MaskTensor::kBool) {
    const bool is_visible = ptx::ld_global_8(static_cast<const unsigned char*>(options.mask) + index) != 0;
    return is_visible ? score : ptx::negative_infinity();
  }
  const float value = unpack<Element>(ptx::ld_global_16(static_cast<const Element*>(options.mask) + index)).x;
  const float term = value * options.mask_factor;
  // A finite value stays one, and so does its exponent: a row whose keys all have the lowest one averages them. -inf hides a key.
  constexpr float kLargest = 1.3e36f;
  const bool is_finite = value > ptx::negative_infinity() && value < -ptx::negative_infinity();
  return score + (is_finite ? max(-kLargest, min(kLargest, term)) : term);
}

// A head's sink as an exponent to base 2; -inf without one. Of folded heads each row has its own.
__device__ __forceinline__ float sink_log2(const ScoreOptions& options, int head, int row) {
  if (options.sinks == nullptr) return ptx::negative_infinity();
  return ptx::ld_global_float(options.sinks + (options.folded_heads > 1 ? head * options.folded_heads + row : head)) *
         kLog2E;
}

// A row at its end: the factor that its sums over keys take to the output, and its log-sum-exp.
struct FinishedRow {
  float inverse;
  float lse;
};

// sum: over keys of 2^(exponent - shift), shift -inf where no key was seen. The sink is one term more.
__device__ __forceinline__ FinishedRow finish_with_sink(float shift, float sum, float sink) {
  constexpr float kNaturalLog2 = 0.693147180559945309f;
  const float largest = ptx::max_ftz(shift, sink);
  if (largest == ptx::negative_infinity()) {  // no term, or NaN alone, which the sum holds
    return FinishedRow{sum == 0.0f ? 0.0f : 1.0f / sum, sum == 0.0f ? largest : sum};
  }
  const float factor = ptx::exp2_approx(ptx::sub_rn(shift, largest));
  const float total = ptx::fma_rn(sum, factor, ptx::exp2_approx(ptx::sub_rn(sink, largest)));
  return FinishedRow{factor / total, (largest + ptx::lg2_approx(total)) * kNaturalLog2};
}

// What the mask adds to a score, zero without a mask and where is_read is false; without a branch.
template <typename Element>
__device__ __forceinline__ float mask_term(const ScoreOptions& options, int64_t index, bool is_read) {
  const bool is_bool = options.mask_type == MaskTensor::kBool;
  const auto* mask = static_cast<const unsigned char*>(options.mask);
  const uint32_t flag = ptx::ld_global_8_if(mask + index, is_read && is_bool);
  const uint32_t bits = ptx::ld_global_16_if(mask + 2 * index, is_read && options.mask_type == MaskTensor::kAdditive);
  if (is_bool) return is_read && flag == 0 ? ptx::negative_infinity() : 0.0f;
  const float value = unpack<Element>(bits).x;
  const float term = value * options.mask_factor;
  constexpr float kLargest = 1.3e36f;
  const bool is_finite = value > ptx::negative_infinity() && value < -ptx::negative_infinity();
  return is_finite ? max(-kLargest, min(kLargest, term)) : term;
}

}  // namespace attention
}  // namespace flashmoe
