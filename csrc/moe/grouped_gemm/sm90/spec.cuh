// The compile-time values of the sm90 grouped products and their shared-memory map.
#pragma once

#include "device/ring.cuh"
#include "device/shared_tile.cuh"
#include "moe/grouped_gemm/weights.cuh"
#include "ptx/mbarrier.cuh"

namespace flashmoe::moe::sm90 {

// Warpgroup 0 is the producer, warpgroups 1 and 2 multiply: each has 64 of the tile's 128 rows and all columns. A tile
// of 64 rows has one consumer.
//   kNumStages     blocks of 64 k of A and B in shared memory
//   kOutputSlabs   [64 rows][64 columns] buffers per consumer, through which results are stored
//   kIsGated       the columns are 64 of gate and the same 64 of up alternately (kKnPairs: single columns interleaved);
//                  kBlockN columns give kBlockN / 2 of the result
//   kGathersA      the rows of A are not contiguous: the producer copies them one by one
template <typename Element_, int kBlockM_, int kBlockN_, int kNumStages_, int kNumWarps_, int kOutputSlabs_,
          bool kIsGated_, bool kGathersA_>
struct TileSpec {
  using Element = Element_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kBlockK = 64;  // 128 bytes: the width of the swizzle
  static constexpr int kNumStages = kNumStages_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kOutputSlabs = kOutputSlabs_;
  static constexpr bool kIsGated = kIsGated_;
  static constexpr bool kGathersA = kGathersA_;

  static constexpr int kNumThreads = kNumWarps * 32;
  static constexpr int kNumConsumers = kBlockM == 64 ? 1 : 2;
  static constexpr int kProducerWarps = kGathersA ? 4 : 1;                 // that work
  static constexpr int kRowBlocks = kBlockM / 64 / kNumConsumers;          // of 64 rows, per consumer
  static constexpr int kAccumulators = kBlockN / 2;                        // per thread, for each 64 rows
  static constexpr int kOutputColumns = kIsGated ? kBlockN / 2 : kBlockN;  // per tile
  static constexpr int kNumTileSlots = 2;
  // Arrivals at a stage's full barrier: TMA's bytes, and the copies of each producer thread.
  static constexpr int kFullArrivals = kGathersA ? 1 + 32 * kProducerWarps : 1;

  static_assert(kBlockM == 64 * kNumConsumers || kBlockM == 128 * kNumConsumers, "64 or 128 rows per consumer");
  static_assert(kBlockN <= 256 && kBlockN % (kIsGated ? 128 : 16) == 0,
                "columns leave in slabs of 64, the last of which may be a part of one");
  static_assert(kNumWarps == 4 * (kNumConsumers + 1), "one producer warpgroup and the consumers");

  // Registers per thread, multiples of 8; 128 * (producer + consumers * consumer) <= 64512, what 384 threads of 168
  // start with. 256 threads have enough without moving any.
  static constexpr bool kMovesRegisters = kNumConsumers > 1;
  static constexpr int kProducerRegisters = kGathersA ? 56 : kRowBlocks == 2 ? 24 : 40;
  static constexpr int kConsumerRegisters = kGathersA ? 224 : kRowBlocks == 2 ? 240 : 232;

  using ATile = SharedTile<kBlockM, kBlockK>;  // of one stage
  using Slab = SharedTile<64, 64>;

  // Bytes.
  static constexpr int kSlabBytes = Slab::kBytes;
  static constexpr int kABytes = ATile::kBytes;
  static constexpr int kBBytes = kBlockN * 128;
  static constexpr int kAOffset = 0;
  static constexpr int kBOffset = kAOffset + kNumStages * kABytes;
  static constexpr int kOutputOffset = kBOffset + kNumStages * kBBytes;
  static constexpr int kTileOffset = kOutputOffset + kNumConsumers * kOutputSlabs * kSlabBytes;
  static constexpr int kBarrierOffset = kTileOffset + kNumTileSlots * 16;
  static constexpr int kNumBarriers = 2 * (kNumStages + kNumTileSlots);
  static constexpr int kSharedBytes = kBarrierOffset + kNumBarriers * 8;
  static_assert(kSharedBytes <= 232448, "sm_90 gives a block at most 227 KiB");
};

// d = A B, with A loaded by TMA.
template <typename Element, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kOutputSlabs>
using GemmSpec = TileSpec<Element, kBlockM, kBlockN, kNumStages, kNumWarps, kOutputSlabs, false, false>;

// d = activation(A B), with gathered rows of A.
template <typename Element, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kOutputSlabs>
using GatedGemmSpec = TileSpec<Element, kBlockM, kBlockN, kNumStages, kNumWarps, kOutputSlabs, true, true>;

// Pointers into a block's shared memory.
template <typename Spec>
struct SharedMemory {
  unsigned char* base;

  // [kBlockM rows][64 k], swizzled.
  __device__ __forceinline__ unsigned char* a(int stage) const { return base + Spec::kAOffset + stage * Spec::kABytes; }
  // nk: [kBlockN rows][64 k]; kn: [kBlockN / 64][64 k][64 columns]; swizzled.
  __device__ __forceinline__ unsigned char* b(int stage) const { return base + Spec::kBOffset + stage * Spec::kBBytes; }
  template <Weights kWeights>
  __device__ __forceinline__ auto b_operand(int stage) const {
    if constexpr (kWeights == Weights::kNk) return SharedTile<Spec::kBlockN, Spec::kBlockK>{b(stage)}.k_major();
    if constexpr (kWeights != Weights::kNk) return SharedTile<Spec::kBlockK, Spec::kBlockN>{b(stage)}.mn_major();
  }
  // [64 rows][64 columns], swizzled.
  __device__ __forceinline__ unsigned char* output(int consumer, int slab) const {
    return base + Spec::kOutputOffset + (consumer * Spec::kOutputSlabs + slab) * Spec::kSlabBytes;
  }
  __device__ __forceinline__ unsigned char* tile(int slot) const { return base + Spec::kTileOffset + slot * 16; }

  __device__ __forceinline__ ptx::Mbarrier* barrier(int index) const {
    return reinterpret_cast<ptx::Mbarrier*>(base + Spec::kBarrierOffset) + index;
  }
  // full: the stage's A and B have arrived. empty: every consumer warp has multiplied with them.
  __device__ __forceinline__ ptx::Mbarrier* full(int stage) const { return barrier(stage); }
  __device__ __forceinline__ ptx::Mbarrier* empty(int stage) const { return barrier(Spec::kNumStages + stage); }
  // full: the tile is in the slot. empty: all warps have read it.
  __device__ __forceinline__ ptx::Mbarrier* tile_full(int slot) const { return barrier(2 * Spec::kNumStages + slot); }
  __device__ __forceinline__ ptx::Mbarrier* tile_empty(int slot) const {
    return barrier(2 * Spec::kNumStages + Spec::kNumTileSlots + slot);
  }
};

template <typename Spec>
__device__ __forceinline__ void init_barriers(const SharedMemory<Spec>& smem) {
  constexpr int kConsumerWarps = 4 * Spec::kNumConsumers;
#pragma unroll
  for (int stage = 0; stage < Spec::kNumStages; ++stage) {
    ptx::mbarrier_init(smem.full(stage), Spec::kFullArrivals);
    ptx::mbarrier_init(smem.empty(stage), kConsumerWarps);
  }
#pragma unroll
  for (int slot = 0; slot < Spec::kNumTileSlots; ++slot) {
    ptx::mbarrier_init(smem.tile_full(slot), 1);
    ptx::mbarrier_init(smem.tile_empty(slot), kConsumerWarps + Spec::kProducerWarps - 1);
  }
  ptx::mbarrier_init_fence();
}

}  // namespace flashmoe::moe::sm90
