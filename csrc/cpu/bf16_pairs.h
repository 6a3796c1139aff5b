// Products of pairs of bf16, for a translation unit whose target has AVX512_BF16. Include after vector_avx512.h.
// Internal linkage. (A macro cannot choose: g++ 12 defines none for a target that a pragma sets.)
#pragma once

#include "cpu/gemm_pack.h"

namespace flashmoe::cpu {
namespace {

template <>
struct Words<BFloat16> {
  static constexpr int kElements = 2;
  static Vector::Float multiply_add(Vector::Float a, Vector::Float b, Vector::Float sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
  static Vector::Float load(const BFloat16* row) { return _mm512_castsi512_ps(_mm512_loadu_si512(row)); }
  static Vector::Float load_columns(const BFloat16* row, const BFloat16* next) {
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(Vector::load(row)), 16);  // fp32: bf16 in the high half
    if (next == nullptr) return _mm512_castsi512_ps(low);
    return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_castps_si512(Vector::load(next))));
  }
  static Vector::Float of_columns(Vector::Float first, Vector::Float second) {
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(first));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(second));
    return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
};

}  // namespace
}  // namespace flashmoe::cpu
