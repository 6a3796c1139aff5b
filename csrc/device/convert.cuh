// Conversions between fp32 and the 16-bit element types, two at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ptx/types.cuh"

namespace flashmoe {

// Rounds to nearest even; `low` lands in bits 0 to 15, the lower address.
template <typename Element>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// The inverse: x is what lies in bits 0 to 15.
template <typename Element>
__device__ __forceinline__ float2 unpack(uint32_t pair);

template <>
__device__ __forceinline__ float2 unpack<__half>(uint32_t pair) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}

template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(uint32_t pair) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
}

}  // namespace flashmoe
