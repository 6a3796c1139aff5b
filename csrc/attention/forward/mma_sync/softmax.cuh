// Online softmax over the m16n8 accumulator layout: a thread holds, of each 16-row block, rows g = lane / 4 and g + 8
// (elements 0, 1 and 2, 3 of each 8-column block); the four lanes of a quad share a row.
#pragma once

#include "device/reduce.cuh"
#include "ptx/math.cuh"

namespace flashmoe {

constexpr float kLn2 = 0.693147180559945309f;

namespace attention {
namespace mma_sync {

// Running state of one row: the maximum of the unscaled scores so far (equal in the quad) and this thread's share of
// the sum of exponentials (added over the quad once, at the end).
struct RowState {
  float max;
  float sum;

  __device__ __forceinline__ RowState() : max(ptx::negative_infinity()), sum(0.0f) {}
};

// Takes the tile's maximum into the row state. Returns what the old sum and the old output must be multiplied by, and
// in `shift` what exp2(score * scale_log2 - shift) subtracts.
__device__ __forceinline__ float advance_max(RowState& row, float tile_max, float scale_log2, bool may_be_empty,
                                             float& shift) {
  const float new_max = ptx::max_ftz(row.max, quad_max(tile_max));
  // A row that has seen no key yet has the maximum -inf, and -inf - -inf is NaN. Only masked tiles can leave it so; -inf
  // scores that come from the inputs go the way of a plain softmax.
  shift = (may_be_empty && new_max == ptx::negative_infinity() ? 0.0f : new_max) * scale_log2;
  // The old exponentials refer to the rounded product. An fma here would leave its rounding error, in every tile anew: at
  // scores of 2^14, up to 9% after 128 tiles. So a maximum that stays gives exactly 1.
  const float rescale = ptx::exp2_approx(ptx::sub_rn(row.max * scale_log2, shift));
  row.max = new_max;
  row.sum *= rescale;
  return rescale;
}

// Natural logarithm of the sum of exp(score * scale): max * scale + ln(sum); -inf for a row without a key.
__device__ __forceinline__ float log_sum_exp(float max, float sum, float scale_log2) {
  return sum == 0.0f ? ptx::negative_infinity() : ptx::fma_rn(max, scale_log2, ptx::lg2_approx(sum)) * kLn2;
}

}  // namespace mma_sync
}  // namespace attention
}  // namespace flashmoe
