// The online softmax of one row, the same in every forward kernel: a row's bits depend only on its own scores, whatever
// the kernel, tile or batch. (This also needs keys in ascending order, in blocks of one width from key 0 on.)
#pragma once

#include "ptx/math.cuh"

namespace flashmoe {

constexpr float kLn2 = 0.693147180559945309f;

namespace attention {

// A row's exponentials refer to a maximum, its reference, which only guards against overflow, so a stale one serves as
// well. It moves when a new score would give an exponential over 2^kMaxExponent. Only the row's own scores decide that,
// because rescaling changes bits. P up to 2^8 is as exact in fp16 and bf16 as P up to 1. largest: maximum of the
// reference and the new scores, in some of a row's columns or in all. Returns false for the NaN of a row without keys.
constexpr float kMaxExponent = 8.0f;
__device__ __forceinline__ bool reference_stays(float largest, float reference, float scale_log2) {
  return (largest - reference) * scale_log2 <= kMaxExponent;
}

// A finished row: the factor that turns its sum over keys into the output, and its log-sum-exp, a natural logarithm.
struct FinishedRow {
  float inverse;
  float lse;
};

// sum: sum over keys of 2^(exponent - shift). shift: the reference times scale_log2, rounded as in the exponentials;
// -inf if no key was seen. Explicit instructions, because the compiler may contract a product and a sum in one kernel
// and not in another.
__device__ __forceinline__ FinishedRow finish_row(float shift, float sum) {
  if (sum == 0.0f) return FinishedRow{0.0f, ptx::negative_infinity()};
  return FinishedRow{ptx::rcp_approx(sum), ptx::sub_rn(ptx::lg2_approx(sum), -shift) * kLn2};
}

// The same for a row with a sink (an exponent to base 2, -inf for none), which is one more term in the sum.
__device__ __forceinline__ FinishedRow finish_row(float shift, float sum, float sink) {
  if (sink == ptx::negative_infinity()) return finish_row(shift, sum);
  const float largest = ptx::max_ftz(shift, sink);
  const float factor = ptx::exp2_approx(ptx::sub_rn(shift, largest));
  const float total = ptx::fma_rn(sum, factor, ptx::exp2_approx(ptx::sub_rn(sink, largest)));
  return FinishedRow{factor * ptx::rcp_approx(total), ptx::sub_rn(ptx::lg2_approx(total), -largest) * kLn2};
}

}  // namespace attention
}  // namespace flashmoe
