// What the host passes to the kernel that computes only row_dot, for calls that need no dq. Plain C types only.
#pragma once

#include "attention/params/forward.h"

namespace flashmoe::attention {

// Ragged rows are passed as one long sequence.
struct RowDotParams {
  const void* out;    // [batch, heads, rows, head_dim]
  const void* dout;   // the same
  const float* lse;   // [batch, heads, rows], contiguous
  const float* dlse;  // the same; null if there is none
  float* row_dot;     // the same: BackwardParams::row_dot
  Strides out_stride;
  Strides dout_stride;
  int32_t batch;
  int32_t heads;
  int32_t rows;
  int32_t head_dim;  // of out and dout, a multiple of 8
};

}  // namespace flashmoe::attention
