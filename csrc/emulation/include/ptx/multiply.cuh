// Emulated: the signatures of csrc/ptx/multiply.cuh.
#pragma once

#include "ptx/types.cuh"

namespace flashmoe::ptx {

__device__ __forceinline__ void multiply_wide(uint32_t& low, uint32_t& high, uint32_t a, uint32_t b) {
  const uint64_t product = static_cast<uint64_t>(a) * b;
  low = static_cast<uint32_t>(product);
  high = static_cast<uint32_t>(product >> 32);
}

}  // namespace flashmoe::ptx
