// What the host passes to cuTensorMapEncodeTiled for the four tensor maps of the sm90 forward kernel. Plain C++.
//
// The host fills one ptx::TensorMap per tensor with
//   cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16 or _BFLOAT16, kTensorMapRank, address, dims,
//                          strides_bytes, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
//                          CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
//                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
// Fill NONE means zeros. Preconditions (copy the tensor to contiguous otherwise): the address and every stride of a
// dimension longer than 1 are multiples of 16 bytes, strides are positive and below 2^40 bytes.
#pragma once

#include <cstdint>

#include "attention/params/forward.h"
#include "ptx/tensor_map.h"

namespace flashmoe::attention::sm90 {

constexpr int kTensorMapRank = 4;
constexpr int kElementBytes = 2;
constexpr int kSlabColumns = 64;    // a 128-byte swizzled row
constexpr int kWarpgroupRows = 64;  // rows of Q and of the output that one warpgroup owns

struct TensorMapArguments {
  void* address;
  std::uint64_t dims[kTensorMapRank];               // {head_dim, rows, heads, batch}, elements
  std::uint64_t strides_bytes[kTensorMapRank - 1];  // of rows, heads, batch
  std::uint32_t box[kTensorMapRank];                // elements
  std::uint32_t element_strides[kTensorMapRank];
};

struct ForwardTensorMaps {
  TensorMapArguments q;
  TensorMapArguments k;
  TensorMapArguments v;
  TensorMapArguments out;
};

inline TensorMapArguments tensor_map_arguments(const void* address, const Strides& strides, int head_dim, int rows,
                                               int heads, int batch, int box_rows) {
  // The stride of a dimension of length 1 is never used but must still be valid.
  const auto stride_bytes = [](std::int64_t elements, int length) {
    return static_cast<std::uint64_t>(length == 1 ? 16 : elements * kElementBytes);
  };
  return TensorMapArguments{
      const_cast<void*>(address),
      {static_cast<std::uint64_t>(head_dim), static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(heads),
       static_cast<std::uint64_t>(batch)},
      {stride_bytes(strides.row, rows), stride_bytes(strides.head, heads), stride_bytes(strides.batch, batch)},
      {kSlabColumns, static_cast<std::uint32_t>(box_rows), 1, 1},
      {1, 1, 1, 1}};
}

// The map of an additive mask [batches, heads, rows, keys], with the strides of its options.
inline TensorMapArguments mask_map(const ScoreOptions& options, int keys, int rows, int heads, int batches,
                                   int box_rows) {
  const Strides strides{options.mask_stride_batch, options.mask_stride_head, options.mask_stride_row};
  return tensor_map_arguments(options.mask, strides, keys, rows, heads, batches, box_rows);
}
// The same for a call: a stride of 0 means one matrix for all.
template <typename Params>
TensorMapArguments mask_map(const Params& params, int box_rows) {
  const ScoreOptions& options = params.score_options;
  return mask_map(options, params.seq_k, params.seq_q, options.mask_stride_head == 0 ? 1 : params.heads_q,
                  options.mask_stride_batch == 0 ? 1 : params.batch, box_rows);
}

// block_n: that of the kernel, from the kernel table.
inline ForwardTensorMaps forward_tensor_maps(const ForwardParams& params, int block_n) {
  return ForwardTensorMaps{tensor_map_arguments(params.q, params.q_stride, params.head_dim, params.seq_q,
                                                params.heads_q, params.batch, kWarpgroupRows),
                           tensor_map_arguments(params.k, params.k_stride, params.head_dim, params.seq_k,
                                                params.heads_kv, params.batch, block_n),
                           tensor_map_arguments(params.v, params.v_stride, params.head_dim, params.seq_k,
                                                params.heads_kv, params.batch, block_n),
                           tensor_map_arguments(params.out, params.out_stride, params.head_dim, params.seq_q,
                                                params.heads_q, params.batch, kWarpgroupRows)};
}

}  // namespace flashmoe::attention::sm90
