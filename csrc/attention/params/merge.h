// What the host passes to the kernel that merges two results, over two sets of keys, into one.
#pragma once

#include "attention/params/forward.h"

namespace flashmoe::attention {

// out_a, out_b and out are [batch, heads, rows, head_dim], lse_a, lse_b and lse [batch, heads, rows]. `out` may be
// out_a, and lse may be lse_a.
struct MergeParams {
  const void* out_a;
  const void* out_b;
  void* out;
  const float* lse_a;
  const float* lse_b;
  float* lse;
  Strides out_a_stride;
  Strides out_b_stride;
  Strides out_stride;
  Strides lse_a_stride;
  Strides lse_b_stride;
  Strides lse_stride;
  int32_t batch;
  int32_t heads;
  int32_t rows;  // per head; over all heads fewer than 2^31
  int32_t head_dim;
  int32_t lanes_shift;  // 1 << lanes_shift lanes share a row, at most 32
  int32_t is_float;     // 1: out_a and out are float32; 0: of the element type, like out_b
};

}  // namespace flashmoe::attention
