// Tensor maps of the products of e4m3 operands; see tensor_map.h. Their elements are pairs of values. Plain C++.
#pragma once

#include "moe/grouped_gemm/sm90/tensor_map.h"
#include "moe/params/scaled.h"

namespace flashmoe::moe::sm90 {

struct ScaledGemmTensorMaps {
  TensorMapArguments a;
  TensorMapArguments b;
  TensorMapArguments d;
};

inline ScaledGemmTensorMaps scaled_gemm_tensor_maps(const ScaledGemmParams& params, int block_n) {
  const GemmTensorMaps maps = gemm_tensor_maps(params.gemm, block_n);
  return ScaledGemmTensorMaps{maps.a, maps.b_nk, maps.d};
}

struct ScaledGatedGemmTensorMaps {
  TensorMapArguments b;
  TensorMapArguments d;  // pairs of columns
};

inline ScaledGatedGemmTensorMaps scaled_gated_gemm_tensor_maps(const ScaledGemmParams& params, int block_n) {
  const GemmParams& gemm = params.gemm;
  return ScaledGatedGemmTensorMaps{gated_gemm_tensor_maps(gemm, block_n).b_nk,
                                   slots_map(gemm.d, gemm.n / 4, gemm.d_stride, gemm)};
}

struct ScaledKeptGemmTensorMaps {
  TensorMapArguments b;
  TensorMapArguments d;
  TensorMapArguments preactivation;
};

inline ScaledKeptGemmTensorMaps scaled_kept_gemm_tensor_maps(const ScaledGemmParams& params, int block_n) {
  const auto maps = scaled_gated_gemm_tensor_maps(params, block_n);
  const GemmParams& gemm = params.gemm;
  return ScaledKeptGemmTensorMaps{maps.b, maps.d, slots_map(gemm.preactivation, gemm.n, gemm.n, gemm)};
}

}  // namespace flashmoe::moe::sm90
