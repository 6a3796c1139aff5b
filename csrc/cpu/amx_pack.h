// Packs rows of a 16-bit tensor as operands of the AMX tiles, and their products as rows. Include after
// vector_avx512.h. Internal linkage.
//
// A tile row of a right operand holds pairs along the summed dimension. bf16 is packed without arithmetic: if that
// dimension is the one within a row, neighbours form a pair; if it runs over rows, elements i and i + 16 of a step.
// fp16 is split into planes, and i and i + 16 form a pair in both cases, which two vectors give without a shuffle.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/amx_tiles.h"

namespace flashmoe::cpu {
namespace {

// Rows of whole 32-element steps.
template <class T>
struct WholeRows {
  const T* data;
  int64_t stride;
};

// src [rows, dim] as [32, padded_dim], zero past the ends: in place if it is whole there, else a copy in `buffer`.
template <class T>
inline WholeRows<T> make_whole(const T* src, int64_t stride, int32_t rows, int32_t dim, int32_t padded_dim, T* buffer) {
  if (rows == kStep && dim == padded_dim) return {src, stride};
  memset(buffer, 0, kStep * static_cast<size_t>(padded_dim) * sizeof(T));
  for (int32_t row = 0; row < rows; ++row) {
    memcpy(buffer + int64_t{row} * padded_dim, src + row * stride, static_cast<size_t>(dim) * sizeof(T));
  }
  return {buffer, padded_dim};
}

// Two values per lane to one word per lane and plane: plane i's 8 bits of `low` in the low half, of `high` in the high
// half. The sum of the planes is the value, rounded in the second plane.
inline void split_pair(__m512 low, __m512 high, __m512i (&words)[2]) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u)), half = _mm512_set1_epi32(0x8000);
  constexpr int kSelect = 0xca;  // first ? second : third, bit by bit
  const __m512i low_bits = _mm512_castps_si512(low), high_bits = _mm512_castps_si512(high);
  words[0] = _mm512_ternarylogic_epi32(upper, high_bits, _mm512_srli_epi32(low_bits, 16), kSelect);
  low = _mm512_sub_ps(low, _mm512_castsi512_ps(_mm512_and_si512(low_bits, upper)));
  high = _mm512_sub_ps(high, _mm512_castsi512_ps(_mm512_and_si512(high_bits, upper)));
  const __m512i low_rest = _mm512_add_epi32(_mm512_castps_si512(low), half);
  const __m512i high_rest = _mm512_add_epi32(_mm512_castps_si512(high), half);
  words[1] = _mm512_ternarylogic_epi32(upper, high_rest, _mm512_srli_epi32(low_rest, 16), kSelect);
}

// A left operand [32, padded_dim]: bf16 in place, if it is whole.
inline LeftOperand pack_left(const BFloat16* src, int64_t stride, int32_t rows, int32_t dim, int32_t padded_dim,
                             BFloat16*, uint16_t* packed) {
  const WholeRows<BFloat16> whole = make_whole(src, stride, rows, dim, padded_dim, reinterpret_cast<BFloat16*>(packed));
  return {whole.data, whole.stride * 2, kTileBytesPerRow, 0};
}
// fp16: [planes][32, padded_dim]. buffer: [32, padded_dim].
inline LeftOperand pack_left(const Half* src, int64_t stride, int32_t rows, int32_t dim, int32_t padded_dim,
                             Half* buffer, uint16_t* packed) {
  const WholeRows<Half> whole = make_whole(src, stride, rows, dim, padded_dim, buffer);
  const int64_t plane = int64_t{kStep} * padded_dim;
  for (int64_t row = 0; row < kStep; ++row) {
    for (int32_t i = 0; i < padded_dim; i += kStep) {
      const Half* p = whole.data + row * whole.stride + i;
      __m512i words[2];
      split_pair(Vector::load(p), Vector::load(p + Vector::kWidth), words);
      _mm512_store_si512(packed + row * padded_dim + i, words[0]);
      _mm512_store_si512(packed + plane + row * padded_dim + i, words[1]);
    }
  }
  return {packed, padded_dim * 2, kTileBytesPerRow, plane * 2};
}

// 128 bits at p, p + distance, p + 2 distance, p + 3 distance as one vector.
inline __attribute__((always_inline)) __m512i load_quarters(const BFloat16* p, int64_t distance) {
  const auto quarter = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * distance)); };
  __m512i x = _mm512_broadcast_i32x4(quarter(0));
  x = _mm512_mask_broadcast_i32x4(x, 0x00f0, quarter(1));
  x = _mm512_mask_broadcast_i32x4(x, 0x0f00, quarter(2));
  return _mm512_mask_broadcast_i32x4(x, 0xf000, quarter(3));
}

// 32 elements of each of 32 rows -> a step of a right operand whose columns are the rows: a transpose. In bf16 the
// loads do its coarse half, because shuffles have only one port.
inline __attribute__((always_inline)) void pack_transposed(const BFloat16* rows, int64_t stride, uint32_t* step) {
  for (int half = 0; half < 2; ++half, rows += kTileRows * stride) {
    const BFloat16* src = rows;
#pragma GCC unroll 4
    for (int quad = 0; quad < 4; ++quad, src += 8, step += 4 * Vector::kWidth) {  // lane i: rows 4 i .. 4 i + 3
      __m512i row[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) row[i] = load_quarters(src + i * stride, 4 * stride);
      const __m512i a = _mm512_unpacklo_epi32(row[0], row[1]), b = _mm512_unpackhi_epi32(row[0], row[1]);
      const __m512i c = _mm512_unpacklo_epi32(row[2], row[3]), d = _mm512_unpackhi_epi32(row[2], row[3]);
      _mm512_store_si512(step, _mm512_unpacklo_epi64(a, c));
      _mm512_store_si512(step + Vector::kWidth, _mm512_unpackhi_epi64(a, c));
      _mm512_store_si512(step + 2 * Vector::kWidth, _mm512_unpacklo_epi64(b, d));
      _mm512_store_si512(step + 3 * Vector::kWidth, _mm512_unpackhi_epi64(b, d));
    }
  }
}
// Transposed as fp32, then split into planes.
inline void pack_transposed(const Half* rows, int64_t stride, uint32_t* step) {
  for (int tile = 0; tile < 2; ++tile, rows += kTileRows * stride, step += kTileWords) {
    __m512i low[16], high[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) low[i] = _mm512_castps_si512(Vector::load(rows + i * stride));
    Vector::transpose(low);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) high[i] = _mm512_castps_si512(Vector::load(rows + i * stride + Vector::kWidth));
    Vector::transpose(high);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      __m512i words[2];
      split_pair(_mm512_castsi512_ps(low[i]), _mm512_castsi512_ps(high[i]), words);
      _mm512_store_si512(step + i * Vector::kWidth, words[0]);
      _mm512_store_si512(step + 2 * kTileWords + i * Vector::kWidth, words[1]);
    }
  }
}

// 32 columns of 32 rows -> a step of a right operand, which sums over the rows. In bf16 the first tile holds the even
// columns and the second the odd ones, for one shuffle each; store_output restores their order.
inline void pack_rows(const BFloat16* rows, int64_t stride, uint32_t* step) {
  const __m512i low_to_high = _mm512_set4_epi32(0x0d0c0000, 0x09080000, 0x05040000, 0x01000000);
  const __m512i high_to_low = _mm512_set4_epi32(0x00000f0e, 0x00000b0a, 0x00000706, 0x00000302);
  constexpr __mmask64 kHighWords = 0xccccccccccccccccu, kLowWords = 0x3333333333333333u;
#pragma GCC unroll 4
  for (int32_t pair = 0; pair < kTileRows; ++pair, rows += stride, step += Vector::kWidth) {
    const __m512i low = _mm512_loadu_si512(rows), high = _mm512_loadu_si512(rows + kTileRows * stride);
    _mm512_store_si512(step, _mm512_mask_shuffle_epi8(low, kHighWords, high, low_to_high));
    _mm512_store_si512(step + kTileWords, _mm512_mask_shuffle_epi8(high, kLowWords, low, high_to_low));
  }
}
inline void pack_rows(const Half* rows, int64_t stride, uint32_t* step) {
  for (int32_t pair = 0; pair < kTileRows; ++pair, rows += stride, step += Vector::kWidth) {
#pragma GCC unroll 2
    for (int tile = 0; tile < 2; ++tile) {
      const Half* low = rows + tile * kTileRows;
      __m512i words[2];
      split_pair(Vector::load(low), Vector::load(low + kTileRows * stride), words);
      _mm512_store_si512(step + tile * kTileWords, words[0]);
      _mm512_store_si512(step + (2 + tile) * kTileWords, words[1]);
    }
  }
}

// product [rows, 32], columns in the order of pack_rows, times a factor per row -> out [rows, columns], columns <= 32.
// Returns NaN or Inf if any element is. Ties are rounded away from zero in bf16.
inline __m512 store_output(const float* product, const float* factors, int32_t rows, int32_t columns, int64_t out_row,
                           BFloat16* out) {
  const __m512i high_to_low = _mm512_set4_epi32(0x00000f0e, 0x00000b0a, 0x00000706, 0x00000302);
  const __m512i half = _mm512_set1_epi32(0x8000);
  constexpr __mmask64 kLowWords = 0x3333333333333333u;
  const __mmask32 stored = columns >= kBlockColumns ? ~0u : (1u << columns) - 1;
  __m512 total = Vector::zero();
  for (int32_t row = 0; row < rows; ++row, product += kBlockColumns, out += out_row) {
    const __m512 factor = Vector::broadcast(factors[row]);
    const __m512 even = Vector::mul(Vector::load(product), factor);
    const __m512 odd = Vector::mul(Vector::load(product + Vector::kWidth), factor);
    total = Vector::fma(even, odd, total);
    const __m512i even_bits = _mm512_add_epi32(_mm512_castps_si512(even), half);
    const __m512i odd_bits = _mm512_add_epi32(_mm512_castps_si512(odd), half);
    _mm512_mask_storeu_epi16(out, stored, _mm512_mask_shuffle_epi8(odd_bits, kLowWords, even_bits, high_to_low));
  }
  return total;
}
inline __m512 store_output(const float* product, const float* factors, int32_t rows, int32_t columns, int64_t out_row,
                           Half* out) {
  const __mmask32 stored = columns >= kBlockColumns ? ~0u : (1u << columns) - 1;
  __m512 total = Vector::zero();
  for (int32_t row = 0; row < rows; ++row, product += kBlockColumns, out += out_row) {
    const __m512 factor = Vector::broadcast(factors[row]);
    const __m512 low = Vector::mul(Vector::load(product), factor);
    const __m512 high = Vector::mul(Vector::load(product + Vector::kWidth), factor);
    total = Vector::fma(low, high, total);
    const __m256i low_halves = _mm512_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT);
    const __m256i high_halves = _mm512_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT);
    _mm512_mask_storeu_epi16(out, stored, _mm512_inserti64x4(_mm512_castsi256_si512(low_halves), high_halves, 1));
  }
  return total;
}

}  // namespace
}  // namespace flashmoe::cpu
