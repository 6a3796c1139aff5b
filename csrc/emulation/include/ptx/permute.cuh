// Emulated: the signatures of csrc/ptx/permute.cuh; none needs a call site.
#pragma once

#include "ptx/types.cuh"

namespace flashmoe {
namespace ptx {

// A digit of 8 and more would repeat a sign on the GPU: no kernel has one.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(both >> (selector >> (4 * i) & 7) * 8 & 0xFF) << (8 * i);
  return result;
}

}  // namespace ptx
}  // namespace flashmoe
