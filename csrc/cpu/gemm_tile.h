// Products of packed operands, a tile of rows and two vectors of columns at a time. Include after a vector_*.h.
// Internal linkage.
//
// An element is summed in blocks of kBlockWords words along the summed dimension, each in ascending order from zero,
// and the blocks' sums are added in ascending order: its bits depend on nothing else in the product, nor on the tile.
#pragma once

#include <cstdint>

#include "cpu/gemm_pack.h"

namespace flashmoe::cpu {
namespace {

constexpr int kPanelVectors = 2;
constexpr int32_t kPanelColumns = kPanelVectors * Vector::kWidth;
// A panel of the right operand (32 KiB with AVX-512) stays in the L1 and L2 caches while the rows pass by. Half of it,
// which would fit an L1 cache, was 3% slower on Zen 4: sums are loaded and stored once per panel.
constexpr int32_t kBlockWords = 256;
// Distance between rows of the left operand: constant, so that a tile's rows need one register; no multiple of 4 KiB.
constexpr int64_t kLeftStride = kBlockWords + 16;

template <class T>
constexpr int32_t kBlockElements = kBlockWords * kWordElements<T>;

// c[r][column] (+)= sum over words of a[r][word] b[word][column] for r < kRows.
template <class T, int kRows>
void multiply_tile(const float* a, const float* b, int32_t words, bool is_first, float* c) {
  Vector::Float sum[kRows][kPanelVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) sum[r][v] = Vector::zero();
  }
  for (int32_t word = 0; word < words; ++word, ++a, b += kPanelColumns) {
    Vector::Float column[kPanelVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) column[v] = Vector::load(b + v * Vector::kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vector::Float element = Vector::broadcast(a[r * kLeftStride]);
#pragma GCC unroll 2
      for (int v = 0; v < kPanelVectors; ++v) sum[r][v] = Words<T>::multiply_add(element, column[v], sum[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) {
      float* out = c + r * kPanelColumns + v * Vector::kWidth;
      Vector::store(out, is_first ? sum[r][v] : Vector::add(Vector::load(out), sum[r][v]));
    }
  }
}

// Calls the tile of the given height. The recursion ends at kRows = 1: heights are 1..kMaxTileRows.
template <class T, int kRows = Vector::kMaxTileRows>
inline void multiply_tile_of(int32_t rows, const float* a, const float* b, int32_t words, bool is_first, float* c) {
  if (kRows == 1 || rows == kRows) return multiply_tile<T, kRows>(a, b, words, is_first, c);
  return multiply_tile_of<T, (kRows > 1 ? kRows - 1 : 1)>(rows, a, b, words, is_first, c);
}

// c [rows, kPanelColumns] (+)= a [rows, words] b [words, kPanelColumns], a block of the summed dimension. The fewest
// tiles, of heights that differ by at most one: a tile of 4 after five of 12 would wait for its own additions.
template <class T>
inline void multiply_panel(const float* a, int32_t rows, const float* b, int32_t words, bool is_first, float* c) {
  const int32_t tiles = (rows + Vector::kMaxTileRows - 1) / Vector::kMaxTileRows;
  for (int32_t tile = 0; tile < tiles; ++tile) {
    const int32_t begin = rows * tile / tiles, end = rows * (tile + 1) / tiles;
    multiply_tile_of<T>(end - begin, a + begin * kLeftStride, b, words, is_first, c + begin * int64_t{kPanelColumns});
  }
}

}  // namespace
}  // namespace flashmoe::cpu
