// Arithmetic that must be one specific PTX instruction. The approximations flush subnormals to zero (.ftz).
#pragma once

#include "ptx/types.cuh"

namespace flashmoe::ptx {

__device__ __forceinline__ uint32_t float_bits(float x) { return __float_as_uint(x); }

__device__ __forceinline__ float bits_float(uint32_t bits) { return __uint_as_float(bits); }

// The number of bits that are set.
__device__ __forceinline__ int population_count(uint32_t bits) { return __popc(bits); }

// NVRTC has no constant expression for it.
__device__ __forceinline__ float negative_infinity() { return __uint_as_float(0xff800000u); }

// 2^x, relative error 2^-22; exp2_approx(-inf) == 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// log2(x); -inf at 0.
__device__ __forceinline__ float lg2_approx(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 1 / x, at most 1 ulp off.
__device__ __forceinline__ float rcp_approx(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// a - b of the rounded a and b: in a plain difference a product may be fused into an fma and lose its rounding.
__device__ __forceinline__ float sub_rn(float a, float b) {
  float result;
  asm("sub.rn.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// a * b + c with one rounding.
__device__ __forceinline__ float fma_rn(float a, float b, float c) {
  float result;
  asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
  return result;
}

// The larger of the two; a number wins over a NaN (the row sum carries the NaN instead).
__device__ __forceinline__ float max_ftz(float a, float b) {
  float result;
  asm("max.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// The smaller of the two; NaN if either is.
__device__ __forceinline__ float min_nan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

}  // namespace flashmoe::ptx
