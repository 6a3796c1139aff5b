// Decoding of multi-head latent attention for sm_90a, up to 16 rows of a sequence: bound by how many bytes of keys are asked for.
//   grid   parts blocks (plan.cuh)
//   maps   ../sm90/tensor_map.h says how the host builds them
// Read spec.cuh (what lies where), loader.cuh and consumer.cuh in this order.
#pragma once

#include "mla/params/decode.h"
#include "mla/plan.cuh"
#include "mla/sm90_few/consumer.cuh"
#include "mla/sm90_few/loader.cuh"
#include "mla/sm90_few/spec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::mla::sm90_few {

template <typename Spec>
__device__ __forceinline__ void decode(const DecodeParams& params, const ptx::TensorMap& q_map,
                                       const ptx::TensorMap& cache_map) {
  const SharedMemory<Spec> shared{ptx::dynamic_shared_memory()};
  const int warp = ptx::shuffle_index(ptx::warp_index(), 0);  // the same in the whole warp, for the compiler
  if (warp == Spec::kConsumerWarps && ptx::elect_one()) {
    ptx::prefetch_tensor_map(&q_map);
    ptx::prefetch_tensor_map(&cache_map);
    ptx::mbarrier_init(shared.query_full(), 1);
    ptx::mbarrier_init(shared.query_empty(), Spec::kConsumerWarps);
#pragma unroll 1
    for (int stage = 0; stage < Spec::kNumStages; ++stage) {
      ptx::mbarrier_init(shared.key_full(stage), 1);
      ptx::mbarrier_init(shared.key_empty(stage), Spec::kConsumerWarps);
    }
    ptx::mbarrier_init_fence();
  }
  ptx::barrier_sync_block();
  ptx::grid_dependency_wait();  // what the kernel in front writes may be lengths, pages, keys or Q
  ptx::grid_launch_dependents();
  Plan plan(params, ptx::block_index());
  if (warp == Spec::kConsumerWarps) {
    Loader<Spec>{params, shared, q_map, cache_map}.run(plan);
  } else {
    Consumer<Spec>(params, shared).run(plan);
  }
}

}  // namespace flashmoe::mla::sm90_few
