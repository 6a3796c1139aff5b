// Vectors of doubles, as wide as those of floats, in the compiler's own vector types: one source for every instruction
// set. Include after a vector_*.h. Internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/rows.h"

namespace flashmoe::cpu {
namespace {

using Double = double __attribute__((vector_size(Vector::kWidth * sizeof(float))));
using DoubleBits = int64_t __attribute__((vector_size(Vector::kWidth * sizeof(float))));
constexpr int32_t kDoubles = Vector::kWidth / 2;
constexpr int32_t kDoubleTileRows = 4;
constexpr int32_t kDoubleTileColumns = 2 * kDoubles;

inline Double load(const double* p) {
  Double x;
  memcpy(&x, p, sizeof x);
  return x;
}
inline void store(double* p, Double x) { memcpy(p, &x, sizeof x); }
inline Double all_of(double x) { return Double{} + x; }

// 2^x to within two units in the last place; 2^1000 or 2^-1000 beyond those. NaN stays NaN.
inline Double exp2(Double x) {
  constexpr double kLn2 = 0.693147180559945309417;
  constexpr double kRound = 0x1.8p52;  // a number of this size has no fraction
  constexpr int kDegree = 12;          // of the Taylor series of e^(f ln 2), |f| <= 1/2: the next term is below 2e-16
  const Double most = all_of(1000.0), least = all_of(-1000.0);
  x = x > most ? most : x;
  x = x < least ? least : x;
  const Double shifted = x + kRound, f = (x - (shifted - kRound)) * kLn2;
  Double p = all_of(1.0);
  for (int power = kDegree; power > 0; --power) p = 1.0 + p * f * (1.0 / power);
  DoubleBits bits, exponent;
  memcpy(&bits, &p, sizeof bits);
  memcpy(&exponent, &shifted, sizeof exponent);
  bits += exponent << 52;
  memcpy(&p, &bits, sizeof p);
  return p;
}

struct DoubleMatrix {
  double* data;
  int64_t row_stride;
  int64_t column_stride;
};

// c [rows, columns] = a [rows, words] b [words, columns], or added to it; `rows` are those of one tile, columns are
// whole tiles. The columns of b and c are adjacent.
inline void multiply_tiles(DoubleMatrix a, DoubleMatrix b, int32_t words, int32_t columns, bool is_added,
                           DoubleMatrix c) {
  for (int32_t column = 0; column < columns; column += kDoubleTileColumns) {
    Double sum[kDoubleTileRows][2] = {};
    const double* left = a.data;
    const double* right = b.data + column;
    for (int32_t word = 0; word < words; ++word, left += a.column_stride, right += b.row_stride) {
      const Double right0 = load(right), right1 = load(right + kDoubles);
#pragma GCC unroll 4
      for (int r = 0; r < kDoubleTileRows; ++r) {
        sum[r][0] += left[r * a.row_stride] * right0;
        sum[r][1] += left[r * a.row_stride] * right1;
      }
    }
    for (int r = 0; r < kDoubleTileRows; ++r) {
      double* to = c.data + r * c.row_stride + column;
      for (int v = 0; v < 2; ++v, to += kDoubles) store(to, is_added ? load(to) + sum[r][v] : sum[r][v]);
    }
  }
}

}  // namespace
}  // namespace flashmoe::cpu
