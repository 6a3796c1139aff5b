// Where the rows and keys of a batch entry lie. Dense tensors: every entry has params.seq_q rows and params.seq_k keys.
//
// Ragged and paged batches change this file: rows, keys and the offsets of the first row and key then come from an array
// per entry, the address of a key tile from a page table. (The sm90 kernels name rows by tensor-map coordinates, in
// producer.cuh and epilogue.cuh, not by these offsets.)
#pragma once

#include "attention/params/forward.h"

namespace flashmoe {
namespace attention {

// Grouped heads: query head h reads key head h / heads_per_key_head.
__device__ __forceinline__ int heads_per_key_head(const ForwardParams& params) {
  return params.heads_q / params.heads_kv;
}

// One batch entry. Accessors, not fields: a copy would hold registers through the loop over key tiles.
struct Sequence {
  const ForwardParams& params;
  int batch;

  __device__ __forceinline__ int rows() const { return params.seq_q; }
  __device__ __forceinline__ int keys() const { return params.seq_k; }

  // Elements from the start of a tensor to the sequence's first row (query, output) or first key (key, value) of a head.
  __device__ __forceinline__ int64_t row_offset(const Strides& stride, int head) const {
    return batch * stride.batch + head * stride.head;
  }
  __device__ __forceinline__ int64_t key_offset(const Strides& stride, int key_head) const {
    return batch * stride.batch + key_head * stride.head;
  }

  // Index of `head` in [batch, heads_q], or of its part in [num_splits, batch, heads_q]; and the first of its rows among
  // all rows of the log-sum-exp or of the partial results, [..., heads_q, seq_q].
  template <bool kIsSplit>
  __device__ __forceinline__ int64_t result_head(int head, int split) const {
    const int64_t index = kIsSplit ? static_cast<int64_t>(split) * params.batch + batch : batch;
    return index * params.heads_q + head;
  }
  __device__ __forceinline__ int64_t result_row(int64_t result_head) const { return result_head * params.seq_q; }
};

}  // namespace attention
}  // namespace flashmoe
