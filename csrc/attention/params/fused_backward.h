// What the host passes to the kernels before and after the fused backward kernel. Plain C types only.
#pragma once

#include "attention/params/forward.h"

namespace flashmoe {
namespace attention {

struct FusedQueryParams {
  const void* out;    // [batch, heads, rows, head_dim]
  const void* dout;   // the same
  const float* lse;   // [batch, heads, rows], contiguous
  const float* dlse;  // the same; null where there is none
  float* row_dot;     // the same
  float* sums;  // [batch, heads, ceil(rows / 64)] pieces of 64 rows of dq, at the kernel's width; then a turn for each
  void* dq;     // [batch, heads, rows, head_dim]
  Strides out_stride;
  Strides dout_stride;
  Strides dq_stride;
  int32_t batch;
  int32_t heads;
  int32_t rows;
  int32_t head_dim;  // a multiple of 8
  float scale;
};

}  // namespace attention
}  // namespace flashmoe
