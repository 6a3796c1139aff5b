// Gathers the keys of a 16-bit cache that indices select. Indices that select none give zeros.
#pragma once

#include "device/ring.cuh"
#include "device/shared_tile.cuh"
#include "mla/topk_indices.cuh"
#include "mla/tile_scheduler.cuh"
#include "mla/sm90_few/spec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::mla::sm90_few {

template <typename Spec>
struct Gatherer {
  using Rows = GatheredRows<Spec::kBlockN, 2>;

  const DecodeParams& params;
  const SharedMemory<Spec> shared;
  const int warp;  // among the gathering warps
  RingPosition<Spec::kNumStages> ring;

  __device__ __forceinline__ Gatherer(const DecodeParams& params_, const SharedMemory<Spec>& shared_, int warp_)
      : params(params_), shared(shared_), warp(warp_) {}

  __device__ __forceinline__ void load_keys(int64_t lane_offset) {
    const int chunk = ptx::lane_index() % 8;
    const Rows rows(params, lane_offset, chunk);
#pragma unroll
    for (int group = 0; group < Spec::kNumGroups; ++group) {
      unsigned char* first_smem = shared.group(ring.stage).chunk(warp * 4 + ptx::lane_index() / 8, 0, chunk);
      ptx::mbarrier_wait(shared.key_empty(ring.stage), ring.parity ^ 1);
#pragma unroll
      for (int pass = 0; pass < Rows::kPasses; ++pass)
#pragma unroll
        for (int slab = 0; slab < Spec::kGroupSlabs; ++slab) {
          ptx::cp_async_16(first_smem + (slab * Spec::GroupTile::kSlabBytes + pass * Rows::kPassRows * kSlabRowBytes),
                           rows.gmem[pass] + (group * Spec::kGroupSlabs + slab) * kSlabRowBytes,
                           rows.exists[pass] ? 16 : 0);
        }
      ptx::mbarrier_arrive_cp_async(shared.key_full(ring.stage));
      ring.advance();
    }
  }

  // A block's indices are read two blocks ahead and turned into offsets one block ahead.
  __device__ __forceinline__ void run(TileScheduler& scheduler) {
    WorkTile work;
    while (scheduler.next(work)) {
      int64_t offset = Rows::byte_offset(params, Rows::load_topk_index(params, work, work.begin_block, warp));
      int next = Rows::load_topk_index(params, work, work.begin_block + 1, warp);
#pragma unroll 1
      for (int block = work.begin_block; block < work.end_block; ++block) {
        load_keys(offset);
        offset = Rows::byte_offset(params, next);
        next = Rows::load_topk_index(params, work, block + 2, warp);
      }
    }
  }
};

}  // namespace flashmoe::mla::sm90_few
