// Arguments of cuTensorMapEncodeTiled for the tensor maps of the sm90 weight-gradient kernel; see
// moe/grouped_gemm/sm90/tensor_map.h. Plain C++.
#pragma once

#include <cstdint>

#include "moe/grouped_gemm/sm90/tensor_map.h"
#include "moe/params/gemm.h"

namespace flashmoe::moe::weight_gradient::sm90 {

using moe::sm90::TensorMapArguments;

struct WeightGradientTensorMaps {
  TensorMapArguments a;
  TensorMapArguments b;
  TensorMapArguments d;
};

inline WeightGradientTensorMaps weight_gradient_tensor_maps(const GemmParams& params, int /*block_n*/) {
  constexpr int kWarpRows = 16;  // rows of d that a warp stores at a time
  return WeightGradientTensorMaps{
      moe::sm90::slots_map(params.a, params.n, params.a_stride, params),
      moe::sm90::slots_map(params.b, params.k, params.b_stride, params),
      moe::sm90::tensor_map_arguments(params.d, params.k, {params.n, params.d_stride}, {1, 0},
                                      {params.experts, params.n * params.d_stride}, kWarpRows, 1)};
}

}  // namespace flashmoe::moe::weight_gradient::sm90
