// Products of whole numbers.
#pragma once

#include "ptx/types.cuh"

namespace flashmoe::ptx {

// Both words of the product. As an instruction of its own: the compiler makes a product of 64-bit words of what it has combined in 64 bits, which adds
// a zero.
__device__ __forceinline__ void multiply_wide(uint32_t& low, uint32_t& high, uint32_t a, uint32_t b) {
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  low = static_cast<uint32_t>(product);
  high = static_cast<uint32_t>(product >> 32);
}

}  // namespace flashmoe::ptx
