// One warp issues the TMA loads of Q and the key blocks, group by group; with FP8, bulk loads of 16 keys at a time.
// (Keys that indices select are loaded by gatherer.cuh and converter.cuh.)
#pragma once

#include "device/ring.cuh"
#include "mla/params/codes.h"
#include "mla/plan.cuh"
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
  RingPosition<Spec::kHasCodes ? Spec::kCodeStages : Spec::kNumStages> ring;
  int query_parity = 1;

  // Each lane loads one box of every slab; with FP8 the first four lanes have the pages of 16 keys each. Returns the
  // page of this lane's keys of a block; -1 if there are none.
  __device__ __forceinline__ int find(const Segment& segment, int block) const {
    const int row = ptx::lane_index() * (Spec::kHasCodes ? Spec::kStageKeys : params.box_rows);
    const int key = block * Spec::kBlockN + row;
    if (row >= Spec::kBlockN || key >= segment.keys || block >= segment.end_block) return -1;
    if (params.block_table == nullptr) return segment.batch;
    const int32_t* page_gmem = params.block_table + segment.batch * params.block_table_stride +
                               static_cast<uint32_t>(key) / static_cast<uint32_t>(params.page_size);
    return max(0, min(params.num_pages - 1, static_cast<int>(ptx::ld_global_32(page_gmem))));
  }

  __device__ __forceinline__ void load_keys(const Segment& segment, int block, int page) {
    const int first_key = block * Spec::kBlockN;
    const int row = ptx::lane_index() * params.box_rows;
    const int key = first_key + row;
    const int boxes =
        (min(Spec::kBlockN, segment.keys - first_key) + params.box_rows - 1) / params.box_rows;  // boxes with a key
    const int page_key = params.block_table == nullptr
                             ? key
                             : static_cast<int>(static_cast<uint32_t>(key) % static_cast<uint32_t>(params.page_size));
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
  __device__ __forceinline__ void load_codes(const Segment& segment, int block, int page) {
    const bool is_one_piece = params.key_stride == kCodedKeyBytes;
    const int own = ptx::lane_index() * (is_one_piece ? Spec::kStageKeys : 1);
#pragma unroll 1
    for (int part = 0; part < Spec::kCodeStagesOfBlock; ++part) {
      const int first_key = block * Spec::kBlockN + part * Spec::kStageKeys;
      const int keys = max(0, min(Spec::kStageKeys, segment.keys - first_key));
      const int part_page = ptx::shuffle_index(page, part);
      const int row =
          params.block_table == nullptr
              ? first_key
              : static_cast<int>(static_cast<uint32_t>(first_key) % static_cast<uint32_t>(params.page_size));
      ptx::Mbarrier* full = shared.codes_full(ring.stage);
      ptx::mbarrier_wait(shared.codes_empty(ring.stage), ring.parity ^ 1);
      ptx::warp_sync();  // no lane still waits when the next phase ends
      if (ptx::lane_index() == 0) ptx::mbarrier_arrive_expect_tx(full, keys * kCodedKeyBytes);
      ptx::warp_sync();  // bytes are announced before they arrive
      if (own < keys) {
        const auto* key_gmem = static_cast<const unsigned char*>(params.cache) + part_page * params.page_stride +
                               (row + own) * params.key_stride;
        ptx::bulk_load(shared.codes(ring.stage) + own * kCodedKeyBytes, key_gmem,
                       (is_one_piece ? keys : 1) * kCodedKeyBytes, full, ptx::CacheHint::kEvictFirst);
      }
      ring.advance();
    }
  }

  __device__ __forceinline__ void load_query(const Segment& segment) {
    ptx::mbarrier_wait(shared.query_empty(), query_parity);
    query_parity ^= 1;
    ptx::warp_sync();
    if (ptx::lane_index() == 0) {
      ptx::mbarrier_arrive_expect_tx(shared.query_full(), Spec::QueryTile::kBytes);
#pragma unroll 1
      for (int slab = 0; slab < Spec::QueryTile::kNumSlabs; ++slab) {
        ptx::tma_load_4d(shared.query().slab(slab), &q_map, shared.query_full(), slab * kSlabColumns,
                         row_tile_of<Spec>(params) * Spec::kBlockM, 0, segment.batch, ptx::CacheHint::kEvictNormal);
      }
    }
    ptx::warp_sync();
  }

  __device__ __forceinline__ void run(Plan& plan) {
    Segment segment;
    bool is_first = true;
    while (plan.next(segment)) {
      int page = find(segment, segment.begin_block);
      if (is_first) load_query(segment);  // while the page number is being loaded
#pragma unroll 1
      for (int block = segment.begin_block; block < segment.end_block; ++block) {
        const int next_page = find(segment, block + 1);
        if constexpr (Spec::kHasCodes) {
          load_codes(segment, block, page);
        } else {
          load_keys(segment, block, page);
        }
        // After the keys, whose stages became free earlier.
        if (block == segment.begin_block && !is_first) load_query(segment);
        page = next_page;
      }
      is_first = false;
    }
  }
};

}  // namespace flashmoe::mla::sm90_few
