// What a band does to the scores of one key block, in the accumulator layout of wgmma (softmax.cuh): softcap, mask tensors, the window's
// two ends; and the sink.
#pragma once

#include "attention/masks.cuh"
#include "attention/params/forward.h"
#include "device/convert.cuh"
#include "device/math.cuh"
#include "device/reduce.cuh"
#include "attention/forward/sm90/softmax.cuh"
#include "attention/forward/sm90/varlen/schedule.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/shuffle.cuh"

namespace flashmoe {
namespace attention {
namespace sm90 {

// scores become tanh(scores * factor), within 2e-7. Up to 1/2 by a polynomial, which leaves the exponential units to the softmax;
// where some score of the warp is larger, by an exponential.
template <int kN>
__device__ __forceinline__ void cap_scores(float (&scores)[kN / 2], float factor) {
  constexpr float kPolynomialEnd = 0.5f;
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
    scores[i] *= factor;
    largest = ptx::max_ftz(largest, fabsf(scores[i]));
  }
  if (!ptx::vote_any(largest > kPolynomialEnd)) {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      const float square = scores[i] * scores[i];
      float series = ptx::fma_rn(square, -0.04422886f, 0.13185846f);
      series = ptx::fma_rn(square, series, -0.33326459f);
      scores[i] = ptx::fma_rn(scores[i] * square, series, scores[i]);
    }
    return;
  }
  constexpr float kTwoLog2E = 2.8853900817779268f;
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {  // 1 - 2 / (e^2x + 1)
    const float inverse = ptx::rcp_approx(ptx::exp2_approx(scores[i] * kTwoLog2E) + 1.0f);
    scores[i] = ptx::fma_rn(-2.0f, inverse, 1.0f);
  }
}

// Where a mask tensor has the scores of this thread: two rows, of keys two neighbours in every eight from first_key on.
template <typename Element>
struct MaskReader {
  const unsigned char* row_gmem[2];  // of key 0; null past the last row
  const Band& band;
  const int keys;

  __device__ __forceinline__ MaskReader(const ForwardParams& params, const VarlenTile& tile, int row)
      : band(params.band), keys(tile.keys) {
    const int bytes = band.mask_type == MaskTensor::kBool ? 1 : 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t offset = tile.batch * band.mask_stride_batch + tile.head * band.mask_stride_head +
                             (row + 8 * r) * band.mask_stride_row;
      row_gmem[r] = row + 8 * r < tile.rows ? static_cast<const unsigned char*>(band.mask) + offset * bytes : nullptr;
    }
  }

  template <int kN>
  __device__ __forceinline__ void hide(float (&scores)[kN / 2], int first_key) const {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      const int r = i / 2 % 2;
      const int key = first_key + 8 * (i / 4) + i % 2;
      if (row_gmem[r] == nullptr || key >= keys) continue;
      if (ptx::ld_global_8(row_gmem[r] + key * band.mask_stride_key) == 0) scores[i] = ptx::negative_infinity();
    }
  }

  // scores become score * factor + value * value_factor; the product is held to the range of float, unless the value is infinite.
  template <int kN>
  __device__ __forceinline__ void add(float (&scores)[kN / 2], int first_key, float factor, float value_factor) const {
    constexpr float kLargest = 3.0e38f;
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      const int r = i / 2 % 2;
      const int key = first_key + 8 * (i / 4) + i % 2;
      float added = 0.0f;
      if (row_gmem[r] != nullptr && key < keys) {
        const float value = unpack<Element>(ptx::ld_global_16(row_gmem[r] + 2 * key * band.mask_stride_key)).x;
        added = value == ptx::negative_infinity() ? value : ptx::max_ftz(value * value_factor, -kLargest);
      }
      scores[i] = ptx::fma_rn(scores[i], factor, added);
    }
  }
};

// Scores of columns before hidden[r] become -inf; counted as mask_scores counts.
template <int kN>
__device__ __forceinline__ void mask_scores_before(float (&scores)[kN / 2], const int (&hidden)[2]) {
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
    const int column = 8 * (i / 4) + i % 2;
    if (column < hidden[(i / 2) % 2]) scores[i] = ptx::negative_infinity();
  }
}

// finish_softmax of rows to whose sums a term exp(sink) belongs; sink_log2[r] is the sink times log2(e), -inf for none.
__device__ __forceinline__ void finish_softmax_with_sinks(const RowState& rows, float (&inverse_sum)[2], float (&lse)[2],
                                                          float scale_log2, const float (&sink_log2)[2]) {
  constexpr float kLn2 = 0.693147180559945309f;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = quad_sum(rows.sum[r]);
    const float max_log2 = sum == 0.0f ? ptx::negative_infinity() : rows.max[r] * scale_log2;
    const float top = ptx::max_ftz(max_log2, sink_log2[r]);
    const bool is_empty = top == ptx::negative_infinity();
    const float weight = is_empty ? 0.0f : ptx::exp2_approx(max_log2 - top);
    const float total = is_empty ? 0.0f : ptx::fma_rn(sum, weight, ptx::exp2_approx(sink_log2[r] - top));
    inverse_sum[r] = is_empty ? 0.0f : weight * ptx::rcp_approx(total);
    lse[r] = is_empty ? ptx::negative_infinity() : (top + ptx::lg2_approx(total)) * kLn2;
  }
}

}  // namespace sm90
}  // namespace attention
}  // namespace flashmoe
