// Arithmetic of which the range, or what becomes of NaN, is not that of ptx/math.cuh. Subnormals are flushed to zero (.ftz).
#pragma once

#include "ptx/types.cuh"

namespace flashmoe {
namespace ptx {

// a * b + c with one rounding, below 0 raised to 0 and above 1 lowered to 1; 0 for NaN.
__device__ __forceinline__ float fma_sat(float a, float b, float c) {
  float result;
  asm("fma.rn.ftz.sat.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
  return result;
}

// The larger of the two; NaN where one is.
__device__ __forceinline__ float max_nan(float a, float b) {
  float result;
  asm("max.NaN.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

}  // namespace ptx
}  // namespace flashmoe
