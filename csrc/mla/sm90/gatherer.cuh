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

namespace flashmoe::mla::sm90 {

template <typename Spec>
struct Gatherer {
  static constexpr int kPassRows = 16;
  static constexpr int kPasses = Spec::kBlockN / kPassRows;
  static constexpr int kValueBytes = Spec::kHasCodes ? 1 : 2;

  Loader<Spec> loader;  // of Q
  StageUses uses;

  // A warp has four keys of each pass. This lane's of a block, as a row of all pages; the same for two lanes.
  __device__ __forceinline__ int find(const Segment& segment, int block) const {
    const int lane = ptx::lane_index() % 16;
    const int key = lane / 4 * kPassRows + ptx::warp_index() * 4 + lane % 4;
    return block < segment.end_block ? index_of(loader.params, segment, block * Spec::kBlockN + key) : -1;
  }

  // Where it lies, in bytes; -1: nowhere.
  __device__ __forceinline__ int64_t place(int row) const {
    return row < 0 ? -1 : row_offset(loader.params, row) * kValueBytes;
  }

  __device__ __forceinline__ void load_keys(int64_t place_of_lane, int index) const {
    const SharedMemory<Spec>& shared = loader.shared;
    const int stage = index % Spec::kNumStages;
    const typename Spec::KeyTile tile = shared.key(stage);
    const int chunk = ptx::thread_index() % 8;
    static_assert(kPassRows % 8 == 0, "the rows of two passes differ by the period of the swizzle");
    unsigned char* first_smem = tile.chunk(ptx::thread_index() / 8, 0, chunk);
    const unsigned char* row_gmem[kPasses];
    bool exists[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const auto place = static_cast<int64_t>(
          ptx::shuffle_index(static_cast<uint64_t>(place_of_lane), pass * 4 + ptx::lane_index() / 8));
      exists[pass] = place >= 0;
      row_gmem[pass] = static_cast<const unsigned char*>(loader.params.cache) + (exists[pass] ? place : 0) + chunk * 16;
    }
#pragma unroll
    for (int group = 0; group < kNumGroups; ++group) {
      ptx::mbarrier_wait(shared.key_empty(stage, group), uses.parity(index) ^ 1);
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        if (Spec::kHasCodes && !exists[pass]) continue;
#pragma unroll
        for (int box = 0; box < Loader<Spec>::boxes_of(group); ++box) {
          ptx::cp_async_16(first_smem + (Loader<Spec>::slab_of(group, box) * Spec::KeyTile::kSlabBytes +
                                         pass * kPassRows * kSlabRowBytes),
                           row_gmem[pass] + Loader<Spec>::column_of(group, box) * 2, exists[pass] ? 16 : 0);
        }
      }
      ptx::mbarrier_arrive_cp_async(Spec::kHasCodes ? shared.landed(stage, group) : shared.key_full(stage, group));
    }
  }

  // The indices of a block are read two blocks ahead, and what they mean is computed a block ahead.
  __device__ __forceinline__ void run(Plan& plan) {
    Segment segment;
    while (plan.next(segment)) {
      const int blocks = segment.end_block - segment.begin_block;
      int64_t own = place(find(segment, segment.begin_block));
      int next = find(segment, segment.begin_block + 1);
#pragma unroll 1
      for (int index = 0; index < blocks; ++index) {
        load_keys(own, index);
        if (index == 0 && ptx::warp_index() == 0) loader.load_query(segment);
        own = place(next);
        next = find(segment, segment.begin_block + index + 2);
      }
      uses.end_segment(blocks);
    }
  }
};

}  // namespace flashmoe::mla::sm90
