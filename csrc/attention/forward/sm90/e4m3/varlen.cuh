// Ragged batches of 8-bit floats (e4m3): tiles, scheduling warp and loads of the 16-bit kernel (../varlen/forward.cuh),
// products of the dense kernel (consumer.cuh). A preceding kernel transposes V (transpose.cuh), with zeros after each
// sequence's last key.
//   maps     tensor_map.h says how the host builds them
#pragma once

#include "attention/forward/sm90/e4m3/consumer.cuh"
#include "attention/forward/sm90/e4m3/spec.cuh"
#include "attention/forward/sm90/varlen/forward.cuh"
#include "attention/params/e4m3.h"

namespace flashmoe::attention::sm90 {

template <typename Spec>
__device__ __forceinline__ void forward_varlen_e4m3(const E4m3AttentionParams& params, const ptx::TensorMap& q_map,
                                                    const ptx::TensorMap& k_map, const ptx::TensorMap& v_map,
                                                    const ptx::TensorMap& out_map) {
  run_varlen<Spec, E4m3AttentionParams, E4m3Consumer<Spec, MaskKind::kRuntime>>(params, params.forward, q_map, k_map,
                                                                                v_map, out_map);
}

}  // namespace flashmoe::attention::sm90
