// Integer products.
#pragma once

#include "ptx/types.cuh"

namespace flashmoe::ptx {

// Both words of the product. As inline PTX, because the compiler multiplies values that it has combined into 64 bits as
// 64-bit words, which adds a zero.
__device__ __forceinline__ void multiply_wide(uint32_t& low, uint32_t& high, uint32_t a, uint32_t b) {
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  low = static_cast<uint32_t>(product);
  high = static_cast<uint32_t>(product >> 32);
}

}  // namespace flashmoe::ptx
