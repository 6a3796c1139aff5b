// Eight floats: AVX2, FMA, F16C. Include after the translation unit has set its target. Internal linkage.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/scalar_types.h"

namespace flashmoe::cpu {
namespace {

struct Vector {
  using Float = __m256;
  static constexpr int kWidth = 8;
  static constexpr int kMaxTileRows = 6;  // of a tile 2 vectors wide: 12 accumulators, 2 operands, 1 broadcast

  static Float zero() { return _mm256_setzero_ps(); }
  static Float broadcast(float x) { return _mm256_set1_ps(x); }
  static Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
  static Float sub(Float a, Float b) { return _mm256_sub_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static Float div(Float a, Float b) { return _mm256_div_ps(a, b); }
  static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  // b if either is NaN.
  static Float max(Float a, Float b) { return _mm256_max_ps(a, b); }
  // yes where a == b, else no.
  static Float where_equal(Float a, Float b, Float yes, Float no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_EQ_OQ));
  }
  static bool any_differs(Float a, Float b) {  // NaN differs
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NEQ_UQ)) != 0;
  }
  // x in the lanes from `first` on, else other. first may be outside 0..width.
  static Float from_lane(int32_t first, Float x, Float other) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), lanes);
    return _mm256_blendv_ps(x, other, _mm256_castsi256_ps(before));
  }

  // 2^n and t - n, where n = t rounded. t is at most a little above 0; 2^-127 and below count as 0, and no subnormal
  // arises on the way (each would cost an assist of some 150 cycles: masked scores, at t = -inf, are many).
  static Float split_exponent(Float t, Float* fraction) {
    t = _mm256_max_ps(_mm256_set1_ps(-127.0f), t);           // NaN stays
    const Float magic = _mm256_set1_ps(0x1.8p23f + 127.0f);  // t + magic has n + 127 in its low mantissa bits
    const Float shifted = _mm256_add_ps(t, magic);
    *fraction = _mm256_sub_ps(t, _mm256_sub_ps(shifted, magic));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(shifted), 23));
  }

  static Float load(const float* p) { return _mm256_loadu_ps(p); }
  static Float load(const BFloat16* p) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
  }
  static Float load(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

  static void store(float* p, Float x) { _mm256_storeu_ps(p, x); }
  static void store(BFloat16* p, Float x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i halves = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
  }
  static void store(Half* p, Float x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }

  // dst[j][i] = row(i)[j], 8 x 8 of 32-bit elements.
  template <class Row>
  static void transpose(Row row, float* dst, int64_t dst_stride) {
    __m256 rows[8], pairs[8];
    for (int i = 0; i < 8; ++i) rows[i] = row(i);
    for (int i = 0; i < 8; i += 2) {
      pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
      pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      rows[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
      rows[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
      rows[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
      rows[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
      store(dst + i * dst_stride, _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x20));
      store(dst + (i + 4) * dst_stride, _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x31));
    }
  }
};

}  // namespace
}  // namespace flashmoe::cpu
