// Loads and stores of eight neighbouring elements: 16 bytes of 16-bit elements.
#pragma once

#include "device/convert.cuh"
#include "ptx/memory.cuh"

namespace flashmoe::moe {

template <typename Element>
__device__ __forceinline__ void load_eight(float* values, const Element* gmem) {
  uint32_t words[4];
  ptx::ld_global_128(words, gmem);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack<Element>(words[i]);
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}

template <typename Element>
__device__ __forceinline__ void store_eight(Element* gmem, const float* values) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = pack<Element>(values[2 * i], values[2 * i + 1]);
  ptx::st_global_128(gmem, words);
}

}  // namespace flashmoe::moe
