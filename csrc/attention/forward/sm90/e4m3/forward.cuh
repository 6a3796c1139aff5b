// Forward attention on 8-bit floats (e4m3) for sm_90a, with the structure, grid, counter and schedule of the 16-bit
// kernel (../forward.cuh).
//   maps     tensor_map.h says how the host builds them; v is the output of transpose.cuh
#pragma once

#include "attention/forward/sm90/e4m3/consumer.cuh"
#include "attention/forward/sm90/e4m3/spec.cuh"
#include "attention/forward/sm90/forward.cuh"
#include "attention/params/e4m3.h"

namespace flashmoe::attention::sm90 {

template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void forward_e4m3(const E4m3AttentionParams& params, const ptx::TensorMap& q_map,
                                             const ptx::TensorMap& k_map, const ptx::TensorMap& v_map,
                                             const ptx::TensorMap& out_map) {
  const SharedMemory<Spec> shared{ptx::dynamic_shared_memory()};
  // The shuffle tells the compiler that the role is uniform across the warp.
  const int warp = ptx::shuffle_index(ptx::warp_index(), 0);

  if (warp == 0 && ptx::elect_one()) {
    ptx::prefetch_tensor_map(&q_map);
    ptx::prefetch_tensor_map(&k_map);
    ptx::prefetch_tensor_map(&v_map);
    ptx::prefetch_tensor_map(&out_map);
    init_barriers(shared);
  }
  ptx::barrier_sync_block();

  if (warp < 4) {
    ptx::setmaxnreg_dec<Spec::kProducerRegisters>();
    if (warp == 0 && ptx::elect_one()) {
      ptx::grid_dependency_wait();  // transposed V comes from the preceding kernel
      produce<Spec, kMask>(params.forward, shared, q_map, k_map, v_map);
    }
  } else {
    ptx::setmaxnreg_inc<Spec::kConsumerRegisters>();
    E4m3Consumer<Spec, kMask>(params, shared, warp / 4 - 1).run(out_map);
  }
}

}  // namespace flashmoe::attention::sm90
