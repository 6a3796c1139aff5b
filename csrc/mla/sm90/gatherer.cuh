// Gathers the keys that indices select. Indices that select none give zeros; with FP8 the converters write those.
#pragma once

#include "device/shared_tile.cuh"
#include "mla/topk_indices.cuh"
#include "mla/tile_scheduler.cuh"
#include "mla/sm90/loader.cuh"
#include "mla/sm90/spec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::mla::sm90 {

template <typename Spec>
struct Gatherer {
  using Rows = GatheredRows<Spec::kBlockN, Spec::kIsFp8 ? 1 : 2>;

  Loader<Spec> loader;  // loads Q
  StageUses uses;

  __device__ __forceinline__ void load_keys(int64_t lane_offset, int index) const {
    const SharedMemory<Spec>& shared = loader.shared;
    const int stage = index % Spec::kNumStages;
    const typename Spec::KeyTile tile = shared.key(stage);
    const int chunk = ptx::thread_index() % 8;
    unsigned char* first_smem = tile.chunk(ptx::thread_index() / 8, 0, chunk);
    const Rows rows(loader.params, lane_offset, chunk);
#pragma unroll
    for (int group = 0; group < kNumGroups; ++group) {
      ptx::mbarrier_wait(shared.key_empty(stage, group), uses.parity(index) ^ 1);
#pragma unroll
      for (int pass = 0; pass < Rows::kPasses; ++pass) {
        if (Spec::kIsFp8 && !rows.exists[pass]) continue;
#pragma unroll
        for (int box = 0; box < Loader<Spec>::boxes_of(group); ++box) {
          ptx::cp_async_16(first_smem + (Loader<Spec>::slab_of(group, box) * Spec::KeyTile::kSlabBytes +
                                         pass * Rows::kPassRows * kSlabRowBytes),
                           rows.gmem[pass] + Loader<Spec>::column_of(group, box) * 2, rows.exists[pass] ? 16 : 0);
        }
      }
      ptx::mbarrier_arrive_cp_async(Spec::kIsFp8 ? shared.raw_full(stage, group) : shared.key_full(stage, group));
    }
  }

  __device__ __forceinline__ int load_topk_index(const WorkTile& work, int block) const {
    return Rows::load_topk_index(loader.params, work, block, ptx::warp_index());
  }

  // A block's indices are read two blocks ahead and turned into offsets one block ahead.
  __device__ __forceinline__ void run(TileScheduler& scheduler) {
    WorkTile work;
    while (scheduler.next(work)) {
      const int blocks = work.end_block - work.begin_block;
      int64_t offset = Rows::byte_offset(loader.params, load_topk_index(work, work.begin_block));
      int next = load_topk_index(work, work.begin_block + 1);
#pragma unroll 1
      for (int index = 0; index < blocks; ++index) {
        load_keys(offset, index);
        if (index == 0 && ptx::warp_index() == 0) loader.load_query(work);
        offset = Rows::byte_offset(loader.params, next);
        next = load_topk_index(work, work.begin_block + index + 2);
      }
      uses.end_work_tile(blocks);
    }
  }
};

}  // namespace flashmoe::mla::sm90
