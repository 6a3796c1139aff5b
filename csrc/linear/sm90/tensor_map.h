// Arguments of cuTensorMapEncodeTiled for the sm90 kernels of linear. Plain C++.
#pragma once

#include "linear/params/linear.h"
#include "moe/grouped_gemm/sm90/tensor_map.h"

namespace flashmoe::linear::sm90 {

struct LinearTensorMaps {
  moe::sm90::TensorMapArguments a;
  moe::sm90::TensorMapArguments b;
  moe::sm90::TensorMapArguments d;
};

// With fewer than 64 rows, a box of a has only that many: TMA is slow at rows that do not exist.
inline LinearTensorMaps linear_tensor_maps(const LinearParams& params, int block_n) {
  const auto maps = moe::sm90::gemm_tensor_maps(params.gemm, block_n);
  LinearTensorMaps linear{maps.a, maps.b_nk, maps.d};
  if (params.gemm.slots < moe::sm90::kSlab) linear.a.box[1] = static_cast<std::uint32_t>(params.gemm.slots);
  return linear;
}

}  // namespace flashmoe::linear::sm90
