// The scale of a block of 128 values, from their largest magnitude.
#pragma once

#include "ptx/math.cuh"

namespace flashmoe::moe {

// 1 / x to the nearest float, for x of 2^-126 to 2^126 and infinity: one Newton step. For infinite x its error term is
// NaN, which fmaxf replaces by -1.
__device__ __forceinline__ float reciprocal(float x) {
  const float first = ptx::rcp_approx(x);
  return ptx::fma_rn(first, fmaxf(ptx::fma_rn(-x, first, 1.0f), -1.0f), first);
}

// The largest e4m3 number is 448. The scale and its inverse are finite even for a block of zeros. The maximum ignores a
// NaN, which stays NaN; an infinity makes its whole block NaN.
struct BlockScale {
  float scale;
  float inverse;

  __device__ __forceinline__ explicit BlockScale(float largest)
      : scale(fmaxf(largest, 7.888609052210118e-31f) * (1.0f / 448.0f)), inverse(reciprocal(scale)) {}  // 2^-100
};

}  // namespace flashmoe::moe
