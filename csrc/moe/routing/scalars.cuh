// Reads tensors whose dtype is known only at run time: raw bits first, so that many loads are in flight before the
// first conversion.
#pragma once

#include "moe/params/routing.h"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"

namespace flashmoe::moe {

// The bits of element `index`: fp32, or 16 bits in the low half.
__device__ __forceinline__ uint32_t load_bits(const void* gmem, int64_t index, Scalar dtype) {
  if (dtype == Scalar::kFloat32) return ptx::ld_global_32(static_cast<const float*>(gmem) + index);
  return ptx::ld_global_16(static_cast<const uint16_t*>(gmem) + index);
}

__device__ __forceinline__ float float_of_bits(uint32_t bits, Scalar dtype) {
  if (dtype == Scalar::kFloat32) return ptx::bits_float(bits);
  if (dtype == Scalar::kFloat16) return ptx::unpack<ptx::F16>(bits).x;
  return ptx::bits_float(bits << 16);
}

}  // namespace flashmoe::moe
