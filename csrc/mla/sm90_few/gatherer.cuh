// Where indices name the keys of a 16-bit cache: four warps gather them by cp.async, 16 rows at a time, eight threads for each row of a slab. What
// names no key becomes zeros.
#pragma once

#include "device/ring.cuh"
#include "device/shared_tile.cuh"
#include "mla/indices.cuh"
#include "mla/plan.cuh"
#include "mla/sm90_few/spec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::mla::sm90_few {

template <typename Spec>
struct Gatherer {
  static constexpr int kPassRows = 16;
  static constexpr int kPasses = Spec::kBlockN / kPassRows;

  const DecodeParams& params;
  const SharedMemory<Spec> shared;
  const int warp;  // of the gathering ones
  RingPosition<Spec::kNumStages> ring;

  __device__ __forceinline__ Gatherer(const DecodeParams& params_, const SharedMemory<Spec>& shared_, int warp_)
      : params(params_), shared(shared_), warp(warp_) {}

  // A warp has four keys of each pass. This lane's of a block, as a row of all pages; the same for two lanes.
  __device__ __forceinline__ int find(const Segment& segment, int block) const {
    const int lane = ptx::lane_index() % 16;
    const int key = lane / 4 * kPassRows + warp * 4 + lane % 4;
    return block < segment.end_block ? index_of(params, segment, block * Spec::kBlockN + key) : -1;
  }

  // Where it lies, in bytes; -1: nowhere.
  __device__ __forceinline__ int64_t place(int row) const { return row < 0 ? -1 : row_offset(params, row) * 2; }

  __device__ __forceinline__ void load_keys(int64_t place_of_lane) {
    const int chunk = ptx::lane_index() % 8;
    const unsigned char* row_gmem[kPasses];
    bool exists[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const auto own = static_cast<int64_t>(
          ptx::shuffle_index(static_cast<uint64_t>(place_of_lane), pass * 4 + ptx::lane_index() / 8));
      exists[pass] = own >= 0;
      row_gmem[pass] = static_cast<const unsigned char*>(params.cache) + (exists[pass] ? own : 0) + chunk * 16;
    }
#pragma unroll
    for (int group = 0; group < Spec::kNumGroups; ++group) {
      static_assert(kPassRows % 8 == 0, "the rows of two passes differ by the period of the swizzle");
      unsigned char* first_smem = shared.group(ring.stage).chunk(warp * 4 + ptx::lane_index() / 8, 0, chunk);
      ptx::mbarrier_wait(shared.key_empty(ring.stage), ring.parity ^ 1);
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass)
#pragma unroll
        for (int slab = 0; slab < Spec::kGroupSlabs; ++slab) {
          ptx::cp_async_16(first_smem + (slab * Spec::GroupTile::kSlabBytes + pass * kPassRows * kSlabRowBytes),
                           row_gmem[pass] + (group * Spec::kGroupSlabs + slab) * kSlabRowBytes, exists[pass] ? 16 : 0);
        }
      ptx::mbarrier_arrive_cp_async(shared.key_full(ring.stage));
      ring.advance();
    }
  }

  // The indices of a block are read two blocks ahead, and what they mean is computed a block ahead.
  __device__ __forceinline__ void run(Plan& plan) {
    Segment segment;
    while (plan.next(segment)) {
      int64_t own = place(find(segment, segment.begin_block));
      int next = find(segment, segment.begin_block + 1);
#pragma unroll 1
      for (int block = segment.begin_block; block < segment.end_block; ++block) {
        load_keys(own);
        own = place(next);
        next = find(segment, block + 2);
      }
    }
  }
};

}  // namespace flashmoe::mla::sm90_few
