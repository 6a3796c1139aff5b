// Where indices name the keys of a 16-bit cache. What names no key becomes zeros.
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
  const int warp;  // of the gathering ones
  RingPosition<Spec::kNumStages> ring;

  __device__ __forceinline__ Gatherer(const DecodeParams& params_, const SharedMemory<Spec>& shared_, int warp_)
      : params(params_), shared(shared_), warp(warp_) {}

  __device__ __forceinline__ void load_keys(const Rows& rows) {
#pragma unroll
    for (int group = 0; group < Spec::kNumGroups; ++group) {
      unsigned char* first_smem =
          shared.group(ring.stage).chunk(warp * 4 + ptx::lane_index() / 8, 0, ptx::lane_index() % 8);
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

  __device__ __forceinline__ void run(Plan& plan) {
    Segment segment;
    while (plan.next(segment)) {
      Rows::gather(params, segment, warp, [&](const Rows& rows, int) { load_keys(rows); });
    }
  }
};

}  // namespace flashmoe::mla::sm90_few
