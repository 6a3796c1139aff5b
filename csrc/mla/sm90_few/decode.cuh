// Decoding of multi-head latent attention for sm_90a, up to 16 rows of a sequence, or 32 as two tiles: bound by how
// many bytes of keys are in flight. With an FP8 cache, the same products in the same order, so the same bits.
//   grid   num_sm_parts blocks (tile_scheduler.cuh) per tile of rows, those of the first tile before the others
//   maps   ../sm90/tensor_map.h says how the host builds them
// Read spec.cuh (memory layout), loader.cuh, converter.cuh, gatherer.cuh and consumer.cuh in this order.
#pragma once

#include "mla/params/decode.h"
#include "mla/tile_scheduler.cuh"
#include "mla/sm90_few/consumer.cuh"
#include "mla/sm90_few/converter.cuh"
#include "mla/sm90_few/gatherer.cuh"
#include "mla/sm90_few/loader.cuh"
#include "mla/sm90_few/spec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::mla::sm90_few {

template <typename Spec, bool kIsFp8 = Spec::kIsFp8>
struct HelperOf {
  using Type = Gatherer<Spec>;
};
template <typename Spec>
struct HelperOf<Spec, true> {
  using Type = Converter<Spec>;
};

template <typename Spec>
__device__ __forceinline__ void decode(const DecodeParams& params, const ptx::TensorMap& q_map,
                                       const ptx::TensorMap& cache_map) {
  const SharedMemory<Spec> shared{ptx::dynamic_shared_memory()};
  const int warp = ptx::shuffle_index(ptx::warp_index(), 0);  // tells the compiler that it is uniform in the warp
  if (warp == Spec::kConsumerWarps && ptx::elect_one()) {
    ptx::prefetch_tensor_map(&q_map);
    if constexpr (Spec::kHelperWarps == 0) ptx::prefetch_tensor_map(&cache_map);
    ptx::mbarrier_init(shared.query_full(), 1);
    ptx::mbarrier_init(shared.query_empty(), Spec::kConsumerWarps);
#pragma unroll 1
    for (int stage = 0; stage < Spec::kNumStages; ++stage) {
      ptx::mbarrier_init(shared.key_full(stage), Spec::kIsFp8      ? Spec::kHelperWarps
                                                 : Spec::kIsSparse ? 32 * Spec::kHelperWarps
                                                                   : 1);
      ptx::mbarrier_init(shared.key_empty(stage), Spec::kConsumerWarps);
    }
#pragma unroll 1
    for (int stage = 0; stage < Spec::kFp8Stages; ++stage) {
      ptx::mbarrier_init(shared.fp8_full(stage), 1);
      ptx::mbarrier_init(shared.fp8_empty(stage), 1);
    }
    ptx::mbarrier_init_fence();
  }
  ptx::barrier_sync_block();
  ptx::grid_dependency_wait();  // the preceding kernel may write lengths, pages, keys or Q
  ptx::grid_launch_dependents();
  TileScheduler scheduler(params, ptx::block_index() - row_tile_of<Spec>(params) * params.num_sm_parts);
  if (warp == Spec::kConsumerWarps) {
    Loader<Spec> loader{params, shared, q_map, cache_map};
    if constexpr (Spec::kIsSparse) {
      WorkTile work;
      while (scheduler.next(work)) loader.load_query(work);
    } else {
      loader.run(scheduler);
    }
    return;
  }
  if constexpr (Spec::kHelperWarps > 0) {
    if (warp > Spec::kConsumerWarps) {
      typename HelperOf<Spec>::Type(params, shared, warp - Spec::kConsumerWarps - 1).run(scheduler);
      return;
    }
  }
  Consumer<Spec>(params, shared).run(scheduler);
}

}  // namespace flashmoe::mla::sm90_few
