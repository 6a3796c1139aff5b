// The tensor maps of the products with weights of 4 bits (tensor_map.h). Plain C++.
#pragma once

#include "moe/grouped_gemm/sm90/tensor_map.h"
#include "moe/params/mxfp4.h"

namespace flashmoe {
namespace moe {
namespace sm90 {

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

}  // namespace sm90
}  // namespace moe
}  // namespace flashmoe
