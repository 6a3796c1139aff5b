// What the host passes to cuTensorMapEncodeTiled for the tensor maps of the sm90 backward kernels; the call is that of the
// forward pass (attention/forward/sm90/tensor_map.h). Plain C++.
#pragma once

#include "attention/params/backward.h"
#include "attention/forward/sm90/tensor_map.h"

namespace flashmoe {
namespace attention {
namespace backward {
namespace sm90 {

using attention::sm90::kWarpgroupRows;
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

// Rows of Q's kind (Q, dO, dq) and of K's kind (K, V, dk, dv), box_rows of them in a box.
inline TensorMapArguments query_map(const BackwardParams& params, const void* address, const Strides& strides,
                                    int box_rows) {
  return tensor_map_arguments(address, strides, params.head_dim, params.seq_q, params.heads_q, params.batch, box_rows);
}
inline TensorMapArguments key_map(const BackwardParams& params, const void* address, const Strides& strides,
                                  int box_rows) {
  return tensor_map_arguments(address, strides, params.head_dim, params.seq_k, params.heads_kv, params.batch, box_rows);
}

// block_n: keys of a block of the stream.
inline QueryGradientTensorMaps query_gradient_tensor_maps(const BackwardParams& params, int block_n) {
  return QueryGradientTensorMaps{query_map(params, params.q, params.q_stride, kWarpgroupRows),
                                 key_map(params, params.k, params.k_stride, block_n),
                                 key_map(params, params.v, params.v_stride, block_n),
                                 query_map(params, params.dout, params.dout_stride, kWarpgroupRows),
                                 query_map(params, params.dq, params.dq_stride, kWarpgroupRows)};
}

// block_m: queries of a block of the stream.
inline KeyValueGradientTensorMaps key_value_gradient_tensor_maps(const BackwardParams& params, int block_m) {
  return KeyValueGradientTensorMaps{query_map(params, params.q, params.q_stride, block_m),
                                    key_map(params, params.k, params.k_stride, kWarpgroupRows),
                                    key_map(params, params.v, params.v_stride, kWarpgroupRows),
                                    query_map(params, params.dout, params.dout_stride, block_m),
                                    key_map(params, params.dk, params.dk_stride, kWarpgroupRows),
                                    key_map(params, params.dv, params.dv_stride, kWarpgroupRows)};
}

}  // namespace sm90
}  // namespace backward
}  // namespace attention
}  // namespace flashmoe
