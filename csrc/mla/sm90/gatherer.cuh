// Where indices name the keys. What names no key becomes zeros; of codes the converters see to that.
#pragma once

#include "device/shared_tile.cuh"
#include "mla/indices.cuh"
#include "mla/plan.cuh"
#include "mla/sm90/loader.cuh"
#include "mla/sm90/spec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::mla::sm90 {

template <typename Spec>
struct Gatherer {
  using Rows = GatheredRows<Spec::kBlockN, Spec::kHasCodes ? 1 : 2>;

  Loader<Spec> loader;  // of Q
  StageUses uses;

  __device__ __forceinline__ void load_keys(const Rows& rows, int index) const {
    const SharedMemory<Spec>& shared = loader.shared;
    const int stage = index % Spec::kNumStages;
    unsigned char* first_smem = shared.key(stage).chunk(ptx::thread_index() / 8, 0, ptx::thread_index() % 8);
#pragma unroll
    for (int group = 0; group < kNumGroups; ++group) {
      ptx::mbarrier_wait(shared.key_empty(stage, group), uses.parity(index) ^ 1);
#pragma unroll
      for (int pass = 0; pass < Rows::kPasses; ++pass) {
        if (Spec::kHasCodes && !rows.exists[pass]) continue;
#pragma unroll
        for (int box = 0; box < Loader<Spec>::boxes_of(group); ++box) {
          ptx::cp_async_16(first_smem + (Loader<Spec>::slab_of(group, box) * Spec::KeyTile::kSlabBytes +
                                         pass * Rows::kPassRows * kSlabRowBytes),
                           rows.gmem[pass] + Loader<Spec>::column_of(group, box) * 2, rows.exists[pass] ? 16 : 0);
        }
      }
      ptx::mbarrier_arrive_cp_async(Spec::kHasCodes ? shared.landed(stage, group) : shared.key_full(stage, group));
    }
  }

  __device__ __forceinline__ void run(Plan& plan) {
    Segment segment;
    while (plan.next(segment)) {
      Rows::gather(loader.params, segment, ptx::warp_index(), [&](const Rows& rows, int index) {
        load_keys(rows, index);
        if (index == 0 && ptx::warp_index() == 0) loader.load_query(segment);
      });
      uses.end_segment(segment.end_block - segment.begin_block);
    }
  }
};

}  // namespace flashmoe::mla::sm90
