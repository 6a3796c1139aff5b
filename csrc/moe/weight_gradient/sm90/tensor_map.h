// What the host passes to cuTensorMapEncodeTiled for the tensor maps of the sm90 weight-gradient kernel, as in
// moe/grouped_gemm/sm90/tensor_map.h. Plain C++.
#pragma once

#include <cstdint>

#include "moe/grouped_gemm/sm90/tensor_map.h"
#include "moe/params/gemm.h"

namespace flashmoe {
namespace moe {
namespace weight_gradient {
namespace sm90 {

using moe::sm90::TensorMapArguments;

struct WeightGradientTensorMaps {
  TensorMapArguments a;
  TensorMapArguments b;
  TensorMapArguments d;
};

// The maps of a and b are used where their rows lie in place; an operand that is gathered still gets a valid one.
inline WeightGradientTensorMaps weight_gradient_tensor_maps(const GemmParams& params, int /*block_n*/) {
  const auto operand = [&params](const void* address, std::int64_t columns, std::int64_t stride,
                                 const std::int32_t* slots) {
    const int rows = slots != nullptr ? params.tokens : params.slots;
    return moe::sm90::tensor_map_arguments(address, columns, {rows, stride}, {1, 0}, {1, 0}, moe::sm90::kSlab, 1);
  };
  constexpr int kWarpRows = 16;  // of d, that a warp stores at a time
  return WeightGradientTensorMaps{
      operand(params.a, params.n, params.a_stride, params.a_slots),
      operand(params.b, params.k, params.b_stride, params.b_slots),
      moe::sm90::tensor_map_arguments(params.d, params.k, {params.n, params.d_stride}, {1, 0},
                                      {params.experts, params.n * params.d_stride}, kWarpRows, 1)};
}

}  // namespace sm90
}  // namespace weight_gradient
}  // namespace moe
}  // namespace flashmoe
