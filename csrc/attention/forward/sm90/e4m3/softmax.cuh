// The softmax of a block of keys, for P in e4m3 (../softmax.cuh describes the register layout of a 64 x kN
// accumulator).
//
// P of a block refers to the block's own maximum, where it is 2^8: in each row and block the largest P is exact, and
// small ones keep their bits whatever other blocks hold. A factor in float32 converts the block's sums to the units of
// the row's sums.
#pragma once

#include "attention/forward/sm90/softmax.cuh"

namespace flashmoe::attention::sm90 {

// The exponent to base 2 of a block's largest P. e4m3 has normal numbers from 2^-6 to 448.
constexpr float kTopExponent = 8.0f;
// The row's reference moves if a block's maximum exceeds it by more than this many powers of two; sums in float32 have
// room for that.
constexpr float kFarthest = 48.0f;

// Moves the references of the rows in `moves` to a block's largest scores. Returns whether any lane of the warp has
// moved one.
__device__ __forceinline__ bool move_references(RowState& rows, float (&rescale)[2], float scale_log2,
                                                const float (&largest)[2], const bool (&moves)[2]) {
  const bool moved = ptx::vote_any(moves[0] || moves[1]);
  if (moved) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rescale[r] = 1.0f;
      if (!moves[r]) continue;
      rescale[r] = ptx::exp2_approx(ptx::sub_rn(rows.max[r] * scale_log2, largest[r] * scale_log2));
      rows.max[r] = largest[r];
      rows.sum[r] *= rescale[r];
    }
  }
  return moved;
}

// Replaces the scores s by 2^(s * scale_log2 - the block's largest + kTopExponent) and adds them, times the block's
// factor, to the sums, which refer to rows.max. Returns whether (in any lane of the warp) a reference moved; then the
// output so far must be multiplied by `rescale`.
//
// kMayBeEmpty: a row may see no key of the block; otherwise a maximum of -inf comes from NaN, which must be propagated.
template <int kN, bool kMayBeEmpty>
__device__ __forceinline__ bool block_softmax(float (&scores)[kN / 2], RowState& rows, float (&factor)[2],
                                              float (&rescale)[2], float scale_log2) {
  float largest[2];
  bool moves[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    largest[r] = ptx::negative_infinity();
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      largest[r] = ptx::max_ftz(largest[r], ptx::max_ftz(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]));
    }
    largest[r] = quad_max(largest[r]);
    moves[r] = (largest[r] - rows.max[r]) * scale_log2 > kFarthest;
  }
  const bool moved = move_references(rows, rescale, scale_log2, largest, moves);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool is_empty = kMayBeEmpty && largest[r] == ptx::negative_infinity();
    const float top = (is_empty ? 0.0f : largest[r]) * scale_log2;
    factor[r] = is_empty ? 0.0f : ptx::exp2_approx(ptx::sub_rn(top, rows.max[r] * scale_log2));
    const float shift = ptx::sub_rn(top, kTopExponent);
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& score = scores[4 * j + 2 * r + c];
        score = ptx::exp2_approx(ptx::fma_rn(score, scale_log2, -shift));
        sum[c] += score;
      }
    }
    rows.sum[r] = ptx::fma_rn(sum[0] + sum[1], factor[r], rows.sum[r]);
  }
  return moved;
}

// The same with a positive factor for the scores of each 64 keys: rows.max is an exponent here. A separate function,
// because a common one made the loops without scales spill.
template <int kN, bool kMayBeEmpty>
__device__ __forceinline__ bool scaled_block_softmax(float (&scores)[kN / 2], RowState& rows, float (&factor)[2],
                                                     float (&rescale)[2], const float (&factors)[kN / 64]) {
  float largest[2];
  bool moves[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    largest[r] = ptx::negative_infinity();
#pragma unroll
    for (int i = 0; i < kN / 64; ++i) {
      float own = ptx::negative_infinity();
#pragma unroll
      for (int j = 8 * i; j < 8 * i + 8; ++j) {
        own = ptx::max_ftz(own, ptx::max_ftz(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]));
      }
      largest[r] = ptx::max_ftz(largest[r], own * factors[i]);
    }
    largest[r] = quad_max(largest[r]);
    moves[r] = largest[r] - rows.max[r] > kFarthest;
  }
  const bool moved = move_references(rows, rescale, 1.0f, largest, moves);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool is_empty = kMayBeEmpty && largest[r] == ptx::negative_infinity();
    const float top = is_empty ? 0.0f : largest[r];
    factor[r] = is_empty ? 0.0f : ptx::exp2_approx(ptx::sub_rn(top, rows.max[r]));
    const float shift = ptx::sub_rn(top, kTopExponent);
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& score = scores[4 * j + 2 * r + c];
        score = ptx::exp2_approx(ptx::fma_rn(score, factors[j / 8], -shift));
        sum[c] += score;
      }
    }
    rows.sum[r] = ptx::fma_rn(sum[0] + sum[1], factor[r], rows.sum[r]);
  }
  return moved;
}

}  // namespace flashmoe::attention::sm90
