// The compile-time values of an sm90 decoding kernel and its shared-memory map.
#pragma once

#include "device/shared_tile.cuh"
#include "mla/params/decode.h"
#include "ptx/mbarrier.cuh"

namespace flashmoe::mla::sm90 {

// Slabs of a key block that are loaded and released together: the left half of V, the right half, the rotary columns.
enum KeyGroup : int { kLeft, kRight, kRotary, kNumGroups };

// Warpgroup 0 loads; the last two consume. The output of 64 rows, 64 x 512 in fp32, does not fit in the registers of
// one warpgroup, so each has half of its columns. One of them computes a block's scores and passes P and the running
// maxima to the other through shared memory.
// kIsSparse   1: indices select a row's keys, which warpgroup 0 gathers by cp.async (gatherer.cuh).
// kIsFp8      1: the cache is FP8 (params/fp8.h); warpgroup 1 converts it within its stage (converter.cuh).
template <typename Element_, int kBlockM_, int kBlockN_, int kNumStages_, int kNumWarps_, int kIsFp8_, int kIsSparse_>
struct DecodeSpec {
  using Element = Element_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kNumStages = kNumStages_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr bool kIsFp8 = kIsFp8_ != 0;
  static constexpr bool kIsSparse = kIsSparse_ != 0;
  static constexpr int kConverterWarps = 4;
  static constexpr int kGathererThreads = 128;
  static constexpr int kConsumerWarps = 8;
  static constexpr int kFirstConsumer = kIsFp8 ? 2 : 1;  // warpgroup
  static constexpr int kWarpsPerConsumer = 4;

  static_assert(kBlockM == 64 && kBlockN == 64, "a warpgroup multiplies 64 rows, and P is one slab of 64 keys");
  static_assert(kNumStages == 2, "a third does not fit");
  static_assert(kNumWarps == 4 * kFirstConsumer + kConsumerWarps, "a warpgroup for each role, and two consumers");

  static constexpr int kLoaderRegisters = kIsFp8 && !kIsSparse ? 32 : 40;
  static constexpr int kConverterRegisters = 96 - kLoaderRegisters;
  static constexpr int kConsumerRegisters = kIsFp8 ? 208 : 232;

  using QueryTile = SharedTile<kBlockM, kHeadDim>;
  using KeyTile = SharedTile<kBlockN, kHeadDim>;
  using ProbabilityTile = SharedTile<kBlockM, kBlockN>;
  static constexpr int kNumSlabs = KeyTile::kNumSlabs;
  static constexpr int kRotarySlab = kLatentDim / kSlabColumns;
  static constexpr int kOutputs = kLatentDim / 2 / 2;  // accumulators per thread: half of the columns
  // Products per half of V: one with 128 accumulators needs more registers than 16 warps are launched with.
  static constexpr int kValueTiles = kIsFp8 ? 2 : 1;

  static constexpr int kQueryOffset = 0;
  static constexpr int kKeyOffset = kQueryOffset + QueryTile::kBytes;
  static constexpr int kProbabilityOffset = kKeyOffset + kNumStages * KeyTile::kBytes;
  static constexpr int kMaxOffset =
      kProbabilityOffset + (kIsFp8 ? 0 : ProbabilityTile::kBytes);  // [2][64]: row maxima up to the stage's block
  static constexpr int kSumOffset =
      kMaxOffset + 2 * kBlockM * 4;  // [2][2][64]: alternating work tiles, even and odd blocks
  static constexpr int kBarrierOffset = kSumOffset + 4 * kBlockM * 4;
  // Data that threads change before it is multiplied is announced a second time: with FP8 every group, otherwise blocks
  // that end past the keys, as a whole.
  static constexpr int kNumFulls =
      kIsFp8 ? 2 : kNumGroups;  // rotary columns of FP8 values are announced with the right half
  static constexpr int kNumRawFulls = kIsFp8 ? kNumGroups : 1;
  static constexpr int kNumBarriers = 2 + kNumStages * (kNumFulls + kNumGroups + 2 + kNumRawFulls);
  static constexpr int kSharedBytes = kBarrierOffset + kNumBarriers * 8;
  static_assert(kSharedBytes <= 232448, "sm_90 gives a block at most 227 KiB");
};

// Named barriers besides number 0.
enum class Barrier : int {
  kConsumers = 1,  // 256 threads. Read after write: the row sums; write after read: those two work tiles before
  kScores =
      2,  // and 3: 128 threads, per consumer. Write after read: its block's rotary columns, over which P is written
};

// Pointers into a block's shared memory.
template <typename Spec>
struct SharedMemory {
  unsigned char* base;

  __device__ __forceinline__ typename Spec::QueryTile query() const { return {base + Spec::kQueryOffset}; }
  __device__ __forceinline__ typename Spec::KeyTile key(int stage) const {
    return {base + Spec::kKeyOffset + stage * Spec::KeyTile::kBytes};
  }
  // P of the stage's block. P of odd blocks overlaps the rotary columns of Q, which the first consumer keeps in
  // registers. With FP8, where registers are scarcer, P overlaps the rotary columns of its own block.
  __device__ __forceinline__ typename Spec::ProbabilityTile probability(int stage) const {
    if constexpr (Spec::kIsFp8) return {key(stage).slab(Spec::kRotarySlab)};
    return {stage == 0 ? base + Spec::kProbabilityOffset : query().slab(Spec::kRotarySlab)};
  }
  __device__ __forceinline__ ptx::SmemPointer row_max(int stage, int row) const {
    return base + Spec::kMaxOffset + (stage * Spec::kBlockM + row) * 4;
  }
  __device__ __forceinline__ ptx::SmemPointer row_sum(int parity, int which, int row) const {
    return base + Spec::kSumOffset + ((parity * 2 + which) * Spec::kBlockM + row) * 4;
  }

  __device__ __forceinline__ ptx::Mbarrier* barrier(int index) const {
    return reinterpret_cast<ptx::Mbarrier*>(base + Spec::kBarrierOffset) + index;
  }
  // full: written by TMA, or with FP8 by the converters. empty: read for the last time by every warp that reads it.
  __device__ __forceinline__ ptx::Mbarrier* query_full() const { return barrier(0); }
  __device__ __forceinline__ ptx::Mbarrier* query_empty() const { return barrier(1); }
  __device__ __forceinline__ ptx::Mbarrier* key_full(int stage, int group) const {
    return barrier(2 + stage * Spec::kNumFulls + group);
  }
  __device__ __forceinline__ ptx::Mbarrier* key_empty(int stage, int group) const {
    return key_full(Spec::kNumStages, stage * kNumGroups + group);
  }
  // P and the row maxima of the stage's block: full when one consumer has written them, empty when the other read them.
  __device__ __forceinline__ ptx::Mbarrier* probability_full(int stage) const {
    return key_empty(Spec::kNumStages, stage);
  }
  __device__ __forceinline__ ptx::Mbarrier* probability_empty(int stage) const {
    return probability_full(Spec::kNumStages + stage);
  }
  // A group of FP8 values, or a block that ends past the keys, is loaded; converters or zeroing warp signal key_full.
  __device__ __forceinline__ ptx::Mbarrier* raw_full(int stage, int group = 0) const {
    return probability_full(2 * Spec::kNumStages + stage * Spec::kNumRawFulls + group);
  }
};

// How often each stage was used before the current work tile, whose first block takes stage 0.
struct StageUses {
  int even = 0;
  int odd = 0;

  // For block `index` of the work tile.
  __device__ __forceinline__ int parity(int index) const { return ((index % 2 == 0 ? even : odd) + index / 2) % 2; }
  __device__ __forceinline__ void end_work_tile(int blocks) {
    even += (blocks + 1) / 2;
    odd += blocks / 2;
  }
};

}  // namespace flashmoe::mla::sm90
