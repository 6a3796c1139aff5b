// Decoding of multi-head latent attention for sm_90a: TMA, wgmma, one loading, two consumer, with FP8 one converting
// warpgroup.
//   grid   row_tiles * num_sm_parts blocks (tile_scheduler.cuh)
//   maps   tensor_map.h says how the host builds them
// Read spec.cuh (memory layout), loader.cuh, converter.cuh and consumer.cuh in this order.
#pragma once

#include "mla/params/decode.h"
#include "mla/tile_scheduler.cuh"
#include "mla/sm90/consumer.cuh"
#include "mla/sm90/converter.cuh"
#include "mla/sm90/gatherer.cuh"
#include "mla/sm90/loader.cuh"
#include "mla/sm90/spec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/register_control.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::mla::sm90 {

template <typename Spec>
__device__ __forceinline__ void init_barriers(const SharedMemory<Spec>& shared) {
  ptx::mbarrier_init(shared.query_full(), 1);
  ptx::mbarrier_init(shared.query_empty(), Spec::kConsumerWarps);
#pragma unroll
  for (int stage = 0; stage < Spec::kNumStages; ++stage) {
#pragma unroll
    for (int group = 0; group < Spec::kNumFulls; ++group) {
      ptx::mbarrier_init(shared.key_full(stage, group), Spec::kIsFp8      ? Spec::kConverterWarps
                                                        : Spec::kIsSparse ? Spec::kGathererThreads
                                                                          : 1);
    }
#pragma unroll
    for (int group = 0; group < kNumGroups; ++group) {
      // The last reader of half of V is the consumer that multiplies it: it has waited for P, so the scores are done.
      ptx::mbarrier_init(shared.key_empty(stage, group), Spec::kWarpsPerConsumer);
    }
#pragma unroll
    for (int group = 0; group < Spec::kNumRawFulls; ++group) {
      ptx::mbarrier_init(shared.raw_full(stage, group), Spec::kIsSparse ? Spec::kGathererThreads : 1);
    }
    ptx::mbarrier_init(shared.probability_full(stage), Spec::kWarpsPerConsumer);
    ptx::mbarrier_init(shared.probability_empty(stage), Spec::kWarpsPerConsumer);
  }
  ptx::mbarrier_init_fence();
}

template <typename Spec>
__device__ __forceinline__ void decode(const DecodeParams& params, const ptx::TensorMap& q_map,
                                       const ptx::TensorMap& cache_map) {
  const SharedMemory<Spec> shared{ptx::dynamic_shared_memory()};
  // The shuffle tells the compiler that the role is the same in the whole warp.
  const int warp = ptx::shuffle_index(ptx::warp_index(), 0);
  const int warpgroup = warp / 4;
  if (warp == 0 && ptx::elect_one()) {
    ptx::prefetch_tensor_map(&q_map);
    ptx::prefetch_tensor_map(&cache_map);
    init_barriers(shared);
  }
  ptx::barrier_sync_block();
  ptx::grid_dependency_wait();  // the preceding kernel may write lengths, pages, keys or Q
  ptx::grid_launch_dependents();
  const int sm_part = ptx::block_index() / params.row_tiles;
  const int row_tile = ptx::block_index() - sm_part * params.row_tiles;
  TileScheduler scheduler(params, sm_part);  // here, not in each role: the code is fetched once
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Spec::kLoaderRegisters>();
    if (warp > (Spec::kIsSparse ? 3 : Spec::kIsFp8 ? 0 : 1)) return;
    const Loader<Spec> loader{params, shared, q_map, cache_map, row_tile};
    if constexpr (Spec::kIsSparse) {
      Gatherer<Spec>{loader}.run(scheduler);
    } else if (warp == 0) {
      Loader<Spec>(loader).run(scheduler);
    } else {
      zero_oob_rows<Spec>(scheduler, shared);
    }
    return;
  }
  if constexpr (Spec::kIsFp8) {
    if (warpgroup == 1) {
      ptx::setmaxnreg_dec<Spec::kConverterRegisters>();
      Converter<Spec>(params, shared).run(scheduler);
      return;
    }
  }
  ptx::setmaxnreg_inc<Spec::kConsumerRegisters>();
  Consumer<Spec>(params, shared, warpgroup - Spec::kFirstConsumer, row_tile).run(scheduler);
}

}  // namespace flashmoe::mla::sm90
