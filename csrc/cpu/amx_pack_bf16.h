// Operands of the tile unit for bf16 tensors, a panel at a time. Include after vector_avx512.h. Internal linkage.
#pragma once

#include <cstdint>

#include "amx_pack.h"

namespace flashmoe {
namespace cpu {
namespace {

constexpr int64_t kBf16StepBytes = 2 * kTileBytes;  // 32 elements of the summed dimension, 32 columns
constexpr int64_t kBlockFloats = int64_t{kGroupRows} * kPanelColumns;

// 128 bits at p, p + distance, p + 2 distance, p + 3 distance as one vector.
inline __attribute__((always_inline)) __m512i load_quarters(const BFloat16* p, int64_t distance) {
  const auto quarter = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * distance)); };
  __m512i x = _mm512_broadcast_i32x4(quarter(0));
  x = _mm512_mask_broadcast_i32x4(x, 0x00f0, quarter(1));
  x = _mm512_mask_broadcast_i32x4(x, 0x0f00, quarter(2));
  return _mm512_mask_broadcast_i32x4(x, 0xf000, quarter(3));
}

// 32 of head_dim of k [16 keys, ...] -> a tile of [16 pairs of head_dim, 16 keys]: a transpose whose coarse half is done
// by the loads, since shuffles have one port.
inline __attribute__((always_inline)) void pack_k_tile(const BFloat16* k, int64_t stride, uint32_t* tile) {
#pragma GCC unroll 4
  for (int quad = 0; quad < 4; ++quad, k += 8, tile += 4 * Vector::kWidth) {  // of pairs; lane i: keys 4 i .. 4 i + 3
    __m512i key[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) key[i] = load_quarters(k + i * stride, 4 * stride);
    const __m512i a = _mm512_unpacklo_epi32(key[0], key[1]), b = _mm512_unpackhi_epi32(key[0], key[1]);
    const __m512i c = _mm512_unpacklo_epi32(key[2], key[3]), d = _mm512_unpackhi_epi32(key[2], key[3]);
    _mm512_store_si512(tile, _mm512_unpacklo_epi64(a, c));
    _mm512_store_si512(tile + Vector::kWidth, _mm512_unpackhi_epi64(a, c));
    _mm512_store_si512(tile + 2 * Vector::kWidth, _mm512_unpacklo_epi64(b, d));
    _mm512_store_si512(tile + 3 * Vector::kWidth, _mm512_unpackhi_epi64(b, d));
  }
}

// 32 of head_dim of v [32 keys, ...] -> 2 tiles of [16 pairs of keys i, i + 16; 16 columns]: the even columns, the odd
// ones, which take one shuffle each. store_output puts them in order.
inline void pack_v_step(const BFloat16* v, int64_t stride, uint32_t* step) {
  const __m512i low_to_high = _mm512_set4_epi32(0x0d0c0000, 0x09080000, 0x05040000, 0x01000000);
  const __m512i high_to_low = _mm512_set4_epi32(0x00000f0e, 0x00000b0a, 0x00000706, 0x00000302);
  constexpr __mmask64 kHighWords = 0xccccccccccccccccu, kLowWords = 0x3333333333333333u;
#pragma GCC unroll 4
  for (int32_t pair = 0; pair < kTileRows; ++pair, v += stride, step += Vector::kWidth) {
    const __m512i low = _mm512_loadu_si512(v), high = _mm512_loadu_si512(v + kTileRows * stride);
    _mm512_store_si512(step, _mm512_mask_shuffle_epi8(low, kHighWords, high, low_to_high));
    _mm512_store_si512(step + kTileWords, _mm512_mask_shuffle_epi8(high, kLowWords, low, high_to_low));
  }
}

// Distances in bytes: from a row to the next and from a step of 32 elements to the next.
struct LeftSteps {
  const char* data;
  int64_t row;
  int64_t step;
};

constexpr int64_t kProductRowBytes = kPanelColumns * sizeof(float);

// Tiles 0, 1 above 2, 3: a product [32, 32].
inline void clear_product() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}
inline void load_product(const float* c) {
  _tile_loadd(0, c, kProductRowBytes);
  _tile_loadd(1, c + kTileRows, kProductRowBytes);
  _tile_loadd(2, c + kBlockFloats / 2, kProductRowBytes);
  _tile_loadd(3, c + kBlockFloats / 2 + kTileRows, kProductRowBytes);
}
inline void store_product(float* c) {
  _tile_stored(0, c, kProductRowBytes);
  _tile_stored(1, c + kTileRows, kProductRowBytes);
  _tile_stored(2, c + kBlockFloats / 2, kProductRowBytes);
  _tile_stored(3, c + kBlockFloats / 2 + kTileRows, kProductRowBytes);
}

// Adds steps of a [32, 32] b [32, 32].
inline void add_products(const LeftSteps& a, const uint32_t* panel, int32_t begin, int32_t end) {
  const char* b = reinterpret_cast<const char*>(panel);
  for (int32_t step = begin; step < end; ++step) {
    _tile_loadd(4, a.data + step * a.step, a.row);
    _tile_loadd(6, b + step * kBf16StepBytes, kTileBytesPerRow);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + step * kBf16StepBytes + kTileBytes, kTileBytesPerRow);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a.data + step * a.step + kTileRows * a.row, a.row);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// Tiles 0 and 2: adds the sums of the rows of steps of a [32, 32], in every column. A product with ones, for the vector
// unit's dot product of bf16 takes two cycles.
inline void add_row_sums(const LeftSteps& a, const uint16_t* ones, int32_t begin, int32_t end) {
  _tile_loadd(6, ones, kTileBytesPerRow);
  for (int32_t step = begin; step < end; ++step) {
    _tile_loadd(4, a.data + step * a.step, a.row);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, a.data + step * a.step + kTileRows * a.row, a.row);
    _tile_dpbf16ps(2, 5, 6);
  }
}
inline void store_row_sums(float* c) {
  _tile_stored(0, c, kProductRowBytes);
  _tile_stored(2, c + kBlockFloats / 2, kProductRowBytes);
}

// Adds the first column of c [32, 32] to sums [32].
inline void add_first_columns(const float* c, float* sums) {
  const __m512i rows = _mm512_slli_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 5);
  static_assert(kPanelColumns == 1 << 5, "floats in a row of c");
  for (int tile = 0; tile < 2; ++tile, c += kBlockFloats / 2, sums += kTileRows) {
    Vector::store(sums, Vector::add(Vector::load(sums), _mm512_i32gather_ps(rows, c, sizeof(float))));
  }
}

// product [rows, 32] of even and odd columns (pack_v_step), times a factor a row, as bf16 -> out [rows, columns], no
// more than 32. Ties are rounded away from zero. Returns NaN or Inf if any part is.
inline __m512 store_output(const float* product, const float* factors, int32_t rows, int32_t columns, int64_t out_row,
                           BFloat16* out) {
  const __m512i high_to_low = _mm512_set4_epi32(0x00000f0e, 0x00000b0a, 0x00000706, 0x00000302);
  const __m512i half = _mm512_set1_epi32(0x8000);
  constexpr __mmask64 kLowWords = 0x3333333333333333u;
  const __mmask32 stored = columns >= kPanelColumns ? ~0u : (1u << columns) - 1;
  __m512 total = Vector::zero();
  for (int32_t row = 0; row < rows; ++row, product += kPanelColumns, out += out_row) {
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

}  // namespace
}  // namespace cpu
}  // namespace flashmoe
