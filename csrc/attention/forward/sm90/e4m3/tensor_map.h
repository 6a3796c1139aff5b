// What the host passes to cuTensorMapEncodeTiled for the e4m3 kernels: two codes are one element of a 16-bit map
// (../tensor_map.h). Plain C++.
#pragma once

#include "attention/forward/sm90/tensor_map.h"
#include "attention/params/e4m3.h"

namespace flashmoe::attention::sm90 {

// Strides of transposed V: [batch, heads_kv, value_blocks, value_rows, keys of a block] codes.
inline Strides transposed_strides(const E4m3AttentionParams& params, int block_n) {
  const std::int64_t head = static_cast<std::int64_t>(params.value_blocks) * params.value_rows * block_n;
  return Strides{head * params.forward.heads_kv, head, block_n};
}

inline ForwardTensorMaps e4m3_tensor_maps(const E4m3AttentionParams& params, int block_n) {
  const ForwardParams& forward = params.forward;
  const Batch& sequences = forward.sequences;
  const bool is_ragged = sequences.cu_seqlens_k != nullptr;  // and Q: one sequence of all rows
  const int batch = is_ragged ? 1 : forward.batch;
  const int rows = is_ragged ? sequences.rows_total : forward.seq_q;
  const int keys = is_ragged ? sequences.keys_total : forward.seq_k;
  const auto pairs = [](const Strides& codes) { return Strides{codes.batch / 2, codes.head / 2, codes.row / 2}; };
  return ForwardTensorMaps{
      tensor_map_arguments(forward.q, pairs(forward.q_stride), forward.head_dim / 2, rows, forward.heads_q, batch,
                           kWarpgroupRows),
      tensor_map_arguments(forward.k, pairs(forward.k_stride), forward.head_dim / 2, keys, forward.heads_kv, batch,
                           block_n),
      tensor_map_arguments(forward.v, pairs(transposed_strides(params, block_n)), block_n / 2,
                           params.value_blocks * params.value_rows, forward.heads_kv, batch, params.value_rows),
      tensor_map_arguments(forward.out, forward.out_stride, forward.head_dim_v, rows, forward.heads_q, batch,
                           kWarpgroupRows)};
}

}  // namespace flashmoe::attention::sm90
