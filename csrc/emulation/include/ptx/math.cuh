// Emulated: the signatures of csrc/ptx/math.cuh; none needs a call site; a test compares the two.
#pragma once

#include "emulation/machine.h"
#include "ptx/types.cuh"

namespace flashmoe::ptx {

__device__ __forceinline__ uint32_t float_bits(float x) { return emulation::float_bits(x); }

__device__ __forceinline__ float bits_float(uint32_t bits) { return emulation::bits_float(bits); }

__device__ __forceinline__ int population_count(uint32_t bits) { return __builtin_popcount(bits); }

__device__ __forceinline__ float negative_infinity() { return emulation::bits_float(0xff800000u); }

// The approximations of the GPU are within 2 units in the last place of these (rounded from double), but not equal to
// them bit for bit.
__device__ __forceinline__ float exp2_approx(float x) {
  return emulation::flush_to_zero(static_cast<float>(__builtin_exp2(static_cast<double>(emulation::flush_to_zero(x)))));
}

__device__ __forceinline__ float lg2_approx(float x) {
  return emulation::flush_to_zero(static_cast<float>(__builtin_log2(static_cast<double>(emulation::flush_to_zero(x)))));
}

__device__ __forceinline__ float rcp_approx(float x) {
  return emulation::flush_to_zero(static_cast<float>(1.0 / static_cast<double>(emulation::flush_to_zero(x))));
}

__device__ __forceinline__ float sub_rn(float a, float b) {
  return emulation::flush_to_zero(emulation::flush_to_zero(a) - emulation::flush_to_zero(b));
}

__device__ __forceinline__ float fma_rn(float a, float b, float c) {
  return emulation::flush_to_zero(
      __builtin_fmaf(emulation::flush_to_zero(a), emulation::flush_to_zero(b), emulation::flush_to_zero(c)));
}

__device__ __forceinline__ float max_ftz(float a, float b) {
  return __builtin_fmaxf(emulation::flush_to_zero(a), emulation::flush_to_zero(b));
}

__device__ __forceinline__ float min_nan(float a, float b) { return __builtin_isnan(a) || a < b ? a : b; }

}  // namespace flashmoe::ptx
