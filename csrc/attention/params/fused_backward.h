// What the host passes to the kernels before and after the fused backward kernel. Plain C types only.
#pragma once

#include "attention/params/forward.h"

namespace flashmoe::attention {

constexpr int32_t kFusedTileKeys = 128;  // keys per tile of the fused kernel
constexpr int32_t kDqPartialRows = 64;   // rows per partial of dq

struct FusedQueryParams {
  const void* out;    // [batch, heads, rows, head_dim]
  const void* dout;   // the same
  const float* lse;   // [batch, heads, rows], contiguous
  const float* dlse;  // the same; null if there is none
  float* row_dot;     // the same
  // [batch, heads, ceil(rows / 64)] partials of 64 rows of dq, at the kernel's width; then a semaphore each.
  float* sums;
  void* dq;  // [batch, heads, rows, head_dim]
  Strides out_stride;
  Strides dout_stride;
  Strides dq_stride;
  int32_t batch;
  int32_t heads;
  int32_t rows;
  int32_t head_dim;  // a multiple of 8
  int32_t keys;
  // Keys that row 0 sees, one more for each later row; negative if a causal mask hides rows, past `keys` if none.
  int32_t row_keys;
  float scale;
};

// The same for a batch described by a Batch (attention/backward/sm90 gives the layout of the partials). Ragged rows:
// tensors are [rows_total, heads, head_dim], batch strides are 0, and statistics are [heads, rows_total].
struct VarlenFusedQueryParams {
  const void* out;   // [batch, heads, rows, head_dim_v]
  const void* dout;  // the same
  const float* lse;  // [batch, heads, rows], contiguous
  const float* dlse;
  float* row_dot;
  float* sums;  // [heads, partials of a head]; then a semaphore for each
  void* dq;     // [batch, heads, rows, head_dim]
  Strides out_stride;
  Strides dout_stride;
  Strides dq_stride;
  const int32_t* cu_seqlens_q;  // [batch + 1]; null: dense rows
  int32_t rows_total;
  int32_t batch;
  int32_t heads;
  int32_t rows;  // at most, per sequence
  int32_t head_dim;
  int32_t head_dim_v;
  int32_t width;  // columns of the fused kernel: 64 or 128
  float scale;
};

}  // namespace flashmoe::attention
