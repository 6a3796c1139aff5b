// A cache of 8-bit floats (e4m3) under a chunk: what its parameters add, and what the loading thread tells the warps that make elements of codes
// (converter.cuh).
#pragma once

#include "attention/params/e4m3.h"
#include "device/persistent.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"

namespace flashmoe::attention::sm90 {

// What the loading thread says of a block of codes.
struct CodeBlock {
  static constexpr int kEnd = -(1 << 30);  // in place of keys, behind the last block
  int keys;                                // of the sequence, from the block's first on
  int batch;
  int kv_head;
  int first;  // key of the block
};

// The parameters of a kernel over codes begin with those of one over elements.
__device__ __forceinline__ const E4m3ForwardParams& of_codes(const ForwardParams& params) {
  return reinterpret_cast<const E4m3ForwardParams&>(params);
}

// Of a sequence. Scales of pages are in the elements.
__device__ __forceinline__ float scale_of(const CacheScale& scale, int batch, int kv_head) {
  if (scale.is_of_pages) return 1.0f;
  if (scale.values == nullptr) return scale.factor;
  return scale.factor * ptx::ld_global_float(scale.values + batch * scale.stride + kv_head * scale.head_stride);
}

// What scores are multiplied by: the references of a softmax go by products with a number above zero, so a sign is the codes', and what is no
// such number leaves zeros or NaN of them.
__device__ __forceinline__ bool is_positive(float scale) {
  return scale > 0.0f && scale < ptx::bits_float(0x7f800000u);
}
__device__ __forceinline__ float score_factor(float scale) {
  const float magnitude = ptx::bits_float(ptx::float_bits(scale) & 0x7fffffffu);
  return is_positive(magnitude) ? magnitude : 1.0f;
}

}  // namespace flashmoe::attention::sm90
