// The compile-time values of the sm90 weight-gradient kernel and its shared-memory map.
//
// As a matrix product: M runs over the columns of a (params.n), N over those of b (params.k), and the sum over the rows
// of one expert, 64 per stage. Both operands are stored in shared memory as in global memory, as rows of 64-column
// slabs, so both are "transposed" operands of wgmma.
#pragma once

#include "device/ring.cuh"
#include "moe/params/gemm.h"
#include "ptx/mbarrier.cuh"

namespace flashmoe::moe::weight_gradient::sm90 {

// Warpgroup 0 is the producer; each of the others computes 64 rows of M.
//   kBlockM, kBlockN   columns of a and of b per tile
//   kNumStages         stages of 64 rows of both
//   kOutputSlabs       64-column buffers through which a consumer stores its result
//   kLead              stages by which the first consumer is ahead of the others: while it stores, they still multiply
template <typename Element_, int kBlockM_, int kBlockN_, int kNumStages_, int kNumWarps_, int kOutputSlabs_, int kLead_>
struct WeightGradientSpec {
  using Element = Element_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kNumStages = kNumStages_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kOutputSlabs = kOutputSlabs_;
  static constexpr int kLead = kLead_;

  static constexpr int kStageRows = 64;
  static constexpr int kNumConsumers = kBlockM / 64;
  static constexpr int kNumThreads = kNumWarps * 32;
  static constexpr int kProducerThreads = 128;
  static constexpr int kTileSlots = 4;
  static constexpr int kSortedExperts = 256;  // up to this many are taken longest first

  static_assert(kBlockM % 64 == 0 && kNumConsumers >= 2 && kNumConsumers <= 3, "a warpgroup computes 64 rows");
  static_assert(kBlockN % 64 == 0 && kBlockN <= 256, "a tile is cut into 64-column slabs, and wgmma takes N <= 256");
  static_assert(kNumWarps == 4 * (kNumConsumers + 1), "one producer warpgroup and the consumers");
  static_assert(kNumStages >= 2, "a stage is released once the next one's products have been issued");
  static_assert(kLead < kNumStages, "the stages between the consumers are in shared memory");
  static_assert(kOutputSlabs >= 1 && kOutputSlabs <= kBlockN / 64, "a buffer of 64 columns each");

  // Registers per thread, multiples of 8; 128 * (producer + consumers * consumer) <= 65536.
  static constexpr int kProducerRegisters = kNumConsumers == 3 ? 56 : 72;
  static constexpr int kConsumerRegisters = kNumConsumers == 3 ? 152 : 216;

  // Bytes. Every slab starts at a multiple of 1024, the period of the 128-byte swizzle.
  static constexpr int kSlabBytes = kStageRows * 128;
  static constexpr int kABytes = kBlockM / 64 * kSlabBytes;  // per stage
  static constexpr int kBBytes = kBlockN / 64 * kSlabBytes;
  static constexpr int kStageBytes = kABytes + kBBytes;
  static constexpr int kOutputBytes = kOutputSlabs * kSlabBytes;  // per consumer

  static constexpr int kOutputOffset = kNumStages * kStageBytes;
  static constexpr int kOrderOffset = kOutputOffset + kNumConsumers * kOutputBytes;
  static constexpr int kTileOffset = kOrderOffset + 2 * kSortedExperts * 4;
  static constexpr int kBarrierOffset = kTileOffset + kTileSlots * 16;
  static constexpr int kSharedBytes = kBarrierOffset + 2 * (kNumStages + kTileSlots) * 8;
  static_assert(kSharedBytes <= 232448, "sm_90 gives a block at most 227 KiB");
};

// Pointers into a block's shared memory.
template <typename Spec>
struct SharedMemory {
  unsigned char* base;

  // [kBlockM / 64 or kBlockN / 64 slabs][64 rows][64 columns], swizzled.
  __device__ __forceinline__ unsigned char* a(int stage) const { return base + stage * Spec::kStageBytes; }
  __device__ __forceinline__ unsigned char* b(int stage) const { return a(stage) + Spec::kABytes; }
  // [64 rows][64 columns], swizzled; 16 of the rows per warp.
  __device__ __forceinline__ unsigned char* output(int consumer, int slab) const {
    return base + Spec::kOutputOffset + consumer * Spec::kOutputBytes + slab * Spec::kSlabBytes;
  }
  // [kSortedExperts] int32: the experts, those with the most rows first; then the number of rows of each, by expert.
  __device__ __forceinline__ unsigned char* order() const { return base + Spec::kOrderOffset; }
  __device__ __forceinline__ unsigned char* lengths() const { return order() + Spec::kSortedExperts * 4; }
  // The tiles that the producer has taken (schedule.cuh).
  __device__ __forceinline__ unsigned char* tile(int slot) const { return base + Spec::kTileOffset + slot * 16; }

  __device__ __forceinline__ ptx::Mbarrier* barrier(int index) const {
    return reinterpret_cast<ptx::Mbarrier*>(base + Spec::kBarrierOffset) + index;
  }
  // full: all rows of the stage are written. empty: every consumer warp has multiplied with them.
  __device__ __forceinline__ ptx::Mbarrier* full(int stage) const { return barrier(stage); }
  __device__ __forceinline__ ptx::Mbarrier* empty(int stage) const { return barrier(Spec::kNumStages + stage); }
  // tile_full: the tile is written. tile_empty: every warp of producer and consumers has read it.
  __device__ __forceinline__ ptx::Mbarrier* tile_full(int slot) const { return barrier(2 * Spec::kNumStages + slot); }
  __device__ __forceinline__ ptx::Mbarrier* tile_empty(int slot) const { return tile_full(Spec::kTileSlots + slot); }
};

template <typename Spec>
__device__ __forceinline__ void init_barriers(const SharedMemory<Spec>& smem) {
#pragma unroll
  for (int stage = 0; stage < Spec::kNumStages; ++stage) {
    // One arrival per producer thread when its copies are done, and one for the bytes that TMA copies.
    ptx::mbarrier_init(smem.full(stage), Spec::kProducerThreads + 1);
    ptx::mbarrier_init(smem.empty(stage), 4 * Spec::kNumConsumers);
  }
#pragma unroll
  for (int slot = 0; slot < Spec::kTileSlots; ++slot) {
    ptx::mbarrier_init(smem.tile_full(slot), 1);
    ptx::mbarrier_init(smem.tile_empty(slot), Spec::kNumWarps);
  }
  ptx::mbarrier_init_fence();
}

}  // namespace flashmoe::moe::weight_gradient::sm90
