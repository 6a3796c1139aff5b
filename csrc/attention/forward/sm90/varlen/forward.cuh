// Forward attention for sm_90a over ragged and paged batches, with windows: the dense kernel's structure
// (../forward.cuh), with tiles that the scheduling warp finds from the lengths in device memory.
//   grid     min(largest possible number of tiles, multiprocessors) blocks
//   maps     tensor_map.h says how the host builds them
//   counter  as for the dense kernel
// Read schedule.cuh and scheduler.cuh (which tile), producer.cuh (loads, pages), ../consumer.cuh (products),
// ../score_mod.cuh, ../epilogue.cuh in this order.
#pragma once

#include "attention/forward/sm90/forward.cuh"
#include "attention/forward/sm90/varlen/producer.cuh"
#include "attention/forward/sm90/varlen/scheduler.cuh"
#include "attention/forward/sm90/varlen/spec.cuh"
#include "ptx/grid_dependency.cuh"

namespace flashmoe::attention::sm90 {

// Params: the parameters of the consumers, ForwardParams or a struct that has it as `forward`. Convert: the work of one
// more warpgroup after the consumers, if Spec::kConvertsCodes. mask_map, visible: if Spec::kStreamsMask.
template <typename Spec, typename Params, typename Compute = Consumer<Spec, MaskKind::kRuntime>,
          typename Convert = void>
__device__ __forceinline__ void run_varlen(const Params& given, const ForwardParams& params,
                                           const ptx::TensorMap& q_map, const ptx::TensorMap& k_map,
                                           const ptx::TensorMap& v_map, const ptx::TensorMap& out_map,
                                           const ptx::TensorMap* mask_map = nullptr,
                                           const VisibleBlocks* visible = nullptr) {
  const SharedMemory<Spec> shared{ptx::dynamic_shared_memory()};
  // The shuffle tells the compiler that the role is uniform across the warp.
  const int warp = ptx::shuffle_index(ptx::warp_index(), 0);
  const int warpgroup = warp / 4;

  TileScheduler<Spec> scheduler(params, shared, visible);
  // Before all else, because the first tile waits for the lengths.
  if (warp == 1) {
    if constexpr (Spec::kIsFolded) ptx::grid_dependency_wait();  // the preceding kernel may write the lengths
    scheduler.sequences.start();
  }
  if (warp == 0 && ptx::elect_one()) {
    ptx::prefetch_tensor_map(&q_map);
    ptx::prefetch_tensor_map(&k_map);
    ptx::prefetch_tensor_map(&v_map);
    ptx::prefetch_tensor_map(&out_map);
#pragma unroll
    for (int i = 0; i < 5; ++i) ptx::mbarrier_init(shared.next_tile_full(i), 1);
    if constexpr (Spec::kConvertsCodes) {
#pragma unroll
      for (int slot = 0; slot < Spec::kCodeSlots; ++slot) {
        ptx::mbarrier_init(shared.codes_full(slot), 1);
        ptx::mbarrier_init(shared.codes_empty(slot), 4);
      }
    }
    init_barriers(shared);
  }
  if constexpr (Spec::kIsFolded) ptx::grid_dependency_wait();  // or pages, Q, K and V
  ptx::barrier_sync_block();
  if constexpr (Spec::kIsFolded) {
    if ((params.hints & kStartsNext) != 0) ptx::grid_launch_dependents();
  }

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Spec::kProducerRegisters>();
    if (warp == 0) {
      if (ptx::elect_one()) {
        if constexpr (Spec::kHasCodes) ptx::grid_dependency_wait();  // transposed V comes from the preceding kernel
        VarlenProducer<Spec>(params, shared, q_map, k_map, v_map, Spec::kStreamsMask ? *mask_map : v_map).run();
      }
    } else if (warp == 1) {
      scheduler.run();
    }
    return;
  }
  if constexpr (Spec::kConvertsCodes) {
    if (warpgroup > Spec::kNumConsumers) {
      ptx::setmaxnreg_dec<Spec::kConverterRegisters>();
      Convert(params, shared).run();
      return;
    }
  }
  {
    ptx::setmaxnreg_inc<Spec::kConsumerRegisters>();
    Compute(given, shared, warpgroup - 1).run(out_map);
  }
}

template <typename Spec>
__device__ __forceinline__ void forward_varlen(const ForwardParams& params, const ptx::TensorMap& q_map,
                                               const ptx::TensorMap& k_map, const ptx::TensorMap& v_map,
                                               const ptx::TensorMap& out_map) {
  run_varlen<Spec>(params, params, q_map, k_map, v_map, out_map);
}

template <typename Spec>
__device__ __forceinline__ void forward_mask(const MaskForwardParams& params, const ptx::TensorMap& q_map,
                                             const ptx::TensorMap& k_map, const ptx::TensorMap& v_map,
                                             const ptx::TensorMap& out_map, const ptx::TensorMap& mask_map) {
  run_varlen<Spec>(params.forward, params.forward, q_map, k_map, v_map, out_map, &mask_map, &params.visible);
}

template <typename Spec>
__device__ __forceinline__ void forward_dropout(const DropoutForwardParams& params, const ptx::TensorMap& q_map,
                                                const ptx::TensorMap& k_map, const ptx::TensorMap& v_map,
                                                const ptx::TensorMap& out_map) {
  static_assert(Spec::kHasDropout, "kernels without dropout take ForwardParams");
  forward_varlen<Spec>(params.forward, q_map, k_map, v_map, out_map);
}

}  // namespace flashmoe::attention::sm90
