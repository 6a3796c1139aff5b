// ALiBi (../../scores.cuh) in the accumulator layout of wgmma, and the blocks at which the references of its rows move.
#pragma once

#include "attention/forward/sm90/softcap.cuh"
#include "attention/forward/sm90/softmax.cuh"
#include "attention/params/forward.h"
#include "attention/softmax.cuh"
#include "ptx/math.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention::sm90 {

// Exponents of P while a row's scores rise: its largest P is between 2^-kRisingAhead and 2^kRisingMost. For float16 the
// range in which no value loses precision. bfloat16 has the range of float32, which leaves room for sums over 2^20 keys
// and for v as small as 2^-40 or as large as 2^40.
template <typename Element>
constexpr float kRisingMost = kHasRangeOfFloat<Element> ? 60.0f : 15.0f;
template <typename Element>
constexpr float kRisingAhead = kHasRangeOfFloat<Element> ? 30.0f : 6.0f;
constexpr float kRisingSpread = 8.0f;  // room for differences between the rows' maxima besides the bias

// Adds ALiBi to a block's scores. own_key: the own key of the thread's first row. What a row gets depends only on its
// own key and the block.
//
// Before a row's own key, and after it, the bias is linear. Its value at the thread's first column is left to the
// softmax (base), so that a score takes one instruction. In the block that holds the row's own key the bias is a
// distance, and base is 0.
template <typename Element, int kN>
__device__ __forceinline__ RisingRows add_alibi(float (&scores)[kN / 2], const ForwardParams& params, float slope,
                                                int own_key, int block) {
  static_assert(!ptx::kIsEither<Element>, "how far references go ahead depends on the type's range");
  const int lane = ptx::lane_index();
  const int own = own_key - block * kN;  // own key of row 0, counted from the block's first key
  const int own_of_warp = own - lane / 4;
  const auto distance = static_cast<float>(own - lane % 4 * 2);
  RisingRows rising;
  const bool is_behind = own_of_warp + 15 < 0;  // all keys are after the own keys of all 16 rows
  if (is_behind || own_of_warp >= kN) {
    const float line = is_behind ? slope : -slope;
#pragma unroll
    for (int r = 0; r < 2; ++r) rising.base[r] = -line * (distance + 8.0f * r);
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      scores[i] = ptx::fma_rn(line, static_cast<float>(8 * (i / 4) + i % 2), scores[i]);
    }
  } else {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int own_of_row = own + 8 * r;
      const float to_own = distance + 8.0f * r;
      const bool is_inside = own_of_row >= 0 && own_of_row < kN;
      const float line = own_of_row < 0 ? slope : -slope;
      rising.base[r] = is_inside ? 0.0f : -line * to_own;
#pragma unroll
      for (int i = 0; i < kN / 4; ++i) {
        const auto column = static_cast<float>(8 * (i / 2) + i % 2);
        float& score = scores[i / 2 * 4 + 2 * r + i % 2];
        score = ptx::fma_rn(is_inside ? slope : line, is_inside ? fabsf(to_own - column) : column, score);
      }
    }
  }
  // References move at blocks spaced so that between two of them the scores rise by what the exponents have room for.
  constexpr float kRoom = kRisingMost<Element> + kRisingAhead<Element> - kRisingSpread;
  const float moves = -slope * params.scale_log2 * (kN / kRoom);  // per block
  const bool is_due = floorf(moves * static_cast<float>(block + 1)) > floorf(moves * static_cast<float>(block));
  const float most_ahead = kRisingAhead<Element> * kLn2 * params.score_options.mask_factor;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float rise = -slope * static_cast<float>(own + 8 * r - (kN - 1));  // after this block
    rising.ahead[r] = ptx::max_ftz(min(rise, most_ahead), 0.0f);
    rising.limit[r] = is_due && rise > 0.0f ? -rising.ahead[r] * params.scale_log2 : kRisingMost<Element>;
  }
  return rising;
}

}  // namespace flashmoe::attention::sm90
