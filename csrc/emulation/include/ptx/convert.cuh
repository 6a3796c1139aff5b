// Emulated: the signatures of csrc/ptx/convert.cuh.
#pragma once

#include "emulation/vector_types.h"
#include "ptx/element_format.h"
#include "ptx/types.cuh"

namespace flashmoe::ptx {

template <typename Element>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  using Format = ElementFormat<Element>;
  return Format::bits(low) | static_cast<uint32_t>(Format::bits(high)) << 16;
}

template <typename Element>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  using Format = ElementFormat<Element>;
  return float2{Format::value(static_cast<uint16_t>(pair)), Format::value(static_cast<uint16_t>(pair >> 16))};
}

}  // namespace flashmoe::ptx
