// Online softmax in base 2 over a 64 x kN accumulator of wgmma. A thread holds two rows, r = 0 and 1 (16 * warp + g and
// that + 8, g = lane / 4), in elements 4j + 2r and the next: columns 8j + 2 * (lane % 4) and the next. The four lanes
// of a quad share the rows.
#pragma once

#include "attention/softmax.cuh"
#include "device/reduce.cuh"
#include "ptx/math.cuh"
#include "ptx/shuffle.cuh"

namespace flashmoe::attention::sm90 {

// The two rows of a thread: the maximum of the unscaled scores that the exponentials refer to (equal in the quad) and
// this thread's share of the sum of exponentials.
struct RowState {
  float max[2];
  float sum[2];
};

// Sets scores of columns from visible[r] on to -inf. visible[r]: number of leading visible columns of row r in this
// tile, counted from this thread's first column, 2 * (lane % 4); may be negative.
template <int kN>
__device__ __forceinline__ void mask_scores(float (&scores)[kN / 2], const int (&visible)[2]) {
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
    const int column = 8 * (i / 4) + i % 2;
    if (column >= visible[(i / 2) % 2]) scores[i] = ptx::negative_infinity();
  }
}

// Sets scores of columns before hidden[r] to -inf; counted as in mask_scores.
template <int kN>
__device__ __forceinline__ void mask_scores_before(float (&scores)[kN / 2], const int (&hidden)[2]) {
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
    const int column = 8 * (i / 4) + i % 2;
    if (column < hidden[(i / 2) % 2]) scores[i] = ptx::negative_infinity();
  }
}

// Replaces the scores s by exp2((s - max) * scale_log2) and adds them to the sums. Returns whether (in any lane of the
// warp) the maximum moved; then the old output of row r must be multiplied by rescale[r], as the old sum has been.
//
// After the first few tiles no row's maximum moves (attention/softmax.cuh). Then the maximum over the quad is not
// computed and the output is not rescaled; nothing would overlap either. The warp's vote only skips multiplications by
// exactly 1.
//
// kMayBeEmpty: a row may have seen no key yet; its maximum is -inf, and -inf - -inf is NaN. Unmasked tiles have no such
// row, and a NaN there comes from the inputs and must be propagated.
template <int kN, bool kMayBeEmpty>
__device__ __forceinline__ bool online_softmax(float (&scores)[kN / 2], RowState& rows, float (&rescale)[2],
                                               float scale_log2) {
  float new_max[2];  // of this thread's columns; of the whole row only if the maximum moves
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    new_max[r] = rows.max[r];
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      new_max[r] = ptx::max_ftz(new_max[r], ptx::max_ftz(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]));
    }
  }
  const bool stays =
      reference_stays(new_max[0], rows.max[0], scale_log2) && reference_stays(new_max[1], rows.max[1], scale_log2);
  const bool moved = ptx::vote_any(!stays);
  if (moved) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      new_max[r] = quad_max(new_max[r]);
      if (reference_stays(new_max[r], rows.max[r], scale_log2)) new_max[r] = rows.max[r];
      const float shift = (kMayBeEmpty && new_max[r] == ptx::negative_infinity() ? 0.0f : new_max[r]) * scale_log2;
      // Rounded products on both sides, as in the exponentials: a row whose maximum stays is multiplied by exactly 1.
      rescale[r] = ptx::exp2_approx(ptx::sub_rn(rows.max[r] * scale_log2, shift));
      rows.max[r] = new_max[r];
      rows.sum[r] *= rescale[r];
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float shift = (kMayBeEmpty && rows.max[r] == ptx::negative_infinity() ? 0.0f : rows.max[r]) * scale_log2;
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& score = scores[4 * j + 2 * r + c];
        score = ptx::exp2_approx(ptx::fma_rn(score, scale_log2, -shift));
        rows.sum[r] += score;
      }
    }
  }
  return moved;
}

// Inputs of rising_softmax for a thread's two rows and a key block.
struct RisingRows {
  float base[2];   // added to the scores to get those that the reference refers to
  float ahead[2];  // how far above a new maximum its reference is set, in units of scores
  float limit[2];  // how far above the reference a maximum may be, as an exponent
};

// online_softmax for scores that rise from block to block, as ALiBi's do. A reference that followed them would move in
// every other block, and the references of a warp in nearly all, because a warp rescales if any of its 16 rows requires
// it. So references are set ahead of the rise, at blocks that the caller chooses for all rows of a head.
template <int kN, bool kMayBeEmpty>
__device__ __forceinline__ bool rising_softmax(float (&scores)[kN / 2], RowState& rows, float (&rescale)[2],
                                               float scale_log2, const RisingRows& rising) {
  float new_max[2];  // of this thread's columns
  bool stays = true;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    new_max[r] = ptx::max_ftz(scores[2 * r], scores[2 * r + 1]);
#pragma unroll
    for (int j = 1; j < kN / 8; ++j) {
      new_max[r] = ptx::max_ftz(new_max[r], ptx::max_ftz(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]));
    }
    new_max[r] += rising.base[r];
    stays = stays && (new_max[r] - rows.max[r]) * scale_log2 <= rising.limit[r];
  }
  const bool moved = ptx::vote_any(!stays);
  if (moved) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float of_row = quad_max(new_max[r]);
      const bool row_stays = (of_row - rows.max[r]) * scale_log2 <= rising.limit[r];
      const float next = row_stays ? rows.max[r] : of_row + rising.ahead[r];
      const float shift = (kMayBeEmpty && next == ptx::negative_infinity() ? 0.0f : next) * scale_log2;
      const float old_shift = rows.max[r] * scale_log2;
      rescale[r] = ptx::exp2_approx(ptx::sub_rn(old_shift, shift));
      rows.max[r] = next;
      rows.sum[r] *= rescale[r];
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float reference = kMayBeEmpty && rows.max[r] == ptx::negative_infinity() ? 0.0f : rows.max[r];
    const float shift = ptx::sub_rn(reference * scale_log2, rising.base[r] * scale_log2);
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      float& p = scores[4 * (i / 2) + 2 * r + i % 2];
      p = ptx::exp2_approx(ptx::fma_rn(p, scale_log2, -shift));
      rows.sum[r] += p;
    }
  }
  return moved;
}

}  // namespace flashmoe::attention::sm90
