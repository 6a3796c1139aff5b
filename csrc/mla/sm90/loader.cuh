// One warp issues the TMA loads of Q and the key blocks; with a 16-bit cache another one writes zeros after a
// sequence's last key.
#pragma once

#include "mla/params/fp8.h"
#include "mla/tile_scheduler.cuh"
#include "mla/sm90/spec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/tma.cuh"

namespace flashmoe::mla::sm90 {

// Whether a block reaches past the sequence's keys: those rows may hold anything, or be in pages that no sequence owns.
template <typename Spec>
__device__ __forceinline__ bool has_oob_rows(const WorkTile& work, int block) {
  return (block + 1) * Spec::kBlockN > work.keys;
}

template <typename Spec>
struct Loader {
  const DecodeParams& params;
  const SharedMemory<Spec> shared;
  const ptx::TensorMap& q_map;
  const ptx::TensorMap& cache_map;
  const int row_tile;
  StageUses uses;
  int query_parity = 1;

  // Each lane loads one box of every slab. Returns the page of this lane's box of a block; -1 if it holds no key.
  __device__ __forceinline__ int get_page(const WorkTile& work, int block) const {
    const int row = ptx::lane_index() * params.box_rows;
    const int key = block * Spec::kBlockN + row;
    if (row >= Spec::kBlockN || key >= work.keys || block >= work.end_block) return -1;
    return mla::get_page(params, work.batch, key);
  }

  // The slab a box is loaded into, and its first column, counted in 16 bits. FP8 values take half of the slabs
  // that they become: the right ones, so that the converters can write the left slabs first.
  __device__ __forceinline__ static constexpr int boxes_of(int group) {
    return group == kRotary ? 1 : Spec::kIsFp8 ? 2 : 4;
  }
  __device__ __forceinline__ static constexpr int slab_of(int group, int box) {
    return group * 4 + box + (Spec::kIsFp8 && group != kRotary ? 2 : 0);
  }
  __device__ __forceinline__ static constexpr int column_of(int group, int box) {
    if constexpr (!Spec::kIsFp8) return slab_of(group, box) * kSlabColumns;
    return group == kRotary ? kRotaryBytesOffset / 2 : (group * 2 + box) * kSlabColumns;
  }

  __device__ __forceinline__ void load_keys(const WorkTile& work, int index, int page) const {
    const int stage = index % Spec::kNumStages;
    const int parity = uses.parity(index);
    const int first_key = (work.begin_block + index) * Spec::kBlockN;
    const int key = first_key + ptx::lane_index() * params.box_rows;
    const bool is_tail = !Spec::kIsFp8 && has_oob_rows<Spec>(work, work.begin_block + index);
    const int boxes =
        (min(Spec::kBlockN, work.keys - first_key) + params.box_rows - 1) / params.box_rows;  // boxes with a key
    const typename Spec::KeyTile tile = shared.key(stage);
    const int page_key = params.block_table == nullptr ? key : row_in_page(params, key);
    // A block with such rows is announced as a whole, once its stage is empty: the zeroing warp writes to all of it.
    for (int group = 0; is_tail && group < kNumGroups; ++group) {
      ptx::mbarrier_wait(shared.key_empty(stage, group), parity ^ 1);
    }
#pragma unroll
    for (int group = 0; group < kNumGroups; ++group) {
      const int group_boxes = boxes_of(group);
      ptx::Mbarrier* full = Spec::kIsFp8 ? shared.raw_full(stage, group)
                            : is_tail    ? shared.raw_full(stage)
                                         : shared.key_full(stage, group);
      if (!is_tail) ptx::mbarrier_wait(shared.key_empty(stage, group), parity ^ 1);
      ptx::warp_sync();  // no lane still waits when the next phase ends
      if (ptx::lane_index() == 0) {
        const int bytes = boxes * params.box_rows * kSlabRowBytes;
        if (!is_tail) ptx::mbarrier_arrive_expect_tx(full, bytes * group_boxes);
        if (is_tail && group == 0) ptx::mbarrier_arrive_expect_tx(full, bytes * Spec::kNumSlabs);
      }
      ptx::warp_sync();  // bytes are announced before they arrive
      if (page < 0) continue;
      for (int box = 0; box < group_boxes; ++box) {
        ptx::tma_load_4d(tile.row(ptx::lane_index() * params.box_rows, slab_of(group, box)), &cache_map, full,
                         column_of(group, box), page_key, 0, page, ptx::CacheHint::kEvictFirst);
      }
    }
  }

  __device__ __forceinline__ void load_query(const WorkTile& work) {
    ptx::mbarrier_wait(shared.query_empty(), query_parity);
    query_parity ^= 1;
    ptx::warp_sync();
    if (ptx::lane_index() == 0) {
      ptx::mbarrier_arrive_expect_tx(shared.query_full(), Spec::QueryTile::kBytes);
#pragma unroll 1
      for (int slab = 0; slab < Spec::kNumSlabs; ++slab) {
        ptx::tma_load_4d(shared.query().slab(slab), &q_map, shared.query_full(), slab * kSlabColumns,
                         row_tile * Spec::kBlockM, 0, work.batch, ptx::CacheHint::kEvictNormal);
      }
    }
    ptx::warp_sync();
  }

  __device__ __forceinline__ void run(TileScheduler& scheduler) {
    WorkTile work;
    bool is_first = true;
    while (scheduler.next(work)) {
      const int blocks = work.end_block - work.begin_block;
      int page = get_page(work, work.begin_block);
      if (is_first) load_query(work);  // while the page number is being loaded
      for (int index = 0; index < blocks; ++index) {
        const int next_page = get_page(work, work.begin_block + index + 1);
        load_keys(work, index, page);
        if (index == 0 && !is_first) load_query(work);  // after the keys, whose stage became free earlier
        page = next_page;
      }
      is_first = false;
      uses.end_work_tile(blocks);
    }
  }
};

// Rows after the sequence's last key become zeros, whatever was loaded: 0 * NaN is NaN.
template <typename Spec>
__device__ __forceinline__ void zero_oob_rows(TileScheduler& scheduler, const SharedMemory<Spec>& shared) {
  int even_tails = 0;
  int odd_tails = 0;
  WorkTile work;
  while (scheduler.next(work)) {
    const int stage = (work.end_block - work.begin_block - 1) % Spec::kNumStages;
    if (has_oob_rows<Spec>(work, work.end_block - 1)) {
      ptx::mbarrier_wait(shared.raw_full(stage), (stage == 0 ? even_tails : odd_tails) % 2);
      (stage == 0 ? even_tails : odd_tails) += 1;
      const int first = max(0, work.keys - (work.end_block - 1) * Spec::kBlockN);
      constexpr int kRowChunks = Spec::kNumSlabs * 8;
      const uint32_t zeros[4] = {0, 0, 0, 0};
      for (int row = first; row < Spec::kBlockN; ++row)
        for (int chunk = ptx::lane_index(); chunk < kRowChunks; chunk += 32) {
          ptx::st_shared_128(shared.key(stage).chunk(row, chunk / 8, chunk % 8), zeros);
        }
      ptx::fence_proxy_async_shared();
      ptx::warp_sync();
      if (ptx::lane_index() == 0) {
#pragma unroll
        for (int group = 0; group < kNumGroups; ++group) ptx::mbarrier_arrive(shared.key_full(stage, group));
      }
    }
  }
}

}  // namespace flashmoe::mla::sm90
