// The CUDA keywords and built-ins of a kernel source, for g++. Force-included before every emulated translation unit.
#pragma once

#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS  // C's math.h only: <cmath> takes a sixth of a unit's compile time
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <cstdint>

#include "emulation/vector_types.h"

#define __global__
#define __device__
#define __host__
#define __shared__
#define __constant__ const
#define __grid_constant__
#define __forceinline__ inline  // a function that is not copied into each caller is compiled once: half of the time
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __restrict__

using uint = unsigned int;

// CUDA has these for every arithmetic type, without a header.
inline int min(int a, int b) { return b < a ? b : a; }
inline int max(int a, int b) { return a < b ? b : a; }
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline int __float_as_int(float x) {
  int bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}
inline unsigned int __float_as_uint(float x) { return static_cast<unsigned int>(__float_as_int(x)); }
inline float __int_as_float(int bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}
inline float __uint_as_float(unsigned int bits) { return __int_as_float(static_cast<int>(bits)); }
