// What one row's online softmax does, the same in every forward kernel: a row's bits depend on its own scores alone, whichever kernel, tile or
// batch it is in. (Keys in ascending order, in blocks of one width from key 0 on, do the rest.)
#pragma once

#include "ptx/math.cuh"

namespace flashmoe {

constexpr float kLn2 = 0.693147180559945309f;

namespace attention {

// The maximum that a row's exponentials refer to only guards against overflow, so a stale one serves as well. It moves when a new score would
// give an exponential over 2^kMaxExponent, by the row's own scores alone: a rescaling changes bits. P up to 2^8 is as exact in fp16 and bf16
// as P up to 1. largest: of the new scores and the reference; of some of a row's columns, or of all. False for the NaN of a row without keys.
constexpr float kMaxExponent = 8.0f;
__device__ __forceinline__ bool reference_stays(float largest, float reference, float scale_log2) {
  return (largest - reference) * scale_log2 <= kMaxExponent;
}

// A row at its end: the factor that its sums over keys take to the output, and its log-sum-exp, a natural logarithm.
struct FinishedRow {
  float inverse;
  float lse;
};

// sum: over keys of 2^(exponent - shift). shift: the reference times scale_log2, rounded, as the exponentials have it; -inf where no key was seen.
// Explicit instructions: the compiler may contract a product and a sum in one kernel and not in another.
__device__ __forceinline__ FinishedRow finish_row(float shift, float sum) {
  if (sum == 0.0f) return FinishedRow{0.0f, ptx::negative_infinity()};
  return FinishedRow{ptx::rcp_approx(sum), ptx::sub_rn(ptx::lg2_approx(sum), -shift) * kLn2};
}

// The same of a row with a sink (an exponent to base 2, -inf for none), which is one term more in the sum.
__device__ __forceinline__ FinishedRow finish_row(float shift, float sum, float sink) {
  if (sink == ptx::negative_infinity()) return finish_row(shift, sum);
  const float largest = ptx::max_ftz(shift, sink);
  const float factor = ptx::exp2_approx(ptx::sub_rn(shift, largest));
  const float total = ptx::fma_rn(sum, factor, ptx::exp2_approx(ptx::sub_rn(sink, largest)));
  return FinishedRow{factor * ptx::rcp_approx(total), ptx::sub_rn(ptx::lg2_approx(total), -largest) * kLn2};
}

}  // namespace attention
}  // namespace flashmoe
