// Emulated: the signatures of csrc/ptx/bf16x2.cuh; none needs a call site.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/elements.cuh"

namespace flashmoe::ptx {

// A float holds the product of two bf16.
__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  const float2 left = unpack<BF16>(a), right = unpack<BF16>(b);
  return pack<BF16>(left.x * right.x, left.y * right.y);
}

template <typename Element>
__device__ __forceinline__ uint32_t larger_magnitudes(uint32_t a, uint32_t b) {
  const float2 left = unpack<Element>(a & 0x7fff7fffu), right = unpack<Element>(b & 0x7fff7fffu);
  return pack<Element>(__builtin_fmaxf(left.x, right.x), __builtin_fmaxf(left.y, right.y)) | ((a ^ b) & 0x80008000u);
}

}  // namespace flashmoe::ptx
