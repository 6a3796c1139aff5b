// Two 16-bit integers in a word (sm_90).
#pragma once

#include "ptx/types.cuh"

namespace flashmoe::ptx {

// The larger of a + b and c, unsigned.
__device__ __forceinline__ uint32_t max_of_sum_u16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("{\n.reg .b32 sum;\nadd.u16x2 sum, %1, %2;\nmax.u16x2 %0, sum, %3;\n}" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

}  // namespace flashmoe::ptx
