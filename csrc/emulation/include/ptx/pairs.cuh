// Emulated: the signatures of csrc/ptx/pairs.cuh; a test compares the two.
#pragma once

#include "ptx/types.cuh"

namespace flashmoe::ptx {

__device__ __forceinline__ uint32_t max_of_sum_u16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const uint32_t sum = ((a >> shift) + (b >> shift)) & 0xffffu;
    const uint32_t other = (c >> shift) & 0xffffu;
    result |= (sum > other ? sum : other) << shift;
  }
  return result;
}

}  // namespace flashmoe::ptx
