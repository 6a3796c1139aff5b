// Forward attention for sm_90a: TMA, wgmma, one producer and up to four consumer warpgroups, a persistent grid.
//   grid     min(tiles, multiprocessors) blocks; tiles = ceil(seq_q / kBlockM) * heads_q * batch
//   maps     tensor_map.h says how the host builds them
//   counter  params.tile_counter is 0 at launch, and 0 again at the end; null means a static schedule, which is slower
//            (up to 27%, causal) if grid < tiles
// Read schedule.cuh (which tile), producer.cuh (loads), consumer.cuh (products), softmax.cuh, epilogue.cuh in this
// order.
#pragma once

#include "attention/params/forward.h"
#include "attention/forward/sm90/consumer.cuh"
#include "attention/forward/sm90/producer.cuh"
#include "attention/forward/sm90/spec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/register_control.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention::sm90 {

template <typename Spec>
__device__ __forceinline__ void init_barriers(const SharedMemory<Spec>& shared) {
  constexpr int kWarpsPerConsumer = 4;
#pragma unroll
  for (int stage = 0; stage < Spec::kNumQueryStages; ++stage) {
#pragma unroll
    for (int consumer = 0; consumer < Spec::kNumConsumers; ++consumer) {
      ptx::mbarrier_init(shared.query_full(stage, consumer), 1);
      ptx::mbarrier_init(shared.query_empty(stage, consumer), kWarpsPerConsumer);
    }
  }
#pragma unroll
  for (int stage = 0; stage < Spec::kNumStages; ++stage) {
    // Arrivals: the thread that issues TMA, or the four warps that convert codes to elements.
    for (int part = 0; part < Spec::kKeyParts; ++part) {
      ptx::mbarrier_init(shared.key_full(stage, part), Spec::kConvertsCodes ? 4 : 1);
    }
    ptx::mbarrier_init(shared.value_full(stage), Spec::kConvertsCodes ? 4 : 1);
    for (int part = 0; part < Spec::kKeyParts; ++part) {
      ptx::mbarrier_init(shared.key_empty(stage, part), Spec::kNumConsumers * kWarpsPerConsumer);
    }
    ptx::mbarrier_init(shared.value_empty(stage), Spec::kNumConsumers * kWarpsPerConsumer);
  }
  ptx::mbarrier_init_fence();
}

template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void forward(const ForwardParams& params, const ptx::TensorMap& q_map,
                                        const ptx::TensorMap& k_map, const ptx::TensorMap& v_map,
                                        const ptx::TensorMap& out_map) {
  const SharedMemory<Spec> shared{ptx::dynamic_shared_memory()};
  // The shuffle tells the compiler that the role is uniform across the warp.
  const int warp = ptx::shuffle_index(ptx::warp_index(), 0);
  const int warpgroup = warp / 4;

  if (warp == 0 && ptx::elect_one()) {
    ptx::prefetch_tensor_map(&q_map);
    ptx::prefetch_tensor_map(&k_map);
    ptx::prefetch_tensor_map(&v_map);
    ptx::prefetch_tensor_map(&out_map);
    init_barriers(shared);
  }
  ptx::barrier_sync_block();
  // The combining kernel may be launched now; it waits for the end of this grid.
  if constexpr (Spec::kIsSplit) ptx::grid_launch_dependents();

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Spec::kProducerRegisters>();
    if (warp == 0 && ptx::elect_one()) produce<Spec, kMask>(params, shared, q_map, k_map, v_map);
  } else {
    ptx::setmaxnreg_inc<Spec::kConsumerRegisters>();
    Consumer<Spec, kMask>(params, shared, warpgroup - 1).run(out_map);
  }
}

}  // namespace flashmoe::attention::sm90
