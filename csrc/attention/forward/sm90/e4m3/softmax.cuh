// The softmax of a block of keys, for P in e4m3 (../softmax.cuh says how a 64 x kN accumulator lies in registers).
//
// P of a block refers to the block's own maximum, and is 2^8 there: of each row and block the largest P is exact, and small ones keep their bits,
// whatever other blocks hold. What the block's sums are worth is a factor in float32, by which they join those of the row.
#pragma once

#include "attention/forward/sm90/softmax.cuh"
#include "ptx/saturate.cuh"

namespace flashmoe {
namespace attention {
namespace sm90 {

// The exponent to base 2 of a block's largest P. e4m3 has normal numbers from 2^-6 to 448.
constexpr float kTopExponent = 8.0f;
// The row's reference moves where a block's maximum is past it by so many powers of two: sums in float32 have room for that.
constexpr float kFarthest = 48.0f;

// A part of the exponentials is computed by FMA units, as those of their own are what the kernel waits for: of every four groups of eight
// columns the last kPolynomialGroups, in every block. 2^(x) of x / 128 + 120 / 128 in [0, 1]: a sum with 1.5 * 2^16 rounds x to an integer, what
// is left is in [-1/2, 1/2], and a cubic polynomial has its power with a relative error of 7.5e-5. Less than 2^-120 is 2^-120.
// A NaN becomes a number: the maximum, which every row's sum has seen, carries it.
__device__ __forceinline__ float exp2_polynomial(float x) {
  constexpr float kInteger = 98304.0f;
  const float place = ptx::fma_sat(x, 1.0f / 128.0f, 120.0f / 128.0f);
  const float whole = ptx::sub_rn(place, -kInteger);
  const float rest = ptx::sub_rn(place, ptx::sub_rn(whole, kInteger));
  float power = ptx::fma_rn(rest, 0.05517165f * 0x1p-99f, 0.24261138f * 0x1p-106f);
  power = ptx::fma_rn(power, rest, 0.69326101f * 0x1p-113f);
  power = ptx::fma_rn(power, rest, 0.99992806f * 0x1p-120f);
  return ptx::bits_float(ptx::float_bits(power) + (ptx::float_bits(whole) << 23));
}

// Replaces the scores s by 2^(s * scale_log2 - the block's largest + kTopExponent), and adds them to the sums, in units of rows.max, with the
// block's factor. Returns whether (in any lane of the warp) a reference moved: then what was added before is multiplied by `rescale`.
//
// kMayBeEmpty: a row may see no key of the block. A NaN becomes the maximum, and with it everything of its row.
template <int kN, int kPolynomialGroups, bool kMayBeEmpty>
__device__ __forceinline__ bool block_softmax(float (&scores)[kN / 2], RowState& rows, float (&factor)[2],
                                              float (&rescale)[2], float scale_log2) {
  float largest[2];
  bool moves[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    largest[r] = ptx::negative_infinity();
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      largest[r] = ptx::max_nan(largest[r], ptx::max_nan(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]));
    }
    largest[r] = ptx::max_nan(largest[r], ptx::shuffle_xor(largest[r], 1));
    largest[r] = ptx::max_nan(largest[r], ptx::shuffle_xor(largest[r], 2));
    moves[r] = (largest[r] - rows.max[r]) * scale_log2 > kFarthest;
  }
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
        const float x = ptx::fma_rn(score, scale_log2, -shift);
        score = j % 4 >= 4 - kPolynomialGroups ? exp2_polynomial(x) : ptx::exp2_approx(x);
        sum[c] += score;
      }
    }
    rows.sum[r] = ptx::fma_rn(sum[0] + sum[1], factor[r], rows.sum[r]);
  }
  return moved;
}

}  // namespace sm90
}  // namespace attention
}  // namespace flashmoe
