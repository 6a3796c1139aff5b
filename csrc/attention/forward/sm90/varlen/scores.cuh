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
// those of raw scores. Time follows the number of instructions, whichever units they are for.
//
// kSoft   up to 5/16 tanh(x) is x times two terms more in x^2, 4e-7 off.
// kMild   up to 3/4 x times four terms more, 3e-7 off.
// kExact  1 - 2 / (e^2x + 1), where four scores share one reciprocal: up to 10, from where on tanh is 1.
// kHeld   the same beyond, with e^2x held to what the product of four leaves finite.
//
// Below -end both series fall faster than tanh, which does not show: beside a maximum of -1/8 or more, with a cap of kLeastSoftcap or
// more, such scores weigh less than e^-10 (kSoft: less than 2%, of which they miss a thousandth).
enum class Cap { kSoft, kMild, kExact, kHeld };

struct Softcap {
  static constexpr float kSoftEnd = 0.3125f;
  static constexpr float kMildEnd = 0.75f;
  static constexpr float kExactEnd = 10.0f;
  static constexpr float kSeriesBegin = -0.125f;
  static constexpr float kLeastSoftcap = 24.0f * 1.44269504f;  // as scale_log2
  // Factors whose eighth power is still a float, and not the least of them.
  static constexpr float kLeastFactor = 1e-4f;
  static constexpr float kMostFactor = 1e3f;
  static constexpr float kMostExponent = 30.0f;  // of kHeld

  float factor;
  float scale_log2;

  template <Cap kCap>
  __device__ __forceinline__ bool serves(float max) const {
    const float x = max * factor;
    if constexpr (kCap == Cap::kExact) return x <= kExactEnd;
    return x <= (kCap == Cap::kSoft ? kSoftEnd : kMildEnd) && x >= kSeriesBegin && scale_log2 >= kLeastSoftcap &&
           factor >= kLeastFactor && factor <= kMostFactor;
  }
  __device__ __forceinline__ float slope() const { return factor * scale_log2; }

  // score * series(score): the exponent.
  template <Cap kCap>
  __device__ __forceinline__ float series(float score) const {
    const float square = score * score;
    const float at = factor * factor;
    constexpr bool kIsSoft = kCap == Cap::kSoft;
    constexpr float kTerms[] = {kIsSoft ? -0.33308466f : -0.33328045f, kIsSoft ? 0.12584438f : 0.13253363f,
                                -0.04986608f, 0.01275058f};
    const float third = kTerms[0] * at * slope();
    float fifth = kTerms[1] * at * at * slope();
    if constexpr (!kIsSoft) {
      const float high = at * at * at * slope();
      fifth = ptx::fma_rn(square, ptx::fma_rn(square, kTerms[3] * at * high, kTerms[2] * high), fifth);
    }
    return ptx::fma_rn(square, ptx::fma_rn(square, fifth, third), slope());
  }
  // e^2x + 1.
  template <Cap kCap>
  __device__ __forceinline__ float denominator(float score) const {
    const float exponent = score * (factor * kTwoLog2E);
    return ptx::exp2_approx(kCap == Cap::kHeld ? ptx::min_nan(exponent, kMostExponent) : exponent) + 1.0f;
  }
  __device__ __forceinline__ float exact(float score) const {
    const float inverse = ptx::rcp_approx(denominator<Cap::kHeld>(score));
    return score == ptx::negative_infinity() ? score : ptx::fma_rn(-2.0f * scale_log2, inverse, scale_log2);
  }
  template <Cap kCap>
  __device__ __forceinline__ float exponent(float score) const {
    if constexpr (kCap == Cap::kExact || kCap == Cap::kHeld) return exact(score);
    return score * series<kCap>(score);
  }
};

// What capped_softmax does after it has a row's new maxima: scores become exponentials, in one piece with the exponents, so that the
// exponential units are busy while others are worked out.
template <int kN, Cap kCap, bool kMayBeEmpty>
__device__ __forceinline__ void find_exponentials(float (&scores)[kN / 2], RowState& rows, const float (&new_max)[2],
                                               bool moved, float (&rescale)[2], const Softcap& cap) {
  constexpr bool kIsSeries = kCap == Cap::kSoft || kCap == Cap::kMild;
  float shift[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float before = cap.exponent<kCap>(rows.max[r]);
    shift[r] = before;
    if (moved) {
      rows.max[r] = new_max[r];
      shift[r] = cap.exponent<kCap>(new_max[r]);
    }
    if (kMayBeEmpty && !kIsSeries && rows.max[r] == ptx::negative_infinity()) shift[r] = 0.0f;
    if (moved) {
      rescale[r] = ptx::exp2_approx(ptx::sub_rn(before, shift[r]));
      rows.sum[r] *= rescale[r];
    }
  }
#pragma unroll
  for (int j = 0; j < kN / 2; j += 8) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int first = j + 2 * r;  // of four in one row: an array of them would cost wgmma its registers
      if constexpr (kIsSeries) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          float& score = scores[first + c / 2 * 4 + c % 2];
          score = ptx::fma_rn(score, cap.series<kCap>(score), -shift[r]);
        }
      } else {
        float of[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) of[c] = cap.denominator<kCap>(scores[first + c / 2 * 4 + c % 2]);
        const float pairs[2] = {of[0] * of[1], of[2] * of[3]};
        const float inverse = -2.0f * cap.scale_log2 * ptx::rcp_approx(pairs[0] * pairs[1]);
        const float inverse_pairs[2] = {inverse * pairs[1], inverse * pairs[0]};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          float& score = scores[first + c / 2 * 4 + c % 2];
          const float exponent = ptx::fma_rn(inverse_pairs[c / 2], of[c ^ 1], cap.scale_log2 - shift[r]);
          score = kMayBeEmpty && score == ptx::negative_infinity() ? score : exponent;
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
    scores[i] = ptx::exp2_approx(scores[i]);
    rows.sum[i / 2 % 2] += scores[i];
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
  if (ptx::vote_all(cap.serves<Cap::kSoft>(new_max[0]) && cap.serves<Cap::kSoft>(new_max[1]))) {
    find_exponentials<kN, Cap::kSoft, kMayBeEmpty>(scores, rows, new_max, moved, rescale, cap);
  } else if (ptx::vote_all(cap.serves<Cap::kMild>(new_max[0]) && cap.serves<Cap::kMild>(new_max[1]))) {
    find_exponentials<kN, Cap::kMild, kMayBeEmpty>(scores, rows, new_max, moved, rescale, cap);
  } else if (ptx::vote_all(cap.serves<Cap::kExact>(new_max[0]) && cap.serves<Cap::kExact>(new_max[1]))) {
    find_exponentials<kN, Cap::kExact, kMayBeEmpty>(scores, rows, new_max, moved, rescale, cap);
  } else {
    find_exponentials<kN, Cap::kHeld, kMayBeEmpty>(scores, rows, new_max, moved, rescale, cap);
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
