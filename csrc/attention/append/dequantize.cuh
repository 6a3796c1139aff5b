// A cache of 8-bit floats (e4m3) as one of 16 bits: each sequence's keys and values behind each other, times their scales. Keys past a sequence's
// end stay unwritten. Grid: a thread for 16 codes of a row, in this order: columns of K, then of V, heads, keys, sequences.
#pragma once

#include "attention/append/append.cuh"
#include "attention/params/e4m3.h"
#include "ptx/e4m3.cuh"

namespace flashmoe::attention {

template <typename Spec>
__device__ __forceinline__ void dequantize_e4m3(const DequantizeParams& params) {
  using Element = typename Spec::Element;
  constexpr int kCodes = 16;
  const int key_parts = params.head_dim / kCodes;
  const int parts = key_parts + params.head_dim_v / kCodes;
  int index = ptx::block_index() * Spec::kNumThreads + ptx::thread_index();
  int part = index % parts;
  index /= parts;
  const int head = index % params.heads_kv;
  index /= params.heads_kv;
  const int batch = index / params.seq_k;
  const int key = index - batch * params.seq_k;
  if (batch >= params.batch || key >= key_extent(params, batch).length) return;
  const bool is_value = part >= key_parts;
  if (is_value) part -= key_parts;

  const Batch& sequences = params.sequences;
  const Strides& stride = is_value ? params.v_stride : params.k_stride;
  int place = batch;
  int row = key;
  if (sequences.block_table != nullptr) {
    const int page = key / sequences.page_size;
    place = load_length(sequences.block_table + batch * sequences.block_table_stride + page);
    if (place < 0 || place >= sequences.num_pages) place = 0;
    row = key - page * sequences.page_size;
  }
  const CacheScale& of = is_value ? params.v_scale : params.k_scale;
  float scale = of.factor;
  if (of.values != nullptr) {
    const int64_t of_index = of.is_of_pages ? place : batch;
    scale *= ptx::ld_global_float(of.values + of_index * of.stride + head * of.head_stride);
  }
  const unsigned char* from_gmem = static_cast<const unsigned char*>(is_value ? params.v : params.k) +
                                   place * stride.batch + head * stride.head + row * stride.row + part * kCodes;
  const int columns = is_value ? params.head_dim_v : params.head_dim;
  Element* to_gmem = static_cast<Element*>(is_value ? params.v_out : params.k_out) +
                     ((static_cast<int64_t>(batch) * params.heads_kv + head) * params.seq_k + key) * columns +
                     part * kCodes;
  uint32_t codes[4];
  ptx::ld_global_128(codes, from_gmem);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t elements[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float values[4];
      ptx::widen_e4m3(values, codes[2 * half + i]);
      elements[2 * i] = pack<Element>(values[0] * scale, values[1] * scale);
      elements[2 * i + 1] = pack<Element>(values[2] * scale, values[3] * scale);
    }
    ptx::st_global_128(to_gmem + half * 8, elements);
  }
}

}  // namespace flashmoe::attention
