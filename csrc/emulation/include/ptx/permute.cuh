// Emulated: the signatures of csrc/ptx/permute.cuh; none needs a call site.
#pragma once

#include "ptx/types.cuh"

namespace flashmoe::ptx {

__device__ __forceinline__ uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t digit = selector >> (4 * i) & 15;
    uint32_t byte = static_cast<uint32_t>(both >> (digit & 7) * 8 & 0xFF);
    if (digit >= 8) byte = byte >= 128 ? 0xFF : 0;
    result |= byte << (8 * i);
  }
  return result;
}

}  // namespace flashmoe::ptx
