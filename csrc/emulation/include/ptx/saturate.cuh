// Emulated: the signatures of csrc/ptx/saturate.cuh; none needs a call site; a test holds the two against each other.
#pragma once

#include <cmath>

#include "emulation/machine.h"
#include "ptx/math.cuh"

namespace flashmoe {
namespace ptx {

__device__ __forceinline__ float fma_sat(float a, float b, float c) {
  return std::fmin(std::fmax(fma_rn(a, b, c), 0.0f), 1.0f);
}

__device__ __forceinline__ float max_nan(float a, float b) {
  return emulation::flush_to_zero(std::isnan(a) || a > b ? a : b);
}

}  // namespace ptx
}  // namespace flashmoe
