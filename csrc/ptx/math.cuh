// Arithmetic where one PTX instruction is meant. The approximations flush subnormals to zero (.ftz).
#pragma once

#include "ptx/types.cuh"

namespace flashmoe::ptx {

__device__ __forceinline__ uint32_t float_bits(float x) { return __float_as_uint(x); }

__device__ __forceinline__ float bits_float(uint32_t bits) { return __uint_as_float(bits); }

// How many bits are set.
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

// a - b, of what a and b are once rounded: in a plain difference a product may lose its rounding to an fma.
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

// The larger of the two; a NaN loses against a number (the row sum carries it instead).
__device__ __forceinline__ float max_ftz(float a, float b) {
  float result;
  asm("max.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// The smaller of the two; NaN where one is.
__device__ __forceinline__ float min_nan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

}  // namespace flashmoe::ptx
