// One warp issues the TMA loads of Q and the key blocks, group by group; with FP8, bulk loads of 16 keys at a time.
// (Keys that indices select are loaded by gatherer.cuh and converter.cuh.)
#pragma once

#include "device/ring.cuh"
#include "mla/params/fp8.h"
#include "mla/tile_scheduler.cuh"
#include "mla/sm90_few/spec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk_load.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/tma.cuh"

namespace flashmoe::mla::sm90_few {

template <typename Spec>
struct Loader {
  const DecodeParams& params;
  const SharedMemory<Spec> shared;
  const ptx::TensorMap& q_map;
  const ptx::TensorMap& cache_map;
  RingPosition<Spec::kIsFp8 ? Spec::kFp8Stages : Spec::kNumStages> ring;
  int query_parity = 1;

  // Each lane loads one box of every slab; with FP8 the first four lanes have the pages of 16 keys each. Returns the
  // page of this lane's keys of a block; -1 if there are none.
  __device__ __forceinline__ int get_page(const WorkTile& work, int block) const {
    const int row = ptx::lane_index() * (Spec::kIsFp8 ? Spec::kStageKeys : params.box_rows);
    const int key = block * Spec::kBlockN + row;
    if (row >= Spec::kBlockN || key >= work.keys || block >= work.end_block) return -1;
    return mla::get_page(params, work.batch, key);
  }

  __device__ __forceinline__ void load_keys(const WorkTile& work, int block, int page) {
    const int first_key = block * Spec::kBlockN;
    const int row = ptx::lane_index() * params.box_rows;
    const int key = first_key + row;
    const int boxes =
        (min(Spec::kBlockN, work.keys - first_key) + params.box_rows - 1) / params.box_rows;  // boxes with a key
    const int page_key = params.block_table == nullptr ? key : row_in_page(params, key);
#pragma unroll
    for (int group = 0; group < Spec::kNumGroups; ++group) {
      ptx::Mbarrier* full = shared.key_full(ring.stage);
      const typename Spec::GroupTile tile = shared.group(ring.stage);
      ptx::mbarrier_wait(shared.key_empty(ring.stage), ring.parity ^ 1);
      ptx::warp_sync();  // no lane still waits when the next phase ends
      if (ptx::lane_index() == 0) {
        ptx::mbarrier_arrive_expect_tx(full, boxes * params.box_rows * kSlabRowBytes * Spec::kGroupSlabs);
      }
      ptx::warp_sync();  // bytes are announced before they arrive
      if (page >= 0) {
#pragma unroll
        for (int slab = 0; slab < Spec::kGroupSlabs; ++slab) {
          ptx::tma_load_4d(tile.row(row, slab), &cache_map, full, (group * Spec::kGroupSlabs + slab) * kSlabColumns,
                           page_key, 0, page, ptx::CacheHint::kEvictFirst);
        }
      }
      ring.advance();
    }
  }

  // Keys of 656 bytes, in one copy if they are contiguous; none past the last.
  __device__ __forceinline__ void load_fp8(const WorkTile& work, int block, int page) {
    const bool is_contiguous = params.key_stride == kFp8KeyBytes;
    const int lane_key = ptx::lane_index() * (is_contiguous ? Spec::kStageKeys : 1);
#pragma unroll 1
    for (int slice = 0; slice < Spec::kFp8StagesPerBlock; ++slice) {
      const int first_key = block * Spec::kBlockN + slice * Spec::kStageKeys;
      const int keys = max(0, min(Spec::kStageKeys, work.keys - first_key));
      const int slice_page = ptx::shuffle_index(page, slice);
      const int row = params.block_table == nullptr ? first_key : row_in_page(params, first_key);
      ptx::Mbarrier* full = shared.fp8_full(ring.stage);
      ptx::mbarrier_wait(shared.fp8_empty(ring.stage), ring.parity ^ 1);
      ptx::warp_sync();  // no lane still waits when the next phase ends
      if (ptx::lane_index() == 0) ptx::mbarrier_arrive_expect_tx(full, keys * kFp8KeyBytes);
      ptx::warp_sync();  // bytes are announced before they arrive
      if (lane_key < keys) {
        const auto* key_gmem = static_cast<const unsigned char*>(params.cache) + slice_page * params.page_stride +
                               (row + lane_key) * params.key_stride;
        ptx::bulk_load(shared.fp8(ring.stage) + lane_key * kFp8KeyBytes, key_gmem,
                       (is_contiguous ? keys : 1) * kFp8KeyBytes, full, ptx::CacheHint::kEvictFirst);
      }
      ring.advance();
    }
  }

  __device__ __forceinline__ void load_query(const WorkTile& work) {
    ptx::mbarrier_wait(shared.query_empty(), query_parity);
    query_parity ^= 1;
    ptx::warp_sync();
    if (ptx::lane_index() == 0) {
      ptx::mbarrier_arrive_expect_tx(shared.query_full(), Spec::QueryTile::kBytes);
#pragma unroll 1
      for (int slab = 0; slab < Spec::QueryTile::kNumSlabs; ++slab) {
        ptx::tma_load_4d(shared.query().slab(slab), &q_map, shared.query_full(), slab * kSlabColumns,
                         row_tile_of<Spec>(params) * Spec::kBlockM, 0, work.batch, ptx::CacheHint::kEvictNormal);
      }
    }
    ptx::warp_sync();
  }

  __device__ __forceinline__ void run(TileScheduler& scheduler) {
    WorkTile work;
    bool is_first = true;
    while (scheduler.next(work)) {
      int page = get_page(work, work.begin_block);
      if (is_first) load_query(work);  // while the page number is being loaded
#pragma unroll 1
      for (int block = work.begin_block; block < work.end_block; ++block) {
        const int next_page = get_page(work, block + 1);
        if constexpr (Spec::kIsFp8) {
          load_fp8(work, block, page);
        } else {
          load_keys(work, block, page);
        }
        // After the keys, whose stages became free earlier.
        if (block == work.begin_block && !is_first) load_query(work);
        page = next_page;
      }
      is_first = false;
    }
  }
};

}  // namespace flashmoe::mla::sm90_few
