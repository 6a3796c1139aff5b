// What the host passes to cuTensorMapEncodeTiled for the tensor maps of the sm90 weight-gradient kernel: as described in
// attention/forward/sm90/tensor_map.h, with the same preconditions. Plain C++.
#pragma once

#include <cstdint>

#include "attention/forward/sm90/tensor_map.h"
#include "moe/params/gemm.h"

namespace flashmoe {
namespace moe {
namespace weight_gradient {
namespace sm90 {

using attention::sm90::TensorMapArguments;

struct WeightGradientTensorMaps {
  TensorMapArguments a;
  TensorMapArguments b;
  TensorMapArguments d;
};

// [matrices][rows][columns], strides in elements; boxes of box_rows rows and 64 columns.
inline TensorMapArguments matrix_map(const void* address, int columns, int rows, int matrices, std::int64_t row_stride,
                                     std::int64_t matrix_stride, int box_rows) {
  attention::Strides strides{};
  strides.row = row_stride;
  strides.head = matrix_stride;
  return attention::sm90::tensor_map_arguments(address, strides, columns, rows, matrices, 1, box_rows);
}

// The maps of a and b are used where their rows lie in place. A tensor without rows still gets a valid map.
inline WeightGradientTensorMaps weight_gradient_tensor_maps(const GemmParams& params, int) {
  const auto rows = [&params](const std::int32_t* by_slot) {
    const int count = by_slot != nullptr ? params.tokens : params.slots;
    return count > 0 ? count : 1;
  };
  constexpr int kStageRows = 64;
  constexpr int kWarpRows = 16;
  return WeightGradientTensorMaps{
      matrix_map(params.a, params.n, rows(params.a_slots), 1, params.a_stride, 0, kStageRows),
      matrix_map(params.b, params.k, rows(params.b_slots), 1, params.b_stride, 0, kStageRows),
      matrix_map(params.d, params.k, params.n, params.experts, params.d_stride, params.n * params.d_stride, kWarpRows)};
}

}  // namespace sm90
}  // namespace weight_gradient
}  // namespace moe
}  // namespace flashmoe
