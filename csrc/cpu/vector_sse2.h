// Four floats, SSE2 only, which every x86-64 has. Internal linkage, like everything compiled for one instruction set.
#pragma once

#include <emmintrin.h>

#include <cstdint>

#include "cpu/scalar_types.h"

namespace flashmoe::cpu {
namespace {

struct Vector {
  using Float = __m128;
  static constexpr int kWidth = 4;
  static constexpr int kMaxTileRows = 5;  // of a tile 2 vectors wide: 10 accumulators, 2 operands, product, broadcast

  static Float zero() { return _mm_setzero_ps(); }
  static Float broadcast(float x) { return _mm_set1_ps(x); }
  static Float add(Float a, Float b) { return _mm_add_ps(a, b); }
  static Float sub(Float a, Float b) { return _mm_sub_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm_mul_ps(a, b); }
  static Float div(Float a, Float b) { return _mm_div_ps(a, b); }
  static Float fma(Float a, Float b, Float c) { return _mm_add_ps(_mm_mul_ps(a, b), c); }
  // b if either is NaN.
  static Float max(Float a, Float b) { return _mm_max_ps(a, b); }
  static Float select(__m128 mask, Float yes, Float no) {
    return _mm_or_ps(_mm_and_ps(mask, yes), _mm_andnot_ps(mask, no));
  }
  // yes where a == b, else no.
  static Float where_equal(Float a, Float b, Float yes, Float no) { return select(_mm_cmpeq_ps(a, b), yes, no); }
  static bool any_differs(Float a, Float b) { return _mm_movemask_ps(_mm_cmpneq_ps(a, b)) != 0; }  // NaN differs
  // x in the lanes from `first` on, else other. first may be outside 0..width.
  static Float from_lane(int32_t first, Float x, Float other) {
    const __m128i lanes = _mm_setr_epi32(0, 1, 2, 3);
    return select(_mm_castsi128_ps(_mm_cmpgt_epi32(_mm_set1_epi32(first), lanes)), other, x);
  }

  // 2^n and t - n, where n = t rounded. t is at most a little above 0; 2^-127 and below count as 0, and no subnormal
  // arises on the way (each would cost an assist of some 150 cycles: masked scores, at t = -inf, are many).
  static Float split_exponent(Float t, Float* fraction) {
    t = _mm_max_ps(_mm_set1_ps(-127.0f), t);              // NaN stays
    const Float magic = _mm_set1_ps(0x1.8p23f + 127.0f);  // t + magic has n + 127 in its low mantissa bits
    const Float shifted = _mm_add_ps(t, magic);
    *fraction = _mm_sub_ps(t, _mm_sub_ps(shifted, magic));
    return _mm_castsi128_ps(_mm_slli_epi32(_mm_castps_si128(shifted), 23));
  }

  static Float load(const float* p) { return _mm_loadu_ps(p); }
  static Float load(const BFloat16* p) {
    const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), raw));
  }
  static Float load(const Half* p) {
    const __m128i raw = _mm_unpacklo_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), _mm_setzero_si128());
    const __m128i sign = _mm_slli_epi32(_mm_and_si128(raw, _mm_set1_epi32(0x8000)), 16);
    const __m128i magnitude = _mm_slli_epi32(_mm_and_si128(raw, _mm_set1_epi32(0x7fff)), 13);
    // As a float the magnitude is 2^112 too small, subnormal halves included.
    const __m128 scaled = _mm_mul_ps(_mm_castsi128_ps(magnitude), _mm_set1_ps(0x1p112f));
    const __m128i is_special = _mm_cmpgt_epi32(magnitude, _mm_set1_epi32(0x0f7fffff));  // Inf, NaN
    const __m128i exponent = _mm_and_si128(is_special, _mm_set1_epi32(0x7f800000));
    return _mm_castsi128_ps(_mm_or_si128(_mm_or_si128(_mm_castps_si128(scaled), exponent), sign));
  }

  static void store(float* p, Float x) { _mm_storeu_ps(p, x); }
  static void store(BFloat16* p, Float x) {
    const __m128i bits = _mm_castps_si128(x);
    const __m128i odd = _mm_and_si128(_mm_srli_epi32(bits, 16), _mm_set1_epi32(1));
    const __m128i rounded = _mm_add_epi32(bits, _mm_add_epi32(odd, _mm_set1_epi32(0x7fff)));
    const __m128i quiet = _mm_or_si128(bits, _mm_set1_epi32(0x400000));
    const __m128i is_nan = _mm_castps_si128(_mm_cmpunord_ps(x, x));
    store_low_halves(p, _mm_srli_epi32(choose(is_nan, quiet, rounded), 16));
  }
  static void store(Half* p, Float x) {
    const __m128i bits = _mm_castps_si128(x);
    const __m128i sign = _mm_and_si128(bits, _mm_set1_epi32(static_cast<int32_t>(0x80000000u)));
    const __m128i magnitude = _mm_xor_si128(bits, sign);
    // Below 2^-14 the half is subnormal: adding 0.5 leaves its bits, rounded to nearest even, in the low mantissa.
    const __m128 half = _mm_set1_ps(0.5f);
    const __m128i subnormal =
        _mm_sub_epi32(_mm_castps_si128(_mm_add_ps(_mm_castsi128_ps(magnitude), half)), _mm_castps_si128(half));
    const __m128i odd = _mm_and_si128(_mm_srli_epi32(magnitude, 13), _mm_set1_epi32(1));
    const __m128i rebias = _mm_set1_epi32(0xfff - (112 << 23));
    const __m128i normal = _mm_srli_epi32(_mm_add_epi32(magnitude, _mm_add_epi32(rebias, odd)), 13);
    const __m128i is_subnormal = _mm_cmpgt_epi32(_mm_set1_epi32(113 << 23), magnitude);
    const __m128i is_large = _mm_cmpgt_epi32(magnitude, _mm_set1_epi32((143 << 23) - 1));  // 2^16 on, Inf, NaN
    const __m128i is_nan = _mm_castps_si128(_mm_cmpunord_ps(x, x));
    const __m128i special = choose(is_nan, _mm_set1_epi32(0x7e00), _mm_set1_epi32(0x7c00));
    const __m128i result = choose(is_large, special, choose(is_subnormal, subnormal, normal));
    store_low_halves(p, _mm_or_si128(result, _mm_srli_epi32(sign, 16)));
  }

  // dst[j][i] = row(i)[j], 4 x 4 of 32-bit elements.
  template <class Row>
  static void transpose(Row row, float* dst, int64_t dst_stride) {
    __m128 a = row(0), b = row(1), c = row(2), d = row(3);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    store(dst, a);
    store(dst + dst_stride, b);
    store(dst + 2 * dst_stride, c);
    store(dst + 3 * dst_stride, d);
  }

 private:
  static __m128i choose(__m128i mask, __m128i yes, __m128i no) {
    return _mm_or_si128(_mm_and_si128(mask, yes), _mm_andnot_si128(mask, no));
  }
  // SSE2 packs with signed saturation only: sign-extend first.
  static void store_low_halves(void* p, __m128i x) {
    const __m128i extended = _mm_srai_epi32(_mm_slli_epi32(x, 16), 16);
    _mm_storel_epi64(static_cast<__m128i*>(p), _mm_packs_epi32(extended, extended));
  }
};

}  // namespace
}  // namespace flashmoe::cpu
