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

constexpr float kTwoLog2E = 2.8853900817779268f;

// scores become tanh(scores * factor), where a mask tensor follows: 1 - 2 / (e^2x + 1), right at both infinities.
template <int kN>
__device__ __forceinline__ void cap_scores(float (&scores)[kN / 2], float factor) {
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
    const float inverse = ptx::rcp_approx(ptx::exp2_approx(scores[i] * (factor * kTwoLog2E)) + 1.0f);
    scores[i] = ptx::fma_rn(-2.0f, inverse, 1.0f);
  }
}

// The softcap inside the softmax: exponents scale_log2 * tanh(score * factor) of raw scores, whose order they keep, so that maxima are
// those of raw scores. What bounds the kernel is the exponential units, which the plain softmax keeps half busy at head dim 128.
//
// kSoft   up to 5/16 tanh(x) is x times two terms more in x^2, 4e-7 off: three multiply-adds a score.
// kMild   up to 5/4 x times seven terms, 5e-7 off: seven.
// kExact  1 - 2 / (e^2x + 1), where two scores share one reciprocal.
//
// Below -end both series fall faster than tanh, which does not show: beside a maximum of -1/8 or more, with a cap of kLeastSoftcap or
// more, such scores weigh less than e^-10 (kSoft: less than 2%, of which they miss a thousandth).
enum class Cap { kSoft, kMild, kExact };

struct Softcap {
  static constexpr float kSoftEnd = 0.3125f;
  static constexpr float kMildEnd = 1.25f;
  static constexpr float kSeriesBegin = -0.125f;
  static constexpr float kLeastSoftcap = 24.0f * 1.44269504f;  // as scale_log2
  // Of kExact: there the product of two e^2x + 1 is finite, and tanh is 1.
  static constexpr float kMostExponent = 60.0f;

  float factor;
  float scale_log2;

  __device__ __forceinline__ bool serves(float max, float end) const {
    return max * factor <= end && max * factor >= kSeriesBegin && scale_log2 >= kLeastSoftcap;
  }
  __device__ __forceinline__ float slope() const { return factor * scale_log2; }

  // score * series(score): the exponent.
  template <Cap kCap>
  __device__ __forceinline__ float series(float score) const {
    if constexpr (kCap == Cap::kSoft) {
      const float square = score * score;
      const float at = factor * factor;
      constexpr float kCube = -0.33308466f;
      constexpr float kFifth = 0.12584438f;
      constexpr float kLeast = 1.2e-38f;  // zero times the square of -inf would be NaN
      const float fifth = ptx::max_ftz(kFifth * at * at * slope(), kLeast);
      return ptx::fma_rn(square, ptx::fma_rn(square, fifth, kCube * at * slope()), slope());
    }
    constexpr float kTerms[] = {0.9999964559f, -0.33324215279f, 0.1326480200754f, -0.0516446655f,
                                0.017636209f,  -0.00432547536f, 0.00052547979f};
    const float x = score * factor;  // the sixth power of its square is no factor for a coefficient
    const float square = x * x;
    float sum = kTerms[6];
#pragma unroll
    for (int term = 5; term >= 0; --term) sum = ptx::fma_rn(square, sum, kTerms[term]);
    return sum * slope();
  }
  // e^2x + 1.
  __device__ __forceinline__ float denominator(float score) const {
    return ptx::exp2_approx(ptx::min_nan(score * (factor * kTwoLog2E), kMostExponent)) + 1.0f;
  }
  __device__ __forceinline__ float exact(float score) const {
    const float exponent = ptx::fma_rn(-2.0f * scale_log2, ptx::rcp_approx(denominator(score)), scale_log2);
    return score == ptx::negative_infinity() ? score : exponent;
  }
  template <Cap kCap>
  __device__ __forceinline__ float exponent(float score) const {
    if constexpr (kCap == Cap::kExact) return exact(score);
    return score * series<kCap>(score);
  }
};

// What online_softmax does after it has a row's new maxima.
template <int kN, Cap kCap, bool kMayBeEmpty>
__device__ __forceinline__ void capped_exponentials(float (&scores)[kN / 2], RowState& rows, const float (&new_max)[2],
                                                    bool moved, float (&rescale)[2], const Softcap& cap) {
  float shift[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float before = cap.exponent<kCap>(rows.max[r]);
    shift[r] = before;
    if (moved) {
      rows.max[r] = new_max[r];
      shift[r] = cap.exponent<kCap>(new_max[r]);
    }
    if (kMayBeEmpty && kCap == Cap::kExact && rows.max[r] == ptx::negative_infinity()) shift[r] = 0.0f;
    if (moved) {
      rescale[r] = ptx::exp2_approx(ptx::sub_rn(before, shift[r]));
      rows.sum[r] *= rescale[r];
    }
  }
#pragma unroll
  for (int i = 0; i < kN / 2; i += 2) {
    const int r = i / 2 % 2;
    if constexpr (kCap == Cap::kExact) {
      const float top = cap.scale_log2 - shift[r];
      const float denominators[2] = {cap.denominator(scores[i]), cap.denominator(scores[i + 1])};
      const float inverse = ptx::rcp_approx(denominators[0] * denominators[1]);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float exponent = ptx::fma_rn(-2.0f * cap.scale_log2, inverse * denominators[1 - c], top);
        const bool is_hidden = kMayBeEmpty && scores[i + c] == ptx::negative_infinity();
        scores[i + c] = ptx::exp2_approx(is_hidden ? scores[i + c] : exponent);
      }
    } else {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& score = scores[i + c];
        score = ptx::exp2_approx(ptx::fma_rn(score, cap.series<kCap>(score), -shift[r]));
      }
    }
    rows.sum[r] += scores[i];
    rows.sum[r] += scores[i + 1];
  }
}

// online_softmax of raw scores under a softcap.
template <int kN, bool kMayBeEmpty>
__device__ __forceinline__ bool capped_softmax(float (&scores)[kN / 2], RowState& rows, float (&rescale)[2],
                                               const Softcap& cap) {
  constexpr float kMaxExponent = 8.0f;
  float new_max[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    new_max[r] = rows.max[r];
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      new_max[r] = ptx::max_ftz(new_max[r], ptx::max_ftz(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]));
    }
  }
  // False for the NaN of a row without keys.
  const bool stays = (new_max[0] - rows.max[0]) * cap.slope() <= kMaxExponent &&
                     (new_max[1] - rows.max[1]) * cap.slope() <= kMaxExponent;
  const bool moved = ptx::vote_any(!stays);
  if (moved) {
    new_max[0] = quad_max(new_max[0]);
    new_max[1] = quad_max(new_max[1]);
  }
  if (ptx::vote_all(cap.serves(new_max[0], Softcap::kSoftEnd) && cap.serves(new_max[1], Softcap::kSoftEnd))) {
    capped_exponentials<kN, Cap::kSoft, kMayBeEmpty>(scores, rows, new_max, moved, rescale, cap);
  } else if (ptx::vote_all(cap.serves(new_max[0], Softcap::kMildEnd) && cap.serves(new_max[1], Softcap::kMildEnd))) {
    capped_exponentials<kN, Cap::kMild, kMayBeEmpty>(scores, rows, new_max, moved, rescale, cap);
  } else {
    capped_exponentials<kN, Cap::kExact, kMayBeEmpty>(scores, rows, new_max, moved, rescale, cap);
  }
  return moved;
}

// Where a mask tensor has the scores of this thread: two rows, of keys two neighbours in every eight from first_key on. Row by row, so
// that only one row's loads wait in registers.
template <typename Element>
struct MaskReader {
  const Band& band;
  const VarlenTile& tile;
  const int first_key;
  const bool is_paired;  // two neighbours in one load

  // end_key: of the block.
  __device__ __forceinline__ MaskReader(const Band& band_, const VarlenTile& tile_, int first_key_, int end_key)
      : band(band_), tile(tile_), first_key(first_key_), is_paired(has_pairs(band_) && end_key <= tile_.keys) {}

  // Of an additive mask.
  static __device__ __forceinline__ bool has_pairs(const Band& band) {
    const auto strides = static_cast<int>(band.mask_stride_batch | band.mask_stride_head | band.mask_stride_row);
    const auto address = static_cast<int>(reinterpret_cast<uint64_t>(band.mask) >> 1);
    return band.mask_stride_key == 1 && ((strides | address) & 1) == 0;
  }

  template <int kBytes>
  __device__ __forceinline__ const unsigned char* row_of(int row) const {
    const int64_t offset = tile.batch * band.mask_stride_batch + tile.head * band.mask_stride_head +
                           row * band.mask_stride_row + first_key * band.mask_stride_key;
    return static_cast<const unsigned char*>(band.mask) + ptx::recompute(offset) * kBytes;
  }

  // From a pair's first key to its second, and from there to the next pair's first.
  template <int kBytes>
  __device__ __forceinline__ const unsigned char* next_key(const unsigned char* gmem, int c) const {
    return ptx::advance_pointer(gmem, (c == 0 ? 1 : 7) * band.mask_stride_key * kBytes);
  }

  template <int kN>
  __device__ __forceinline__ void hide(float (&scores)[kN / 2], int first_row) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (first_row + 8 * r >= tile.rows) continue;
      const unsigned char* gmem = row_of<1>(first_row + 8 * r);
#pragma unroll
      for (int j = 0; j < kN / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (first_key + 8 * j + c < tile.keys && ptx::ld_global_8(gmem) == 0) {
            scores[4 * j + 2 * r + c] = ptx::negative_infinity();
          }
          gmem = next_key<1>(gmem, c);
        }
      }
    }
  }

  // scores become score * factor + value * value_factor; the product is held to the range of float, unless the value is infinite.
  template <int kN>
  __device__ __forceinline__ void add(float (&scores)[kN / 2], int first_row, float factor, float value_factor) const {
    constexpr float kLargest = 3.0e38f;
    const auto sum = [&](float& score, float value) {
      const float held = ptx::max_ftz(value * value_factor, -kLargest);
      score = ptx::fma_rn(score, factor, value == ptx::negative_infinity() ? value : held);
    };
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const unsigned char* gmem = row_of<2>(minimum(first_row + 8 * r, tile.rows - 1));
      if (is_paired) {
        uint32_t pairs[kN / 8];
#pragma unroll
        for (int j = 0; j < kN / 8; ++j) pairs[j] = ptx::ld_global_32(gmem + 16 * j);
#pragma unroll
        for (int j = 0; j < kN / 8; ++j) {
          const float2 values = unpack<Element>(pairs[j]);
          sum(scores[4 * j + 2 * r], values.x);
          sum(scores[4 * j + 2 * r + 1], values.y);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kN / 8; ++j) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float value = 0.0f;
            if (first_key + 8 * j + c < tile.keys) {
              value = unpack<Element>(ptx::ld_global_16(gmem)).x;
            }
            sum(scores[4 * j + 2 * r + c], value);
            gmem = next_key<2>(gmem, c);
          }
        }
      }
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
__device__ __forceinline__ void finish_softmax_with_sinks(const RowState& rows, float (&inverse_sum)[2],
                                                          float (&lse)[2], float scale_log2,
                                                          const float (&sink_log2)[2]) {
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
