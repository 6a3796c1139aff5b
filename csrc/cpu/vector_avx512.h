// Sixteen floats: AVX-512 F, BW, DQ, VL. Include after the translation unit has set its target. Internal linkage.
#pragma once

// g++ 12 warns about its own intrinsics' deliberately undefined merge operands once they are inlined (GCC PR 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "cpu/scalar_types.h"

namespace flashmoe::cpu {
namespace {

struct Vector {
  using Float = __m512;
  static constexpr int kWidth = 16;
  static constexpr int kMaxTileRows = 12;  // of a tile 2 vectors wide: 24 accumulators, 2 operands, broadcasts

  static Float zero() { return _mm512_setzero_ps(); }
  static Float broadcast(float x) { return _mm512_set1_ps(x); }
  static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
  static Float sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float div(Float a, Float b) { return _mm512_div_ps(a, b); }
  static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  // b if either is NaN.
  static Float max(Float a, Float b) { return _mm512_max_ps(a, b); }
  // yes where a == b, else no.
  static Float where_equal(Float a, Float b, Float yes, Float no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ), no, yes);
  }
  static bool any_differs(Float a, Float b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ) != 0; }  // NaN differs
  // x in the lanes from `first` on, else other. first may be outside 0..width.
  static Float from_lane(int32_t first, Float x, Float other) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_mask_blend_ps(_mm512_cmpge_epi32_mask(lanes, _mm512_set1_epi32(first)), other, x);
  }

  // 2^n and t - n, where n = t rounded. t is at most a little above 0; 2^-127 and below count as 0, and no subnormal
  // arises on the way (each would cost an assist of some 150 cycles: masked scores, at t = -inf, are many).
  static Float split_exponent(Float t, Float* fraction) {
    t = _mm512_max_ps(_mm512_set1_ps(-127.0f), t);           // NaN stays
    const Float magic = _mm512_set1_ps(0x1.8p23f + 127.0f);  // t + magic has n + 127 in its low mantissa bits
    const Float shifted = _mm512_add_ps(t, magic);
    *fraction = _mm512_sub_ps(t, _mm512_sub_ps(shifted, magic));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(shifted), 23));
  }

  static Float load(const float* p) { return _mm512_loadu_ps(p); }
  static Float load(const BFloat16* p) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
  }
  static Float load(const Half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

  static void store(float* p, Float x) { _mm512_storeu_ps(p, x); }
  static void store(BFloat16* p, Float x) {
#ifdef __AVX512BF16__  // set with the target of a translation unit that may use it
    const __m256bh halves = _mm512_cvtneps_pbh(x);
    memcpy(p, &halves, sizeof halves);
#else
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i halves = _mm512_srli_epi32(_mm512_mask_blend_epi32(is_nan, rounded, quiet), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(halves));
#endif
  }
  static void store(Half* p, Float x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }

  // rows[j][i] = rows[i][j], 16 x 16 of 32-bit elements. (A call would pass the rows through memory: twice the time.)
  static inline __attribute__((always_inline)) void transpose(__m512i (&rows)[16]) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
      t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {  // rows[i + j]: column j of each 128-bit lane's four, of source rows i..i+3
      rows[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
      rows[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
      rows[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
      rows[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {  // lanes: rows i..i+3 of columns j, j+4, j+8, j+12
      const __m512i low_even = _mm512_shuffle_i32x4(rows[j], rows[j + 4], 0x88);
      const __m512i low_odd = _mm512_shuffle_i32x4(rows[j], rows[j + 4], 0xdd);
      const __m512i high_even = _mm512_shuffle_i32x4(rows[j + 8], rows[j + 12], 0x88);
      const __m512i high_odd = _mm512_shuffle_i32x4(rows[j + 8], rows[j + 12], 0xdd);
      t[j] = _mm512_shuffle_i32x4(low_even, high_even, 0x88);
      t[j + 8] = _mm512_shuffle_i32x4(low_even, high_even, 0xdd);
      t[j + 4] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
      t[j + 12] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) rows[i] = t[i];
  }
  // dst[j][i] = row(i)[j], 16 x 16 of 32-bit elements.
  template <class Row>
  static void transpose(Row row, float* dst, int64_t dst_stride) {
    __m512i rows[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) rows[i] = _mm512_castps_si512(row(i));
    transpose(rows);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(dst + i * dst_stride, rows[i]);
  }
};

}  // namespace
}  // namespace flashmoe::cpu
