// Gathers the keys of a 16-bit cache that indices select. Indices that select none give zeros.
#pragma once

#include "device/ring.cuh"
#include "device/shared_tile.cuh"
#include "mla/indices.cuh"
#include "mla/plan.cuh"
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

  __device__ __forceinline__ void load_keys(int64_t place_of_lane) {
    const int chunk = ptx::lane_index() % 8;
    const Rows rows(params, place_of_lane, chunk);
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
  __device__ __forceinline__ void run(Plan& plan) {
    Segment segment;
    while (plan.next(segment)) {
      int64_t own = Rows::place(params, Rows::find(params, segment, segment.begin_block, warp));
      int next = Rows::find(params, segment, segment.begin_block + 1, warp);
#pragma unroll 1
      for (int block = segment.begin_block; block < segment.end_block; ++block) {
        load_keys(own);
        own = Rows::place(params, next);
        next = Rows::find(params, segment, block + 2, warp);
      }
    }
  }
};

}  // namespace flashmoe::mla::sm90_few
