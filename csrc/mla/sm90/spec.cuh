// The compile-time values of an sm90 decoding kernel and its shared-memory map.
#pragma once

#include "device/shared_tile.cuh"
#include "mla/params/decode.h"
#include "ptx/mbarrier.cuh"

namespace flashmoe::mla::sm90 {

// Slabs of a key block that are loaded and released together: the left half of V, the right half, the rotary columns.
enum KeyGroup : int { kLeft, kRight, kRotary, kNumGroups };

// Warpgroup 0 loads; the last two consume. The output of 64 rows, 64 x 512 in fp32, does not fit the registers of one warpgroup, so each
// has half of its columns. A block's scores are of one, P goes to the other through shared memory, and so do the running maxima.
// kIsSparse   1: a row's keys are those that indices name, which warpgroup 0 gathers by cp.async (gatherer.cuh).
// kHasCodes   1: the cache holds 8-bit floats (params/codes.h), which warpgroup 1 makes elements of, in their stage (converter.cuh).
template <typename Element_, int kBlockM_, int kBlockN_, int kNumStages_, int kNumWarps_, int kHasCodes_,
          int kIsSparse_>
struct DecodeSpec {
  using Element = Element_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kNumStages = kNumStages_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr bool kHasCodes = kHasCodes_ != 0;
  static constexpr bool kIsSparse = kIsSparse_ != 0;
  static constexpr int kConverterWarps = 4;
  static constexpr int kGathererThreads = 128;
  static constexpr int kConsumerWarps = 8;
  static constexpr int kFirstConsumer = kHasCodes ? 2 : 1;  // warpgroup
  static constexpr int kWarpsPerConsumer = 4;

  static_assert(kBlockM == 64 && kBlockN == 64, "a warpgroup multiplies 64 rows, and P is one slab of 64 keys");
  static_assert(kNumStages == 2, "a third does not fit");
  static_assert(kNumWarps == 4 * kFirstConsumer + kConsumerWarps, "a warpgroup for each role, and two consumers");

  static constexpr int kLoaderRegisters = kHasCodes && !kIsSparse ? 32 : 40;
  static constexpr int kConverterRegisters = 96 - kLoaderRegisters;
  static constexpr int kConsumerRegisters = kHasCodes ? 208 : 232;

  using QueryTile = SharedTile<kBlockM, kHeadDim>;
  using KeyTile = SharedTile<kBlockN, kHeadDim>;
  using ProbabilityTile = SharedTile<kBlockM, kBlockN>;
  static constexpr int kNumSlabs = KeyTile::kNumSlabs;
  static constexpr int kRotarySlab = kLatentDim / kSlabColumns;
  static constexpr int kOutputs = kLatentDim / 2 / 2;  // accumulators of a thread: half of the columns
  // Products that these are computed by: one with 128 accumulators needs more registers than 16 warps are launched with.
  static constexpr int kValueParts = kHasCodes ? 2 : 1;

  static constexpr int kQueryOffset = 0;
  static constexpr int kKeyOffset = kQueryOffset + QueryTile::kBytes;
  static constexpr int kProbabilityOffset = kKeyOffset + kNumStages * KeyTile::kBytes;
  static constexpr int kMaxOffset =
      kProbabilityOffset + (kHasCodes ? 0 : ProbabilityTile::kBytes);  // [2][64]: of the rows, up to the stage's block
  static constexpr int kSumOffset =
      kMaxOffset + 2 * kBlockM * 4;  // [2][2][64]: of segments by turns, of even and odd blocks
  static constexpr int kBarrierOffset = kSumOffset + 4 * kBlockM * 4;
  // What threads change before it is multiplied is announced once more: all groups of codes, else blocks with a tail as one.
  static constexpr int kNumFulls =
      kHasCodes ? 2 : kNumGroups;  // rotary columns of codes are announced with the right half
  static constexpr int kLandings = kHasCodes ? kNumGroups : 1;
  static constexpr int kNumBarriers = 2 + kNumStages * (kNumFulls + kNumGroups + 2 + kLandings);
  static constexpr int kSharedBytes = kBarrierOffset + kNumBarriers * 8;
  static_assert(kSharedBytes <= 232448, "sm_90 gives a block at most 227 KiB");
};

// Named barriers of the block beside its own.
enum class Barrier : int {
  kConsumers = 1,  // 256 threads. Read after write: the row sums; the write after next: that they have been read
  kScores =
      2,  // and 3: 128 threads, of each consumer. Write after read: the rotary columns of its block, over which P is written
};

// Pointers into a block's shared memory.
template <typename Spec>
struct SharedMemory {
  unsigned char* base;

  __device__ __forceinline__ typename Spec::QueryTile query() const { return {base + Spec::kQueryOffset}; }
  __device__ __forceinline__ typename Spec::KeyTile key(int stage) const {
    return {base + Spec::kKeyOffset + stage * Spec::KeyTile::kBytes};
  }
  // P of the stage's block. That of odd blocks lies over the rotary columns of Q, which the first consumer keeps in registers. Of codes, where
  // registers are scarcer, P lies over the rotary columns of its own block.
  __device__ __forceinline__ typename Spec::ProbabilityTile probability(int stage) const {
    if constexpr (Spec::kHasCodes) return {key(stage).slab(Spec::kRotarySlab)};
    return {stage == 0 ? base + Spec::kProbabilityOffset : query().slab(Spec::kRotarySlab)};
  }
  __device__ __forceinline__ ptx::SmemPointer row_max(int stage, int row) const {
    return base + Spec::kMaxOffset + (stage * Spec::kBlockM + row) * 4;
  }
  __device__ __forceinline__ ptx::SmemPointer row_sum(int turn, int which, int row) const {
    return base + Spec::kSumOffset + ((turn * 2 + which) * Spec::kBlockM + row) * 4;
  }

  __device__ __forceinline__ ptx::Mbarrier* barrier(int index) const {
    return reinterpret_cast<ptx::Mbarrier*>(base + Spec::kBarrierOffset) + index;
  }
  // full: the copy engine has written it, of codes the converters. empty: every warp that reads it has done so for the last time.
  __device__ __forceinline__ ptx::Mbarrier* query_full() const { return barrier(0); }
  __device__ __forceinline__ ptx::Mbarrier* query_empty() const { return barrier(1); }
  __device__ __forceinline__ ptx::Mbarrier* key_full(int stage, int group) const {
    return barrier(2 + stage * Spec::kNumFulls + group);
  }
  __device__ __forceinline__ ptx::Mbarrier* key_empty(int stage, int group) const {
    return key_full(Spec::kNumStages, stage * kNumGroups + group);
  }
  // P and the row maxima of the stage's block: written by one consumer, read by the other for the last time.
  __device__ __forceinline__ ptx::Mbarrier* probability_full(int stage) const {
    return key_empty(Spec::kNumStages, stage);
  }
  __device__ __forceinline__ ptx::Mbarrier* probability_empty(int stage) const {
    return probability_full(Spec::kNumStages + stage);
  }
  // The copy engine has written a group of codes, or a block that ends past the keys: the converters, or the zeroing warp, then say that it
  // is full.
  __device__ __forceinline__ ptx::Mbarrier* landed(int stage, int group = 0) const {
    return probability_full(2 * Spec::kNumStages + stage * Spec::kLandings + group);
  }
};

// How often each stage has been used before the present segment, whose first block takes stage 0.
struct StageUses {
  int even = 0;
  int odd = 0;

  // Of block `index` of the segment.
  __device__ __forceinline__ int parity(int index) const { return ((index % 2 == 0 ? even : odd) + index / 2) % 2; }
  __device__ __forceinline__ void end_segment(int blocks) {
    even += (blocks + 1) / 2;
    odd += blocks / 2;
  }
};

}  // namespace flashmoe::mla::sm90
