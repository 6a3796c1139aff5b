// Where indices name the keys: four warps gather them by cp.async, 16 rows at a time, eight threads for each row of a slab. What names no key
// becomes zeros; of codes the converters see to that.
#pragma once

#include "device/shared_tile.cuh"
#include "mla/indices.cuh"
#include "mla/plan.cuh"
#include "mla/sm90/loader.cuh"
#include "mla/sm90/spec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe {
namespace mla {
namespace sm90 {

template <typename Spec>
struct Gatherer {
  static constexpr int kPassRows = 16;
  static constexpr int kPasses = Spec::kBlockN / kPassRows;
  static constexpr int kValueBytes = Spec::kHasCodes ? 1 : 2;

  Loader<Spec> loader;  // of Q
  StageUses uses;

  // This lane's two keys of a block, as rows of all pages.
  __device__ __forceinline__ void find(int (&rows)[2], const Segment& segment, int block) const {
    const int key = block * Spec::kBlockN + ptx::lane_index();
    rows[0] = block < segment.end_block ? index_of(loader.params, segment, key) : -1;
    rows[1] = block < segment.end_block ? index_of(loader.params, segment, key + 32) : -1;
  }

  __device__ __forceinline__ void load_keys(const int (&rows)[2], int index) const {
    const SharedMemory<Spec>& shared = loader.shared;
    const int stage = index % Spec::kNumStages;
    const typename Spec::KeyTile tile = shared.key(stage);
    const int chunk = ptx::thread_index() % 8;
    const int first_row = ptx::thread_index() / 8;
#pragma unroll
    for (int group = 0; group < kNumGroups; ++group) {
      ptx::mbarrier_wait(shared.key_empty(stage, group), uses.parity(index) ^ 1);
#pragma unroll 1
      for (int pass = 0; pass < kPasses; ++pass) {
        const int row = ptx::shuffle_index(pass < 2 ? rows[0] : rows[1], pass % 2 * kPassRows + first_row);
        const bool exists = row >= 0;
        if (Spec::kHasCodes && !exists) continue;
        const auto* row_gmem = static_cast<const unsigned char*>(loader.params.cache) + chunk * 16;
        if (exists) row_gmem += row_offset(loader.params, row) * kValueBytes;
#pragma unroll
        for (int box = 0; box < Loader<Spec>::boxes_of(group); ++box) {
          ptx::cp_async_16(tile.chunk(pass * kPassRows + first_row, Loader<Spec>::slab_of(group, box), chunk),
                           row_gmem + Loader<Spec>::column_of(group, box) * 2, exists ? 16 : 0);
        }
      }
      ptx::mbarrier_arrive_cp_async(Spec::kHasCodes ? shared.landed(stage, group) : shared.key_full(stage, group));
    }
  }

  __device__ __forceinline__ void run(Plan& plan) {
    Segment segment;
    while (plan.next(segment)) {
      const int blocks = segment.end_block - segment.begin_block;
      int rows[2];
      find(rows, segment, segment.begin_block);
#pragma unroll 1
      for (int index = 0; index < blocks; ++index) {
        load_keys(rows, index);
        if (index == 0 && ptx::warp_index() == 0) loader.load_query(segment);
        find(rows, segment, segment.begin_block + index + 1);
      }
      uses.end_segment(blocks);
    }
  }
};

}  // namespace sm90
}  // namespace mla
}  // namespace flashmoe
