// What the host passes to kernels that read 8-bit floats. Plain C types only.
#pragma once

#include "attention/params/append.h"
#include "attention/params/forward.h"

namespace flashmoe::attention {

// What a cache's codes are multiplied by: factor * values[index * stride + head * head_stride], index that of the sequence or of the page.
struct CacheScale {
  const float* values;  // null: `factor` alone
  int64_t stride;       // 0: the same for all
  int64_t head_stride;
  float factor;
  int32_t is_of_pages;  // then pages are a multiple of 16 keys
};

// k and v hold e4m3, all else is as in ForwardParams.
struct E4m3ForwardParams {
  ForwardParams forward;
  CacheScale k_scale;
  CacheScale v_scale;
};

// What codes of a dense tensor are multiplied by: factor * values[batch * stride + head * head_stride + (row >> block_shift) * block_stride].
struct BlockScale {
  const float* values;  // null: `factor` alone
  int64_t stride;       // 0: the same for all
  int64_t head_stride;
  int64_t block_stride;
  int32_t block_shift;  // 0: one for all rows, and block_stride is 0
  float factor;
};

// q, k and v hold e4m3; out is of 16 bits. Blocks of q and k are multiples of 64 rows, those of v of 128. Scales of q and of keys multiply the scores, which must leave these positive; those of values the
// output. forward.v is what TransposeParams describe: [batch, heads_kv, value_blocks, value_rows, 128 keys].
struct E4m3AttentionParams {
  ForwardParams forward;
  BlockScale q_scale;
  BlockScale k_scale;
  BlockScale v_scale;
  int32_t value_blocks;  // of transposed V: ceil(seq_k / 128), or of ragged keys keys_total / 128 + batch
  int32_t value_rows;    // the kernel's head dim
};

// V before and after attention/forward/sm90/e4m3/transpose.cuh.
struct TransposeParams {
  // [batch, heads_kv, seq_k, head_dim_v], or ragged [keys_total, heads_kv, head_dim_v]; rows at multiples of 4 bytes
  const void* v;
  void* out;  // [batch, heads_kv, value_blocks, value_rows, 128]; of ragged keys without batch
  Strides v_stride;
  int32_t batch;  // sequences
  int32_t heads_kv;
  int32_t seq_k;       // of ragged keys the most of a sequence
  int32_t head_dim_v;  // a multiple of 4
  int32_t value_blocks;
  int32_t value_rows;
  Batch sequences;  // of keys; all null: dense
};

// A cache of e4m3 and the same in 16 bits, k_out [batch, heads_kv, seq_k, head_dim] and v_out likewise: fewer than 2^31 elements in all.
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
  int32_t read_keys;  // at the end of a sequence, at most seq_k: those before them stay unwritten
  int32_t head_dim;   // a multiple of 16, as head_dim_v
  int32_t head_dim_v;
  Batch sequences;  // no ragged keys
  CacheScale k_scale;
  CacheScale v_scale;
};

// The caches hold e4m3, the new rows 16 bits, which are divided by the scale as they are appended.
struct E4m3AppendParams {
  AppendParams append;
  CacheScale k_scale;
  CacheScale v_scale;
};

}  // namespace flashmoe::attention
