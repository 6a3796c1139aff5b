// What the host passes to kernels that read 8-bit floats. Plain C types only.
#pragma once

#include "attention/params/append.h"
#include "attention/params/forward.h"

namespace flashmoe::attention {

// The scale of a cache's codes (e4m3 bytes): factor * values[index * stride + head * head_stride], where index is that
// of the sequence or of the page.
struct CacheScale {
  const float* values;  // null: only `factor`
  int64_t stride;       // 0: the same for all
  int64_t head_stride;
  float factor;
  int32_t is_of_pages;  // index is that of the page; pages are then a multiple of 16 keys
};

// k and v hold e4m3; everything else is as in ForwardParams.
struct E4m3ForwardParams {
  ForwardParams forward;
  CacheScale k_scale;
  CacheScale v_scale;
};

// The scale of the codes of a dense tensor:
// factor * values[batch * stride + head * head_stride + (row >> block_shift) * block_stride].
struct BlockScale {
  const float* values;  // null: only `factor`
  int64_t stride;       // 0: the same for all
  int64_t head_stride;
  int64_t block_stride;
  int32_t block_shift;  // 0: one scale for all rows, and block_stride is 0
  float factor;
};

// q, k and v hold e4m3; out has 16-bit elements. Scale blocks of q and k are multiples of 64 rows, those of v multiples
// of 128. The scales of q and k multiply the scores, and their product must not be negative: the output is NaN then.
// The scales of v multiply the output. forward.v is the output of the transposition (TransposeParams): [batch,
// heads_kv, value_blocks, value_rows, 128 keys].
struct E4m3AttentionParams {
  ForwardParams forward;
  BlockScale q_scale;
  BlockScale k_scale;
  BlockScale v_scale;
  int32_t value_blocks;  // of transposed V: ceil(seq_k / 128), or with ragged keys keys_total / 128 + batch
  int32_t value_rows;    // the kernel's head dim
};

// V before and after attention/forward/sm90/e4m3/transpose.cuh.
struct TransposeParams {
  // [batch, heads_kv, seq_k, head_dim_v], or ragged [keys_total, heads_kv, head_dim_v]; rows at multiples of 4 bytes
  const void* v;
  void* out;  // [batch, heads_kv, value_blocks, value_rows, 128]; with ragged keys no batch dimension
  Strides v_stride;
  int32_t batch;  // sequences
  int32_t heads_kv;
  int32_t seq_k;       // with ragged keys that of the longest sequence
  int32_t head_dim_v;  // a multiple of 4
  int32_t value_blocks;
  int32_t value_rows;
  Batch sequences;  // of keys; all null: dense
};

// A cache of e4m3 and its 16-bit copy, k_out [batch, heads_kv, seq_k, head_dim] and v_out
// [batch, heads_kv, seq_k, head_dim_v]: fewer than 2^31 elements in total.
struct DequantizeParams {
  const void* k;  // rows at multiples of 16 bytes
  const void* v;
  void* k_out;
  void* v_out;
  Strides k_stride;
  Strides v_stride;
  int32_t batch;
  int32_t heads_kv;
  int32_t seq_k;
  int32_t read_keys;  // number of keys to convert at the end of a sequence, at most seq_k: others stay unwritten
  int32_t head_dim;   // a multiple of 16, like head_dim_v
  int32_t head_dim_v;
  Batch sequences;  // no ragged keys
  CacheScale k_scale;
  CacheScale v_scale;
};

// The caches hold e4m3; the new rows have 16-bit elements, which are divided by the scale as they are appended.
struct E4m3AppendParams {
  AppendParams append;
  CacheScale k_scale;
  CacheScale v_scale;
};

}  // namespace flashmoe::attention
