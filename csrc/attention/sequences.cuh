// The location of the rows and keys of one sequence of a batch. In dense tensors every sequence has params.seq_q rows
// and params.seq_k keys. Kernels for MaskKind::kRuntime read lengths and offsets from arrays, so their Sequence stores
// what it has read.
//
// (The sm90 kernels address rows by tensor-map coordinates, in producer.cuh and epilogue.cuh, not by these offsets.)
#pragma once

#include "attention/params/forward.h"
#include "device/math.cuh"
#include "ptx/memory.cuh"

namespace flashmoe::attention {

// Grouped heads: query head h reads key head h / heads_per_key_head.
__device__ __forceinline__ int heads_per_key_head(const ForwardParams& params) {
  return params.heads_q / params.heads_kv;
}

// Columns of v and out.
template <MaskKind kMask>
__device__ __forceinline__ int value_columns(const ForwardParams& params) {
  return kMask == MaskKind::kRuntime ? params.head_dim_v : params.head_dim;
}

// One sequence. Accessors instead of fields: a copy would occupy registers throughout the loop over key tiles.
template <MaskKind kMask>
struct Sequence {
  const ForwardParams& params;
  int batch;

  __device__ __forceinline__ Sequence(const ForwardParams& params_, int batch_) : params(params_), batch(batch_) {}

  __device__ __forceinline__ int rows() const { return params.seq_q; }
  __device__ __forceinline__ int keys() const { return params.seq_k; }

  // Elements from the start of a tensor to the sequence's first row (query, output) or first key (key, value) of a
  // head.
  __device__ __forceinline__ int64_t row_offset(const Strides& stride, int head) const {
    return batch * stride.batch + head * stride.head;
  }
  __device__ __forceinline__ int64_t key_offset(const Strides& stride, int key_head) const {
    return batch * stride.batch + key_head * stride.head;
  }

  // result_head: index of `head` in [batch, heads_q], or of its split in [num_splits, batch, heads_q]. result_row: its
  // first row among all rows of the log-sum-exp or of the partial results, [..., heads_q, seq_q].
  template <bool kIsSplit>
  __device__ __forceinline__ int64_t result_head(int head, int split) const {
    const int64_t index = kIsSplit ? static_cast<int64_t>(split) * params.batch + batch : batch;
    return index * params.heads_q + head;
  }
  __device__ __forceinline__ int64_t result_row(int64_t result_head) const { return result_head * params.seq_q; }
};

struct Extent {
  int first;
  int length;
};

__device__ __forceinline__ int load_length(const int32_t* gmem) { return static_cast<int>(ptx::ld_global_32(gmem)); }

// The rows of sequence `batch` according to a cu_seqlens array, clamped to [0, total] and to at most `most` rows.
__device__ __forceinline__ Extent extent_of(const int32_t* cu_seqlens, int batch, int total, int most) {
  const int first = max(0, min(total, load_length(cu_seqlens + batch)));
  const int end = max(first, min(total, load_length(cu_seqlens + batch + 1)));
  return Extent{first, min(end - first, most)};
}

// Params: any parameter struct with `sequences` and seq_q or seq_k.
template <typename Params>
__device__ __forceinline__ Extent row_extent(const Params& params, int batch) {
  const Batch& sequences = params.sequences;
  if (sequences.cu_seqlens_q == nullptr) return Extent{0, params.seq_q};
  return extent_of(sequences.cu_seqlens_q, batch, sequences.rows_total, params.seq_q);
}
template <typename Params>
__device__ __forceinline__ Extent key_extent(const Params& params, int batch) {
  const Batch& sequences = params.sequences;
  Extent keys{0, params.seq_k};
  if (sequences.cu_seqlens_k != nullptr) {
    keys = extent_of(sequences.cu_seqlens_k, batch, sequences.keys_total, params.seq_k);
  }
  if (sequences.seqused_k != nullptr) {
    keys.length = max(0, min(keys.length, load_length(sequences.seqused_k + batch)));
  }
  return keys;
}

template <>
struct Sequence<MaskKind::kRuntime> {
  const ForwardParams& params;
  int batch;
  Extent row;
  Extent key;

  __device__ __forceinline__ Sequence(const ForwardParams& params_, int batch_)
      : params(params_), batch(batch_), row(row_extent(params_, batch_)), key(key_extent(params_, batch_)) {}
  // For a sequence whose lengths have been read already.
  __device__ __forceinline__ Sequence(const ForwardParams& params_, int batch_, Extent row_, Extent key_)
      : params(params_), batch(batch_), row(row_), key(key_) {}

  __device__ __forceinline__ int rows() const { return row.length; }
  __device__ __forceinline__ int keys() const { return key.length; }

  // Ragged tensors have no batch dimension: their batch stride is 0. With paged keys, key_offset is the offset within a
  // page, without the page's own.
  __device__ __forceinline__ int64_t row_offset(const Strides& stride, int head) const {
    return batch * stride.batch + row.first * stride.row + head * stride.head;
  }
  __device__ __forceinline__ int64_t key_offset(const Strides& stride, int key_head) const {
    if (params.sequences.block_table != nullptr) return key_head * stride.head;
    return batch * stride.batch + key.first * stride.row + key_head * stride.head;
  }

  // The number of the page that holds key `index`.
  __device__ __forceinline__ int page_of(int index) const {
    return clamp_page(load_page(index / params.sequences.page_size));
  }
  // The same in two steps, so that other work can hide the latency of the load: the page number in the table, then the
  // page to read.
  __device__ __forceinline__ int load_page(int page_of_sequence) const {
    const Batch& sequences = params.sequences;
    return load_length(sequences.block_table + batch * sequences.block_table_stride + page_of_sequence);
  }
  __device__ __forceinline__ int clamp_page(int page) const {
    return page >= 0 && page < params.sequences.num_pages ? page : 0;
  }

  // result_head: the first row of `head` among all rows of the log-sum-exp or of the partial results,
  // [batch, heads_q, seq_q], or [heads_q, rows_total] if rows are ragged, with splits outermost. result_row returns it
  // unchanged.
  template <bool kIsSplit>
  __device__ __forceinline__ int64_t result_head(int head, int split) const {
    const bool is_ragged = params.sequences.cu_seqlens_q != nullptr;
    const int64_t rows_of_head = is_ragged ? params.sequences.rows_total : params.seq_q;
    const int64_t heads = is_ragged ? params.heads_q : static_cast<int64_t>(params.heads_q) * params.batch;
    const int64_t index =
        (is_ragged ? 0 : static_cast<int64_t>(batch) * params.heads_q) + head + (kIsSplit ? split * heads : 0);
    return index * rows_of_head + row.first;
  }
  __device__ __forceinline__ int64_t result_row(int64_t first) const { return first; }
};

}  // namespace flashmoe::attention
