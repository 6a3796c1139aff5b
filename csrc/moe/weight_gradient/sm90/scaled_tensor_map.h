// Tensor maps of the weight gradient of e4m3 operands; see moe/grouped_gemm/sm90/tensor_map.h. Plain C++.
#pragma once

#include "moe/grouped_gemm/sm90/tensor_map.h"
#include "moe/params/training.h"

namespace flashmoe::moe::weight_gradient::sm90 {

struct ScaledWeightGradientTensorMaps {
  moe::sm90::TensorMapArguments a;
  moe::sm90::TensorMapArguments b;
  moe::sm90::TensorMapArguments d;  // the rows of all experts, one expert after another
};

inline ScaledWeightGradientTensorMaps scaled_weight_gradient_tensor_maps(const ScaledGemmParams& params, int block_n) {
  using moe::sm90::kSlab;
  const GemmParams& gemm = params.gemm;
  const auto map = [](const void* address, std::int64_t columns, std::int64_t rows, std::int64_t stride, int box_rows) {
    return moe::sm90::tensor_map_arguments(address, columns, {rows, stride}, {1, 0}, {1, 0}, box_rows, 1);
  };
  return ScaledWeightGradientTensorMaps{
      map(gemm.a, gemm.a_stride, gemm.n, gemm.a_stride, kSlab),
      map(gemm.b, gemm.b_stride, gemm.k, gemm.b_stride, block_n),
      map(gemm.d, gemm.k, static_cast<std::int64_t>(gemm.experts) * gemm.n, gemm.d_stride, kSlab)};
}

}  // namespace flashmoe::moe::weight_gradient::sm90
