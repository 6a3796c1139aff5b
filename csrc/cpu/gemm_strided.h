// Products of small operands that are in a cache, with any strides. Include after a vector_*.h. Internal linkage. An
// element is one sum over the words in ascending order from zero, then added to what was there.
#pragma once

#include <cstdint>

#include "cpu/gemm_pack.h"

namespace flashmoe::cpu {
namespace {

constexpr int kPairVectors = 2;
constexpr int32_t kPairColumns = kPairVectors * Vector::kWidth;  // per pass over the rows

// Words of the left operand, [row][word]: strides in words, one of them 1 or neither.
struct Left {
  const float* data;
  int64_t row_stride;
  int64_t word_stride;
};

// Words of the right operand, [pair of vectors][word][column].
struct Right {
  const float* data;
  int64_t word_stride;
  int64_t pair_stride;
};

template <class T, int kRows>
void multiply_strided_tile(Left a, const float* b, int64_t b_stride, int32_t words, bool is_added, float* c,
                           int64_t c_stride) {
  Vector::Float sum[kRows][kPairVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kPairVectors; ++v) sum[r][v] = Vector::zero();
  }
  // Four rows per pointer: x86 addresses p, p + stride, p + 2 stride without further registers.
  const float* rows[(kRows + 3) / 4];
#pragma GCC unroll 4
  for (int i = 0; i < (kRows + 3) / 4; ++i) rows[i] = a.data + 4 * i * a.row_stride;
  const int64_t stride3 = 3 * a.row_stride;
  for (int32_t word = 0; word < words; ++word, b += b_stride) {
    Vector::Float column[kPairVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kPairVectors; ++v) column[v] = Vector::load(b + v * Vector::kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const float* p = rows[r / 4] + (r % 4 == 3 ? stride3 : (r % 4) * a.row_stride);
      const Vector::Float element = Vector::broadcast(*p);
#pragma GCC unroll 2
      for (int v = 0; v < kPairVectors; ++v) sum[r][v] = Words<T>::multiply_add(element, column[v], sum[r][v]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < (kRows + 3) / 4; ++i) rows[i] += a.word_stride;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kPairVectors; ++v) {
      float* out = c + r * c_stride + v * Vector::kWidth;
      Vector::store(out, is_added ? Vector::add(Vector::load(out), sum[r][v]) : sum[r][v]);
    }
  }
}

// Calls the tile of the given height. The recursion ends at kRows = 1: heights are 1..kMaxTileRows.
template <class T, int kRows = Vector::kMaxTileRows>
inline void multiply_strided_tile_of(int32_t rows, Left a, const float* b, int64_t b_stride, int32_t words,
                                     bool is_added, float* c, int64_t c_stride) {
  if (kRows == 1 || rows == kRows) return multiply_strided_tile<T, kRows>(a, b, b_stride, words, is_added, c, c_stride);
  return multiply_strided_tile_of<T, (kRows > 1 ? kRows - 1 : 1)>(rows, a, b, b_stride, words, is_added, c, c_stride);
}

// c [rows, columns] (+)= a [rows, words] b [words, columns]; columns is a multiple of kPairColumns. The heights of
// tiles differ by at most one: a tile of 4 after five of 12 would wait for its own additions.
template <class T>
inline void multiply_strided(Left a, int32_t rows, Right b, int32_t words, int32_t columns, bool is_added, float* c,
                             int64_t c_stride) {
  const int32_t tiles = (rows + Vector::kMaxTileRows - 1) / Vector::kMaxTileRows;
  for (int32_t column = 0; column < columns; column += kPairColumns, b.data += b.pair_stride) {
    for (int32_t tile = 0; tile < tiles; ++tile) {
      const int32_t begin = rows * tile / tiles, end = rows * (tile + 1) / tiles;
      const Left part = {a.data + begin * a.row_stride, a.row_stride, a.word_stride};
      multiply_strided_tile_of<T>(end - begin, part, b.data, b.word_stride, words, is_added,
                                  c + begin * c_stride + column, c_stride);
    }
  }
}

}  // namespace
}  // namespace flashmoe::cpu
