// Stand-in for CUDA's header: storage types and the conversions, rounded as the GPU rounds them. Arithmetic on __half is
// left out on purpose: a kernel that used it would round differently here, so it does not compile.
#pragma once

#include "emulation/numerics.h"
#include "emulation/vector_types.h"

struct alignas(2) __half {
  unsigned short bits;
};
struct alignas(4) __half2 {
  __half x, y;
};
using half = __half;
using half2 = __half2;

inline __half __float2half_rn(float value) { return __half{flashmoe::emulation::float_to_f16(value)}; }
inline __half __float2half(float value) { return __float2half_rn(value); }
inline float __half2float(__half value) { return flashmoe::emulation::f16_to_float(value.bits); }
inline __half2 __floats2half2_rn(float x, float y) { return __half2{__float2half_rn(x), __float2half_rn(y)}; }
inline __half2 __float22half2_rn(float2 value) { return __floats2half2_rn(value.x, value.y); }
inline float2 __half22float2(__half2 value) { return float2{__half2float(value.x), __half2float(value.y)}; }
inline __half2 __halves2half2(__half x, __half y) { return __half2{x, y}; }
inline float __low2float(__half2 value) { return __half2float(value.x); }
inline float __high2float(__half2 value) { return __half2float(value.y); }
inline unsigned short __half_as_ushort(__half value) { return value.bits; }
inline __half __ushort_as_half(unsigned short bits) { return __half{bits}; }
