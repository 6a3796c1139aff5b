// Arguments of cuTensorMapEncodeTiled for the tensor maps of the sm90 backward kernels; the host makes the call as for
// the forward pass (attention/forward/sm90/tensor_map.h). Plain C++.
#pragma once

#include "attention/forward/sm90/tensor_map.h"
#include "attention/params/backward.h"
#include "attention/params/bias_gradient.h"
#include "attention/params/dropout.h"
#include "attention/params/mask_backward.h"
#include "attention/ragged_tensor_map.h"

namespace flashmoe::attention::backward::sm90 {

using attention::sm90::kElementBytes;
using attention::sm90::kSlabColumns;
using attention::sm90::kWarpgroupRows;
using attention::sm90::mask_map;
using attention::sm90::tensor_map_arguments;
using attention::sm90::TensorMapArguments;

struct QueryGradientTensorMaps {
  TensorMapArguments q;
  TensorMapArguments k;
  TensorMapArguments v;
  TensorMapArguments dout;
  TensorMapArguments dq;
};

struct KeyValueGradientTensorMaps {
  TensorMapArguments q;
  TensorMapArguments k;
  TensorMapArguments v;
  TensorMapArguments dout;
  TensorMapArguments dk;
  TensorMapArguments dv;
};

// Tensors with query rows (Q, dO, dq) or with keys (K, V, dk, dv), box_rows of them per box.
inline TensorMapArguments query_map(const BackwardParams& params, const void* address, const Strides& strides,
                                    int box_rows) {
  return tensor_map_arguments(address, strides, params.head_dim, params.seq_q, params.heads_q, params.batch, box_rows);
}
inline TensorMapArguments key_map(const BackwardParams& params, const void* address, const Strides& strides,
                                  int box_rows) {
  return tensor_map_arguments(address, strides, params.head_dim, params.seq_k, params.heads_kv, params.batch, box_rows);
}

// block_n: keys per block of the stream.
inline QueryGradientTensorMaps query_gradient_tensor_maps(const BackwardParams& params, int block_n) {
  return QueryGradientTensorMaps{query_map(params, params.q, params.q_stride, kWarpgroupRows),
                                 key_map(params, params.k, params.k_stride, block_n),
                                 key_map(params, params.v, params.v_stride, block_n),
                                 query_map(params, params.dout, params.dout_stride, kWarpgroupRows),
                                 query_map(params, params.dq, params.dq_stride, kWarpgroupRows)};
}

// block_m: queries per block of the stream.
inline KeyValueGradientTensorMaps key_value_gradient_tensor_maps(const BackwardParams& params, int block_m) {
  return KeyValueGradientTensorMaps{query_map(params, params.q, params.q_stride, block_m),
                                    key_map(params, params.k, params.k_stride, kWarpgroupRows),
                                    key_map(params, params.v, params.v_stride, kWarpgroupRows),
                                    query_map(params, params.dout, params.dout_stride, block_m),
                                    key_map(params, params.dk, params.dk_stride, kWarpgroupRows),
                                    key_map(params, params.dv, params.dv_stride, kWarpgroupRows)};
}

// For MaskKind::kRuntime: ragged maps (attention/ragged_tensor_map.h). Additional preconditions: the stride between
// sequences is a multiple of that between rows, which is below 2^34 elements.
struct RaggedTensorMapArguments {
  void* address;
  std::uint64_t dims[kRaggedMapRank];
  std::uint64_t strides_bytes[kRaggedMapRank - 1];
  std::uint32_t box[kRaggedMapRank];
  std::uint32_t element_strides[kRaggedMapRank];
};

inline RaggedTensorMapArguments ragged_map(const void* address, const Strides& strides, int head_dim, int heads,
                                           int box_rows) {
  constexpr std::uint64_t kAnyRow = 0x7fff0000;  // a bound that no coordinate reaches
  const auto row = static_cast<std::uint64_t>(strides.row) * kElementBytes;
  const auto head = static_cast<std::uint64_t>(heads == 1 ? 8 : strides.head) * kElementBytes;
  return RaggedTensorMapArguments{
      const_cast<void*>(address),
      {static_cast<std::uint64_t>(head_dim), kRaggedRows, static_cast<std::uint64_t>(heads), kAnyRow, kAnyRow},
      {row, head, row, (std::uint64_t{1} << 35) - row},
      {kSlabColumns, static_cast<std::uint32_t>(box_rows), 1, 1, 1},
      {1, 1, 1, 1, 1}};
}

struct VarlenQueryGradientTensorMaps {
  RaggedTensorMapArguments q;
  RaggedTensorMapArguments k;
  RaggedTensorMapArguments v;
  RaggedTensorMapArguments dout;
  RaggedTensorMapArguments dq;
};

struct VarlenKeyValueGradientTensorMaps {
  RaggedTensorMapArguments q;
  RaggedTensorMapArguments k;
  RaggedTensorMapArguments v;
  RaggedTensorMapArguments dout;
  RaggedTensorMapArguments dk;
  RaggedTensorMapArguments dv;
};

inline VarlenQueryGradientTensorMaps varlen_query_gradient_tensor_maps(const BackwardParams& params, int block_n) {
  const auto& p = params;
  return VarlenQueryGradientTensorMaps{ragged_map(p.q, p.q_stride, p.head_dim, p.heads_q, kWarpgroupRows),
                                       ragged_map(p.k, p.k_stride, p.head_dim, p.heads_kv, block_n),
                                       ragged_map(p.v, p.v_stride, p.head_dim_v, p.heads_kv, block_n),
                                       ragged_map(p.dout, p.dout_stride, p.head_dim_v, p.heads_q, kWarpgroupRows),
                                       ragged_map(p.dq, p.dq_stride, p.head_dim, p.heads_q, kWarpgroupRows)};
}

inline VarlenKeyValueGradientTensorMaps varlen_key_value_gradient_tensor_maps(const BackwardParams& params,
                                                                              int block_m) {
  const auto& p = params;
  return VarlenKeyValueGradientTensorMaps{ragged_map(p.q, p.q_stride, p.head_dim, p.heads_q, block_m),
                                          ragged_map(p.k, p.k_stride, p.head_dim, p.heads_kv, kWarpgroupRows),
                                          ragged_map(p.v, p.v_stride, p.head_dim_v, p.heads_kv, kWarpgroupRows),
                                          ragged_map(p.dout, p.dout_stride, p.head_dim_v, p.heads_q, block_m),
                                          ragged_map(p.dk, p.dk_stride, p.head_dim, p.heads_kv, kWarpgroupRows),
                                          ragged_map(p.dv, p.dv_stride, p.head_dim_v, p.heads_kv, kWarpgroupRows)};
}
inline VarlenKeyValueGradientTensorMaps varlen_key_value_gradient_tensor_maps(const DropoutBackwardParams& params,
                                                                              int block_m) {
  return varlen_key_value_gradient_tensor_maps(params.backward, block_m);
}

inline VarlenQueryGradientTensorMaps varlen_query_gradient_tensor_maps(const DropoutBackwardParams& params,
                                                                       int block_n) {
  return varlen_query_gradient_tensor_maps(params.backward, block_n);
}

struct MaskFusedTensorMaps : VarlenKeyValueGradientTensorMaps {
  TensorMapArguments mask;
  TensorMapArguments scores_gradient;  // if there is none, the mask's
};
inline MaskFusedTensorMaps mask_fused_tensor_maps(const MaskBackwardParams& params, int block_m) {
  const BackwardParams& p = params.backward;
  TensorMapArguments gradient = mask_map(p, block_m);
  if (params.scores_gradient != nullptr) {
    const int64_t head = p.seq_q * params.scores_gradient_row;
    gradient = tensor_map_arguments(params.scores_gradient, Strides{p.heads_q * head, head, params.scores_gradient_row},
                                    p.seq_k, p.seq_q, p.heads_q, p.batch, block_m);
  }
  return MaskFusedTensorMaps{varlen_key_value_gradient_tensor_maps(p, block_m), mask_map(p, block_m), gradient};
}

// Dense. Boxes of block_n rows, which equals block_m.
struct BiasGradientTensorMaps {
  TensorMapArguments q;
  TensorMapArguments k;
  TensorMapArguments v;
  TensorMapArguments dout;
  TensorMapArguments mask;
};
inline BiasGradientTensorMaps bias_gradient_tensor_maps(const BiasGradientParams& params, int block_n) {
  const BackwardParams& p = params.launched.backward;
  return BiasGradientTensorMaps{
      query_map(p, p.q, p.q_stride, block_n), key_map(p, p.k, p.k_stride, block_n),
      tensor_map_arguments(p.v, p.v_stride, p.head_dim_v, p.seq_k, p.heads_kv, p.batch, block_n),
      tensor_map_arguments(p.dout, p.dout_stride, p.head_dim_v, p.seq_q, p.heads_q, p.batch, block_n),
      mask_map(p.score_options, p.seq_k, p.seq_q, params.heads, params.batches, block_n)};
}

}  // namespace flashmoe::attention::backward::sm90
