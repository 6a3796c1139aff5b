// Turns scores into softmax weights, as left operands of the tile unit. Include after vector_avx512.h. Internal
// linkage.
//
// No maximum is subtracted: it would cancel when the output is divided by the sum of the same weights, and bf16 has the
// exponents of fp32, so only the range of x = score * scale * log2(e) must be checked. If an x is outside the window or
// NaN, or all weights of a row are very small, the row block is left to forward_simd.h.
//
// fp16: a weight is 2^x in two planes. bf16: a weight is 2^(x + 30), computed in 16-bit fixed point, 32 per vector: x
// in units of 1/256 is a word with 8 bits of exponent and 8 of fraction f; adding 2^f - 1 - f, from a table indexed by
// the first 7 bits of f, and rounding to 7 bits of fraction gives the weight.
#pragma once

#include <cstdint>

#include "attention/cpu/mask.h"
#include "attention/cpu/softmax.h"
#include "cpu/amx_pack.h"
#include "cpu/exp2.h"

namespace flashmoe::cpu {
namespace {

// The window of bf16 is -157 <= x < 99; x in its last unit or first tenth gives a weight of Inf or NaN, which shows in
// the output.
constexpr int kWindowLow = 157;
// The window of fp16 has no lower end: 2^-127 and below is 0.
constexpr float kWindowHigh = 126.0f;
// The tile unit flushes weights and products below 2^-126 to 0. This does not matter if a row's sum is at least this
// times the number of keys, unless V is below 2^-76.
constexpr float kLeastSumOfKey = 0x1p-50f;
constexpr int kFractions = 256;
constexpr int kCells = 128;
constexpr int kCellFractions = kFractions / kCells;
constexpr int kHalfUnit = 1;  // of bf16, whose fraction has one bit less than the words

// 2^f for |f| <= 1, at compile time.
constexpr double exp2_series(double f) {
  double term = 1.0, sum = 1.0;
  for (int i = 1; i < 24; ++i) {
    term *= f * 0.69314718055994530942 / i;
    sum += term;
  }
  return sum;
}

// Entry i: 1 + f - 2^f in units of 1/256, for the words whose fraction starts with the bits of i; the integer with the
// least square error of the weights. The words hold kHalfUnit more than x.
struct Correction {
  alignas(64) uint8_t entry[kCells] = {};

  // Squared relative error of the weight of fraction `word`.
  static constexpr double square_error(int word, int correction) {
    const int shifted = word - correction + 2 * kFractions;  // positive
    const int rounded = shifted / 2 - kFractions;            // in 1/128; below 0 the exponent is one less
    const double weight = 1.0 + rounded / (rounded < 0 ? 256.0 : 128.0);
    const double error = weight / exp2_series(static_cast<double>(word - kHalfUnit) / kFractions) - 1.0;
    return error * error;
  }
  constexpr Correction() {
    constexpr int kMost = 24;  // 0.0861 * 256 = 22.04
    for (int cell = 0; cell < kCells; ++cell) {
      double least = 1.0;
      for (int correction = 0; correction <= kMost; ++correction) {
        double sum = 0.0;
        for (int i = 0; i < kCellFractions; ++i) sum += square_error(cell * kCellFractions + i, correction);
        if (sum >= least) continue;
        least = sum;
        entry[cell] = static_cast<uint8_t>(correction);
      }
    }
  }
};
constexpr Correction kCorrection;

// Entry n: the mask of the words of keys 0..n-1 of 32. Word 2 i is key i, word 2 i + 1 is key i + 16: the pairs of V
// (amx_pack.h).
struct FirstKeys {
  uint32_t words[kStep + 1] = {};

  constexpr FirstKeys() {
    for (int keys = 0; keys < kStep; ++keys) {
      words[keys + 1] = words[keys] | 1u << (keys % kTileRows * 2 + keys / kTileRows);
    }
  }
};
constexpr FirstKeys kFirstKeys;

constexpr int32_t kRowsAtOnce = 16;  // of a block of 32, so that each of two products can overlap with vector work

// x = 2^(score * scale_log2) of 32 keys, 0 if the mask hides one; returns the larger of `largest` and the exponents,
// ignoring NaN.
template <bool kMasked, int kDegree>
inline __m512 exact_weights(const float* scores, __m512 scale_log2, KeyRange visible, __m512 largest, __m512 (&x)[2]) {
  const __m512 hidden = Vector::broadcast(kMinusInfinity);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    x[i] = Vector::mul(Vector::load(scores + i * Vector::kWidth), scale_log2);
    if (kMasked) x[i] = Vector::from_lane(visible.end - i * Vector::kWidth, hidden, x[i]);
    largest = Vector::max(x[i], largest);
  }
  exp2_of<kDegree>(x);
  return largest;
}

// Computes kRowsAtOnce rows of the weights [planes][32 rows, 32 keys], from as many rows of scores; the mask's rows are
// these. Returns whether all x were inside the window; for fp16 a NaN is not detected, but gives a NaN weight.
template <bool kMasked>
inline bool scores_to_weights(const float* scores, float scale_log2, BlockMask mask, Half*, uint16_t* weights) {
  const __m512 scale = Vector::broadcast(scale_log2), limit = Vector::broadcast(kWindowHigh);
  __m512 largest = Vector::zero();
  for (int32_t row = 0; row < kRowsAtOnce; ++row, weights += kStep) {
    __m512 x[2];
    largest = exact_weights<kMasked, kExpDegree16Bit>(scores + row * kStep, scale, mask.keys_of(row), largest, x);
    __m512i words[2];
    split_pair(x[0], x[1], words);
    _mm512_store_si512(weights, words[0]);
    _mm512_store_si512(weights + kStepBytes / 2, words[1]);
  }
  return !Vector::any_differs(Vector::max(largest, limit), limit);
}
template <bool kMasked>
inline bool scores_to_weights(const float* scores, float scale_log2, BlockMask mask, BFloat16*, uint16_t* weights) {
  constexpr float kMagic = 0x1.8p23f;  // kMagic + n, 0 <= n < 2^16, has the bits of kMagic and n in the low ones
  const __m512i magic = _mm512_castps_si512(Vector::broadcast(kMagic));
  const __m512 scale = Vector::broadcast(scale_log2 * kFractions);
  const __m512 offset = Vector::broadcast(kMagic + kWindowLow * kFractions + kHalfUnit);
  const __m512i table = _mm512_load_si512(kCorrection.entry), table_end = _mm512_load_si512(kCorrection.entry + 64);
  const __m512i low_to_high = _mm512_set4_epi32(0x0d0c0000, 0x09080000, 0x05040000, 0x01000000);
  constexpr __mmask64 kHighWords = 0xccccccccccccccccu, kLowBytes = 0x5555555555555555u;
  __m512i outside_low = _mm512_setzero_si512(), outside_high = outside_low;  // one chain would be the slowest part
#pragma GCC unroll 16
  for (int32_t row = 0; row < kRowsAtOnce; ++row) {
    const float* s = scores + row * kStep;
    const __m512i low = _mm512_castps_si512(Vector::fma(Vector::load(s), scale, offset));
    const __m512i high = _mm512_castps_si512(Vector::fma(Vector::load(s + Vector::kWidth), scale, offset));
    constexpr int kOrDiffers = 0xf6;  // first | (second ^ third)
    outside_low = _mm512_ternarylogic_epi32(outside_low, low, magic, kOrDiffers);
    outside_high = _mm512_ternarylogic_epi32(outside_high, high, magic, kOrDiffers);
    const __m512i words = _mm512_mask_shuffle_epi8(low, kHighWords, high, low_to_high);
    const __m512i cells = _mm512_srli_epi16(words, 1);  // in 7 bits of each low byte
    const __m512i corrections = _mm512_maskz_permutex2var_epi8(kLowBytes, table, cells, table_end);
    __m512i result = _mm512_srli_epi16(_mm512_sub_epi16(words, corrections), 1);
    if (kMasked) result = _mm512_maskz_mov_epi16(kFirstKeys.words[mask.keys_of(row).end], result);
    _mm512_store_si512(weights + row * kStep, result);
  }
  const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
  return _mm512_test_epi32_mask(_mm512_or_si512(outside_low, outside_high), upper) == 0;
}

// Adds 2^x of scores [16 rows, 32 keys] to sums [16, 16]. Used for the log-sum-exp, for which the sum of weights
// rounded to bf16 is not exact enough.
inline void add_exact_weights(const float* scores, float scale_log2, BlockMask mask, float* sums) {
  const __m512 scale = Vector::broadcast(scale_log2);
  for (int32_t row = 0; row < kRowsAtOnce; ++row, sums += Vector::kWidth) {
    __m512 x[2];
    exact_weights<true, kExpDegreeFull>(scores + row * kStep, scale, mask.keys_of(row), Vector::zero(), x);
    Vector::store(sums, Vector::add(Vector::load(sums), Vector::add(x[0], x[1])));
  }
}

// Lane i: the sum of rows[i]'s lanes. Four times folds two vectors into one.
inline __m512 sum_rows(__m512 (&rows)[16]) {
  __m512 t[8], u[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {  // 128-bit lanes 0, 1: of row `first`; 2, 3: of row first + 4
    const int first = i % 4 + i / 4 * 8;
    t[i] = Vector::add(_mm512_shuffle_f32x4(rows[first], rows[first + 4], 0x44),
                       _mm512_shuffle_f32x4(rows[first], rows[first + 4], 0xee));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // 128-bit lanes: rows i, i + 4, i + 8, i + 12
    u[i] = Vector::add(_mm512_shuffle_f32x4(t[i], t[i + 4], 0x88), _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd));
  }
  const __m512 a = Vector::add(_mm512_unpacklo_ps(u[0], u[1]), _mm512_unpackhi_ps(u[0], u[1]));  // rows 0 1 0 1
  const __m512 b = Vector::add(_mm512_unpacklo_ps(u[2], u[3]), _mm512_unpackhi_ps(u[2], u[3]));  // rows 2 3 2 3
  return Vector::add(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
}

}  // namespace
}  // namespace flashmoe::cpu
