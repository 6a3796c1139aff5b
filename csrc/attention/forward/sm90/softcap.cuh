// The softcap as part of the softmax, in the accumulator layout of wgmma (softmax.cuh).
#pragma once

#include "attention/forward/sm90/softmax.cuh"
#include "device/reduce.cuh"
#include "ptx/elements.cuh"
#include "ptx/math.cuh"
#include "ptx/shuffle.cuh"

namespace flashmoe::attention::sm90 {

constexpr float kTwoLog2E = 2.8853900817779268f;

// The softcap inside the softmax: exponents scale_log2 * tanh(x), x = score * factor. tanh preserves the order of the
// raw scores, so maxima are taken of raw scores. Four forms, chosen per warp and key block by the largest x:
//
// kShort  up to 0.38  tanh(x) is x times a polynomial in x^2, of three terms, 9e-7 off
// kLong   up to 0.875 the same of five terms, 8e-7 off
// kFours  up to 10    1 - 2 / (e^2x + 1), where four scores share one reciprocal, 3e-7 off
// kOnes               the same with one reciprocal per score, right at both infinities
//
// Below -end both series fall faster than tanh. This has no visible effect: next to a maximum of kSeriesBegin or more,
// with a cap of kLeastSoftcap or more, such scores have weights below e^-10 (kShort: below 2%, with an error of a
// thousandth of that).
enum class Cap { kShort, kLong, kFours, kOnes };

struct Softcap {
  static constexpr float kSeriesBegin = -0.125f;
  static constexpr float kShortEnd = 0.38f;
  static constexpr float kLongEnd = 0.875f;
  static constexpr float kFoursEnd = 10.0f;
  static constexpr float kLeastOfFours = 1e-3f;                // as scale_log2: the reciprocal's square must be a float
  static constexpr float kLeastSoftcap = 24.0f * 1.44269504f;  // as scale_log2
  // Factors whose eighth power is still a float, and not one of the smallest.
  static constexpr float kLeastFactor = 1e-4f;
  static constexpr float kMostFactor = 1e3f;

  float factor;
  float scale_log2;

  // Whether the series can be used at all, whatever the scores.
  __device__ __forceinline__ bool has_series() const {
    return scale_log2 >= kLeastSoftcap && factor >= kLeastFactor && factor <= kMostFactor;
  }
  __device__ __forceinline__ float slope() const { return factor * scale_log2; }
  __device__ __forceinline__ float power(float score) const {  // e^2x
    return ptx::exp2_approx(score * (factor * kTwoLog2E));
  }
  // The exponent minus shift, in the form kOnes.
  __device__ __forceinline__ float exponent(float score, float shift) const {
    return ptx::fma_rn(-2.0f * scale_log2, ptx::rcp_approx(power(score) + 1.0f), scale_log2 - shift);
  }
  // The exponent of a maximum; -inf if there is none.
  __device__ __forceinline__ float exponent_of_max(float max) const {
    return max == ptx::negative_infinity() ? max : exponent(max, 0.0f);
  }
  // The exponent of kSeriesBegin.
  __device__ __forceinline__ float series_begin() const {
    constexpr float kTanh = -0.124353f;
    return kTanh * scale_log2;
  }
  // The exponent is score * series(score). The last term is positive, so that the exponent falls without bound on the
  // left.
  template <Cap kCap>
  __device__ __forceinline__ float series(float score) const {
    constexpr bool kIsShort = kCap == Cap::kShort;
    constexpr float kTerms[] = {kIsShort ? 0.999984241f : 0.999989536f, kIsShort ? -0.332444873f : -0.333045021f,
                                kIsShort ? 0.12068122f : 0.131081502f, -0.0465520567f, 0.0102363675f};
    const float square = score * score;
    const float at = factor * factor;
    const float third = kTerms[1] * at * slope();
    float fifth = kTerms[2] * at * at * slope();
    if constexpr (!kIsShort) {
      const float high = at * at * at * slope();
      fifth = ptx::fma_rn(square, ptx::fma_rn(square, kTerms[4] * at * high, kTerms[3] * high), fifth);
    }
    return ptx::fma_rn(square, ptx::fma_rn(square, fifth, third), kTerms[0] * slope());
  }
};

// Replaces scores by exponentials and adds these to the sums: one function, so that the compiler interleaves the two.
template <int kN, Cap kCap, bool kMayBeEmpty>
__device__ __forceinline__ void find_exponentials(float (&scores)[kN / 2], RowState& rows, const float (&shift)[2],
                                                  const Softcap& cap) {
  if constexpr (kCap == Cap::kFours) {
    const float inverse_range = ptx::rcp_approx(-2.0f * cap.scale_log2);
#pragma unroll
    for (int j = 0; j < kN / 2; j += 8) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int first = j + 2 * r;  // of four in one row: an array of them would cost wgmma its registers
        float of[4];                  // -(e^2x + 1) / (2 scale_log2)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          of[c] = ptx::fma_rn(cap.power(scores[first + c / 2 * 4 + c % 2]), inverse_range, inverse_range);
        }
        const float pairs[2] = {of[0] * of[1], of[2] * of[3]};
        const float inverse = ptx::rcp_approx(pairs[0] * pairs[1]);
        const float inverse_pairs[2] = {inverse * pairs[1], inverse * pairs[0]};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          float& score = scores[first + c / 2 * 4 + c % 2];
          const float exponent = ptx::fma_rn(inverse_pairs[c / 2], of[c ^ 1], cap.scale_log2 - shift[r]);
          score = kMayBeEmpty && score == ptx::negative_infinity() ? score : exponent;
        }
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      float& score = scores[i];
      if constexpr (kCap == Cap::kOnes) {
        const float exponent = cap.exponent(score, shift[i / 2 % 2]);
        score = kMayBeEmpty && score == ptx::negative_infinity() ? score : exponent;
      } else {
        score = ptx::fma_rn(score, cap.series<kCap>(score), -shift[i / 2 % 2]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
    scores[i] = ptx::exp2_approx(scores[i]);
    rows.sum[i / 2 % 2] += scores[i];
  }
}

// No exponent is above scale_log2. If the elements have the range of float, exponentials can refer to scale_log2
// itself, once each row of the warp has had a key whose exponent is within kReach of it and high enough for the series.
// From then on the maximum of these rows is fixed: they need neither a maximum nor rescaling, and RowState::max is
// infinite, the score whose exponent is scale_log2. Other rows, and elements of a smaller range, have a maximum.
template <typename Element>
constexpr bool kHasRangeOfFloat = false;
template <>
constexpr bool kHasRangeOfFloat<ptx::BF16> = true;
constexpr float kReach = 90.0f;

// Returns the largest of a thread's scores, or any negative one if all are negative. Compares three at a time, as
// integers.
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

// The same for one of the thread's two rows.
template <int kN>
__device__ __forceinline__ float largest_of_row(const float (&scores)[kN / 2], int r) {
  float row[kN / 4];
#pragma unroll
  for (int i = 0; i < kN / 4; ++i) row[i] = scores[4 * (i / 2) + 2 * r + i % 2];
  return largest<kN / 2>(row);
}

// The forms that the scores of a key block allow, for the whole warp.
struct CapChoice {
  bool is_short;
  bool is_long;
  bool is_fours;

  // largest: of the scores; least: a lower bound of the maxima of the thread's two rows.
  __device__ __forceinline__ CapChoice(const Softcap& cap, float largest, float least) {
    const float x = largest * cap.factor;
    const bool has_series = cap.has_series() && least * cap.factor >= Softcap::kSeriesBegin;
    is_short = ptx::vote_all(has_series && x <= Softcap::kShortEnd);
    is_long = ptx::vote_all(has_series && x <= Softcap::kLongEnd);
    is_fours = ptx::vote_all(x <= Softcap::kFoursEnd && cap.scale_log2 >= Softcap::kLeastOfFours);
  }
};

template <int kN, bool kMayBeEmpty>
__device__ __forceinline__ void find_exponentials(float (&scores)[kN / 2], RowState& rows, const float (&shift)[2],
                                                  const Softcap& cap, const CapChoice& choice) {
  if (choice.is_short) {
    find_exponentials<kN, Cap::kShort, kMayBeEmpty>(scores, rows, shift, cap);
  } else if (choice.is_long) {
    find_exponentials<kN, Cap::kLong, kMayBeEmpty>(scores, rows, shift, cap);
  } else if (choice.is_fours) {
    find_exponentials<kN, Cap::kFours, kMayBeEmpty>(scores, rows, shift, cap);
  } else {
    find_exponentials<kN, Cap::kOnes, kMayBeEmpty>(scores, rows, shift, cap);
  }
}

// online_softmax for raw scores with a softcap.
template <typename Element, int kN, bool kMayBeEmpty>
__device__ __forceinline__ bool capped_softmax(float (&scores)[kN / 2], RowState& rows, float (&rescale)[2],
                                               const Softcap& cap) {
  constexpr bool kFixesMax = kHasRangeOfFloat<Element>;
  const float fixed_max = -ptx::negative_infinity();
  if constexpr (kFixesMax && !kMayBeEmpty) {
    if (ptx::vote_all(rows.max[0] == fixed_max && rows.max[1] == fixed_max)) {
      const float shift[2] = {cap.scale_log2, cap.scale_log2};
      find_exponentials<kN, kMayBeEmpty>(scores, rows, shift, cap, CapChoice(cap, largest<kN>(scores), 0.0f));
      return false;
    }
  }
  if constexpr (!kFixesMax && !kMayBeEmpty) {
    // Weights up to 2^kMostExponent are as exact as those up to 1. Up to there no maximum has to move, and none is
    // computed over the quad. A row without a positive score counts as if its largest were zero.
    constexpr float kMostExponent = 14.0f;
    const float shift[2] = {cap.exponent(rows.max[0], 0.0f), cap.exponent(rows.max[1], 0.0f)};
    const float top[2] = {ptx::max_ftz(largest_of_row<kN>(scores, 0), 0.0f),
                          ptx::max_ftz(largest_of_row<kN>(scores, 1), 0.0f)};
    if (ptx::vote_all((top[0] - rows.max[0]) * cap.slope() <= kMostExponent &&
                      (top[1] - rows.max[1]) * cap.slope() <= kMostExponent)) {
      const CapChoice choice(cap, ptx::max_ftz(top[0], top[1]), min(rows.max[0], rows.max[1]));
      find_exponentials<kN, kMayBeEmpty>(scores, rows, shift, cap, choice);
      return false;
    }
  }
  float new_max[2];  // of this thread's columns; of the whole row only if the maximum moves
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    new_max[r] = ptx::negative_infinity();
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      new_max[r] = ptx::max_ftz(new_max[r], ptx::max_ftz(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]));
    }
  }
  const float top = ptx::max_ftz(new_max[0], new_max[1]);
  new_max[0] = ptx::max_ftz(new_max[0], rows.max[0]);
  new_max[1] = ptx::max_ftz(new_max[1], rows.max[1]);
  const CapChoice choice(cap, top, min(new_max[0], new_max[1]));
  // False for the NaN of a row without keys and of a row whose maximum is fixed.
  const bool moved = ptx::vote_any((new_max[0] - rows.max[0]) * cap.slope() > kMaxExponent ||
                                   (new_max[1] - rows.max[1]) * cap.slope() > kMaxExponent);
  float shift[2];
  if (moved) {
    const float before[2] = {cap.exponent_of_max(rows.max[0]), cap.exponent_of_max(rows.max[1])};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      new_max[r] = quad_max(new_max[r]);
      shift[r] = cap.exponent_of_max(new_max[r]);
    }
    if constexpr (kFixesMax) {
      const float least = ptx::max_ftz(cap.scale_log2 - kReach, cap.series_begin());
      if (ptx::vote_all(shift[0] >= least && shift[1] >= least)) {
        new_max[0] = new_max[1] = fixed_max;
        shift[0] = shift[1] = cap.scale_log2;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows.max[r] = new_max[r];
      if (kMayBeEmpty && new_max[r] == ptx::negative_infinity()) shift[r] = 0.0f;
      rescale[r] = ptx::exp2_approx(ptx::sub_rn(before[r], shift[r]));
      rows.sum[r] *= rescale[r];
    }
  } else {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool is_empty = kMayBeEmpty && rows.max[r] == ptx::negative_infinity();
      shift[r] = is_empty ? 0.0f : cap.exponent_of_max(rows.max[r]);
    }
  }
  find_exponentials<kN, kMayBeEmpty>(scores, rows, shift, cap, choice);
  return moved;
}

}  // namespace flashmoe::attention::sm90
