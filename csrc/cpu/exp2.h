// 2^x of vectors. Include after a vector_*.h. Internal linkage.
#pragma once

#include "cpu/scalar_types.h"

namespace flashmoe::cpu {
namespace {

// Degree of the polynomial: the result needs no more digits than the type that it is multiplied in.
constexpr int kExpDegreeFull = 6;   // relative error of the polynomial 2.0e-9, of the whole below 1.2e-7
constexpr int kExpDegree16Bit = 4;  // 2.9e-6; half a unit in the last place of fp16 is 2.4e-4

// t = 2^t for t <= 0 or barely above (rounding), with 2^0 = 1 exactly and 2^-inf = 0; NaN stays NaN. The polynomial is
// 1 + f q(f), minimax in relative error on [-1/2, 1/2]. Step by step over kCount vectors, because one vector's chain of
// operations is longer than a processor looks ahead.
template <int kDegree, int kCount>
inline void exp2_of(Vector::Float (&t)[kCount]) {
  static_assert(kDegree == kExpDegreeFull || kDegree == kExpDegree16Bit, "there are coefficients for two degrees");
  static constexpr float kFull[] = {1.5353362e-4f, 1.3398874e-3f, 9.6184369e-3f, 5.5503324e-2f,
                                    2.4022648e-1f, 6.9314718e-1f, 1.0f};
  static constexpr float k16Bit[] = {9.5828529e-3f, 5.5906426e-2f, 2.4024099e-1f, 6.9312408e-1f, 1.0f};
  const float* coefficients = kDegree == kExpDegreeFull ? kFull : k16Bit;
  Vector::Float f[kCount], p[kCount];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) t[i] = Vector::split_exponent(t[i], &f[i]);
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) p[i] = Vector::broadcast(coefficients[0]);
#pragma GCC unroll 6
  for (int power = 1; power <= kDegree; ++power) {
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) p[i] = Vector::fma(p[i], f[i], Vector::broadcast(coefficients[power]));
  }
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) t[i] = Vector::mul(p[i], t[i]);
}

template <int kDegree>
inline Vector::Float exp2(Vector::Float t) {
  Vector::Float x[1] = {t};
  exp2_of<kDegree>(x);
  return x[0];
}

template <class T>
struct ExpDegree {
  static constexpr int value = kExpDegree16Bit;
};
template <>
struct ExpDegree<float> {
  static constexpr int value = kExpDegreeFull;
};

}  // namespace
}  // namespace flashmoe::cpu
