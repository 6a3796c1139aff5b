// Chunks over a cache of 8-bit floats (e4m3): their additional parameters, and the record that the loading thread
// passes to the warps that convert codes to elements (converter.cuh).
#pragma once

#include "attention/params/e4m3.h"
#include "device/persistent.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"

namespace flashmoe::attention::sm90 {

// A block of codes, as published by the loading thread.
struct CodeBlock {
  static constexpr int kEnd = -(1 << 30);  // instead of keys, after the last block
  int keys;                                // keys of the sequence from the block's first on
  int batch;
  int kv_head;
  int first;  // first key of the block
};

// ForwardParams is the first member of the parameters of a kernel over codes.
__device__ __forceinline__ const E4m3ForwardParams& of_codes(const ForwardParams& params) {
  return reinterpret_cast<const E4m3ForwardParams&>(params);
}

// The scale of a sequence. Scales of pages are applied to the elements.
__device__ __forceinline__ float scale_of(const CacheScale& scale, int batch, int kv_head) {
  if (scale.is_of_pages) return 1.0f;
  if (scale.values == nullptr) return scale.factor;
  return scale.factor * ptx::ld_global_float(scale.values + batch * scale.stride + kv_head * scale.head_stride);
}

// The factor of the scores. The references of a softmax require a positive finite factor, so the sign of a negative
// scale is applied to the codes, and any other scale turns the codes into zeros or NaN (converter.cuh).
__device__ __forceinline__ bool is_positive(float scale) {
  return scale > 0.0f && scale < ptx::bits_float(0x7f800000u);
}
__device__ __forceinline__ float score_factor(float scale) {
  const float magnitude = ptx::bits_float(ptx::float_bits(scale) & 0x7fffffffu);
  return is_positive(magnitude) ? magnitude : 1.0f;
}

}  // namespace flashmoe::attention::sm90
