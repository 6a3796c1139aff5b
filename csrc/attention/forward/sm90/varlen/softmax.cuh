// The softmax of a key block that needs no mask, where most blocks leave every maximum as it is.
#pragma once

#include "attention/forward/sm90/softmax.cuh"
#include "device/reduce.cuh"
#include "ptx/math.cuh"
#include "ptx/shuffle.cuh"

namespace flashmoe {
namespace attention {
namespace sm90 {

// Exponentials up to 2^kMaxExponent do not move a maximum (online_softmax).
constexpr float kMaxExponent = 8.0f;

// The largest of a thread's scores, or any below zero where all are: three at a time, as integers.
template <int kN>
__device__ __forceinline__ float largest(const float (&scores)[kN / 2]) {
  int level[kN / 2];
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) level[i] = static_cast<int>(ptx::float_bits(scores[i]));
  int count = kN / 2;
#pragma unroll
  for (int step = 0; step < 5; ++step) {
    const int next = (count + 2) / 3;
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      if (i >= next) continue;
      const int y = 3 * i + 1 < count ? 3 * i + 1 : 3 * i, z = 3 * i + 2 < count ? 3 * i + 2 : 3 * i;
      level[i] = max(max(level[3 * i], level[y]), level[z]);
    }
    count = next;
  }
  return ptx::bits_float(static_cast<uint32_t>(level[0]));
}

// The same of one of its two rows.
template <int kN>
__device__ __forceinline__ float largest_of_row(const float (&scores)[kN / 2], int r) {
  float row[kN / 4];
#pragma unroll
  for (int i = 0; i < kN / 4; ++i) row[i] = scores[4 * (i / 2) + 2 * r + i % 2];
  return largest<kN / 2>(row);
}

// Whether zero would move no maximum of the warp's rows; then `largest` tells whether a score does.
__device__ __forceinline__ bool shows_moves(const RowState& rows, float scale_log2) {
  return ptx::vote_all(min(rows.max[0], rows.max[1]) * scale_log2 >= -kMaxExponent);
}

// online_softmax of a block that every row sees all of, to the same bits. Whether a maximum moves is asked of the largest score as an
// integer, half as many operations as the maximum itself: `shows` is shows_moves, asked before the scores arrive.
template <int kN>
__device__ __forceinline__ bool unmasked_softmax(float (&scores)[kN / 2], RowState& rows, float (&rescale)[2],
                                                 float scale_log2, bool shows) {
  const auto stays = [&](int r, float max) { return (max - rows.max[r]) * scale_log2 <= kMaxExponent; };
  float top[2] = {0.0f, 0.0f};
  bool all_stay = false;
  if (shows) {
    top[0] = largest_of_row<kN>(scores, 0);
    top[1] = largest_of_row<kN>(scores, 1);
    all_stay = stays(0, top[0]) && stays(1, top[1]);
  }
  bool moved = false;
  if (ptx::vote_any(!all_stay)) {
    float new_max[2];  // of this thread's columns; of the whole row only where it matters
    if (ptx::vote_all(top[0] > 0.0f && top[1] > 0.0f)) {
      new_max[0] = ptx::max_ftz(rows.max[0], top[0]);
      new_max[1] = ptx::max_ftz(rows.max[1], top[1]);
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        new_max[r] = rows.max[r];
#pragma unroll
        for (int j = 0; j < kN / 8; ++j) {
          new_max[r] = ptx::max_ftz(new_max[r], ptx::max_ftz(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]));
        }
      }
    }
    moved = ptx::vote_any(!(stays(0, new_max[0]) && stays(1, new_max[1])));
    if (moved) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        new_max[r] = quad_max(new_max[r]);
        rescale[r] = ptx::exp2_approx(ptx::sub_rn(rows.max[r] * scale_log2, new_max[r] * scale_log2));
        rows.max[r] = new_max[r];
        rows.sum[r] *= rescale[r];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float shift = rows.max[r] * scale_log2;
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      float& score = scores[4 * (i / 2) + 2 * r + i % 2];
      score = ptx::exp2_approx(ptx::fma_rn(score, scale_log2, -shift));
      rows.sum[r] += score;
    }
  }
  return moved;
}

}  // namespace sm90
}  // namespace attention
}  // namespace flashmoe
