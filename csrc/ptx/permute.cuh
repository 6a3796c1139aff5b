// Byte permutation of two words.
#pragma once

#include "ptx/types.cuh"

namespace flashmoe::ptx {

// Byte i of the result is the byte that hexadecimal digit i of the selector names: 0 to 3 of `low`, 4 to 7 of `high`;
// with 8 added, the top bit of that byte eight times.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
  return result;
}

}  // namespace flashmoe::ptx
