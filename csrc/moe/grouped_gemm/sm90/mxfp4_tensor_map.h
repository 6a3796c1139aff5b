// Tensor maps of the products with 4-bit weights; see tensor_map.h. Plain C++.
#pragma once

#include "moe/grouped_gemm/sm90/tensor_map.h"
#include "moe/params/mxfp4.h"

namespace flashmoe::moe::sm90 {

struct Mxfp4GemmTensorMaps {
  TensorMapArguments a;
  TensorMapArguments d;
};

inline Mxfp4GemmTensorMaps mxfp4_gemm_tensor_maps(const Mxfp4GemmParams& params, int /*block_n*/) {
  const GemmParams& gemm = params.gemm;
  return Mxfp4GemmTensorMaps{slots_map(gemm.a, gemm.k, gemm.a_stride, gemm),
                             slots_map(gemm.d, gemm.n, gemm.d_stride, gemm)};
}

struct Mxfp4GatedGemmTensorMaps {
  TensorMapArguments d;
};

inline Mxfp4GatedGemmTensorMaps mxfp4_gated_gemm_tensor_maps(const Mxfp4GemmParams& params, int /*block_n*/) {
  const GemmParams& gemm = params.gemm;
  return Mxfp4GatedGemmTensorMaps{slots_map(gemm.d, gemm.n / 2, gemm.d_stride, gemm)};
}

inline TensorMapArguments few_rows_map(const void* address, const GemmParams& params, int block_m) {
  return tensor_map_arguments(address, params.k, {params.slots, params.a_stride}, {1, 0}, {1, 0},
                              packed_box_rows(block_m), 1);
}

// Packed weights as lines of 128 bytes; a box is one block per consumer.
inline TensorMapArguments packed_map(const GemmParams& params, int block_n) {
  const std::int64_t lines = params.k / kMxfp4PackedK * kMxfp4PackedLines;
  const std::int64_t blocks = (params.n + kMxfp4PackedRows - 1) / kMxfp4PackedRows;
  return tensor_map_arguments(params.b, kSlab, {lines, kSlab}, {blocks, lines * kSlab},
                              {params.experts, blocks * lines * kSlab}, kMxfp4PackedLines, block_n / kMxfp4PackedRows);
}

struct Mxfp4PackedGemmTensorMaps {
  TensorMapArguments a;
  TensorMapArguments b;
};

inline Mxfp4PackedGemmTensorMaps mxfp4_packed_gemm_tensor_maps(const Mxfp4GemmParams& params, int block_m,
                                                               int block_n) {
  return {few_rows_map(params.gemm.a, params.gemm, block_m), packed_map(params.gemm, block_n)};
}

}  // namespace flashmoe::moe::sm90
