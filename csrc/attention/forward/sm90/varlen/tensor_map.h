// What the host passes to cuTensorMapEncodeTiled for the four tensor maps of the sm90 varlen kernels. Plain C++; see
// ../tensor_map.h.
#pragma once

#include "attention/forward/sm90/tensor_map.h"
#include "attention/params/bool_mask.h"
#include "attention/params/dropout.h"
#include "attention/params/e4m3.h"

namespace flashmoe::attention::sm90 {

// Rows of K or V that one box takes from a page: the largest power of two that divides both the page size and the
// kernel's block. A box has at least 8 rows, the period of the swizzle; other page sizes run on kernels without TMA.
constexpr int kLeastBoxRows = 8;
inline int page_box_rows(int page_size, int block_n) {
  const int both = page_size | block_n;
  return both & -both;
}

// Ragged rows are mapped as one sequence of all rows; each page is mapped as a sequence.
inline ForwardTensorMaps varlen_tensor_maps(const ForwardParams& params, int block_n) {
  const Batch& sequences = params.sequences;
  const bool has_pages = sequences.block_table != nullptr;
  const bool is_ragged_q = sequences.cu_seqlens_q != nullptr;
  const bool is_ragged_k = sequences.cu_seqlens_k != nullptr;
  const int rows = is_ragged_q ? sequences.rows_total : params.seq_q;
  const int keys = has_pages ? sequences.page_size : is_ragged_k ? sequences.keys_total : params.seq_k;
  const int rows_batch = is_ragged_q ? 1 : params.batch;
  const int keys_batch = has_pages ? sequences.num_pages : is_ragged_k ? 1 : params.batch;
  const int box_rows = has_pages ? page_box_rows(sequences.page_size, block_n) : block_n;
  return ForwardTensorMaps{
      tensor_map_arguments(params.q, params.q_stride, params.head_dim, rows, params.heads_q, rows_batch,
                           kWarpgroupRows),
      tensor_map_arguments(params.k, params.k_stride, params.head_dim, keys, params.heads_kv, keys_batch, box_rows),
      tensor_map_arguments(params.v, params.v_stride, params.head_dim_v, keys, params.heads_kv, keys_batch, box_rows),
      tensor_map_arguments(params.out, params.out_stride, params.head_dim_v, rows, params.heads_q, rows_batch,
                           kWarpgroupRows)};
}
inline ForwardTensorMaps varlen_tensor_maps(const DropoutForwardParams& params, int block_n) {
  return varlen_tensor_maps(params.forward, block_n);
}

struct MaskForwardTensorMaps : ForwardTensorMaps {
  TensorMapArguments mask;
};
inline MaskForwardTensorMaps mask_forward_tensor_maps(const MaskForwardParams& params, int block_n) {
  return MaskForwardTensorMaps{varlen_tensor_maps(params.forward, block_n), mask_map(params.forward, kWarpgroupRows)};
}

// Q and the output of a chunk, [batch, key heads, rows, heads of a group, head_dim]. A position takes the smallest
// power of two of rows that holds the group, and a box is as many positions as fit a warpgroup's 64 rows. Heads past
// the group read as zeros and are not written.
struct FoldedMapArguments {
  void* address;
  std::uint64_t dims[kTensorMapRank + 1];
  std::uint64_t strides_bytes[kTensorMapRank];
  std::uint32_t box[kTensorMapRank + 1];
  std::uint32_t element_strides[kTensorMapRank + 1];
};
struct ChunkTensorMaps {
  FoldedMapArguments q;
  TensorMapArguments k;
  TensorMapArguments v;
  FoldedMapArguments out;
};

inline FoldedMapArguments folded_map(const TensorMapArguments& map, int heads_kv) {
  const std::uint64_t group = map.dims[2] / static_cast<std::uint64_t>(heads_kv);
  std::uint32_t box_heads = 1;
  while (box_heads < group) box_heads *= 2;
  const std::uint64_t row = map.strides_bytes[0], head = map.strides_bytes[1], batch = map.strides_bytes[2];
  return FoldedMapArguments{map.address,
                            {map.dims[0], group, map.dims[1], static_cast<std::uint64_t>(heads_kv), map.dims[3]},
                            {head, row, head * group, batch},
                            {kSlabColumns, box_heads, kWarpgroupRows / box_heads, 1, 1},
                            {1, 1, 1, 1, 1}};
}

inline ChunkTensorMaps chunk_tensor_maps(const ForwardParams& params, int block_n) {
  const ForwardTensorMaps maps = varlen_tensor_maps(params, block_n);
  return ChunkTensorMaps{folded_map(maps.q, params.heads_kv), maps.k, maps.v, folded_map(maps.out, params.heads_kv)};
}

// The same over a cache of codes, two of which are one element.
inline TensorMapArguments map_of_codes(TensorMapArguments map) {
  map.dims[0] /= 2;
  for (int axis = 1; axis < kTensorMapRank; ++axis) {
    if (map.dims[axis] > 1) map.strides_bytes[axis - 1] /= 2;
  }
  return map;
}
inline ChunkTensorMaps coded_chunk_tensor_maps(const E4m3ForwardParams& params, int block_n) {
  ChunkTensorMaps maps = chunk_tensor_maps(params.forward, block_n);
  maps.k = map_of_codes(maps.k);
  maps.v = map_of_codes(maps.v);
  return maps;
}

}  // namespace flashmoe::attention::sm90
